"""The frames to one peer: a priority queue, with one task that writes them to one stream, which opens on demand.

A frame that has left may be lost. If a stream breaks, those frames on their way that may arrive twice without harm are
sent again on the next stream: the sender was told that these frames have left, and waits for their effect.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.frames import Frame, decode_credit, wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import FRAME_META_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from shoal.protocol.live.link import Link
from shoal.protocol.live.redial import outcome_of
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.reconnection import DialOutcome

_MOVES_S = 3.0
"""Most seconds for which a move to a better route waits until the old stream's frames are handled (perhaps never)."""


@dataclass(order=True, slots=True)
class _Waiting:
    priority: Priority
    arrival: int
    meta: bytes = field(compare=False)
    payload: Payload = field(compare=False)
    left: asyncio.Future[None] = field(compare=False)
    again: bytes | None = field(compare=False)
    """Header with which the frame is repeated if the stream breaks; None: it is not repeated, or is a repetition."""
    until_s: float = field(compare=False, default=0.0)
    """Time after which a repetition is dropped (its sender does not wait for it); 0: this frame is no repetition."""

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(len(self.meta), memoryview(self.payload).nbytes)


class SendQueue:
    """Queues and sends the frames to one peer. Args: open_link: opens a stream to the peer for this queue."""

    def __init__(self, peer: PeerID, open_link: Callable[["SendQueue"], Awaitable[Link]]) -> None:
        self._peer = peer
        self._open_link = open_link
        self._queue: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._changed = asyncio.Event()
        self._credited = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._left: deque[tuple[int, _Waiting | None]] = deque()
        """Frames that were written to this link and are not known to be handled, oldest first: (bytes of credit that
        the frame took, the frame itself if it is to be repeated after a break of the link, else None)."""
        self._credit_bytes = 0
        """Bytes of returned credit, still too few to cover the first frame in `_left`."""
        self._moves_s = math.inf
        """Time of the first request to move to another link; inf: there was none. The move waits until the frames of
        this link are handled."""

    @property
    def via(self) -> PeerID | None:
        """The third peer that carries the stream; None: the stream is direct, or there is no stream."""
        return None if self._link is None else self._link.via

    def move(self) -> None:
        """Move to a new stream on a better route once all frames that have left are handled, so that no frame is lost
        or overtaken; after `_MOVES_S` in any case."""
        if self._writer is not None:
            self._moves_s = min(self._moves_s, asyncio.get_running_loop().time())
            self._changed.set()

    async def flush(self) -> None:
        """Wait until the peer has handled all frames that have left, or the stream breaks."""
        while self._link is not None and self._link.window.outstanding_bytes:
            self._credited.clear()
            await self._credited.wait()

    async def send(self, meta: bytes, payload: Payload, priority: Priority, *, again: bytes | None = None) -> None:
        """Send a frame; return when the kernel has taken all of it.

        A caller that is cancelled while its frame is written must not change the payload, which is still being read.

        Args: again: the header for one repetition, if the stream breaks before the frame is known to be handled; the
            payload must then not change. None: the frame is sent once.
        Raises: Unreachable; ValueError: the frame is larger than any receiver accepts.
        """
        if len(meta) > FRAME_META_BYTES_MAX or memoryview(payload).nbytes > FRAME_PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"a frame of {len(meta)} + {memoryview(payload).nbytes} bytes is larger than any peer accepts"
            )
        left = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, _Waiting(priority, next(self._arrivals), meta, payload, left, again))
        self._changed.set()
        if self._link is not None:
            self._link.hurry(priority)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name=f"frames to {self._peer[-8:]}")
        await left

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Take the credit that a receiver's frame returns. Raises: RemoteError: the frame is no valid CREDIT."""
        credit_bytes = decode_credit(frame, self._peer)
        link.window.give_back(credit_bytes, self._peer)
        if link is self._link:
            self._handled(credit_bytes)
        self._changed.set()
        self._credited.set()

    def on_lost(self, link: Link, why: str) -> None:
        self._changed.set()

    def cut(self, why: str) -> None:
        """Abort the stream, and send none of its frames a second time. Every waiting sender gets Unreachable."""
        self._left.clear()
        self._queue = [waiting for waiting in self._queue if not waiting.until_s]
        heapq.heapify(self._queue)
        if self._link is not None:
            self._link.abort(why)

    async def close(self) -> None:
        """End the stream and the writing task. Every waiting sender gets Unreachable."""
        await end_tasks(self._writer)
        self._break("this peer is closing")  # if the task was cancelled before its first step, it has run no `finally`

    def _handled(self, credit_bytes: int) -> None:
        self._credit_bytes += credit_bytes
        while self._left and self._left[0][0] <= self._credit_bytes:
            self._credit_bytes -= self._left.popleft()[0]

    async def _write(self, *, in_s: float = 0.0) -> None:
        why, may_repeat = "this peer is closing", False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(in_s):
                    await self._changed.wait()  # `send` sets the event, so a new frame ends the delay
            while True:
                self._moves_s = math.inf
                self._link = await self._open_link(self)
                await self._write_on(self._link)
                self._link.abort("its frames take another route now")
                if not self._queue:
                    return
        except Unreachable as error:
            why = error.why
            may_repeat = outcome_of(why) is not DialOutcome.REFUSED  # refused: the peer's process has ended
        except (RemoteError, OSError, EOFError) as error:
            why, may_repeat = str(error), True
        finally:
            self._break(why, may_repeat=may_repeat)

    async def _write_on(self, link: Link) -> None:
        """Write frames to `link` until the next frame must go to another stream."""
        while True:
            waiting = await self._next(link)
            if waiting is None:
                return
            try:
                await link.write_frame(waiting.meta, waiting.payload, waiting.priority)
            except BaseException:
                heapq.heappush(self._queue, waiting)  # its sender gets Unreachable with the other waiting senders
                raise
            self._left.append((waiting.wire_bytes, waiting if waiting.again is not None else None))
            self._handled(0)  # the frame's credit may have returned before its last bytes left
            if not waiting.left.done():
                waiting.left.set_result(None)
            del waiting  # otherwise this payload would stay in memory until the next frame

    async def _next(self, link: Link) -> _Waiting | None:
        """Wait for the next frame (by priority, then arrival) and for its credit. None: another stream is needed.

        Raises: EOFError: the stream broke.
        """
        while True:
            if link.lost.is_set():
                raise EOFError(link.why_lost)
            while self._queue and self._queue[0].left.done():
                heapq.heappop(self._queue)  # its sender was cancelled
            moves_in_s = self._moves_s + _MOVES_S - asyncio.get_running_loop().time()
            if moves_in_s < math.inf:
                if not link.window.outstanding_bytes:
                    return None
                if moves_in_s <= 0.0:
                    self._repeat_all(except_of=())
                    return None
            elif self._queue and link.window.admits(self._queue[0].wire_bytes):
                link.window.take(self._queue[0].wire_bytes)
                return heapq.heappop(self._queue)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(moves_in_s if moves_in_s < math.inf else None):
                    await self._changed.wait()

    def _break(self, why: str, *, may_repeat: bool = False) -> None:
        was_open = self._link is not None
        if self._link is not None:
            self._link.abort(why)
        self._link = None
        self._writer = None
        self._credited.set()
        queue, self._queue = self._queue, []
        told = {waiting.priority for waiting in queue if not waiting.until_s and not waiting.left.done()}
        for waiting in queue:
            if waiting.until_s:
                self._repeat(waiting, waiting.until_s, may_repeat=may_repeat)
            elif not waiting.left.done():
                waiting.left.set_exception(Unreachable(self._peer, why))
        if may_repeat:
            # A sender that learns that one activation failed sends all activations of this peer elsewhere.
            self._repeat_all(except_of=told.intersection({Priority.ACTIVATION}))
        self._left.clear()
        self._credit_bytes = 0
        if self._queue:
            in_s = 0.0 if was_open else 0.5
            self._changed.clear()
            self._writer = asyncio.create_task(self._write(in_s=in_s), name=f"frames once more to {self._peer[-8:]}")

    def _repeat_all(self, *, except_of: Collection[Priority]) -> None:
        """Queue the frames that were on their way once more, if they may be repeated and their priority is not in
        `except_of`. They are dropped if the peer is not reachable again within ten seconds."""
        until_s = asyncio.get_running_loop().time() + 10.0
        for _, waiting in self._left:
            if waiting is not None and waiting.priority not in except_of:
                self._repeat(waiting, until_s, may_repeat=True)
        self._left.clear()
        self._credit_bytes = 0

    def _repeat(self, waiting: _Waiting, until_s: float, *, may_repeat: bool) -> None:
        loop = asyncio.get_running_loop()
        if not may_repeat or loop.time() >= until_s:
            return
        meta = waiting.again if waiting.again is not None else waiting.meta
        frame = _Waiting(
            waiting.priority, next(self._arrivals), meta, waiting.payload, loop.create_future(), None, until_s
        )
        heapq.heappush(self._queue, frame)
