"""Calls to peers that only a carrier (a third peer) reaches: one stream per peer, many calls at a time both ways.

    a message   kind 1 B | number 4 B | length 4 B | body

An answer has the number of its request; each end numbers its own requests. For each direct call libp2p opens a stream;
over a carrier a stream for each call would need a key agreement each time.
"""

import asyncio
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import IntEnum
from typing import Final

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CARRIED_CALLS_MAX, CONTROL_BYTES_MAX
from shoal.protocol.live.carriage import Streams

logger = logging.getLogger(__name__)

_IDLE_S: Final = 60.0
"""Seconds without calls after which a stream is closed. Peers that work together send a heartbeat every second."""
_HEAD: Final = struct.Struct(">BII")

Answer = Callable[[PeerID, bytes], Awaitable[bytes]]
"""(calling peer, request) -> reply. If it raises any error, the calling peer gets Unreachable."""


class _Kind(IntEnum):
    REQUEST = 0
    REPLY = 1
    FAILED = 2


class CallStream:
    """A stream for calls in both directions. Args: answer: answers the requests of the peer at the other end."""

    def __init__(self, peer: PeerID, streams: Streams, answer: Answer) -> None:
        self._peer = peer
        self._reader, self._writer = streams
        self._answer = answer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(CARRIED_CALLS_MAX)
        self._loop = asyncio.get_running_loop()
        self._used_s = self._loop.time()
        self._timer = self._loop.call_later(_IDLE_S, self._end_if_idle)
        self.is_over = False

    async def call(self, request: bytes) -> bytes:
        """Return the reply to `request`. Raises: Unreachable: the stream broke, or the peer failed to answer."""
        if self.is_over:
            raise Unreachable(self._peer, "the stream over its carrier ended")
        number = next(self._numbers) & 0xFFFFFFFF
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[number] = reply
        try:
            self._say(_Kind.REQUEST, number, request)
            return await reply
        finally:
            self._waiting.pop(number, None)

    async def serve(self) -> None:
        """Take replies, and answer requests, until the stream ends. Raises: RemoteError: a message is invalid."""
        try:
            while True:
                head = await self._reader.readexactly(_HEAD.size)
                kind, number, length = _HEAD.unpack(head)
                if kind > max(_Kind) or length > CONTROL_BYTES_MAX:
                    raise RemoteError(self._peer, f"sent {length} bytes of kind {kind} where calls belong")
                body = await self._reader.readexactly(length)
                self._used_s = self._loop.time()
                if kind == _Kind.REQUEST:
                    await self._free.acquire()
                    task = asyncio.create_task(self._reply(number, body), name=f"answer {self._peer[-8:]}")
                    self._answering.add(task)
                    task.add_done_callback(self._answered)
                elif (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    if kind == _Kind.REPLY:
                        waiting.set_result(body)
                    else:
                        waiting.set_exception(Unreachable(self._peer, "it failed to answer"))
        except (OSError, EOFError) as error:
            logger.debug("calls with %s over a carrier ended: %r", self._peer[-8:], error)
        finally:
            self.end()

    def end(self) -> None:
        """Close the stream. Pending calls raise Unreachable."""
        self.is_over = True
        self._timer.cancel()
        self._writer.transport.abort()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unreachable(self._peer, "the stream over its carrier ended"))
        for task in self._answering:
            task.cancel()

    def _end_if_idle(self) -> None:
        idle_s = 0.0 if self._waiting or self._answering else self._loop.time() - self._used_s
        if idle_s >= _IDLE_S:
            self.end()
        else:
            self._timer = self._loop.call_later(_IDLE_S - idle_s, self._end_if_idle)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._free.release()

    async def _reply(self, number: int, request: bytes) -> None:
        try:
            kind, body = _Kind.REPLY, await self._answer(self._peer, request)
        except Exception:  # logged before; the caller must learn nothing about us
            kind, body = _Kind.FAILED, b""
        if not self.is_over:
            self._say(kind, number, body)
            with suppress(OSError):
                await self._writer.drain()  # if the peer does not read our answers, we stop reading its requests

    def _say(self, kind: _Kind, number: int, body: bytes) -> None:
        self._used_s = self._loop.time()
        self._writer.write(_HEAD.pack(kind, number, len(body)) + body)


class CarriedCalls:
    """This peer's call streams to all peers that only carriers (third peers) reach.

    Args:
        open_stream: opens a stream for calls to a peer, over a carrier. Raises: Unreachable.
        answer: answers the requests of other peers.
    """

    def __init__(self, open_stream: Callable[[PeerID], Awaitable[Streams]], answer: Answer) -> None:
        self._open_stream = open_stream
        self._answer = answer
        self._streams: dict[PeerID, list[CallStream]] = {}
        """Peer -> its streams, newest last. There may be several: both ends may open one at the same time."""
        self._opening: dict[PeerID, asyncio.Task[CallStream]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, peer: PeerID, request: bytes) -> bytes:
        """Call `peer` and return its reply. Raises: Unreachable."""
        held = [stream for stream in self._streams.get(peer, ()) if not stream.is_over]
        return await (held[-1] if held else await self._open(peer)).call(request)

    async def take(self, peer: PeerID, streams: Streams) -> None:
        """Serve a stream that `peer` has opened to us over a carrier, until the stream ends."""
        await self._serve(peer, self._hold(peer, streams))

    def cut(self, is_cut: Callable[[PeerID], bool]) -> None:
        for peer in filter(is_cut, tuple(self._streams)):
            for stream in self._streams[peer]:
                stream.end()

    async def close(self) -> None:
        self.cut(lambda peer: True)
        await end_tasks(*self._opening.values(), *self._tasks)

    async def _open(self, peer: PeerID) -> CallStream:
        """Open a stream to `peer`. Concurrent callers share this one stream; it opens even if some of them give up."""
        task = self._opening.get(peer)
        if task is None:
            task = self._opening[peer] = asyncio.create_task(self._opened(peer), name=f"calls to {peer[-8:]}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # there may be no caller left
        return await asyncio.shield(task)

    async def _opened(self, peer: PeerID) -> CallStream:
        try:
            stream = self._hold(peer, await self._open_stream(peer))
        finally:
            del self._opening[peer]
        task = asyncio.create_task(self._serve(peer, stream), name=f"calls with {peer[-8:]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _serve(self, peer: PeerID, stream: CallStream) -> None:
        try:
            await stream.serve()
        except RemoteError as error:
            logger.warning("closed a stream of calls: %s", error)
        finally:
            self._streams[peer].remove(stream)
            if not self._streams[peer]:
                del self._streams[peer]

    def _hold(self, peer: PeerID, streams: Streams) -> CallStream:
        stream = CallStream(peer, streams, self._answer)
        self._streams.setdefault(peer, []).append(stream)
        return stream
