"""Decides, peer by peer, whether to go there directly or over a carrier, and asks carriers.

Where the daemon has a connection with a peer, that is the way. Where it has none and dialling does not bring one within
two seconds, whoever is connected with us may carry: nobody says beforehand that it carries, since a peer that does not
has no such handler, which costs a round trip to find out, and one that has refuses with a reason. Pairs of peers begin
with different carriers, by a hash of the three, and both ends with the same one.

While a peer is reached over a carrier its addresses are dialled again now and then, also those at which carriers see it
(`carriage.py`: that punches holes into most NATs), and whoever dials us counts too:
once there is a connection, calls take it at once, and frames when those that have left are handled.

A connection over libp2p's own relay does not count: it ends after 128 KiB.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import only_direct
from shoal.protocol.limits import CARRIERS_ASKED_MAX
from shoal.protocol.live.carriage import Streams
from shoal.protocol.live.secure_channel import Purpose

logger = logging.getLogger(__name__)

DIRECT_S: Final = 2.0
"""How long a peer is dialled before a carrier is asked, where there is one."""
_LOOK_S: Final = 1.0
"""How often the daemon's connections are looked at while a peer is reached over a carrier."""
_DIAL_AGAIN_S: Final = (5.0, 10.0, 20.0, 40.0, 60.0)
_DIALS_SECOND_S: Final = 6.0
"""How much later one of two ends behind NATs dials than the other, which has given up by then and has opened its NAT
for it. Where both dial at once TCP connects, and both begin the handshake as clients."""
_UNUSED_S: Final = 120.0
_ASK_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0)
"""How long nobody is asked to carry to a peer to whom nobody did. Most such peers are gone."""
_ASK_NEXT_S: Final = 0.3
"""How long a carrier may take before the next one is asked beside it."""
_SHUNNED_S: Final = 30.0
"""How long a carrier is asked last, after a stream over it has broken."""


class NotCarried(Exception):
    """A carrier's reason why it does not carry a stream."""


Ask = Callable[[PeerID, PeerID, Purpose], Coroutine[Any, Any, Streams]]
"""(carrier, to whom, what for) -> the stream, secured. Raises: NotCarried."""


@dataclass(slots=True, eq=False)
class _Detour:
    """A peer that is reached over carriers."""

    used_s: float
    dial_at_s: float
    num_dials: int = 0


class Routes:
    """Args:
    connections: the daemon's, by peer: the multiaddrs of the other ends.
    dial: connects to a peer by its remembered addresses; whether it is connected then. Takes five seconds at most.
    ask: asks a carrier.
    on_direct: called when a peer that was reached over carriers can be reached directly.
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
        """Peers with whom the daemon had a connection when we looked, and to whom nothing has failed since."""
        self._detours: dict[PeerID, _Detour] = {}
        self._finding: dict[PeerID, asyncio.Task[bool]] = {}
        self._dials: dict[PeerID, asyncio.Task[bool]] = {}
        self._shunned: dict[PeerID, float] = {}
        self._refused: dict[PeerID, tuple[int, float]] = {}
        """Peers to whom nobody carried: how often in a row, and until when nobody is asked."""
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def is_direct(self, peer: PeerID) -> bool:
        """Whether to go to `peer` directly: there is a connection, or nobody who could carry."""
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
        return await asyncio.shield(finding)  # others may wait for it, and whoever comes next

    def failed(self, peer: PeerID) -> None:
        """What went to `peer` directly came to nothing: look anew whether there is a connection."""
        self._direct.discard(peer)

    async def introduced(self, peer: PeerID) -> None:
        """Dial a peer whose addresses are new, so that whoever goes there next need not wait for that."""
        self._refused.pop(peer, None)
        is_reached = await self.dial(peer) or peer in self._detours or peer in self._direct
        if not is_reached and self._in_order(peer, await self._connections()):
            self._take_detour(peer)

    def shun(self, carrier: PeerID) -> None:
        """A stream over this carrier broke: ask others first."""
        self._shunned[carrier] = self._loop.time() + _SHUNNED_S

    def comes_over(self, peer: PeerID) -> None:
        """`peer` had a stream carried to us: it cannot dial us, perhaps we can."""
        self._refused.pop(peer, None)
        if peer not in self._direct and peer not in self._detours and peer not in self._finding:
            self._take_detour(peer)

    def seen(self, peer: PeerID) -> None:
        """A carrier says from where `peer` is connected with it, and says the same of us to `peer` at this moment."""
        self.comes_over(peer)
        if detour := self._detours.get(peer):
            detour.num_dials = 0
            detour.dial_at_s = self._loop.time() + (0.0 if self._me > peer else _DIALS_SECOND_S)

    async def dial(self, peer: PeerID) -> bool:
        """Dial `peer`, once for all who want that at the same time. Returns: whether it is connected now."""
        task = self._dials.get(peer)
        if task is None:
            task = self._dials[peer] = asyncio.create_task(self._dial(peer), name=f"dial {peer[-8:]}")
            task.add_done_callback(lambda _: self._dials.pop(peer, None))
        return await asyncio.shield(task)

    async def carry(self, peer: PeerID, purpose: Purpose) -> tuple[PeerID, Streams]:
        """Have a stream put through to `peer`. Returns: by whom, and the stream.

        Raises: Unreachable: nobody carries it; the sentence says why the last one does not.
        """
        carriers = self._in_order(peer, await self._connections())[:CARRIERS_ASKED_MAX]
        asking: dict[asyncio.Task[Streams], PeerID] = {}
        why = "nobody who is connected with us could carry"
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
        tasks = [*self._finding.values(), *self._dials.values(), *filter(None, [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Finding out

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
                    elif now_s > detour.used_s + _UNUSED_S:
                        del self._detours[peer]
                    elif now_s >= detour.dial_at_s and peer not in self._dials:
                        detour.dial_at_s = now_s + _DIAL_AGAIN_S[min(detour.num_dials, len(_DIAL_AGAIN_S) - 1)]
                        detour.num_dials += 1
                        self._dial_beside(peer)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._looking = None

    def _dial_beside(self, peer: PeerID) -> None:
        task = self._dials[peer] = asyncio.create_task(self._dial(peer), name=f"dial {peer[-8:]}")
        task.add_done_callback(lambda _: self._dials.pop(peer, None))

    def _in_order(self, peer: PeerID, connections: Mapping[PeerID, Sequence[str]]) -> list[PeerID]:
        """Whoever could carry to `peer`, the first to be asked first."""
        now_s = self._loop.time()
        for carrier in [each for each, until_s in self._shunned.items() if until_s <= now_s]:
            del self._shunned[carrier]
        others = [each for each, places in connections.items() if each != peer and is_direct(places)]
        return sorted(others, key=lambda carrier: (carrier in self._shunned, _weight(self._me, peer, carrier)))


def is_direct(places: Sequence[str]) -> bool:
    """Whether one of the connections that end there goes over nobody else."""
    return bool(only_direct(places))


def _weight(a: PeerID, b: PeerID, carrier: PeerID) -> bytes:
    """Highest random weight (Thaler and Ravishankar 1998): all that differ is which pair it is for."""
    return blake3(f"{min(a, b)} {max(a, b)} {carrier}".encode()).digest()


def _close(task: "asyncio.Task[Streams]") -> None:
    """Whoever answered too late carries nothing."""
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()
