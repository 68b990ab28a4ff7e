"""One end of a frame stream: writes frames in pieces and assembles received ones, without copying large payloads.

hivemind gives us a `StreamReader` and a `StreamWriter`, which we use for each side's HELLO frame. Then this protocol
takes over the socket, so that the kernel writes a payload directly to the payload's final buffer. No bytes are left in
the reader: the sender sends nothing until it has read the receiver's HELLO.

Frames use the stream's lanes (`lanes.py`), with some copies, if there are any; all else uses the stream itself.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import (
    PIECE_BYTES,
    CreditWindow,
    Frame,
    FrameAssembler,
    FrameOrder,
    FrameType,
    decode_lanes,
    encode_credit,
    encode_frame,
    encode_lanes,
    wire_bytes,
)
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.live.handshake import NONCE_BYTES, Greeter, StreamHello
from shoal.protocol.live.lane import STREAM_BYTES, Lane
from shoal.protocol.live.lanes import ReceivingLanes, SendingLanes
from shoal.protocol.live.secure_channel import Channel
from shoal.protocol.live.throttle import Intake, Throttle
from shoal.protocol.ports import Payload, Priority

_HANDSHAKE_TIMEOUT_S = 10.0
_JOINED_BYTES = PIECE_BYTES // 4
"""A payload up to this size is copied and leaves in one write with its header and trailer. Each write costs a turn of
the loop, a wake-up of the daemon and a message of its own on the wire; copying 128 KiB takes 10 us."""
_CREDIT_GATHERED_BYTES = STREAM_CREDIT_BYTES // 16
"""Credit is returned at once when it adds up to this (less: after 0.25 s), since each CREDIT frame passes two daemons
and costs a fifth of a data frame. The sender has fifteen sixteenths of its credit left meanwhile."""


class Link(asyncio.BufferedProtocol):
    """One end of a stream.

    Args:
        on_frame: called from the loop with each complete frame.
        on_lost: called from the loop, once, with the reason why the stream ended.
        throttle: rate limits of the traffic; None: there are none.
        via: the peer that carries the stream; None: the stream is direct.
        on_lane: called with True for each new lane (TCP connection) of the stream, with False for each closed one.
        on_lanes_asked: called at the receiving end with the number of lanes that the sender asks it to dial.
    Attributes:
        stream: identifies this stream to the other end when one end opens a lane for it.
        lane_port: the port on which the other end accepts lanes; 0: none.
    """

    def __init__(
        self,
        peer: PeerID,
        *,
        on_frame: Callable[["Link", Frame], None],
        on_lost: Callable[["Link", str], None],
        throttle: Throttle | None = None,
        via: PeerID | None = None,
        on_lane: Callable[["Link", Lane, bool], None] = lambda link, lane, is_more: None,
        on_lanes_asked: Callable[["Link", int], None] = lambda link, count: None,
    ) -> None:
        self.peer = peer
        self.via = via
        self._next_hop = via or peer
        self.window = CreditWindow()
        self.lost = asyncio.Event()
        self.why_lost = "the stream ended"
        self.stream = b""
        self.lane_port = 0
        self.before_frame: Callable[[], None] = lambda: None
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._on_lane = on_lane
        self._on_lanes_asked = on_lanes_asked
        self._lanes: SendingLanes | ReceivingLanes | None = None
        self._order = FrameOrder(peer)
        self._asks_for = 0
        self._throttle = throttle or Throttle()
        self._line = self._throttle.line
        self._priority = Priority.BULK
        self._intake: Intake | None = None
        self._sequence = 1  # HELLO was 0
        self._owed_bytes = 0
        self._credit_timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Future[None] | None = None
        """Future of the slice that waits to be written; done when it may be written. None: no slice waits."""
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
        lane_port: int = 0,
    ) -> None:
        """Exchange HELLOs and take the socket over.

        Args:
            calls: True if this side opened the stream and will send DATA; the other side sends CREDIT.
            on_open: called before the first frame can arrive.
            lane_port: the port on which this end accepts lanes; 0: none.
        Raises: RemoteError; OSError, EOFError, TimeoutError: the connection broke or the peer stays silent.
        """
        self._writer = writer  # kept, since its finalizer would close the connection
        self._assembler = FrameAssembler(self.peer, window=None if calls else self.window)
        nonce = os.urandom(NONCE_BYTES)
        own_hello = greeter.hello(self.peer, nonce=nonce, lane_port=lane_port)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                if calls:
                    writer.write(own_hello)
                hello = greeter.check(await self._read_frame(reader), self.peer)
                self._take_over(writer)
                self.lane_port = hello.lane_port
                nonces = nonce + hello.nonce if calls else hello.nonce + nonce
                self.stream = blake3(nonces).digest(length=STREAM_BYTES)
                self._lanes = self._sending_lanes() if calls else self._receiving_lanes()
                on_open(self, hello)
                if not calls:
                    writer.write(own_hello)
        except BaseException:
            writer.close()
            raise

    async def _read_frame(self, reader: asyncio.StreamReader) -> Frame:
        while True:
            room = self._assembler.buffer()
            try:
                room[:] = await reader.readexactly(len(room))
            except asyncio.IncompleteReadError as error:
                raise EOFError("it closed the stream instead of sending a hello") from error
            frame = self._assembler.advance(len(room))
            if frame is not None:
                return frame

    def _take_over(self, writer: asyncio.StreamWriter) -> None:
        transport: Any = writer.transport
        if transport.is_closing():
            raise EOFError("the stream ended")
        transport.pause_reading()
        transport.set_protocol(self)
        # `drained` then means that the kernel has taken every byte, so that a caller may reuse its buffer.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        if self._throttle.download is not None:
            self._intake = Intake(self._throttle.download, transport, self.lost.is_set)
        transport.resume_reading()

    # Lanes

    def _sending_lanes(self) -> SendingLanes:
        return SendingLanes(
            self.peer, on_lost=self._lane_lost, on_change=lambda lane, is_more: self._on_lane(self, lane, is_more)
        )

    def _receiving_lanes(self) -> ReceivingLanes:
        return ReceivingLanes(
            self.peer,
            window=self.window,
            on_frame=self._came,
            on_breach=self.abort,
            on_change=lambda lane, is_more: self._on_lane(self, lane, is_more),
        )

    @property
    def num_lanes(self) -> int:
        return 0 if self._lanes is None else len(self._lanes)

    @property
    def sends(self) -> bool:
        """True if this end sends frames; the other end then sends credit."""
        return isinstance(self._lanes, SendingLanes)

    def expect_lane(self) -> None:
        """Expect lanes from now on: frames on lanes (TCP connections) and on the stream may overtake each other."""
        if not self.sends:
            self._assembler.may_skip = True

    def add_lane(self, lane: Lane, channel: Channel) -> None:
        """Use another lane (TCP connection) for this stream; close the lane if the stream has ended."""
        if self._lanes is None or self.lost.is_set():
            lane.close()
        else:
            self._lanes.add(lane, channel)

    def ask_for_lanes(self, count: int) -> None:
        """Ask the other end to dial `count` lanes (TCP connections); the request leaves before the next frame."""
        self._asks_for = count

    def tcp_infos(self) -> list[bytes]:
        """Return the kernel's TCP_INFO of each lane; the receiving end returns an empty list."""
        return [lane.tcp_info() for lane in self._lanes.lanes] if isinstance(self._lanes, SendingLanes) else []

    def lane_names(self) -> list[str]:
        """Return the names of the lanes (`tcp_queues.lane_name`); the receiving end returns an empty list."""
        return [lane.name for lane in self._lanes.lanes] if isinstance(self._lanes, SendingLanes) else []

    def close_lanes(self) -> bool:
        """Close all lanes if the receiver has handled all frames of this sending end. Return True if so."""
        if self.window.outstanding_bytes or not isinstance(self._lanes, SendingLanes):
            return False
        self._lanes.close_all()
        return True

    def _lane_lost(self, why: str) -> None:
        if self.window.outstanding_bytes:  # some of them may have been on this lane
            self.abort(f"a lane of the stream was lost: {why}")

    # Frames

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    async def write_frame(self, meta: bytes, payload: Payload, priority: Priority) -> None:
        """Write a frame; return when the kernel has taken every byte. Raises: EOFError: the stream broke."""
        self._priority = priority
        self.before_frame()
        if self._asks_for:
            asks_for, self._asks_for = self._asks_for, 0
            self._transport.write(encode_lanes(self._next_sequence(), asks_for))
        lanes = self._lanes_for(wire_bytes(len(meta), memoryview(payload).nbytes))
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
            if lanes is not None:
                await lanes.write(piece)
                continue
            self._transport.write(piece)
            await self._writable.wait()
        if self.lost.is_set():
            raise EOFError(self.why_lost)

    def _lanes_for(self, frame_bytes: int) -> SendingLanes | None:
        """Return the lanes for a frame of this size; None: the frame uses the stream. A frame larger than the whole
        credit uses the stream, because a receiver that waits for a missing piece holds at most the credit."""
        lanes = self._lanes
        return lanes if isinstance(lanes, SendingLanes) and lanes and frame_bytes <= self.window.limit_bytes else None

    def hurry(self, priority: Priority) -> None:
        """Raise the present frame's priority to `priority`, since a frame of that priority waits behind it."""
        if self._line is not None and priority < self._priority:
            self._priority = priority
            self._line.hurry(self._next_hop, priority)

    def give_back(self, frame_bytes: int) -> None:
        """Return a handled frame's credit to the sender, at once or, together with other credit, within 0.25 s."""
        self._owed_bytes += frame_bytes
        if self._owed_bytes >= _CREDIT_GATHERED_BYTES:
            self._send_credit()
        elif self._credit_timer is None:
            self._credit_timer = asyncio.get_running_loop().call_later(0.25, self._send_credit)

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
        """Close the stream now; `on_lost` is called with `why`."""
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
                self._came(frame)
        except RemoteError as error:
            self.abort(str(error))

    def _came(self, frame: Frame) -> None:
        """Handle a complete frame of the stream or of its lanes. Raises: RemoteError."""
        for following in self._order.put(frame):
            if following.type is FrameType.LANES and not self.sends:
                self._on_lanes_asked(self, decode_lanes(following, self.peer))
            else:
                self._on_frame(self, following)

    def eof_received(self) -> bool:
        if not self._assembler.at_boundary:
            self.why_lost = "the stream ended inside a frame"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.why_lost = f"the stream broke ({exc})"
        self.lost.set()
        if self._lanes is not None:
            self._lanes.close()
        self._writable.set()
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)  # the waiting slice must not wait on for a stream that has ended
        if self._credit_timer is not None:
            self._credit_timer.cancel()
        if self._intake is not None:
            self._intake.close()
        self._on_lost(self, self.why_lost)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
