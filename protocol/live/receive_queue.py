"""Queues of received frames, one per peer: frames are handled one at a time in order of arrival; then credit returns.

A peer can send ahead at most its credit, which bounds its queue. A peer has one stream to us: a new stream replaces the
old one, and unhandled frames of the old stream are dropped (the sender only knows that the stream broke).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import Frame, FrameType
from shoal.protocol.identity import PeerID
from shoal.protocol.live.link import Link
from shoal.protocol.ports import FrameHandler

logger = logging.getLogger(__name__)


class ReceiveQueues:
    """One queue for each peer that has a stream to us or unhandled frames.

    A peer with neither has no queue: sequence numbers and credit belong to a stream, and a stranger may use a new
    identity for each stream.
    """

    def __init__(self) -> None:
        self._queues: dict[PeerID, ReceiveQueue] = {}

    def attach(self, link: Link, handler: FrameHandler) -> None:
        """Take the frames of its peer from `link` from now on; an older stream of the peer ends."""
        queue = self._queues.get(link.peer)
        if queue is None:
            queue = self._queues[link.peer] = ReceiveQueue(link.peer, handler, on_idle=self._forget)
        queue.attach(link)

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Queue a frame that the stream `link` has brought. Raises: RemoteError: `frame` is no DATA frame."""
        queue = self._queues.get(link.peer)
        if queue is not None:
            queue.on_frame(link, frame)

    def on_lost(self, link: Link, why: str) -> None:
        logger.debug("the stream from %s is closed: %s", link.peer[-8:], why)
        queue = self._queues.get(link.peer)
        if queue is not None:
            queue.on_lost(link)

    def cut(self, is_cut: Callable[[PeerID], bool]) -> None:
        """End the streams of the peers for which `is_cut` returns True, and drop these peers' unhandled frames."""
        for peer, queue in tuple(self._queues.items()):
            if is_cut(peer):
                queue.cut()

    async def close(self) -> None:
        await asyncio.gather(*(queue.close() for queue in tuple(self._queues.values())))

    def _forget(self, queue: "ReceiveQueue") -> None:
        if self._queues.get(queue.peer) is queue:
            del self._queues[queue.peer]


class ReceiveQueue:
    """The frames of one peer. Args: on_idle: called when the peer has no stream and no unhandled frame left."""

    def __init__(self, peer: PeerID, handler: FrameHandler, *, on_idle: "Callable[[ReceiveQueue], None]") -> None:
        self.peer = peer
        self._handler = handler
        self._on_idle = on_idle
        self._queue: deque[tuple[Link, Frame]] = deque()
        self._link: Link | None = None
        self._worker: asyncio.Task[None] | None = None

    def attach(self, link: Link) -> None:
        """Take the frames from `link` from now on. End an older stream, and drop its unhandled frames."""
        if self._link is not None:
            self._link.abort("replaced by a new stream of the same peer")
        self._queue.clear()
        self._link = link

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Queue a frame, unless it is of an older stream. Raises: RemoteError: `frame` is no DATA frame."""
        if frame.type is not FrameType.DATA:
            raise RemoteError(self.peer, "sent something other than data")
        if link is not self._link:
            return
        self._queue.append((link, frame))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"frames from {self.peer[-8:]}")

    def on_lost(self, link: Link) -> None:
        """Forget the stream that has ended. Complete frames of that stream are still handled."""
        if link is self._link:
            self._link = None  # its incomplete frame is lost
            self._check_idle()

    def cut(self) -> None:
        self._queue.clear()
        if self._link is not None:
            self._link.abort("excluded from the run")

    async def close(self) -> None:
        if self._link is not None:
            self._link.abort("this peer is closing")
        self._queue.clear()
        await end_tasks(self._worker)

    def _check_idle(self) -> None:
        if self._link is None and self._worker is None:
            self._on_idle(self)

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._handle(*self._queue.popleft())
        finally:
            self._worker = None
            self._check_idle()

    async def _handle(self, link: Link, frame: Frame) -> None:
        frame_bytes = frame.wire_bytes
        try:
            await self._handler(self.peer, frame.meta, frame.payload)
            del frame
            link.give_back(frame_bytes)
        except Exception as error:
            if isinstance(error, RemoteError):
                logger.warning("closed the stream from %s: %s", self.peer[-8:], error)
            else:
                logger.exception("closed the stream from %s: its frame could not be handled", self.peer[-8:])
            # Compare links, since the stream may be gone by now, or replaced by another.
            self._queue = deque(item for item in self._queue if item[0] is not link)
            link.abort(str(error))
