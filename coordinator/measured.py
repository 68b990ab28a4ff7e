"""What peers report to have measured, kept until a plan needs it. Pure.

Claims are not trusted, so what others have measured counts first. Of a link: the receiver's figure bounds the sender's,
and of two round trips over one link the longer counts, so that who claims a better link than there is gains nothing and
who claims a worse one only loses work. Of a device: the seconds that its microbatches took, over what its probe said.

Until others have seen it at work a peer is worth at most the median of those who have been seen, whatever it claims of
its device and its line: six that boast, beside six that work, get what six usual ones would. A peer that works, and
lies about its own seconds, is found out as far as `BOAST_MEASURED` only.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median, median_low

import numpy as np

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import LinkReport
from shoal.protocol.topology import Floats

STEADY_REPORTS = 16
"""Of so many an average is made, in the logarithm; then each new one moves it by 1/16. Noise of +-10 % leaves 1 %."""
ODD = 1.5
ODD_REPORTS = 3
"""Figures off by more than a factor of `ODD`, so many in a row and in one direction, are no noise: believed at once."""
SPEED_REPORTS = 3
"""Before so many a device's figure does not count: its first forward pays for everything that is done once."""
LINKS_KEPT_MAX = 64
"""Of each reporter, the last it spoke of; as many as an honest one tells of."""
BOAST = 4.0
"""A sender is believed to be up to so many times faster than what the receiver has seen arrive, which errs down."""
BOAST_CLAIMED = 16.0
"""While nobody has been measured, as before the first plan, a claim counts up to so many times the usual one: the
boundaries between stages are made of these, and cards and processors do differ that much."""
BOAST_MEASURED = 64.0
"""What a device says of its own work counts up to so many times the usual: a data centre's card among processors."""
CLAIM_MIN = 2.0
"""Bytes/s. A claim of nothing comes as 1 (`MeasuredPeer.of`)."""
RATE_MAX = 1e12
"""Bytes/s and, in seconds, its inverse: figures beyond are no measurements."""


class Smoothed:
    """A positive figure without its noise, but not without its changes."""

    __slots__ = ("_odd", "count", "log")

    def __init__(self) -> None:
        self.count = 0
        self.log = math.nan
        """NaN: no figure yet."""
        self._odd = 0

    @property
    def value(self) -> float:
        return math.exp(self.log)

    def add(self, figure: float) -> None:
        if not self.count:
            self.log, self.count = math.log(figure), 1
            return
        off = math.log(figure) - self.log
        direction = 0 if abs(off) <= math.log(ODD) else 1 if off > 0 else -1
        self._odd = self._odd + direction if self._odd * direction > 0 else direction
        if abs(self._odd) >= ODD_REPORTS:
            self.log, self.count, self._odd = math.log(figure), 1, 0
            return
        self.count = min(self.count + 1, STEADY_REPORTS)
        self.log += min(max(off, -math.log(ODD)), math.log(ODD)) / self.count


@dataclass(slots=True)
class _Link:
    """What one peer says of its link with another."""

    round_trip_s: Smoothed
    sent: Smoothed
    received: Smoothed


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredNetwork:
    """Between peers in the order of a snapshot; NaN: nobody has measured it. Rows are senders."""

    latency_s: Floats
    """[N, N], one way."""
    bytes_per_s: Floats
    """[N, N]"""


