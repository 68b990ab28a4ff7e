"""One end of one raw stream after its handshake: frames in, pieces out, without a copy of the payload.

hivemind hands out a `StreamReader` and a `StreamWriter`. They serve for the HELLO frame each side sends; then this
protocol takes the socket over, so that the kernel writes a payload where it will stay. Between the two nothing can be
lost: the sender is silent until it has read the receiver's HELLO.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import (
    PIECE_BYTES,
    CreditWindow,
    Frame,
    FrameAssembler,
    FrameType,
    encode_credit,
    encode_frame,
)
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.live.handshake import Greeter, StreamHello
from shoal.protocol.live.throttle import Intake, Throttle
from shoal.protocol.ports import Payload, Priority

_HANDSHAKE_TIMEOUT_S = 10.0
_JOINED_BYTES = PIECE_BYTES // 4
"""A payload of at most so many bytes leaves in one write with its header and trailer. Each write is a turn of the loop,
a wake-up of the daemon and a message of its own on the wire; copying 128 KiB takes 10 us."""
_CREDIT_GATHERED_S = 0.25
_CREDIT_GATHERED_BYTES = STREAM_CREDIT_BYTES // 16
"""Credit of small frames goes back together: each message of it passes two daemons and costs a fifth of what a frame
does. The sender has fifteen sixteenths of its credit left meanwhile."""


class Link(asyncio.BufferedProtocol):
    """Args:
    on_frame, on_lost: called from the loop; `on_lost` once, with why.
    throttle: what passes here is within its limits; None: there are none.
    via: whoever carries the stream, to whom the bytes leave us; None: the peer itself is there.
    """

    def __init__(
        self,
        peer: PeerID,
        *,
        on_frame: Callable[["Link", Frame], None],
        on_lost: Callable[["Link", str], None],
        throttle: Throttle | None = None,
        via: PeerID | None = None,
    ) -> None:
        self.peer = peer
        self.via = via
        self._next_hop = via or peer
        self.window = CreditWindow()
        self.lost = asyncio.Event()
        self.why_lost = "the stream ended"
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._throttle = throttle or Throttle()
        self._line = self._throttle.line
        self._priority = Priority.BULK
        """What the frame that is on its way has."""
        self._intake: Intake | None = None
        self._sequence = 1  # HELLO was 0
        self._owed_bytes = 0
        self._credit_timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Future[None] | None = None
        """Done when the slice that waits in line may go."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport
        self._writer: asyncio.StreamWriter
        self._assembler: FrameAssembler

    async def open(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeter: Greeter,
        *,
        calls: bool,
        on_open: Callable[["Link", StreamHello], None],
    ) -> None:
        """Exchange HELLOs and take the socket over.

        Args:
            calls: whether this side opened the stream and will send DATA; the other side sends CREDIT.
            on_open: called before the first frame can arrive.
        Raises: RemoteError; OSError, EOFError, TimeoutError: the connection broke or the peer stays silent.
        """
        self._writer = writer  # its finalizer would close the connection
        self._assembler = FrameAssembler(self.peer, window=None if calls else self.window)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                if calls:
                    writer.write(greeter.hello(self.peer))
                hello = greeter.check(await self._read_frame(reader), self.peer)
                self._take_over(writer)
                on_open(self, hello)
                if not calls:
                    writer.write(greeter.hello(self.peer))
        except BaseException:
            writer.close()
            raise

    async def _read_frame(self, reader: asyncio.StreamReader) -> Frame:
        while True:
            room = self._assembler.buffer()
            try:
                room[:] = await reader.readexactly(len(room))
            except asyncio.IncompleteReadError as error:
                raise EOFError("it closed the stream instead of saying hello") from error
            frame = self._assembler.advance(len(room))
            if frame is not None:
                return frame

    def _take_over(self, writer: asyncio.StreamWriter) -> None:
        transport: Any = writer.transport
        if transport.is_closing():
            raise EOFError("the stream ended")
        transport.pause_reading()
        transport.set_protocol(self)
        # drained() then means that the kernel has it all, and a caller may use its buffer again
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        if self._throttle.download is not None:
            self._intake = Intake(self._throttle.download, transport, self.lost.is_set)
        transport.resume_reading()

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    async def write_frame(self, meta: bytes, payload: Payload, priority: Priority) -> None:
        """Returns when the kernel has every byte. Raises: EOFError: the stream broke."""
        self._priority = priority
        pieces = encode_frame(FrameType.DATA, self._next_sequence(), meta, payload)
        if memoryview(payload).nbytes <= _JOINED_BYTES:
            pieces = iter([b"".join(pieces)])
        for piece in pieces if self._line is None else self._line.cut(pieces, self._next_hop):
            if self._line is not None:
                self._turn = self._line.ask(len(piece), self._priority, self._next_hop)
                if self._turn is not None:
                    await self._turn
            if self.lost.is_set():
                raise EOFError(self.why_lost)
            self._transport.write(piece)
            await self._writable.wait()
        if self.lost.is_set():
            raise EOFError(self.why_lost)

    def hurry(self, priority: Priority) -> None:
        """A frame of this priority waits behind the one that is on its way, which goes on with no less."""
        if self._line is not None and priority < self._priority:
            self._priority = priority
            self._line.hurry(self._next_hop, priority)

    def give_back(self, frame_bytes: int) -> None:
        """Return the credit of a frame that has been handled, before long."""
        self._owed_bytes += frame_bytes
        if self._owed_bytes >= _CREDIT_GATHERED_BYTES:
            self._send_credit()
        elif self._credit_timer is None:
            self._credit_timer = asyncio.get_running_loop().call_later(_CREDIT_GATHERED_S, self._send_credit)

    def _send_credit(self) -> None:
        if self._credit_timer is not None:
            self._credit_timer.cancel()
            self._credit_timer = None
        if not self.lost.is_set():
            owed_bytes, self._owed_bytes = self._owed_bytes, 0
            self.window.give_back(owed_bytes, self.peer)
            credit = encode_credit(self._next_sequence(), owed_bytes)
            self._transport.write(credit)
            self._throttle.sent(len(credit))

    def abort(self, why: str) -> None:
        """Close now; `on_lost` follows."""
        if not self.lost.is_set():
            self.why_lost = why
            self._transport.abort()

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._assembler.buffer()
        return room if self._intake is None else room[: self._intake.slice_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        self._throttle.received(nbytes)
        if self._intake is not None:
            self._intake.came()
        try:
            frame = self._assembler.advance(nbytes)
            if frame is not None:
                self._on_frame(self, frame)
        except RemoteError as error:
            self.abort(str(error))

    def eof_received(self) -> bool:
        if not self._assembler.at_boundary:
            self.why_lost = "the stream ended inside a frame"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.why_lost = f"the stream broke ({exc})"
        self.lost.set()
        self._writable.set()
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)  # a carrier that takes nothing more would keep it waiting
        if self._credit_timer is not None:
            self._credit_timer.cancel()
        if self._intake is not None:
            self._intake.close()
        self._on_lost(self, self.why_lost)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
