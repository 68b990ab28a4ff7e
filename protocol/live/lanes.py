"""The lanes (TCP connections) of one stream: the sending end cuts frames into pieces, the receiving end joins them.

Each frame uses either the lanes or the daemon's stream. The frames that use lanes form one byte stream. The next piece
of this stream goes to any lane that has passed its last piece to the kernel, so a lane that waits for a lost packet
does not delay the pieces on other lanes.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import CreditWindow, Frame, FrameAssembler
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LANE_PIECES_HELD_MAX
from shoal.protocol.live.lane import PIECE_BYTES_MAX, Lane
from shoal.protocol.live.secure_channel import Channel
from shoal.protocol.ports import Payload

_PIECES: Final = 4
"""A slice (25 ms at the line's rate) of 64 KiB or more has at least this many pieces: a stalled lane delays one."""
_PIECE_BYTES_MIN: Final = 16 * 1024
"""Least size of a piece, except the last: about what TCP sends in a connection's first round trip. Each piece costs a
turn of both ends' event loops."""


class SendingLanes:
    """The lanes (TCP connections) of the sending end. Args: on_lost: called with the reason when a lane breaks."""

    def __init__(
        self, peer: PeerID, *, on_lost: Callable[[str], None], on_change: Callable[[Lane, bool], None]
    ) -> None:
        self._peer = peer
        self._on_lost, self._on_change = on_lost, on_change
        self.lanes: list[Lane] = []
        """The open lanes, least recently used first."""
        self._next = 0
        self._changed = asyncio.Event()
        self._is_over = False

    def __len__(self) -> int:
        return len(self.lanes)

    def add(self, lane: Lane, channel: Channel) -> None:
        if self._is_over:
            lane.close()
            return
        self.lanes.append(lane)
        self._on_change(lane, True)
        lane.start(channel, on_piece=self._refuse, on_lost=self._lost, on_free=self._changed.set)
        self._changed.set()

    async def write(self, data: Payload) -> None:
        """Write `data` to the lanes. The caller may change `data` after the return. Raises: EOFError: no lane."""
        view = memoryview(data).cast("B")
        piece_bytes = min(PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, len(view) // _PIECES))
        for at in range(0, len(view), piece_bytes):
            lane = await self._free_lane()
            piece = view[at : at + piece_bytes]
            lane.send(self._next, piece)
            self._next += len(piece)

    def close(self) -> None:
        """Close all lanes, and accept no others."""
        self._is_over = True
        self._changed.set()
        self.close_all()

    def close_all(self) -> None:
        """Close all lanes. If the receiver has not handled all their frames, the caller must end the stream."""
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            self._on_change(lane, False)
            lane.close()

    async def _free_lane(self) -> Lane:
        while True:
            if not self.lanes:
                raise EOFError("the lanes have ended")
            for lane in self.lanes:
                if lane.is_free:
                    self.lanes.remove(lane)
                    self.lanes.append(lane)
                    return lane
            self._changed.clear()
            await self._changed.wait()

    def _refuse(self, start: int, piece: memoryview) -> None:
        raise RemoteError(self._peer, "sent pieces of frames to their sender")

    def _lost(self, lane: Lane, why: str) -> None:
        self.lanes.remove(lane)
        self._on_change(lane, False)
        self._changed.set()
        self._on_lost(why)


class ReceivingLanes:
    """The lanes (TCP connections) of the receiving end.

    Args:
        window: the credit of the whole stream.
        on_frame: takes complete frames; may raise RemoteError.
        on_breach: called, after all lanes were closed, with a description of how the peer broke the protocol.
        on_change: called with True for each new lane, and with False for each lane that has ended.
    """

    def __init__(
        self,
        peer: PeerID,
        *,
        window: CreditWindow,
        on_frame: Callable[[Frame], None],
        on_breach: Callable[[str], None],
        on_change: Callable[[Lane, bool], None],
    ) -> None:
        self._window = window
        self._on_frame, self._on_breach, self._on_change = on_frame, on_breach, on_change
        self._lanes: list[Lane] = []
        self._reassembly = Reassembly(peer)
        self._assembler = FrameAssembler(peer, window=window, sequence=1, may_skip=True)
        self._is_over = False

    def __len__(self) -> int:
        return len(self._lanes)

    def add(self, lane: Lane, channel: Channel) -> None:
        if self._is_over:
            lane.close()
            return

        self._lanes.append(lane)
        self._on_change(lane, True)
        lane.start(channel, on_piece=self._take, on_lost=self._lost)

    def close(self) -> None:
        """Close all lanes, and accept no others."""
        self._is_over = True
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            self._on_change(lane, False)
            lane.close()

    def _take(self, start: int, piece: memoryview) -> None:
        try:
            self._put(start, piece)
        except RemoteError as error:
            self.close()  # the assembler is useless now
            self._on_breach(str(error))

    def _put(self, start: int, piece: memoryview) -> None:
        # Bytes beyond the present frame must fit into the credit that is left.
        free_bytes = max(0, self._window.limit_bytes - self._window.outstanding_bytes)
        for ready in self._reassembly.put(start, piece, reach_bytes=self._assembler.left_bytes + free_bytes):
            self._assemble(ready)

    def _assemble(self, ready: memoryview) -> None:
        while ready:
            room = self._assembler.buffer()[: len(ready)]
            room[:] = ready[: len(room)]
            ready = ready[len(room) :]
            frame = self._assembler.advance(len(room))
            if frame is not None:
                self._on_frame(frame)

    def _lost(self, lane: Lane, why: str) -> None:
        """Forget a broken lane. If bytes were lost, the sender notices it and ends the stream."""
        self._lanes.remove(lane)
        self._on_change(lane, False)


class Reassembly:
    """Restores the order of the pieces of a byte stream that arrive over several connections.

    Each piece has its offset in the stream. An honest sender sends each byte once, and is no further ahead of the first
    missing byte than its credit allows; anything else is an error.

    Args: source: the sender of the pieces.
    """

    def __init__(self, source: PeerID) -> None:
        self._source = source
        self._next = 0
        """Offset of the first missing byte."""
        self._starts: list[int] = []
        """Offsets, ascending, of the pieces that wait for missing earlier bytes."""
        self._held: dict[int, memoryview] = {}

    def put(self, start: int, piece: memoryview, *, reach_bytes: int) -> list[memoryview]:
        """Add one piece.

        Args:
            start: the piece's offset in the stream.
            reach_bytes: how far beyond the first missing byte a piece may end.
        Returns: all pieces, in order, that now follow the bytes that were returned earlier.
        Raises: RemoteError: no honest sender sends this piece.
        """
        end = start + len(piece)
        if not piece:
            raise RemoteError(self._source, "sent a piece of a frame with nothing in it")
        if end > self._next + reach_bytes:
            raise RemoteError(self._source, "sent a piece of a frame beyond its credit")
        at = bisect_right(self._starts, start)
        overlaps_before = at > 0 and self._starts[at - 1] + len(self._held[self._starts[at - 1]]) > start
        overlaps_after = at < len(self._starts) and self._starts[at] < end
        if start < self._next or overlaps_before or overlaps_after:
            raise RemoteError(self._source, "sent a part of a frame twice")
        if start > self._next:
            if len(self._starts) >= LANE_PIECES_HELD_MAX:
                raise RemoteError(self._source, f"sent {LANE_PIECES_HELD_MAX} pieces of frames ahead of a missing one")
            self._starts.insert(at, start)
            self._held[start] = piece
            return []
        return [piece, *self._advance(end)]

    def _advance(self, end: int) -> list[memoryview]:
        """Record that all bytes before `end` have arrived, and return the held pieces that follow these bytes."""
        ready: list[memoryview] = []
        for start in self._starts:
            if start != end:
                break
            ready.append(self._held.pop(start))
            end += len(ready[-1])
        del self._starts[: len(ready)]
        self._next = end
        return ready
