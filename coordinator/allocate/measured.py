"""Keeps the measurements that peers report until a plan needs them. Pure.

Claims are not trusted. For a link, the receiver's figure bounds the sender's, and of two round trips over one link the
longer counts: a peer gains nothing by claiming a better link, and loses work by claiming a worse one. For a device, the
measured seconds of its microbatches count before its probe.

Until others have seen a peer at work, it counts at most as the median of those that have been seen, for any claims
about its device and its line: six boasting peers beside six working ones get the work of six average ones. The gain of
a peer that works and lies about its own seconds is bounded by `BOAST_MEASURED` only."""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median, median_low

import numpy as np

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import LinkReport
from shoal.protocol.topology import Bools, Floats

STEADY_REPORTS = 16
"""Reports in the logarithmic average; after that each new one moves it by 1/16. Noise of +-10 % leaves 1 %."""
ODD = 1.5
ODD_REPORTS = 3
"""A figure replaces the average after this many reports in a row that are more than a factor of `ODD` off."""
SPEED_REPORTS = 3
"""Reports before a device's figure counts, because its first forward includes one-time costs."""
LINKS_KEPT_MAX = 64
"""Links kept of each reporter, the last reported ones. An honest reporter reports no more."""
BOAST = 4.0
"""A sender's rate is believed up to this multiple of the rate that the receiver has seen, which errs low."""
BOAST_CLAIMED = 16.0
"""Bound of a claim over the median claim before anything is measured: cards and processors do differ that much."""
BOAST_MEASURED = 64.0
"""Bound of a device's report about its own work over the median: a data centre's card among processors."""
PROBES_CERTAIN = 3
"""Number of probes of which the best is the link's rate; the best of fewer is a lower bound."""
SLOW_LINE, SLOW_LINE_MIN = 0.5, 4
"""A line counts as slow once this fraction of its links, and at least `SLOW_LINE_MIN` of them, have become slow."""
CLAIM_MIN = 2.0
"""Bytes/s. A claim of nothing arrives as 1 (`MeasuredPeer.of`)."""
WIDE = math.log(2.0) ** 2
"""Variance of the logarithm of a figure that may be off by a factor of two: a device's speed by its probe (six homes
worked at 0.26 to 0.4 of theirs), a link that nobody has measured, one probe on a busy line."""
JOB_VARIANCE = 0.1**2
"""The same of one report of a microbatch's seconds."""
LEAST_VARIANCE = 0.05**2
"""What no number of reports removes: another stage or another hour has another speed."""
VARIANCE_PER_S = 0.2**2 / 600.0
"""A figure that nobody measures again is off by 20 % more after ten minutes."""
PROBES_WORTH = 2
"""Number of devices as which `WIDE` counts in the observed variance of measured over claimed speed."""
RATE_MAX = 1e12
"""Bytes/s and, in seconds, the inverse: figures beyond are no measurements."""


class Smoothed:
    """A positive figure with its noise removed, which still follows changes, and its variance."""

    __slots__ = ("_odd", "at_s", "count", "log", "var")

    def __init__(self) -> None:
        self.count = 0
        self.log = math.nan
        """The figure's logarithm; NaN: none yet."""
        self.var = math.nan
        """The variance of `log` at `at_s`."""
        self.at_s = -math.inf
        """When the figure was measured last."""
        self._odd = 0

    def variance(self, now_s: float) -> float:
        """Return the variance of the figure's natural logarithm now; NaN: there is no figure yet."""
        return LEAST_VARIANCE + self.var + VARIANCE_PER_S * max(0.0, now_s - self.at_s)

    @property
    def value(self) -> float:
        return math.exp(self.log)

    @property
    def is_falling(self) -> bool:
        """True if the last reports are far below the average, but too few to be believed."""
        return self._odd < 0

    def add(self, figure: float, now_s: float = 0.0, variance: float = JOB_VARIANCE, *, is_new: bool = True) -> None:
        """Add a report. Args: variance: of its logarithm. is_new: False: an old measurement, reported again."""
        if not self.count:
            self.log, self.count, self.var, self.at_s = math.log(figure), 1, variance, now_s
            return
        off = math.log(figure) - self.log
        if is_new:
            weight = 1.0 / min(self.count + 1, STEADY_REPORTS)
            aged = self.var + VARIANCE_PER_S * max(0.0, now_s - self.at_s)
            self.var = (1.0 - weight) ** 2 * aged + weight**2 * max(variance, off * off)
            self.at_s = now_s
        direction = 0 if abs(off) <= math.log(ODD) else 1 if off > 0 else -1
        self._odd = self._odd + direction if self._odd * direction > 0 else direction
        if abs(self._odd) >= ODD_REPORTS:
            self.log, self.count, self._odd, self.var = math.log(figure), 1, 0, variance
            return
        self.count = min(self.count + 1, STEADY_REPORTS)
        self.log += min(max(off, -math.log(ODD)), math.log(ODD)) / self.count


