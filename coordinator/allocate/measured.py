"""Turns the figures that peers report into estimates with variances, and limits unproven claims. Pure.

Claims are not trusted. For a link, the receiver's figure limits the sender's, and the longer of the two ends' round
trips counts: a peer gains nothing by claiming a better link, and loses work by claiming a worse one. For a device, the
measured seconds of its microbatches replace its probe.

Until others have seen a peer at work, its device and line count for no more than the median of the peers that have been
seen: six boasting peers beside six working ones get the work of six average ones. A peer that works, but lies about its
own seconds, is limited only by `BOAST_MEASURED`."""

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
"""The n-th report gets weight 1/n in the average, at least 1/16: if reports err by 10 %, the average errs by 1 %."""
ODD = 1.5
ODD_REPORTS = 3
"""The last report replaces the average after this many in a row above it (or below it) by a factor over `ODD`."""
SPEED_REPORTS = 3
"""The reports needed before a device's measured speed counts: its first forward includes one-time costs."""
BOAST = 4.0
"""A sender's claimed rate is limited to this multiple of its receiver's measurement, which tends to be too low."""
BOAST_CLAIMED = 16.0
"""If no rate is measured, claims are limited to this multiple of the median claim: GPUs and CPUs differ that much."""
BOAST_MEASURED = 64.0
"""A device's reported speed is limited to this multiple of the median report: one fast GPU may be among processors."""
WIDE = math.log(2.0) ** 2
"""The variance of the logarithm of a figure that may be off by a factor of two: a device's speed by its probe (six
homes worked at 0.26 to 0.4 of their probes), a link that no peer has measured, a single probe on a busy line."""
JOB_VARIANCE = 0.1**2
"""The variance of log(seconds of a microbatch) in one report."""
REPORT_FORWARDS = 27.0
"""A report is a median of nine microbatches, each as long as three forwards. After this many forwards' time a report
shares no microbatch with an earlier one, and only then it lowers the variance."""
LEAST_VARIANCE = 0.05**2
"""The variance that remains after any number of reports: in another stage or at another hour the speed differs."""
VARIANCE_PER_S = 0.2**2 / 600.0
"""The growth of the variance per second: ten minutes after its last measurement a figure may be off by 20 % more."""
ALIKE = 0.3**2
"""The variance of log(speed at work / speed by the probe) among the devices of a run, before several are measured: what
a probe leaves out, such as a forward's other work or a quota, is much the same for all, and the first device that
works shows it."""
PROBES_WORTH = 2
"""The variance of this ratio is a mean over the measured devices and this many imagined ones with variance `ALIKE`."""
CLAIM_MIN = 2.0
"""A claimed rate below this (bytes/s) counts as no claim: `MeasuredPeer.of` turns a missing claim into 1."""
RATE_MAX = 1e12
"""The largest believable bytes/s. Its inverse is the shortest believable round trip in seconds."""

Pair = tuple[PeerID, PeerID]
"""Two peers, the lesser identifier first."""


def pair_of(one: PeerID, other: PeerID) -> Pair:
    return (one, other) if one < other else (other, one)


