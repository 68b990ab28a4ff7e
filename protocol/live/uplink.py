"""Measures the queue before this peer's uplink while it sends, and reports when there is room again.

`../uplink.py` decides how many bytes may be queued; `tcp_queues.py` reads the queue from the kernel. If the kernel does
not show it (not Linux, or not allowed), no bytes are held back here; the volunteer's own limit still applies.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from shoal.protocol.identity import PeerID
from shoal.protocol.live.tcp_queues import TcpQueues
from shoal.protocol.uplink import UplinkConnection, UplinkWindow

logger = logging.getLogger(__name__)


class Uplink:
    """One peer's uplink. Before `follow` it holds no bytes back.

    Attributes:
        on_room: called after each look at the queue, since there may be room for waiting senders.
        is_awaited: True if a sender waits for room.
    """

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.is_awaited = False
        self._window = UplinkWindow()
        self._queues: TcpQueues | None = None
        self._owners: dict[str, PeerID] = {}
        """A connection's name -> peer, for connections that our streams use; traffic on other connections is small."""
        self._timer: asyncio.TimerHandle | None = None
        self._took_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The line's highest recent delivery rate."""
        return self._window.bytes_per_s

    def follow(self, queues: TcpQueues) -> None:
        """Watch these queues from now on. The caller does this after each start of the network daemon."""
        self.close()
        self._queues = queues
        self._window = UplinkWindow()
        self._owners.clear()
        self._look()

    def close(self) -> None:
        """Hold no bytes back from now on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queues is not None:
            self._queues.close()
            self._queues = None
        self.on_room()

    def opened(self, peer: PeerID, connections: Collection[str]) -> None:
        """Record that a stream to `peer` uses one of `connections`; empty: the stream stays on this machine."""
        if self._queues is None:
            return
        self._forget(peer)
        if not connections:
            return
        self._owners.update(dict.fromkeys(connections, peer))
        try:
            self._queues.list()
        except OSError as error:
            self._give_up(error)
        else:
            self._look(peer)

    def joined(self, peer: PeerID, connection: str) -> None:
        """Record that streams to `peer` also use this connection from now on."""
        if self._queues is not None and self._window.knows(peer):
            self._owners[connection] = peer
            try:
                self._queues.list()
            except OSError as error:
                self._give_up(error)

    def left(self, connection: str) -> None:
        """Record that a connection to a peer has ended."""
        self._owners.pop(connection, None)

    def round_trip_s(self, peer: PeerID) -> float:
        """Return the shortest round trip seen to `peer`; 0: the peer is on this machine, or the time is unknown."""
        return self._window.round_trip_s(peer) if self.holds(peer) else 0.0

    def holds(self, peer: PeerID) -> bool:
        """True if traffic to `peer` is known to use the uplink. False within this machine."""
        return self._queues is not None and self._window.knows(peer)

    def admits(self, peer: PeerID) -> bool:
        if not self.holds(peer) or self._window.admits(peer):
            return True
        self._arm()  # it calls `on_room`
        return False

    def wrote(self, peer: PeerID, nbytes: int) -> None:
        if self.holds(peer) and not self._window.is_busy(peer):
            self._look(peer)  # so that bytes that the kernel holds already are not taken for these
        if self.holds(peer):
            self._arm()
            self._window.wrote(peer, nbytes)

    def _look(self, *peers: PeerID) -> None:
        """Read the kernel's figures of the connections with bytes in flight, and of all connections to `peers`."""
        if self._queues is None:
            return
        asked, now_s = {*peers, *map(PeerID, self._window.busy)}, asyncio.get_running_loop().time()
        # Measure processor time: a busy machine may pause this process, which is no cost of the look.
        begun_s = time.thread_time()
        try:
            found = self._queues.look([name for name, owner in self._owners.items() if owner in asked])
        except OSError as error:
            self._give_up(error)
            return
        seen: dict[str, UplinkConnection] = {}
        for name, connection in found.items():
            owner = self._owners[name]
            seen[owner] = seen[owner] + connection if owner in seen else connection
        for gone in asked - seen.keys():
            self._forget(gone)
        self._window.look(seen, now_s=now_s)
        self._took_s = time.thread_time() - begun_s

    def _forget(self, peer: PeerID) -> None:
        self._window.forget(peer)
        self._owners = {name: owner for name, owner in self._owners.items() if owner != peer}

    def _arm(self) -> None:
        if self._timer is None and self._queues is not None:
            # In 0.02 s a fifth of the queue leaves, so it does not run empty between two looks; in 0.1 s all of it.
            # A look takes 0.1 ms for five peers; with a hundred, look less often, for 5 % of a core at most.
            wait_s = min(max(0.02, self._took_s / 0.05), 0.1)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._look()
        self.on_room()
        if self.is_awaited or self._window.busy:
            self._arm()

    def _give_up(self, error: OSError) -> None:
        logger.info("the queue before the uplink cannot be read any more: %s", error)
        self.close()
