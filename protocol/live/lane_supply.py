"""Decides how many lanes (further TCP connections) a stream of frames needs, and keeps them open while frames use it.

Without packet loss a few connections fill the path, start faster than one, and let calls pass beside frames. With loss
each connection has a fixed rate whatever the line's capacity, so the number of lanes is doubled up to `LANES_MAX`.

The lanes are checked when a frame is about to be written, at most once a second. Only a stream's first frame waits for
lanes, for some round trips; without lanes the daemon's stream takes all frames. If we cannot dial the other end, we ask
it over the stream to dial us; if that also fails, we try again at growing intervals. Idle lanes are closed before a
router on the path forgets them.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from shoal.protocol.limits import LANES_MAX
from shoal.protocol.live.lane_door import LaneDoor
from shoal.protocol.live.link import Link

_LOOK_S: Final = 1.0
_IDLE_S: Final = 30.0
_PATIENCE_S: Final = 10.0
"""Seconds until lanes are tried again after neither end could dial; doubled after each further failure, up to 320."""


LANES_FIRST: Final = 4
_LOSS_MIN: Final = 0.003
"""Share of retransmitted packets from which lanes are added: with 0.3 % and a round trip of 60 ms, one connection
carries only 4 Mbit/s."""
_PACKETS_MIN: Final = 300
"""Least number of packets from which the share of retransmitted packets is computed: 0.3 % of them is one packet."""
_FIELDS: Final = struct.Struct("=100xI52xI")
"""Fields of the kernel's `tcp_info`, whose layout is guaranteed: retransmitted packets, and all packets with data."""


def sent_of(infos: Iterable[bytes]) -> tuple[int, int]:
    """Return (packets with data, retransmitted packets), each summed over all connections. Args: infos: `tcp_info` of
    each connection; empty ones are skipped."""
    figures = [_FIELDS.unpack_from(info) for info in infos if len(info) >= _FIELDS.size]
    return sum(packets for _, packets in figures), sum(again for again, _ in figures)


class LaneCount:
    """Decides how many lanes (TCP connections) one stream should have."""

    def __init__(self) -> None:
        self.wanted = LANES_FIRST
        self._judged = 0, 0

    def look(self, packets: int, again: int) -> None:
        """Double the number of lanes if too many packets are lost. Args: packets: sent so far; again: resent so far."""
        new_packets, new_again = packets - self._judged[0], again - self._judged[1]
        if new_packets < 0 or new_again < 0:  # some lanes have ended, and their packets are gone from the sums
            self._judged = packets, again
        elif new_packets >= _PACKETS_MIN:
            self._judged = packets, again
            if new_again >= _LOSS_MIN * new_packets:
                self.wanted = min(LANES_MAX, 2 * self.wanted)


class LaneSupply:
    """Opens and closes one stream's lanes. Args: hosts: returns IP addresses that may reach the other end of `link`."""

    def __init__(self, link: Link, door: LaneDoor, hosts: Callable[[], Awaitable[Collection[str]]]) -> None:
        self._link, self._door, self._hosts = link, door, hosts
        self._count = LaneCount()
        self._loop = asyncio.get_running_loop()
        self._used_s = self._looks_s = self._loop.time()
        self._patience_s = _PATIENCE_S
        self._had: int | None = None
        """Number of lanes when we last asked the other end to dial more lanes; None: we have not asked."""
        self._dialling: asyncio.Task[None] | None = None
        self._idle = self._loop.call_later(_IDLE_S, self._check_idle)

    async def begin(self, patience_s: float) -> None:
        """Dial the first lanes and wait up to `patience_s` for them: first frames to a peer often measure the path."""
        self.used()
        if self._dialling is not None:
            await asyncio.wait({self._dialling}, timeout=patience_s)

    def used(self) -> None:
        """Record that a frame is about to be sent. At most once a second, begin to open missing lanes."""
        self._used_s = self._loop.time()
        if self._used_s < self._looks_s or self._dialling is not None:
            return
        self._looks_s = self._used_s + _LOOK_S
        self._count.look(*sent_of(self._link.tcp_infos()))
        missing = self._count.wanted - self._link.num_lanes
        if missing > 0:
            self._dialling = self._door.spawn(self._open(missing), f"lanes to {self._link.peer[-8:]}")

    def close(self) -> None:
        self._idle.cancel()
        if self._dialling is not None:
            self._dialling.cancel()

    async def _open(self, count: int) -> None:
        try:
            dials_back = self._dials_back()
            if not dials_back and await self._door.dial(self._link, await self._hosts(), count):
                self._patience_s, self._had = _PATIENCE_S, None
                return
            if self._door.port:
                self._had = self._link.num_lanes
                self._link.ask_for_lanes(count)
            if dials_back:
                self._patience_s = _PATIENCE_S
                self._looks_s = self._loop.time() + 3.0  # less than `_PATIENCE_S`, since the other end can dial us
            else:
                self._looks_s = self._loop.time() + self._patience_s
                self._patience_s = min(320.0, 2 * self._patience_s)
        finally:
            self._dialling = None

    def _dials_back(self) -> bool:
        return self._had is not None and self._link.num_lanes > self._had

    def _check_idle(self) -> None:
        if self._link.lost.is_set():
            return
        if self._dials_back():
            self._patience_s = _PATIENCE_S
        wait_s = self._used_s + _IDLE_S - self._loop.time()
        if wait_s <= 0.0 and self._link.close_lanes():
            self._count = LaneCount()
        self._idle = self._loop.call_later(max(wait_s, _IDLE_S / 2), self._check_idle)
