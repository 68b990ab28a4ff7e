"""Decides for each peer if we reach it directly or over a carrier (a third peer), and asks carriers to carry.

If the daemon has a connection to the peer, we use that. If it has none, and dialling does not make one within two
seconds, we ask peers that are connected to us to carry. Carriers are not announced: a peer that does not carry has no
handler for the request, as we find out within a round trip; a carrier may refuse with a reason. The order in which
possible carriers are asked follows from a hash of both ends and the carrier: the order is the same at both ends, and
differs between pairs.

While we reach a peer over a carrier we dial the peer's addresses now and then, also those from which it is connected to
carriers (`carriage.py`: this opens most NATs), and the peer may dial us. Once there is a connection, calls use it at
once, and frames as soon as earlier frames are handled.

A connection over libp2p's own relay does not count: it ends after 128 KiB.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import only_direct
from shoal.protocol.limits import CARRIERS_ASKED_MAX
from shoal.protocol.live.carriage import Streams
from shoal.protocol.live.secure_channel import Purpose

logger = logging.getLogger(__name__)

DIRECT_S: Final = 2.0
"""Seconds for which a peer is dialled before a carrier is asked, if there is a possible carrier."""
_LOOK_S: Final = 1.0
"""Seconds between checks of the daemon's connections while a peer is reached over a carrier."""
_DIAL_AGAIN_S: Final = (5.0, 10.0, 20.0, 40.0, 60.0)
_DIALS_SECOND_S: Final = 6.0
"""If both ends are behind NATs, one end dials this many seconds later: the other end's dial has then failed, and has
opened the other end's NAT. If both dialled at once TCP would connect, but both would begin the handshake as clients."""
_ASK_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds before carriers are asked again for a peer, after all refused once, twice ...: most such peers are gone."""
_ASK_NEXT_S: Final = 0.3
"""Seconds for a carrier to answer before the next one is asked as well."""


class NotCarried(Exception):
    """A carrier (third peer) does not carry the stream; the error's text is the reason."""


Ask = Callable[[PeerID, PeerID, Purpose], Coroutine[Any, Any, Streams]]
"""(carrier, target, purpose) -> the encrypted stream to the target. Raises: NotCarried."""


@dataclass(slots=True, eq=False)
class _Detour:
    used_s: float
    dial_at_s: float
    num_dials: int = 0


