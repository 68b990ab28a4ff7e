"""What is believed of the figures that peers report: estimates with their variances, and the caps on claims. Pure.

Claims are not trusted. For a link, the receiver's figure bounds the sender's, and of two round trips over one link the
longer counts: a peer gains nothing by claiming a better link, and loses work by claiming a worse one. For a device, the
measured seconds of its microbatches count before its probe.

Until others have seen a peer at work, it counts at most as the median of those that have been seen, for any claims
about its device and its line: six boasting peers beside six working ones get the work of six average ones. The gain of
a peer that works and lies about its own seconds is bounded by `BOAST_MEASURED` only."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import numpy as np

from shoal.protocol.identity import PeerID
from shoal.protocol.topology import Bools, Floats

STEADY_REPORTS = 16
"""Reports in the logarithmic average; after that each new one moves it by 1/16. Noise of +-10 % leaves 1 %."""
ODD = 1.5
ODD_REPORTS = 3
"""A figure replaces the average after this many reports in a row that are more than a factor of `ODD` off."""
SPEED_REPORTS = 3
"""Reports before a device's figure counts, because its first forward includes one-time costs."""
BOAST = 4.0
"""A sender's rate is believed up to this multiple of the rate that the receiver has seen, which errs low."""
BOAST_CLAIMED = 16.0
"""Bound of a claim over the median claim before anything is measured: cards and processors do differ that much."""
BOAST_MEASURED = 64.0
"""Bound of a device's report about its own work over the median: a data centre's card among processors."""
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
CLAIM_MIN = 2.0
"""Bytes/s. A claim of nothing arrives as 1 (`MeasuredPeer.of`)."""
RATE_MAX = 1e12
"""Bytes/s and, in seconds, the inverse: figures beyond are no measurements."""

Pair = tuple[PeerID, PeerID]
"""Two peers that cannot reach each other, the lesser identifier first."""


def pair_of(one: PeerID, other: PeerID) -> Pair:
    return (one, other) if one < other else (other, one)


@dataclass(slots=True)
class Estimate:
    """A positive figure with its noise removed, which still follows changes, and its variance."""

    log: float = math.nan
    """The figure's natural logarithm; NaN: no report yet."""
    var: float = math.nan
    """The variance of `log` at `at_s`."""
    n: int = 0
    """The reports behind it, at most `STEADY_REPORTS`."""
    at_s: float = -math.inf
    """When the figure was measured last."""
    _odd: int = 0
    """Number of reports in a row that are far off; negative: below."""

    @property
    def value(self) -> float:
        return math.exp(self.log)

    @property
    def is_falling(self) -> bool:
        """True if the last reports are far below the average, but too few to be believed."""
        return self._odd < 0

    def variance(self, now_s: float) -> float:
        """Return the variance of the figure's natural logarithm now; NaN: there is no figure yet."""
        return LEAST_VARIANCE + self._aged(now_s)

    def _aged(self, now_s: float) -> float:
        return self.var + VARIANCE_PER_S * max(0.0, now_s - self.at_s)

    def add(self, figure: float, now_s: float, variance: float, *, is_new: bool = True) -> None:
        """Add a report unless it is impossible or 0, which means unknown.
        Args: variance: of its logarithm. is_new: False: an old measurement, reported again."""
        if not 1.0 / RATE_MAX <= figure <= RATE_MAX * 1e6:
            return
        log = math.log(figure)
        if not self.n:
            self.log, self.var, self.n, self.at_s = log, variance, 1, now_s
            return
        off = log - self.log
        direction = 0 if abs(off) <= math.log(ODD) else 1 if off > 0 else -1
        self._odd = self._odd + direction if self._odd * direction > 0 else direction
        if abs(self._odd) >= ODD_REPORTS:
            self.log, self.var, self.n, self.at_s, self._odd = log, variance, 1, now_s, 0
            return
        self.n = min(self.n + 1, STEADY_REPORTS)
        self.log += min(max(off, -math.log(ODD)), math.log(ODD)) / self.n
        if is_new:
            kept, added = (1.0 - 1.0 / self.n) ** 2, (1.0 / self.n) ** 2
            self.var = kept * self._aged(now_s) + added * max(variance, off * off)
            self.at_s = now_s


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


class BelievedSpeed(NamedTuple):
    flop_per_s: float
    variance: float
    """The variance of the natural logarithm of `flop_per_s`."""


def speeds(
    claims: Mapping[PeerID, float],
    reports: Mapping[PeerID, Estimate],
    machines: Mapping[PeerID, str],
    now_s: float,
    *,
    seen: Collection[PeerID],
) -> dict[PeerID, BelievedSpeed]:
    """Return the speed of every peer. A measured peer counts as measured. Any other counts as claimed, times the ratio
    of measurements to claims, but at most as the measured median and as its own report. The ratio is there because a
    microbatch's forward is slower than the single layer of a probe, on every device. A probe is as uncertain as probes
    have been in this run, and more if several devices of one machine may have worked at once.

    Args:
        claims: FLOP/s of each peer by its probe.
        reports: the peers' reports of their own work.
        machines: the claimed machine of each peer; empty: one of its own.
        seen: the peers that others have seen at work; the reports of other peers are claims, which count for the ratio
            while there is nothing better."""
    own = {peer: r.value for peer in claims if (r := reports.get(peer)) is not None and r.n >= SPEED_REPORTS}
    found = {peer: speed for peer, speed in own.items() if peer in seen}
    ratios = [speed / claims[peer] for peer, speed in (found or own).items()]
    worth = median_low(ratios) if ratios else 1.0
    claimed = {peer: min(worth * claim, own.get(peer, math.inf)) for peer, claim in claims.items() if peer not in found}
    speed_max = BOAST_MEASURED * median_low(found.values()) if found else math.inf
    believed = bounded(claimed, found) | {peer: min(speed, speed_max) for peer, speed in found.items()}
    logs = [min(abs(math.log(ratio / worth)), math.log(BOAST_CLAIMED)) for ratio in ratios]  # one liar moves it little
    of_probe = (PROBES_WORTH * WIDE + sum(log * log for log in logs)) / (PROBES_WORTH + len(logs))
    beside = Counter(machines[peer] or peer for peer in claims)
    variances = {peer: reports[peer].variance(now_s) for peer in found}
    return {
        peer: BelievedSpeed(
            believed[peer], variances.get(peer, of_probe + math.log(beside[machines[peer] or peer]) ** 2)
        )
        for peer in claims
    }


def bounded(claimed: dict[PeerID, float], measured: dict[PeerID, float]) -> dict[PeerID, float]:
    """Bound claims by the median of what is measured; if nothing is, by a multiple of the median claim."""
    if measured:
        most = median_low(measured.values())
    elif claimed:
        most = BOAST_CLAIMED * median_low(claimed.values())
    return {peer: min(claim, most) for peer, claim in claimed.items()}
