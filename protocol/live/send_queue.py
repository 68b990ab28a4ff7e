"""Frames on their way to one peer: a queue by priority, one writer, one stream that opens when it is needed."""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.frames import Frame, decode_credit, wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import FRAME_META_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from shoal.protocol.live.link import Link
from shoal.protocol.ports import Payload, Priority


@dataclass(order=True, slots=True)
class _Waiting:
    priority: Priority
    arrival: int
    meta: bytes = field(compare=False)
    payload: Payload = field(compare=False)
    left: asyncio.Future[None] = field(compare=False)

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
        self._moves = False
        """Whether the next frame goes over another link, once this one's have all been handled."""

    @property
    def via(self) -> PeerID | None:
        """Whoever carries the stream; None: nobody does, or there is none."""
        return None if self._link is None else self._link.via

    def move(self) -> None:
        """Open a stream anew, since there is a better way: once all frames that have left are handled, so that nothing
        is lost and nothing overtakes."""
        if self._link is not None:
            self._moves = True
            self._changed.set()

    async def flush(self) -> None:
        """Wait until the peer has handled all that has left, or the stream breaks."""
        while self._link is not None and self._link.window.outstanding_bytes:
            self._credited.clear()
            await self._credited.wait()

    async def send(self, meta: bytes, payload: Payload, priority: Priority) -> None:
        """Returns when the kernel has the whole frame.

        A caller that is cancelled while its frame is being written must leave the payload alone: it is still read.

        Raises: Unreachable; ValueError: larger than any receiver accepts.
        """
        if len(meta) > FRAME_META_BYTES_MAX or memoryview(payload).nbytes > FRAME_PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"a frame of {len(meta)} + {memoryview(payload).nbytes} bytes is larger than any peer accepts"
            )
        left = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, _Waiting(priority, next(self._arrivals), meta, payload, left))
        self._changed.set()
        if self._link is not None:
            self._link.hurry(priority)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name=f"frames to {self._peer[-8:]}")
        await left

    def on_frame(self, link: Link, frame: Frame) -> None:
        """The receiver gave credit back. Raises: RemoteError."""
        link.window.give_back(decode_credit(frame, self._peer), self._peer)
        self._changed.set()
        self._credited.set()

    def on_lost(self, link: Link, why: str) -> None:
        self._changed.set()

    def cut(self, why: str) -> None:
        """End the stream; every waiting sender gets Unreachable."""
        if self._link is not None:
            self._link.abort(why)

    async def close(self) -> None:
        """Every waiting sender gets Unreachable."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        self._break("this peer is closing")  # a task cancelled before its first step runs no finally

    async def _write(self) -> None:
        why = "this peer is closing"
        try:
            while True:
                self._link = await self._open_link(self)
                self._moves = False
                await self._write_on(self._link)
                self._link.abort("its frames go another way from now on")
                if not self._queue:
                    return
        except Unreachable as error:
            why = error.why
        except (RemoteError, OSError, EOFError) as error:
            why = str(error)
        finally:
            self._break(why)

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
            if self._moves:
                if not link.window.outstanding_bytes:
                    return None
            elif self._queue and link.window.admits(self._queue[0].wire_bytes):
                link.window.take(self._queue[0].wire_bytes)
                return heapq.heappop(self._queue)
            self._changed.clear()
            await self._changed.wait()

    def _break(self, why: str) -> None:
        if self._link is not None:
            self._link.abort(why)
        self._link = None
        self._writer = None
        self._credited.set()
        queue, self._queue = self._queue, []
        for waiting in queue:
            if not waiting.left.done():
                waiting.left.set_exception(Unreachable(self._peer, why))
