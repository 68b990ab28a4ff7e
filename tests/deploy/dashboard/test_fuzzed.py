"""Whatever is sent to the dashboard's port, nearly right or not at all: it answers the next one and logs no error."""

import asyncio
import base64
import contextlib
import gc
import logging
import os
import random
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvloop

from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.feed import Feed
from shoal.deploy.dashboard.server import REQUEST_BYTES_MAX, Dashboard, DashboardServer
from shoal.deploy.dashboard.steering import KEY_HEADER, Steering

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


def upgrade(server: DashboardServer, rng: random.Random, *, origin: str = "") -> bytes:
    host = urlsplit(server.url).netloc
    key = base64.b64encode(rng.randbytes(16)).decode()
    lines = ["GET /live HTTP/1.1", f"Host: {host}", "Connection: Upgrade", "Upgrade: websocket"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", *([f"Origin: {origin}"] if origin else [])]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def a_frame(rng: random.Random) -> bytes:
    """Nearly one of a WebSocket's: any opcode, reserved bits, lengths that lie, masked or not."""
    payload = rng.randbytes(rng.choice((0, 1, 2, 125, 126, REQUEST_BYTES_MAX + 1, 70_000)))
    first = rng.choice((0x81, 0x82, 0x88, 0x89, 0x8A, 0x01, 0x00, 0x80, rng.randrange(256)))
    length = rng.choice((len(payload),) * 4 + (2**63 - 1, 2**64 - 1, 0))
    masked = rng.choice((0x80, 0x80, 0x80, 0))
    if length < 126 and rng.random() < 0.9:
        head = bytes((first, masked | length))
    elif length < 2**16:
        head = bytes((first, masked | 126)) + struct.pack(">H", length)
    else:
        head = bytes((first, masked | 127)) + struct.pack(">Q", length)
    return head + (rng.randbytes(4) if masked else b"") + payload


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


def test_frames_that_are_nearly_right(feed, two_peers, run, caplog) -> None:
    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        async with serving(feed) as (server, _):
            for seed in range(CASES):
                rng = random.Random(f"frame {seed}")
                frames = b"".join(a_frame(rng) for _ in range(rng.choice((1, 1, 5))))
                await told(server, upgrade(server, rng) + mutated(frames, rng), rng)
                if seed % 50 == 0:
                    await lives(server)
            await lives(server)

    run(scenario())
    assert complaints(caplog) == []


def test_whoever_talks_without_end_costs_no_memory(feed, two_peers, run) -> None:
    """Messages, pings and pieces of one message, a hundred megabytes of each, to a server that has nothing to ask."""

    async def scenario() -> None:
        feed.take(two_peers, 0.0)
        async with serving(feed) as (server, _):
            where = urlsplit(server.url)
            rng = random.Random(0)
            for head in (
                b"\x81\xfe",
                b"\x89\xfd",
                b"\x01\xfe",
                b"\x00\xfe",
                b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff",
            ):
                _, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.write(upgrade(server, rng))
                await asyncio.sleep(0.05)
                size = {0xFE: 1000, 0xFD: 125, 0xFF: 1000}[head[1]]
                frame = head + (struct.pack(">H", size) if head[1] == 0xFE else b"") + b"\0\0\0\0" + bytes(size)
                gc.collect()
                tracemalloc.start()
                sent = 0
                with contextlib.suppress(ConnectionError, TimeoutError):
                    async with asyncio.timeout(2):
                        while sent < 100 << 20:
                            writer.write(frame * 500)
                            sent += len(frame) * 500
                            await writer.drain()
                writer.transport.abort()
                held, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert held < 8 << 20, f"{held >> 20} MiB after {sent >> 20}"
                await lives(server)

    run(scenario())


@pytest.mark.parametrize("origin", [origin for origin in ORIGINS if origin not in ("", "http://127.0.0.1")])
def test_no_page_of_another_origin_opens_the_websocket(feed, origin: str) -> None:
    async def scenario() -> None:
        async with serving(feed) as (server, _):
            rng = random.Random(0)
            raw = upgrade(server, rng, origin=origin)
            answer = await told(server, raw, rng, patience_s=0.3)
            assert answer.startswith(b"HTTP/1.1 4"), answer[:100]
            assert b"101 Switching" not in answer

    asyncio.run(scenario())
