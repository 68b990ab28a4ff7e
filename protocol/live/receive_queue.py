"""Frames that arrived from one peer: handled one at a time, in the order of arrival; credit returns afterwards.

Reading runs ahead of handling by at most the credit, so this queue is bounded by it. A peer has one stream to us: a
new one replaces the old, whose unhandled frames are dropped (its sender knows that it broke, and nothing more).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import Frame, FrameType
from shoal.protocol.identity import PeerID
from shoal.protocol.live.link import Link
from shoal.protocol.ports import FrameHandler

logger = logging.getLogger(__name__)


class ReceiveQueues:
    """The queue of every peer that has a stream to us or frames to be handled, and of nobody else.

    Sequences and credit belong to a stream, so nothing of a peer is needed until its next one; and strangers may take a
    new identity for each.
    """

    def __init__(self) -> None:
        self._queues: dict[PeerID, ReceiveQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def attach(self, link: Link, handler: FrameHandler) -> None:
        """`link` is its peer's stream from now on."""
        queue = self._queues.get(link.peer)
        if queue is None:
            queue = self._queues[link.peer] = ReceiveQueue(link.peer, handler, on_idle=self._forget)
        queue.attach(link)

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Raises: RemoteError."""
        queue = self._queues.get(link.peer)
        if queue is not None:
            queue.on_frame(link, frame)

    def on_lost(self, link: Link, why: str) -> None:
        logger.debug("the stream from %s is closed: %s", link.peer[-8:], why)
        queue = self._queues.get(link.peer)
        if queue is not None:
            queue.on_lost(link)

    def cut(self, is_cut: Callable[[PeerID], bool]) -> None:
        """End the streams of those peers; what they have sent and nobody has handled is dropped."""
        for peer, queue in tuple(self._queues.items()):
            if is_cut(peer):
                queue.cut()

    async def close(self) -> None:
        await asyncio.gather(*(queue.close() for queue in tuple(self._queues.values())))

    def _forget(self, queue: "ReceiveQueue") -> None:
        if self._queues.get(queue.peer) is queue:
            del self._queues[queue.peer]


class ReceiveQueue:
    """Args: on_idle: called when the stream is gone and nothing is left to be handled."""

    def __init__(self, peer: PeerID, handler: FrameHandler, *, on_idle: "Callable[[ReceiveQueue], None]") -> None:
        self.peer = peer
        self._handler = handler
        self._on_idle = on_idle
        self._queue: deque[tuple[Link, Frame]] = deque()
        self._link: Link | None = None
        self._worker: asyncio.Task[None] | None = None

    def attach(self, link: Link) -> None:
        """`link` is the peer's stream from now on."""
        if self._link is not None:
            self._link.abort("replaced by a new stream of the same peer")
        self._queue.clear()
        self._link = link

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Raises: RemoteError."""
        if frame.type is not FrameType.DATA:
            raise RemoteError(self.peer, "sent something else where only data belongs")
        if link is not self._link:
            return
        self._queue.append((link, frame))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"frames from {self.peer[-8:]}")

    def on_lost(self, link: Link) -> None:
        """The stream has ended; frames that arrived whole are still handled."""
        if link is self._link:
            self._link = None  # and with it what had come of a frame
            self._check_idle()

    def cut(self) -> None:
        self._queue.clear()
        if self._link is not None:
            self._link.abort("excluded from the run")

    async def close(self) -> None:
        if self._link is not None:
            self._link.abort("this peer is closing")
        self._queue.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

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
            # By link, since the stream may be gone by now, or another in its place.
            self._queue = deque(item for item in self._queue if item[0] is not link)
            link.abort(str(error))