class LinkBook:
    """Links as both of their ends report them."""

    def __init__(self) -> None:
        self._links: dict[PeerID, OrderedDict[PeerID, _Link]] = {}

    def note(self, reporter: PeerID, reports: Iterable[LinkReport]) -> None:
        """From a heartbeat of `reporter`, who may say anything."""
        for report in islice(reports, LINKS_PER_HEARTBEAT_MAX):
            if report.peer == reporter:
                continue
            links = self._links.setdefault(reporter, OrderedDict())
            link = links.setdefault(report.peer, _Link(Smoothed(), Smoothed(), Smoothed()))
            links.move_to_end(report.peer)
            _add(link.round_trip_s, report.round_trip_s)
            _add(link.sent, report.bytes_per_s)
            _add(link.received, report.received_bytes_per_s)
            if len(links) > LINKS_KEPT_MAX:
                links.popitem(last=False)

    def keep(self, peers: Collection[PeerID]) -> None:
        """Forget what all others have said."""
        self._links = {peer: links for peer, links in self._links.items() if peer in peers}

    def seen_by_others(self) -> frozenset[PeerID]:
        """From whom somebody else has received anything."""
        links = ((peer, link) for links in self._links.values() for peer, link in links.items())
        return frozenset(peer for peer, link in links if link.received.count)

    def uploads(self, claims: dict[PeerID, float]) -> dict[PeerID, float]:
        """Bytes/s at which each sends, over its usual link, as far as its receivers bear it out. Who has not been
        measured is as fast as it claims, but no faster than the median of the others, and if it claims nothing as fast
        as that: shares of a reduction must not hang on what is not known.
        """
        measured: dict[PeerID, float] = {}
        found: dict[PeerID, float] = {}
        for peer, claim in claims.items():
            rates = [rate for target in self._links.get(peer, {}) if (rate := self._sent(peer, target)) is not None]
            if rates:
                measured[peer] = median(rates)
            elif claim >= CLAIM_MIN:
                found[peer] = claim
        found = bounded(found, measured) | measured
        usual = median(found.values()) if found else 0.0
        return {peer: found.get(peer, max(usual, claim)) for peer, claim in claims.items()}

    def _sent(self, sender: PeerID, receiver: PeerID) -> float | None:
        """Bytes/s; None: the receiver has not seen any."""
        said = self._links[sender][receiver].sent
        links = self._links.get(receiver)
        seen = links.get(sender) if links is not None else None
        if not said.count or seen is None or not seen.received.count:
            return None
        return min(said.value, BOAST * seen.received.value)

    def network(self, peers: Sequence[PeerID]) -> MeasuredNetwork:
        number = {peer: index for index, peer in enumerate(peers)}
        found = [
            (number[reporter], number[target], link.round_trip_s.log, link.sent.log, link.received.log)
            for reporter, links in self._links.items()
            if reporter in number
            for target, link in links.items()
            if target in number
        ]
        latency_s, sent, received = (np.full((len(peers), len(peers)), np.nan) for _ in range(3))
        if found:
            columns = np.array(found)
            i, j = columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64)
            latency_s[i, j] = np.exp(columns[:, 2]) / 2
            sent[i, j], received[j, i] = np.exp(columns[:, 3]), np.exp(columns[:, 4])
        seen = ~np.isnan(received)
        if seen.any():
            sent = np.where(seen, sent, np.fmin(sent, np.median(received[seen])))
        return MeasuredNetwork(
            latency_s=np.fmax(latency_s, latency_s.T),
            bytes_per_s=np.where(np.isnan(sent), received, np.fmin(sent, BOAST * received)),
        )


class SpeedBook:
    """How fast devices are with the stage that they hold."""

    def __init__(self) -> None:
        self._speeds: dict[PeerID, tuple[object, Smoothed]] = {}

    def note(self, peer: PeerID, place: object, flop_per_s: float) -> None:
        """From a heartbeat of `peer`; another `place` is another figure."""
        held, speed = self._speeds.get(peer, (None, None))
        if speed is None or held != place:
            speed = Smoothed()
            self._speeds[peer] = place, speed
        _add(speed, flop_per_s)

    def keep(self, peers: Collection[PeerID]) -> None:
        """Forget all others."""
        self._speeds = {peer: speed for peer, speed in self._speeds.items() if peer in peers}

    def measured(self, peer: PeerID) -> float | None:
        """FLOP/s; None: not measured yet."""
        _, speed = self._speeds.get(peer, (None, None))
        return speed.value if speed is not None and speed.count >= SPEED_REPORTS else None

    def speeds(self, claims: dict[PeerID, float], *, seen: Collection[PeerID]) -> dict[PeerID, float]:
        """FLOP/s of everybody: as measured, or as claimed times what claims have been worth at others', but no more
        than the median of those who have been measured.

        Args: seen: who has been seen at work by others; what the rest say of their own work is a claim.
        A microbatch's forward is slower than a probe's single layer, for everybody alike: without that factor whoever
        has not been measured would look faster than the rest.
        """
        found = {peer: speed for peer in claims if peer in seen and (speed := self.measured(peer)) is not None}
        worth = median(found[peer] / claims[peer] for peer in found) if found else 1.0
        claimed = {peer: worth * claim for peer, claim in claims.items() if peer not in found}
        speed_max = BOAST_MEASURED * median_low(found.values()) if found else math.inf
        believed = bounded(claimed, found) | {peer: min(speed, speed_max) for peer, speed in found.items()}
        return {peer: believed[peer] for peer in claims}


def bounded(claimed: dict[PeerID, float], measured: dict[PeerID, float]) -> dict[PeerID, float]:
    """What claims are believed beside what has been measured of others."""
    if measured:
        most = median_low(measured.values())
    elif claimed:
        most = BOAST_CLAIMED * median_low(claimed.values())
    return {peer: min(claim, most) for peer, claim in claimed.items()}


def _add(smoothed: Smoothed, figure: float) -> None:
    """Unless it is none: 0 says that it is not known, and what cannot be is not believed."""
    if 1.0 / RATE_MAX <= figure <= RATE_MAX * 1e6:
        smoothed.add(figure)
