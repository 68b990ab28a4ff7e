"""Measures this peer's links to others, and its network card, when the coordinator asks for a measurement."""

import asyncio
import heapq
import math

from shoal.peer.compute.probe import FAR_S, LinkProbe
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.links.meter import LinkMeter
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PROBES_PER_REPLY_MAX, TOGETHER_MAX
from shoal.protocol.messages import LinkReport
from shoal.protocol.ports import Clock

_DOUBT_S = 30.0
"""A probe far below earlier ones is repeated if the coordinator has found the run too slow within this many seconds."""


class LinkProbing:
    """Probes the links of one peer."""

    def __init__(self, endpoint: Endpoint, clock: Clock, meter: LinkMeter, vectors: Vectors) -> None:
        self._clock, self._meter = clock, meter
        self._probe = LinkProbe(endpoint=endpoint, clock=clock, vectors=vectors)
        self._links: dict[PeerID, LinkReport] = {}
        self._task: asyncio.Task[None] | None = None
        self._to_probe: list[PeerID] = []
        self._far: set[PeerID] = set()
        """Peers with a round trip of `FAR_S` or more that we have probed since we last probed several links at once."""
        self._beside: tuple[PeerID, ...] = ()
        self.card_bytes_per_s = 0.0
        """Highest rate measured over several links at once: that of our network card; 0: not measured."""
        self._is_card_known = False
        """True if the network card has been measured since its rate was last in doubt."""
        self._doubted_s = -math.inf
        """Time when the coordinator last said that the run is slower than the measured figures explain."""

    @property
    def bytes_per_s(self) -> float:
        """The rate of our best link in bytes/s; 0: none is known."""
        return max((link.bytes_per_s for link in self._links.values()), default=0.0)

    def measure(self, peers: tuple[PeerID, ...], beside: tuple[PeerID, ...]) -> None:
        """Measure our links to `peers` soon. Args: beside: peers that share our network card."""
        self._beside = beside
        self._to_probe = list(dict.fromkeys((*self._to_probe, *peers)))[:16]  # a probe may take a second
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._probe_links(), name="measure links")

    def look(self) -> None:
        """Measure our links by their traffic: the run is too slow, and a slow link may be too busy to be probed."""
        seen_bytes_per_s = self._meter.look(self._beside)
        if seen_bytes_per_s is not None:
            # The card has to be measured again once the lines are quiet.
            self.card_bytes_per_s, self._is_card_known = seen_bytes_per_s, False
        self._doubted_s = self._clock.now_s()

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe_links(self) -> None:
        while self._to_probe:
            await self._drop_unreachable()
            if not self._to_probe:
                return
            if not await self._is_quiet():
                self._to_probe = []
                return  # a probe of a busy line says nothing of the link
            mark = self._meter.mark
            report = await self._probe.measure_if_possible(self._to_probe.pop(0))
            if report is not None:
                self._links[report.peer] = report
                looks_slow = self._meter.probed(report, since=mark)
                if looks_slow and self._clock.now_s() < self._doubted_s + _DOUBT_S:
                    await asyncio.sleep(0.5)
                    self._to_probe.append(report.peer)
                self._far.discard(report.peer)  # an earlier probe may have found it far because our line was busy
                if report.round_trip_s >= FAR_S:
                    self._far.add(report.peer)
            is_last = not self._is_card_known and not self._to_probe
            if len(self._far) >= PROBES_PER_REPLY_MAX or (len(self._far) > 1 and is_last):
                self._far.clear()
                await self._probe_card()

    async def _drop_unreachable(self) -> None:
        """Stop probing peers that do not answer. All peers that we have not met, or may not reach, are tried at once:
        one by one, the tries would take longer than the coordinator delays the first plan."""
        doubtful = [p for p in self._to_probe if self._meter.cannot_reach(p) or not self._meter.has_met(p)]
        answers = await asyncio.gather(*(self._probe.answers(peer) for peer in doubtful))
        silent = {peer for peer, answer in zip(doubtful, answers, strict=True) if not answer}
        self._to_probe = [peer for peer in self._to_probe if peer not in silent]

    async def _probe_card(self) -> None:
        far = (link for link in self._links.values() if link.round_trip_s >= FAR_S)
        quickest = heapq.nlargest(TOGETHER_MAX, far, key=lambda link: (link.bytes_per_s, link.peer))
        if await self._is_quiet():
            found = await self._probe.measure_together(quickest, self._beside)
            self.card_bytes_per_s = max(self.card_bytes_per_s, found)
            self._is_card_known = self._is_card_known or found > 0.0

    async def _is_quiet(self) -> bool:
        """Wait for a moment without traffic, a second at most. Returns: True if such a moment came."""
        for _ in range(20):
            if self._meter.is_quiet:
                return True
            await asyncio.sleep(0.05)
        return False
