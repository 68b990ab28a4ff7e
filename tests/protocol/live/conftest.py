import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from open_gate import everybody

from shoal.protocol.frames import Frame
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.handshake import Greeter, StreamHello
from shoal.protocol.live.link import Link
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.ports import Payload


@dataclass
class End:
    """One end of a connected pair of sockets, and what its link has heard."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    identity: Identity
    frames: list[Frame] = field(default_factory=list)
    hello: StreamHello | None = None

    def greeter(self, run: str = "run") -> Greeter:
        return Greeter(
            identity=self.identity, members=everybody(run), addresses=lambda: (f"/of/{self.identity.peer_id}",)
        )

    async def open(self, peer: PeerID, *, calls: bool, run: str = "run") -> Link:
        link = Link(peer, on_frame=lambda _, frame: self.frames.append(frame), on_lost=lambda *_: None)
        await link.open(self.reader, self.writer, self.greeter(run), calls=calls, on_open=self._opened)
        return link

    def _opened(self, link: Link, hello: StreamHello) -> None:
        self.hello = hello


@pytest.fixture
def socket_pair(tmp_path: Path):
    """An async context manager of two connected `End`s."""

    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[End, End]]:
        accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
        path = str(tmp_path / "socket")
        server = await asyncio.start_unix_server(lambda *streams: accepted.set_result(streams), path)
        caller = End(*await asyncio.open_unix_connection(path), Identity.generate())
        listener = End(*await accepted, Identity.generate())
        try:
            yield caller, listener
        finally:
            for end in (caller, listener):
                end.writer.transport.abort()
            server.close()

    return pair


@dataclass
class Heard:
    calls: list[bytes] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_call(self, source: PeerID, request: bytes) -> bytes:
        self.calls.append(request)
        if request == b"wait":
            await self.gate.wait()
        return b"re: " + request

    async def on_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        if meta == b"wait":
            await self.gate.wait()
        self.frames.append(meta)


@pytest.fixture
def live_peer(tmp_path: Path):
    """Start a transport that serves. Whoever starts it closes it."""

    async def start(name: str = "peer", *, run: str = "run", **options) -> tuple[LiveTransport, Heard]:
        transport = await LiveTransport.start(
            Identity.generate(), members=everybody(run), state_dir=tmp_path / name, use_relay=False, **options
        )
        heard = Heard()
        transport.serve(on_call=heard.on_call, on_frame=heard.on_frame)
        return transport, heard

    return start


@pytest.fixture
def eventually():
    async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - conditions are about plain values, which wake nobody
                await asyncio.sleep(0.01)

    return eventually
