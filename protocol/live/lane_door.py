"""Opens lanes, the further TCP connections of a frame stream: accepts them on a port, and dials them.

A lane belongs to an existing stream, so a caller that does not name a known stream is refused before a key is computed.
A connection must prove its identity within five seconds; until then it counts against limits per address and in total.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, Final

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.limits import LANES_MAX, LANES_OF_ALL_MAX, WAITING_LANES_OF_ADDRESS_MAX
from shoal.protocol.live.doorway import Doorway
from shoal.protocol.live.lane import Lane
from shoal.protocol.live.link import Link
from shoal.protocol.live.listen import TCP
from shoal.protocol.live.secure_channel import Handshake
from shoal.protocol.live.throttle import Throttle

logger = logging.getLogger(__name__)

_HANDSHAKE_S: Final = 5.0


class LaneDoor:
    """Dials and accepts the lanes (TCP connections) of one transport. Before `listen` it can only dial."""

    def __init__(self, identity: Identity, *, run: str, throttle: Throttle) -> None:
        self.port = 0
        self._identity, self._run, self._throttle = identity, run, throttle
        self._streams: dict[bytes, Link] = {}
        self._doorway = Doorway(of_one_max=WAITING_LANES_OF_ADDRESS_MAX)
        self._num_lanes = 0
        self._agreeing: Counter[Link] = Counter()
        self._dialling_back: set[Link] = set()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def listen(self, listen: Sequence[str]) -> None:
        """Listen at the IP addresses of `listen`, multiaddrs over TCP, on a port that the system chooses."""
        places = dict.fromkeys((match[1], match[2]) for match in map(TCP.match, listen) if match is not None)
        try:
            for version, host in places:
                self._listeners.append(_listener(version, host, self.port))
                self.port = self._listeners[-1].getsockname()[1]
        except OSError as error:
            logger.info("this peer accepts no lanes: %s", error)
            self._shut()
        for listener in self._listeners:
            self.spawn(self._accept(listener), "accept lanes")

    def expect(self, link: Link) -> None:
        """Accept TCP connections (lanes) for this stream from now on, until `forget`."""
        self._streams[link.stream] = link

    def forget(self, link: Link) -> None:
        self._streams.pop(link.stream, None)

    def counted(self, is_more: bool) -> None:
        """Count a lane (TCP connection): one more if `is_more`, else one less."""
        self._num_lanes += 1 if is_more else -1

    async def dial(self, link: Link, hosts: Collection[str], count: int) -> int:
        """Open up to `count` more TCP connections (lanes) for a stream, to its peer's lane port at one of `hosts`.

        Returns: the number of new lanes. Never raises.
        """
        for host in hosts if link.lane_port and count > 0 else ():
            if await self._dial(link, host):
                others: list[asyncio.Task[bool]] = [
                    self.spawn(self._dial(link, host), "dial a lane") for _ in range(count - 1)
                ]
                return 1 + sum(await asyncio.gather(*others))
        return 0

    def dial_back(self, link: Link, hosts: Callable[[], Awaitable[Collection[str]]], count: int) -> None:
        """Dial the lanes (TCP connections) that a stream's sender requested, but only one request at a time."""
        if link not in self._dialling_back and not self._is_closed:
            self._dialling_back.add(link)
            self.spawn(self._dial_back(link, hosts, min(count, LANES_MAX)), "dial back")

    async def _dial_back(self, link: Link, hosts: Callable[[], Awaitable[Collection[str]]], count: int) -> None:
        try:
            await self.dial(link, await hosts(), count)
            await asyncio.sleep(1.0)  # further requests of this sender are ignored for another second
        finally:
            self._dialling_back.discard(link)

    async def close(self) -> None:
        """Stop accepting and dialling. Open lanes (TCP connections) remain until their streams end."""
        self._is_closed = True
        await end_tasks(*self._tasks)
        self._shut()

    def _shut(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self.port = 0

    def _has_room(self, link: Link) -> bool:
        of_link, of_all = link.num_lanes + self._agreeing[link], self._num_lanes + self._agreeing.total()
        return of_link < LANES_MAX and of_all < LANES_OF_ALL_MAX and not link.lost.is_set()

    def _handshake(self, link: Link, *, opens: bool) -> Handshake:
        return Handshake(self._identity, link.peer, run=self._run, purpose="lane", opens=opens, part_of=link.stream)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # the process has no file left, or the caller is gone
                logger.debug("no lane was accepted: %r", error)
                await asyncio.sleep(0.1)  # maybe the process has no file left
                continue
            self.spawn(self._welcome(connected, host), "welcome a lane")

    async def _welcome(self, connected: socket.socket, host: str) -> None:
        try:
            lane = await Lane.over(connected, self._throttle, accepted=True)
        except OSError:
            return
        with self._doorway.waits(host, lane.close):
            await self._agree(lane, host, self._welcomed(lane))

    async def _welcomed(self, lane: Lane) -> None:
        link = self._streams.get(await lane.read_stream())
        if link is None or not self._has_room(link):
            raise EOFError("there is no such stream, or it has its lanes")
        with self._about_to_be(link):
            link.add_lane(lane, await lane.accept(self._handshake(link, opens=False)))

    async def _dial(self, link: Link, host: str) -> bool:
        if not self._has_room(link):
            return False
        with self._about_to_be(link):
            try:
                connected = await _connect(host, link.lane_port)
                lane = await Lane.over(connected, self._throttle, accepted=False)
            except (OSError, TimeoutError) as error:
                logger.debug("cannot dial a lane to %s at %s: %r", link.peer[-8:], host, error)
                return False
            return await self._agree(lane, host, self._dialled(lane, link))

    @contextlib.contextmanager
    def _about_to_be(self, link: Link) -> Iterator[None]:
        """Count a lane (TCP connection) of this stream against the limits while its handshake (this context) lasts."""
        link.expect_lane()
        self._agreeing[link] += 1
        try:
            yield
        finally:
            self._agreeing[link] -= 1
            self._agreeing += Counter()  # drops entries that are 0

    async def _dialled(self, lane: Lane, link: Link) -> None:
        link.add_lane(lane, await lane.dial(self._handshake(link, opens=True), link.stream))

    async def _agree(self, lane: Lane, host: str, agreeing: Coroutine[Any, Any, None]) -> bool:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await agreeing
        except RemoteError as error:
            logger.warning("refused a lane: %s", error)
        except (EOFError, OSError, TimeoutError) as error:
            logger.debug("a lane with %s did not begin: %r", host, error)
        except BaseException:
            lane.close()
            raise
        else:
            return not lane.is_lost
        lane.close()
        return False

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Run `work` in a task until it is done, or until `close`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _connect(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setblocking(False)
    try:
        async with asyncio.timeout(3.0):
            await asyncio.get_running_loop().sock_connect(own, (host, port))
    except BaseException:
        own.close()
        raise
    return own


def _listener(version: str, host: str, port: int) -> socket.socket:
    own = socket.socket(socket.AF_INET if version == "4" else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        if version == "6":
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        own.setblocking(False)
        own.bind((host, port))
        own.listen(64)
    except BaseException:
        own.close()
        raise
    return own
