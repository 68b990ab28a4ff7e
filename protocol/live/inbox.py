"""Frames that arrived from one peer: handled one at a time, in the order of arrival; credit returns afterwards.

Reading runs ahead of handling by at most the credit, so this queue is bounded by it. A peer has one stream to us: a
new one replaces the old, whose unhandled frames are dropped (its sender knows that it broke, and nothing more).
"""

import asyncio
import logging
from collections import deque

from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import Frame, FrameType
from shoal.protocol.identity import PeerID
from shoal.protocol.live.link import Link
from shoal.protocol.ports import FrameHandler

logger = logging.getLogger(__name__)


class Inbox:
    def __init__(self, peer: PeerID, handler: FrameHandler) -> None:
        self._peer = peer
        self._handler = handler
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
            raise RemoteError(self._peer, "sent something else where only data belongs")
        if link is not self._link:
            return
        self._queue.append((link, frame))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"frames from {self._peer[-8:]}")

    def on_lost(self, link: Link, why: str) -> None:
        logger.debug("the stream from %s is closed: %s", self._peer[-8:], why)

    async def close(self) -> None:
        if self._link is not None:
            self._link.abort("this peer is closing")
        self._queue.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._handle(*self._queue.popleft())
        finally:
            self._worker = None

    async def _handle(self, link: Link, frame: Frame) -> None:
        frame_bytes = frame.wire_bytes
        try:
            await self._handler(self._peer, frame.meta, frame.payload)
            del frame
            link.give_back(frame_bytes)
        except Exception as error:
            if isinstance(error, RemoteError):
                logger.warning("closed the stream from %s: %s", self._peer[-8:], error)
            else:
                logger.exception("closed the stream from %s: its frame could not be handled", self._peer[-8:])
            if link is self._link:
                self._queue.clear()
            link.abort(str(error))
