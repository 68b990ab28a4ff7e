"""Whatever is sent to the dashboard's port, nearly right or not at all: it answers the next one and logs no error."""

import asyncio
import contextlib
import gc
import logging
import os
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvloop

from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.guard import KEY_HEADER, Steering
from shoal.deploy.dashboard.server import Dashboard, DashboardServer

CASES = int(os.environ.get("SHOAL_FUZZ_CASES", "400"))
KEY = "k" * 22
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "CONNECT", "TRACE", "get", "", "G\0T", "A" * 10_000)
PATHS = (
    "/",
    "/live",
    "/metrics",
    "/state.json",
    "/pause",
    "/resume",
    "/static/app.js",
    "*",
    "//",
    "/%",
    "/%00",
    "/\xff",
)
PATHS_OUT = ("/static/../guard.py", "/static/%2e%2e/guard.py", "/static//etc/passwd", "/static/..%2f..%2fplaces.py")
HOSTS = (
    "127.0.0.1",
    "localhost:1",
    "evil.example",
    "127.0.0.1:x",
    "[::1",
    "[::1]",
    "",
    "\xff",
    "a@127.0.0.1",
    "//",
    "1" * 9000,
)
ORIGINS = (
    "http://127.0.0.1",
    "null",
    "http://[",
    "http://[v1.x]/",
    "https://evil.example",
    "",
    "\xff",
    "http://]:1",
    "//[",
)
FIELDS = ("Connection", "Upgrade", "Content-Length", "Transfer-Encoding", "Sec-WebSocket-Key", "Sec-WebSocket-Version")
FIELDS += (
    "Sec-WebSocket-Extensions",
    "Sec-WebSocket-Protocol",
    "Expect",
    "Range",
    "Cookie",
    "Sec-Fetch-Site",
    KEY_HEADER,
)
VALUES = ("upgrade", "websocket", "keep-alive, Upgrade", "0", "-1", "1" * 40, "chunked", "chunked, chunked", "13", "12")
VALUES += (
    "permessage-deflate; client_max_window_bits=99",
    "100-continue",
    "bytes=0-,5-2",
    "\xff\xfe",
    "x" * 20_000,
    KEY,
)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    return lambda scenario: request.param(asyncio.wait_for(scenario, 120))


@contextlib.asynccontextmanager
async def serving(feed: Feed) -> AsyncIterator[tuple[DashboardServer, list[str]]]:
    """A dashboard that can be steered, and what its key has done."""
    done: list[str] = []

    def act(name: str) -> Callable[[], Awaitable[Mapping[str, Any]]]:
        async def acted() -> Mapping[str, Any]:
            done.append(name)
            return {}

        return acted

    steering = Steering(key=KEY)
    steering.hand(pause=act("pause"), resume=act("resume"))
    server = DashboardServer(Dashboard(feed, now_s=lambda: 1.0, steering=steering), parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield server, done
    finally:
        async with asyncio.timeout(10):
            await server.close()


async def told(server: DashboardServer, raw: bytes, rng: random.Random, *, patience_s: float = 0.02) -> bytes:
    """Send it in pieces, and read for a moment."""
    where = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    answer = b""
    with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop's, when it was sent away in the middle
        at = 0
        while at < len(raw):
            size = rng.choice((1, 7, 100, len(raw)))
            writer.write(raw[at : at + size])
            at += size
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while piece := await reader.read(1 << 16):
                    answer += piece
    writer.transport.abort()
    return answer


async def lives(server: DashboardServer) -> None:
    """A person's browser is answered."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(server.url + "state.json", timeout=1.0)
    assert answer.status_code == 200


def a_request(rng: random.Random) -> bytes:
    """Nearly one of HTTP."""
    method, version = (
        rng.choice((*METHODS, *["GET"] * 10)),
        rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9", "")),
    )
    lines = [f"{method} {rng.choice(PATHS + PATHS_OUT)} {version}"]
    lines += [f"Host: {rng.choice((*HOSTS, *[HOSTS[0]] * 10))}"] * rng.choice((0, 1, 1, 1, 2))
    lines += [f"Origin: {rng.choice(ORIGINS)}"] * rng.choice((0, 0, 1, 1, 2))
    lines += [f"{rng.choice(FIELDS)}: {rng.choice(VALUES)}" for _ in range(rng.choice((0, 1, 3, 8)))]
    raw = rng.choice(("\r\n", "\r\n", "\r\n", "\n", "\r")).join(lines).encode("latin-1") + b"\r\n\r\n"
    return mutated(raw + rng.randbytes(rng.choice((0, 0, 5, 5000))), rng)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((0, 0, 1, 3))):
        if changed:
            at = rng.randrange(len(changed))
            changed[at : at + rng.choice((0, 1, 1, 10))] = rng.randbytes(rng.choice((0, 1, 1, 10)))
    return bytes(changed)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


def test_requests_that_are_nearly_right(feed, two_peers, run, caplog) -> None:
    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        async with serving(feed) as (server, done):
            for seed in range(CASES):
                rng = random.Random(f"request {seed}")
                raw = a_request(rng)
                answer = await told(server, raw, rng)
                assert b"Traceback" not in answer, seed
                assert not answer.startswith(b"HTTP/1.1 500"), (seed, raw[:500])
                assert b"import " not in answer.partition(b"\r\n\r\n")[2][:2000], f"a file outside the page: {seed}"
                if seed % 50 == 0:
                    await lives(server)
            await lives(server)
            assert done == []

    run(scenario())
    assert complaints(caplog) == []


@pytest.mark.parametrize("kind", ["a body", "requests"])
def test_whoever_talks_without_end_costs_no_memory(feed, two_peers, run, kind: str) -> None:
    """A viewer that sends a hundred megabytes to a server that has nothing to ask."""

    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        async with serving(feed) as (server, _):
            where = urlsplit(server.url)
            _, writer = await asyncio.open_connection(where.hostname, where.port)
            head = f"GET /live HTTP/1.1\r\nHost: {where.netloc}\r\n".encode()
            writer.write(head + (b"Content-Length: 200000000\r\n\r\n" if kind == "a body" else b"\r\n"))
            piece = bytes(50_000) if kind == "a body" else (head + b"\r\n") * 1000
            await asyncio.sleep(0.05)
            gc.collect()
            tracemalloc.start()
            sent = 0
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(2):
                    while sent < 100 << 20:
                        writer.write(piece)
                        sent += len(piece)
                        await writer.drain()
            writer.transport.abort()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held < 8 << 20, f"{held >> 20} MiB after {sent >> 20}"
            await lives(server)

    run(scenario())
