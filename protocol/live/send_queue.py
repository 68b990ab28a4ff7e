"""Frames on their way to one peer: a queue by priority, one writer, one stream that opens when it is needed.

A frame that has left is not there yet. What was on its way in a stream that broke, and may come twice, is sent once
more on the next one: its sender has been told that it left, and would wait for what it brings.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.frames import Frame, decode_credit, wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import FRAME_META_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from shoal.protocol.live.link import Link
from shoal.protocol.live.redial import outcome_of
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.reconnection import Outcome

_REPEATS_S = 10.0
"""A peer that can be reached again within so long gets what was on its way to it."""
_RETRY_S = 0.5
_MOVES_S = 3.0
"""A stream that is to be left for a better way is left after so long in any case: what it carries is slow to arrive, or
never will."""


@dataclass(order=True, slots=True)
class _Waiting:
    priority: Priority
    arrival: int
    meta: bytes = field(compare=False)
    payload: Payload = field(compare=False)
    left: asyncio.Future[None] = field(compare=False)
    again: bytes | None = field(compare=False)
    """Its meta if it is sent once more; None: it is not."""
    until_s: float = field(compare=False, default=0.0)
    """The time until which a frame is of use that is sent once more, for which nobody waits; 0: it is none."""

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(len(self.meta), memoryview(self.payload).nbytes)


class SendQueue:
    """Args: open_link: opens a stream to the peer; its frames and its end are this queue's to handle."""

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
        """What has left over that link and is not known to be handled, in order: (bytes of credit, what is sent once
        more should the link break)."""
        self._credit_bytes = 0
        """Credit that is less than the first of them takes."""
        self._moves_s = math.inf
        """When the next frame was to go over another link, once this one's have all been handled; inf: it is not."""

    @property
    def via(self) -> PeerID | None:
        """Whoever carries the stream; None: nobody does, or there is none."""
        return None if self._link is None else self._link.via

    def move(self) -> None:
        """Open a stream anew, since there is a better way: once all frames that have left are handled, so that nothing
        is lost and nothing overtakes, or soon without."""
        if self._writer is not None:
            self._moves_s = min(self._moves_s, asyncio.get_running_loop().time())
            self._changed.set()

    async def flush(self) -> None:
        """Wait until the peer has handled all that has left, or the stream breaks."""
        while self._link is not None and self._link.window.outstanding_bytes:
            self._credited.clear()
            await self._credited.wait()

    async def send(self, meta: bytes, payload: Payload, priority: Priority, *, again: bytes | None = None) -> None:
        """Returns when the kernel has the whole frame.

        A caller that is cancelled while its frame is being written must leave the payload alone: it is still read.

        Args: again: as of the port; the payload must not change then.
        Raises: Unreachable; ValueError: larger than any receiver accepts.
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
        """The receiver gave credit back. Raises: RemoteError."""
        credit_bytes = decode_credit(frame, self._peer)
        link.window.give_back(credit_bytes, self._peer)
        if link is self._link:
            self._handled(credit_bytes)
        self._changed.set()
        self._credited.set()

    def on_lost(self, link: Link, why: str) -> None:
        self._changed.set()

    def cut(self, why: str) -> None:
        """End the stream; every waiting sender gets Unreachable, and nothing is sent once more."""
        self._left.clear()
        self._queue = [waiting for waiting in self._queue if not waiting.until_s]
        heapq.heapify(self._queue)
        if self._link is not None:
            self._link.abort(why)

    async def close(self) -> None:
        """Every waiting sender gets Unreachable."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        self._break("this peer is closing")  # a task cancelled before its first step runs no finally

    def _handled(self, credit_bytes: int) -> None:
        self._credit_bytes += credit_bytes
        while self._left and self._left[0][0] <= self._credit_bytes:
            self._credit_bytes -= self._left.popleft()[0]

    async def _write(self, *, in_s: float = 0.0) -> None:
        why, may_repeat = "this peer is closing", False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(in_s):
                    await self._changed.wait()  # whoever has something to send is told at once whether it can go
            while True:
                self._moves_s = math.inf
                self._link = await self._open_link(self)
                await self._write_on(self._link)
                self._link.abort("its frames go another way from now on")
                if not self._queue:
                    return
        except Unreachable as error:
            why = error.why
            may_repeat = outcome_of(why) is not Outcome.REFUSED  # else the next process of that name knows of no frame
        except (RemoteError, OSError, EOFError) as error:
            why, may_repeat = str(error), True
        finally:
            self._break(why, may_repeat=may_repeat)

    async def _write_on(self, link: Link) -> None:
        """Returns when what comes next has to go over another one."""
        while True:
            waiting = await self._next(link)
            if waiting is None:
                return
            try:
                await link.write_frame(waiting.meta, waiting.payload, waiting.priority)
            except BaseException:
                heapq.heappush(self._queue, waiting)  # its sender is told with the others
                raise
            self._left.append((waiting.wire_bytes, waiting if waiting.again is not None else None))
            self._handled(0)  # its credit may have been back before its last bytes had left here
            if not waiting.left.done():
                waiting.left.set_result(None)
            del waiting  # or the last payload would live until the next one comes

    async def _next(self, link: Link) -> _Waiting | None:
        """The first frame that may go, by priority, then arrival; waits for one, and for credit. None: what comes next
        has to go over another link.

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
            # Who hears that one activation cannot go there sends all that went there to others.
            self._repeat_all(except_of=told.intersection({Priority.ACTIVATION}))
        self._left.clear()
        self._credit_bytes = 0
        if self._queue:
            in_s = 0.0 if was_open else _RETRY_S
            self._changed.clear()
            self._writer = asyncio.create_task(self._write(in_s=in_s), name=f"frames once more to {self._peer[-8:]}")

    def _repeat_all(self, *, except_of: Collection[Priority]) -> None:
        """Queue once more what was on its way, but for these priorities."""
        until_s = asyncio.get_running_loop().time() + _REPEATS_S
        for _, waiting in self._left:
            if waiting is not None and waiting.priority not in except_of:
                self._repeat(waiting, until_s, may_repeat=True)
        self._left.clear()
        self._credit_bytes = 0

    def _repeat(self, waiting: _Waiting, until_s: float, *, may_repeat: bool) -> None:
        """Queue what was on its way, or was to be sent once more and has not left, unless it is of no use any more."""
        loop = asyncio.get_running_loop()
        if not may_repeat or loop.time() >= until_s:
            return
        meta = waiting.again if waiting.again is not None else waiting.meta
        frame = _Waiting(
            waiting.priority, next(self._arrivals), meta, waiting.payload, loop.create_future(), None, until_s
        )
        heapq.heappush(self._queue, frame)