@dataclass(slots=True)
class _Link:
    """One peer's report about its link with another."""

    round_trip_s: Smoothed
    sent: Smoothed
    received: Smoothed
    num_probes: int = 0
    said: tuple[float, int] = 0.0, 0
    """The last reported (rate, number of probes): an equal report tells of the same measurement again."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredNetwork:
    """The links between peers, in the order of a snapshot; NaN: not measured. Rows are senders."""

    latency_s: Floats
    """[N, N], one way."""
    bytes_per_s: Floats
    is_certain: Bools
    """[N, N], True if several probes agree that a link is no faster; elsewhere its rate is a lower bound."""
    rate_variance: Floats = field(default_factory=lambda: np.array(math.nan))
    """[N, N], of the natural logarithm of `bytes_per_s`; NaN: not measured, as everywhere in the default."""


class LinkBook:
    """The links, as both of their ends report them."""

    def __init__(self) -> None:
        self._links: dict[PeerID, OrderedDict[PeerID, _Link]] = {}
        self.targets: set[PeerID] = set()
        """Peers towards which another peer has probed its link."""
        self._degraded: dict[tuple[PeerID, PeerID], float] = {}
        """(from, towards) -> bytes/s of each link that has become slow and has stayed so."""

    def note(
        self,
        reporter: PeerID,
        reports: Iterable[LinkReport],
        now_s: float = 0.0,
        *,
        busy: Collection[PeerID] = (),
    ) -> None:
        """Record the links in a heartbeat of `reporter`, which is not trusted.
        Args: busy: peers that work, so that a probe of their lines may meet other traffic."""
        for report in islice(reports, LINKS_PER_HEARTBEAT_MAX):
            if report.peer == reporter:
                continue
            links = self._links.setdefault(reporter, OrderedDict())
            link = links.setdefault(report.peer, _Link(Smoothed(), Smoothed(), Smoothed()))
            links.move_to_end(report.peer)
            _add(link.round_trip_s, report.round_trip_s)
            before = link.sent.value if link.sent.count else 0.0
            if report.has_fallen and report.bytes_per_s < before / ODD:
                link.sent = Smoothed()  # its reporter has measured twice
            said = report.bytes_per_s, report.num_probes
            probes = max(1, PROBES_CERTAIN if report.has_fallen else min(report.num_probes, PROBES_CERTAIN))
            variance = WIDE / probes if reporter in busy or report.peer in busy else WIDE / probes**2
            _add(link.sent, report.bytes_per_s, now_s, variance, is_new=said != link.said)
            link.said = said
            pair = reporter, report.peer
            if link.sent.count and link.sent.value < before / ODD:
                self._degraded[pair] = link.sent.value
            elif report.bytes_per_s > ODD * self._degraded.get(pair, math.inf):
                del self._degraded[pair]
            _add(link.received, report.received_bytes_per_s)
            link.num_probes = PROBES_CERTAIN if report.has_fallen else min(max(report.num_probes, 0), PROBES_CERTAIN)
            if link.num_probes:
                self.targets.add(report.peer)
            if len(links) > LINKS_KEPT_MAX:
                target, _ = links.popitem(last=False)
                self._degraded.pop((reporter, target), None)

    def keep(self, peers: Collection[PeerID]) -> None:
        self._links = {peer: links for peer, links in self._links.items() if peer in peers}
        self.targets = {t for links in self._links.values() for t, link in links.items() if link.num_probes}
        self._degraded = {pair: rate for pair, rate in self._degraded.items() if pair[0] in peers and pair[1] in peers}

    def seen_by_others(self) -> frozenset[PeerID]:
        """The peers from which another peer has received data."""
        links = ((peer, link) for links in self._links.values() for peer, link in links.items())
        return frozenset(peer for peer, link in links if link.received.count)

    def is_falling(self, peers: Collection[PeerID]) -> bool:
        """True if a link between two of these may have become slow, and a few more reports will decide."""
        among = set(peers)
        return any(
            link.sent.is_falling
            for reporter in among
            for target, link in self._links.get(reporter, {}).items()
            if target in among
        )

    def degraded_links(self) -> dict[PeerID, int]:
        """Return peer -> number of its slow links, if several, and more than at any peer at the other ends."""
        ends: dict[PeerID, set[PeerID]] = {}
        for reporter, target in self._degraded:
            ends.setdefault(reporter, set()).add(target)
            ends.setdefault(target, set()).add(reporter)
        return {
            peer: len(others)
            for peer, others in ends.items()
            if len(others) > 1 and all(len(ends[other]) < len(others) for other in others)
        }

    def _has_slow_line(self, num_others: int) -> set[PeerID]:
        """Return the peers with so many slow links that older figures of their other links are out of date."""
        return {
            peer for peer, slow in self.degraded_links().items() if slow >= max(SLOW_LINE_MIN, SLOW_LINE * num_others)
        }

    def _is_out_of_date(self, sender: PeerID, receiver: PeerID, slow_lines: set[PeerID]) -> bool:
        return not slow_lines.isdisjoint((sender, receiver)) and (sender, receiver) not in self._degraded

    def known_from(self, peer: PeerID) -> set[PeerID]:
        """The peers towards which `peer` has probed its link."""
        return {target for target, link in self._links.get(peer, {}).items() if link.num_probes}

    def uploads(self, claims: dict[PeerID, float]) -> dict[PeerID, float]:
        """Return the bytes/s at which each peer sends over its median link, as its receivers confirm. Without
        measurements it counts as it claims, at most as the median of the others, or as that median if it claims
        nothing."""
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
        """Return bytes/s; None: the receiver has not seen data."""
        said = self._links[sender][receiver].sent
        links = self._links.get(receiver)
        seen = links.get(sender) if links is not None else None
        if not said.count or seen is None or not seen.received.count:
            return None
        return min(said.value, BOAST * seen.received.value)

    def network(self, peers: Sequence[PeerID], now_s: float = 0.0) -> MeasuredNetwork:
        number = {peer: index for index, peer in enumerate(peers)}
        slow_lines = self._has_slow_line(len(peers) - 1)
        found = [
            (
                number[reporter],
                number[target],
                link.round_trip_s.log,
                math.nan if self._is_out_of_date(reporter, target, slow_lines) else link.sent.log,
                link.received.log,
                link.num_probes >= PROBES_CERTAIN,
                link.sent.variance(now_s),
            )
            for reporter, links in self._links.items()
            if reporter in number
            for target, link in links.items()
            if target in number
        ]
        latency_s, sent, received, variance = (np.full((len(peers), len(peers)), np.nan) for _ in range(4))
        is_certain = np.zeros((len(peers), len(peers)), dtype=np.bool_)
        if found:
            columns = np.array(found)
            i, j = columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64)
            latency_s[i, j] = np.exp(columns[:, 2]) / 2
            sent[i, j], received[j, i] = np.exp(columns[:, 3]), np.exp(columns[:, 4])
            is_certain[i, j] = columns[:, 5] > 0.0
            variance[i, j] = columns[:, 6]
        said, seen = sent, ~np.isnan(received)
        if seen.any():
            sent = np.where(seen, sent, np.minimum(sent, BOAST * np.median(received[seen])))
        rate = np.where(np.isnan(sent), np.nan, np.fmin(sent, BOAST * received))
        return MeasuredNetwork(
            latency_s=np.fmax(latency_s, latency_s.T),
            bytes_per_s=rate,
            is_certain=is_certain & ~np.isnan(sent),
            rate_variance=np.where(rate < said, np.fmax(variance, WIDE), np.where(np.isnan(rate), np.nan, variance)),
        )


class SpeedBook:
    """The speeds of devices with the stage that they hold."""

    def __init__(self) -> None:
        self._speeds: dict[PeerID, tuple[object, Smoothed]] = {}

    def note(self, peer: PeerID, place: object, flop_per_s: float, now_s: float = 0.0) -> None:
        """Record a device's speed from a heartbeat; another `place` starts a new average."""
        held, speed = self._speeds.get(peer, (None, None))
        if speed is None or held != place:
            speed = Smoothed()
            self._speeds[peer] = place, speed
        _add(speed, flop_per_s, now_s, JOB_VARIANCE)

    def keep(self, peers: Collection[PeerID]) -> None:
        self._speeds = {peer: speed for peer, speed in self._speeds.items() if peer in peers}

    def measured(self, peer: PeerID) -> float | None:
        """The device's FLOP/s; None: not measured yet."""
        _, speed = self._speeds.get(peer, (None, None))
        return speed.value if speed is not None and speed.count >= SPEED_REPORTS else None

    def speeds(self, claims: dict[PeerID, float], *, seen: Collection[PeerID]) -> dict[PeerID, float]:
        """Return the FLOP/s of every peer. A measured peer counts as measured. Any other counts as claimed, times the
        ratio of measurements to claims, but at most as the measured median and as its own report. The ratio is there
        because a microbatch's forward is slower than the single layer of a probe, on every device.

        Args: seen: the peers that others have seen at work; the other peers' reports of their own work are claims."""
        found = {peer: speed for peer in claims if peer in seen and (speed := self.measured(peer)) is not None}
        own = {peer: speed for peer in claims if (speed := self.measured(peer)) is not None}
        worth = median_low(speed / claims[peer] for peer, speed in own.items()) if own else 1.0
        claimed = {peer: min(worth * claim, own.get(peer, math.inf)) for peer, claim in claims.items()}
        claimed = {peer: claim for peer, claim in claimed.items() if peer not in found}
        speed_max = BOAST_MEASURED * median_low(found.values()) if found else math.inf
        believed = bounded(claimed, found) | {peer: min(speed, speed_max) for peer, speed in found.items()}
        return {peer: believed[peer] for peer in claims}

    def variances(
        self, claims: dict[PeerID, float], machines: dict[PeerID, str], now_s: float, *, seen: Collection[PeerID]
    ) -> dict[PeerID, tuple[float, bool]]:
        """Return of every peer (variance of its speed's natural logarithm, whether that speed is from jobs). A probe is
        as uncertain as probes have been in this run, and more if several of one machine may have worked at once.

        Args: as of `speeds`. machines: the claimed machine of each peer; empty: one of its own."""
        found = {peer: speed for peer in claims if peer in seen and (speed := self.measured(peer)) is not None}
        logs = [math.log(speed / claims[peer]) for peer, speed in found.items()]
        usual = median(logs) if logs else 0.0
        squares = PROBES_WORTH * WIDE + sum((log - usual) ** 2 for log in logs)
        of_probe = squares / (PROBES_WORTH + len(logs))
        beside = Counter(machines[peer] for peer in claims)
        variances = {}
        for peer in claims:
            mates = beside[machines[peer]] if machines[peer] else 1
            is_measured = peer in found
            of_jobs = self._speeds[peer][1].variance(now_s) if is_measured else math.nan
            variances[peer] = of_jobs if is_measured else of_probe + math.log(mates) ** 2, is_measured
        return variances


def bounded(claimed: dict[PeerID, float], measured: dict[PeerID, float]) -> dict[PeerID, float]:
    if measured:
        most = median_low(measured.values())
    elif claimed:
        most = BOAST_CLAIMED * median_low(claimed.values())
    return {peer: min(claim, most) for peer, claim in claimed.items()}


def _add(smoothed: Smoothed, figure: float, now_s: float = 0.0, variance: float = WIDE, *, is_new: bool = True) -> None:
    """Add a figure unless it is impossible or 0, which means unknown."""
    if 1.0 / RATE_MAX <= figure <= RATE_MAX * 1e6:
        smoothed.add(figure, now_s, variance, is_new=is_new)