class Routes:
    """Finds the routes from this peer to all others.

    Args:
        connections: returns peer -> remote multiaddrs of the daemon's connections to it.
        dial: connects to a peer at its remembered addresses; returns True if that succeeds within five seconds.
        ask: gets a stream to a peer over a carrier.
        on_direct: called with a peer that we reached over carriers and can now reach directly.
    """

    def __init__(
        self,
        me: PeerID,
        *,
        connections: Callable[[], Awaitable[Mapping[PeerID, Sequence[str]]]],
        dial: Callable[[PeerID], Coroutine[Any, Any, bool]],
        ask: Ask,
        on_direct: Callable[[PeerID], None],
    ) -> None:
        self._me, self._connections, self._dial, self._ask, self._on_direct = me, connections, dial, ask, on_direct
        self._direct: set[PeerID] = set()
        """Peers with a direct connection at the last check, and without a failed call or frame since then."""
        self._detours: dict[PeerID, _Detour] = {}
        self._finding: dict[PeerID, asyncio.Task[bool]] = {}
        self._dials: dict[PeerID, asyncio.Task[bool]] = {}
        self._shunned: dict[PeerID, float] = {}
        self._refused: dict[PeerID, tuple[int, float]] = {}
        """Peer to which all carriers refused to carry -> (refusals in a row, time until which we ask no carrier)."""
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def is_direct(self, peer: PeerID) -> bool:
        """True if we are to reach `peer` directly: it is connected, if need be by a dial, or we can ask no carrier."""
        if peer in self._direct:
            return True
        detour = self._detours.get(peer)
        if detour is not None:
            detour.used_s = self._loop.time()
            return False
        finding = self._finding.get(peer)
        if finding is None:
            finding = self._finding[peer] = asyncio.create_task(self._find(peer), name=f"way to {peer[-8:]}")
            finding.add_done_callback(lambda _: self._finding.pop(peer, None))
        return await asyncio.shield(finding)  # other callers may wait for the same task

    def failed(self, peer: PeerID) -> None:
        """Record that a direct call or frame to `peer` has failed, so that its connection is checked again."""
        self._direct.discard(peer)

    async def introduced(self, peer: PeerID) -> None:
        """Dial a peer that has new addresses, so that the next caller need not wait for the dial."""
        self._refused.pop(peer, None)
        is_reached = await self.dial(peer) or peer in self._detours or peer in self._direct
        if not is_reached and self._in_order(peer, await self._connections()):
            self._take_detour(peer)

    def shun(self, carrier: PeerID) -> None:
        """Ask this carrier (third peer) last for half a minute, since a stream over it broke."""
        self._shunned[carrier] = self._loop.time() + 30.0

    def comes_over(self, peer: PeerID) -> None:
        """Record that `peer` reached us over a carrier (third peer): it cannot dial us, but perhaps we can dial it."""
        self._refused.pop(peer, None)
        if peer not in self._direct and peer not in self._detours and peer not in self._finding:
            self._take_detour(peer)

    def seen(self, peer: PeerID) -> None:
        """Plan a dial of `peer` at the address that a carrier reports: now or, if our PeerID is lower, 6 s later."""
        self.comes_over(peer)
        if detour := self._detours.get(peer):
            detour.num_dials = 0
            detour.dial_at_s = self._loop.time() + (0.0 if self._me > peer else _DIALS_SECOND_S)

    async def dial(self, peer: PeerID) -> bool:
        """Dial `peer`; concurrent callers share one dial. Return True if `peer` is connected."""
        return await asyncio.shield(self._dials.get(peer) or self._dial_beside(peer))

    async def carry(self, peer: PeerID, purpose: Purpose) -> tuple[PeerID, Streams]:
        """Return a carrier (a third peer) and a stream to `peer` over it.

        Raises: Unreachable: no carrier accepted; the text has the last carrier's reason.
        """
        carriers = self._in_order(peer, await self._connections())[:CARRIERS_ASKED_MAX]
        asking: dict[asyncio.Task[Streams], PeerID] = {}
        why = "no peer that is connected to us could carry"
        try:
            while carriers or asking:
                if carriers:
                    carrier = carriers.pop(0)
                    asking[asyncio.create_task(self._ask(carrier, peer, purpose), name="ask a carrier")] = carrier
                done, _ = await asyncio.wait(
                    asking, timeout=_ASK_NEXT_S if carriers else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    carrier = asking.pop(task)
                    try:
                        streams = task.result()
                    except NotCarried as error:
                        why = f"{carrier[-8:]} does not carry: {error}"
                        logger.debug("no way to %s: %s", peer[-8:], why)
                    else:
                        logger.info("%s to %s go over %s", purpose, peer[-8:], carrier[-8:])
                        self._refused.pop(peer, None)
                        return carrier, streams
        finally:
            for task in asking:
                task.add_done_callback(_close)
                task.cancel()
        self._detours.pop(peer, None)
        times, _ = self._refused.get(peer, (0, 0.0))
        wait_s = _ASK_AGAIN_S[min(times, len(_ASK_AGAIN_S) - 1)]
        self._refused[peer] = (times + 1, self._loop.time() + wait_s)
        raise Unreachable(peer, f"none of its addresses answers, and {why}", is_silence=True)

    async def close(self) -> None:
        self._is_closed = True
        await end_tasks(*self._finding.values(), *self._dials.values(), self._looking)

    # Finding a route

    async def _find(self, peer: PeerID) -> bool:
        connections = await self._connections()
        if is_direct(connections.get(peer, ())):
            self._direct.add(peer)
            return True
        _, refused_until_s = self._refused.get(peer, (0, 0.0))
        could_carry = self._loop.time() >= refused_until_s and bool(self._in_order(peer, connections))
        try:
            async with asyncio.timeout(DIRECT_S if could_carry else None):
                is_connected = await self.dial(peer)
        except TimeoutError:
            is_connected = False
        if is_connected and is_direct((await self._connections()).get(peer, ())):
            self._direct.add(peer)
            return True
        if could_carry:
            self._take_detour(peer)
        return not could_carry

    def _take_detour(self, peer: PeerID) -> None:
        if self._is_closed:
            return
        now_s = self._loop.time()
        self._detours[peer] = _Detour(used_s=now_s, dial_at_s=now_s + _DIAL_AGAIN_S[0])
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_for_better(), name="look for direct ways")

    async def _look_for_better(self) -> None:
        try:
            while self._detours:
                connections = await self._connections()
                now_s = self._loop.time()
                for peer, detour in tuple(self._detours.items()):
                    if is_direct(connections.get(peer, ())):
                        logger.info("%s can be reached directly now: %s", peer[-8:], ", ".join(connections[peer]))
                        del self._detours[peer]
                        self._direct.add(peer)
                        self._on_direct(peer)
                    elif now_s > detour.used_s + 120.0:
                        del self._detours[peer]
                    elif now_s >= detour.dial_at_s and peer not in self._dials:
                        detour.dial_at_s = now_s + _DIAL_AGAIN_S[min(detour.num_dials, len(_DIAL_AGAIN_S) - 1)]
                        detour.num_dials += 1
                        self._dial_beside(peer)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._looking = None

    def _dial_beside(self, peer: PeerID) -> asyncio.Task[bool]:
        task = self._dials[peer] = asyncio.create_task(self._dial(peer), name=f"dial {peer[-8:]}")
        task.add_done_callback(lambda _: self._dials.pop(peer, None))
        return task

    def _in_order(self, peer: PeerID, connections: Mapping[PeerID, Sequence[str]]) -> list[PeerID]:
        """Return the possible carriers to `peer`, in the order in which they are asked."""
        now_s = self._loop.time()
        for carrier in [each for each, until_s in self._shunned.items() if until_s <= now_s]:
            del self._shunned[carrier]
        others = [each for each, places in connections.items() if each != peer and is_direct(places)]
        return sorted(others, key=lambda carrier: (carrier in self._shunned, _weight(self._me, peer, carrier)))


def is_direct(places: Sequence[str]) -> bool:
    """True if one of these connections uses no relay."""
    return bool(only_direct(places))


def _weight(a: PeerID, b: PeerID, carrier: PeerID) -> bytes:
    """Return a carrier's weight for a pair of peers (highest random weight, Thaler and Ravishankar 1998)."""
    return blake3(f"{min(a, b)} {max(a, b)} {carrier}".encode()).digest()


def _close(task: "asyncio.Task[Streams]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()
