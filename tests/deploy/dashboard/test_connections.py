"""Who connects and says nothing, or drips, or does not read, keeps nobody else out."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvloop
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.deploy.dashboard import connections
from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.connections import ANSWER_S, CONNECTIONS_MAX, LIVE, REQUEST_S, Connections
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import KEY_HEADER, Steering
from shoal.deploy.dashboard.server import Dashboard, DashboardServer
from viewers import looking

SILENT = 130
GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BROKEN_UPGRADE = GET[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\n"
BIG = b"GET /static/uplot/uPlot.iife.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def act() -> Mapping[str, Any]:
    return {"paused": True}


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Peers run on uvloop, whose transports are its own."""
    run_on: Callable[..., None] = request.param
    return lambda scenario: run_on(asyncio.wait_for(scenario, 60))


@contextlib.asynccontextmanager
async def serving(feed: Feed, steering: Steering | None = None) -> AsyncIterator[DashboardServer]:
    server = DashboardServer(Dashboard(feed, now_s=lambda: 1.0, steering=steering), parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield server
    finally:
        async with asyncio.timeout(5):
            await server.close()


async def open_to(server: DashboardServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(server.url)
    return await asyncio.open_connection(where.hostname, where.port)


async def ends(reader: asyncio.StreamReader, *, within_s: float) -> bool:
    with contextlib.suppress(ConnectionError):
        try:
            async with asyncio.timeout(within_s):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
    return True


def test_while_many_are_silent_the_owner_pauses_and_the_page_lives(feed, two_peers, run):
    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        steering = Steering()
        steering.hand(pause=act, resume=act)
        async with serving(feed, steering) as server, looking(server.url) as update:
            await update()
            silent = [await open_to(server) for _ in range(SILENT)]
            async with httpx.AsyncClient(base_url=server.url) as client:
                answer = await client.post("/pause", headers={KEY_HEADER: steering.key})
                assert (answer.status_code, answer.text) == (200, '{"paused":true}')
                assert (await client.get("/")).status_code == 200
            ended = await asyncio.gather(*(ends(reader, within_s=1.0) for reader, _ in silent))
            assert sum(ended) > SILENT - CONNECTIONS_MAX
            await update()
            await update()
            for _, writer in silent:
                writer.close()

    run(scenario())


def test_whoever_keeps_a_request_back_is_sent_away_though_they_drip(feed, run, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)

    async def drip(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for byte in itertools.chain(b"GET / HTTP/1.1\r\nX: ", itertools.repeat(ord("x"))):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)

    async def is_sent_away(server: DashboardServer, first: bytes, drips: bool) -> bool:
        reader, writer = await open_to(server)
        writer.write(first)
        dripping = asyncio.create_task(drip(writer)) if drips else None
        try:
            return await ends(reader, within_s=4.0)  # uvicorn's own bound of an answered one that is silent is 5 s
        finally:
            if dripping is not None:
                dripping.cancel()
            writer.close()

    async def scenario() -> None:
        cases = list(itertools.product([b"", GET, BROKEN_UPGRADE], [False, True]))
        async with serving(feed) as server, looking(server.url) as update:
            sent_away = await asyncio.gather(*(is_sent_away(server, *case) for case in cases))
            assert dict(zip(cases, sent_away, strict=True)) == dict.fromkeys(cases, True)
            await update()
            await update()

    run(scenario())


def test_whoever_does_not_read_the_answers_is_sent_away(feed, run, monkeypatch):
    monkeypatch.setattr(connections, "ANSWER_S", 0.3)

    async def scenario() -> None:
        async with serving(feed) as server:
            reader, writer = await open_to(server)
            writer.transport.pause_reading()
            writer.write(BIG * 600)  # 30 MB of answers
            assert server._server is not None
            here = server._server.server_state.connections
            while not here:  # noqa: ASYNC110 (nobody is told)
                await asyncio.sleep(0.01)
            while here:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.transport.abort()
            assert not reader.at_eof()

    run(scenario())


def test_it_stops_without_a_complaint_whoever_is_connected(feed, two_peers, run, caplog):
    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        server = DashboardServer(Dashboard(feed, now_s=lambda: 1.0), parse_address("127.0.0.1:0"))
        await server.start()
        assert server._server is not None
        here = server._server.server_state.connections
        silent, silent_writer = await open_to(server)
        broken, broken_writer = await open_to(server)
        broken_writer.write(BROKEN_UPGRADE)
        while len(here) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with looking(server.url) as update:
            await update()
            async with asyncio.timeout(1.5):  # uvicorn would cancel after 2 s
                await server.close()
            with pytest.raises(EOFError):
                await update()
        assert await ends(silent, within_s=1.0)
        assert await ends(broken, within_s=1.0)
        silent_writer.close()
        broken_writer.close()

    run(scenario())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


# --- without sockets ---


class Pipe:
    """A transport."""

    def __init__(self) -> None:
        self.is_aborted, self.unsent = False, 0

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent


def connected(state: Connections, kind: type, host: str = "a", **says: Any) -> Pipe:
    connection = kind.__new__(kind)
    pipe = Pipe()
    for name, value in {"transport": pipe, "client": (host, 1), "cycle": None, **says}.items():
        setattr(connection, name, value)
    state.connections.add(connection)
    return pipe


class Answer:
    def __init__(self, *, response_complete: bool, path: str = "/") -> None:
        self.response_complete, self.scope = response_complete, {"path": path}


def test_a_viewer_stays_until_it_takes_nothing_for_a_minute():
    state = Connections()
    viewer = connected(state, H11Protocol, cycle=Answer(response_complete=False, path=LIVE))
    state.look(0.0)
    state.look(1e6)
    viewer.unsent = 1
    state.look(1e6 + 1)
    viewer.unsent = 0
    state.look(1e6 + 2)
    viewer.unsent = 1
    state.look(1e6 + 3)
    state.look(1e6 + ANSWER_S + 2)
    assert not viewer.is_aborted
    state.look(1e6 + ANSWER_S + 4)
    assert viewer.is_aborted


@pytest.mark.parametrize("is_complete", [False, True])
def test_an_answer_may_take_longer_than_a_request_and_the_last_of_it_counts(is_complete):
    state = Connections()
    slow = connected(state, H11Protocol, cycle=Answer(response_complete=is_complete))
    slow.unsent = 1
    state.look(0.0)
    state.look(REQUEST_S + 1)
    assert not slow.is_aborted
    state.look(ANSWER_S + 1)
    assert slow.is_aborted


def test_each_request_has_its_time():
    state = Connections()
    phone = connected(state, H11Protocol, cycle=Answer(response_complete=True))
    (connection,) = state.connections
    for second in range(100):
        if second % 9 == 0:
            connection.cycle = Answer(response_complete=True)
        state.look(float(second))
    assert not phone.is_aborted


def test_a_flood_from_one_host_drives_out_its_own():
    state = Connections()
    phone = connected(state, H11Protocol, host="phone")
    state.look(0.0)
    answered = connected(state, H11Protocol, cycle=Answer(response_complete=False))
    state.look(0.1)
    flood = []
    for number in range(2 * CONNECTIONS_MAX):
        flood.append(connected(state, H11Protocol))
        state.look(1.0 + number / 1000)
    assert [pipe.is_aborted for pipe in (phone, answered)] == [False, False]
    gone = len(flood) + 2 - CONNECTIONS_MAX
    expected = [True] * gone + [False] * (len(flood) - gone)
    assert [pipe.is_aborted for pipe in flood] == expected, "the longest here first"
