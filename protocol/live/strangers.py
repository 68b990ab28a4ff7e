"""Limits the work that strangers, peers without a valid certificate, can cause.

Any peer that can dial the network daemon may send requests and open streams. Each costs the daemon and us 0.2 to 0.6 ms
until it is refused for lack of a certificate, and one connection carries a thousand a second. So all strangers of one
network share an allowance of requests. The allowance suffices for newcomers, which are no strangers once they have
shown a certificate. If a stranger exceeds the allowance, we close its connections, and its address cannot dial us for a
while (`connection_limit.py`). In a private network or on this machine each stranger has an allowance of its own, and
none is kept from dialling.
"""

import asyncio
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.protocol.ending import end_tasks
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STRANGERS_ALLOWANCE, STRANGERS_REQUESTS_PER_S
from shoal.protocol.live.allowance import Allowance
from shoal.protocol.live.connection_limit import Network, address_and_network
from shoal.protocol.live.tcp_queues import hosts_of
from shoal.protocol.membership import AccessLevel, Members

logger = logging.getLogger(__name__)


class _Place(NamedTuple):
    whose: Network | PeerID
    """The key of the stranger's allowance: its network or, in a private network, the stranger itself."""
    address: Network | None
    """The stranger's address, if we may keep it from dialling us; None: we may not."""


class Strangers:
    """Admits or rejects requests of strangers.

    Args:
        connections: returns the remote multiaddrs of each connected peer.
        hang_up: closes all connections to a peer; never raises.
        shut_out: keeps an address from dialling us for a while.
    """

    def __init__(
        self,
        members: Members,
        *,
        connections: Callable[[], Awaitable[Mapping[PeerID, Sequence[str]]]],
        hang_up: Callable[[PeerID], Awaitable[None]],
        shut_out: Callable[[Network], None],
    ) -> None:
        self._members = members
        self._connections, self._hang_up, self._shut_out = connections, hang_up, shut_out
        self._allowance = Allowance[Network | PeerID](STRANGERS_ALLOWANCE, STRANGERS_REQUESTS_PER_S)
        self._places: dict[PeerID, _Place] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked_s, self._took_s = -math.inf, 0.0
        self._leaving: dict[PeerID, asyncio.Task[None]] = {}

    async def admits(self, peer: PeerID) -> bool:
        """Return True if we may read a request or stream of `peer`; else its connections are about to be closed."""
        if self._members.access_level(peer) is not AccessLevel.STRANGER:
            return True
        place = await self._place(peer)
        if self._allowance.takes(place.whose, asyncio.get_running_loop().time()):
            return True
        if peer not in self._leaving:
            logger.warning("hung up on %s, a stranger that sends too many requests", peer[-8:])
            self._leaving[peer] = asyncio.create_task(self._send_away(peer, place), name=f"hang up on {peer[-8:]}")
        return False

    async def close(self) -> None:
        await end_tasks(*self._leaving.values(), self._looking)

    async def _send_away(self, peer: PeerID, place: _Place) -> None:
        try:
            if place.address is not None:
                self._shut_out(place.address)
            await self._hang_up(peer)
        finally:
            del self._leaving[peer]

    async def _place(self, peer: PeerID) -> _Place:
        if peer not in self._places:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look(), name="look where strangers are")
            await asyncio.shield(self._looking)
        return self._places.get(peer, _Place(peer, None))

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._looked_s + max(0.1, self._took_s / 0.05) - loop.time())
        began_s = loop.time()
        found = await self._connections()
        self._places = {peer: _place_of(peer, addresses) for peer, addresses in found.items()}
        self._looked_s = loop.time()
        self._took_s = self._looked_s - began_s


def _place_of(peer: PeerID, multiaddrs: Sequence[str]) -> _Place:
    for host in hosts_of(multiaddrs):  # without relays, whose address is not the stranger's
        address, network = address_and_network(ipaddress.ip_address(host))
        if network is not None:
            return _Place(network, address)
    return _Place(peer, None)