@dataclass(slots=True)
class Estimate:
    """A running average of reports of one positive figure, and its variance. It removes noise but follows changes."""

    log: float = math.nan
    """The figure's natural logarithm; NaN: no report yet."""
    var: float = math.nan
    """The variance of `log` at `at_s`."""
    n: int = 0
    """The number of reports in the average, at most `STEADY_REPORTS`."""
    at_s: float = -math.inf
    """The time of the last measurement."""
    _odd: int = 0
    """How many of the newest reports, without a gap, exceed `ODD` times the average; negative: are as far below it."""

    @property
    def value(self) -> float:
        return math.exp(self.log)

    @property
    def is_falling(self) -> bool:
        """True if the last reports are far below the average, but too few to replace the average."""
        return self._odd < 0

    def variance(self, now_s: float) -> float:
        """Return the variance of `log` at `now_s`; NaN: there is no report yet."""
        return LEAST_VARIANCE + self._aged(now_s)

    def _aged(self, now_s: float) -> float:
        return self.var + VARIANCE_PER_S * max(0.0, now_s - self.at_s)

    def add(self, figure: float, now_s: float, variance: float, *, is_new: bool = True) -> None:
        """Add the report `figure`, unless it is impossible or 0 (unknown).
        Args: variance: the variance of the report's logarithm. is_new: False: the report repeats an old measurement."""
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
    """The links between peers, as matrices in the order of `SwarmSnapshot.peers`; row = sender; NaN: not measured."""

    latency_s: Floats
    """[N, N], one-way latency in seconds."""
    bytes_per_s: Floats
    is_certain: Bools
    """[N, N], True if several probes agree that the link is no faster; else its rate is only a lower bound."""
    rate_variance: Floats = field(default_factory=lambda: np.array(math.nan))
    """[N, N], the variance of log(`bytes_per_s`); NaN: not measured. The default is NaN everywhere."""


class BelievedSpeed(NamedTuple):
    flop_per_s: float
    variance: float
    """The variance of log(`flop_per_s`)."""


def speeds(
    claims: Mapping[PeerID, float],
    reports: Mapping[PeerID, Estimate],
    machines: Mapping[PeerID, str],
    now_s: float,
    *,
    seen: Collection[PeerID],
) -> dict[PeerID, BelievedSpeed]:
    """Return the speed of every peer. For a peer in `seen` it is that of its reports. For any other peer it is the
    lowest of three: the peer's claim times the median ratio of reports to claims, the speed by its own reports, and the
    median speed of `seen` peers. The ratio is needed because a microbatch's forward is slower than a probe of one layer
    on every device. The variance of a speed by claim is that of this ratio in this run, or larger if several peers
    share a machine, since their probes may have run at once.

    Args:
        claims: FLOP/s of each peer by its probe. reports: the peers' reports of their own work.
        machines: the claimed machine of each peer; empty: a machine of its own.
        seen: the peers that others have seen at work. If none of them has enough reports, the ratio comes from the
            reports of all peers.
    """
    own = {peer: r.value for peer in claims if (r := reports.get(peer)) is not None and r.n >= SPEED_REPORTS}
    found = {peer: speed for peer, speed in own.items() if peer in seen}
    ratios = [speed / claims[peer] for peer, speed in (found or own).items()]
    worth = median_low(ratios) if ratios else 1.0
    claimed = {peer: min(worth * claim, own.get(peer, math.inf)) for peer, claim in claims.items() if peer not in found}
    speed_max = BOAST_MEASURED * median_low(found.values()) if found else math.inf
    believed = bounded(claimed, found) | {peer: min(speed, speed_max) for peer, speed in found.items()}
    logs = [min(abs(math.log(ratio / worth)), math.log(BOAST_CLAIMED)) for ratio in ratios]  # one liar moves it little
    of_probe = (PROBES_WORTH * ALIKE + sum(log * log for log in logs)) / (PROBES_WORTH + len(logs)) if found else WIDE
    beside = Counter(machines[peer] or peer for peer in claims)
    variances = {peer: reports[peer].variance(now_s) for peer in found}
    return {
        peer: BelievedSpeed(
            believed[peer], variances.get(peer, of_probe + math.log(beside[machines[peer] or peer]) ** 2)
        )
        for peer in claims
    }


def bounded(claimed: dict[PeerID, float], measured: dict[PeerID, float]) -> dict[PeerID, float]:
    """Limit claims to the median of `measured` or, if that is empty, to `BOAST_CLAIMED` times the median claim."""
    if measured:
        most = median_low(measured.values())
    elif claimed:
        most = BOAST_CLAIMED * median_low(claimed.values())
    return {peer: min(claim, most) for peer, claim in claimed.items()}
