"""Chooses the formats in which a placement's tensors travel, by cut and by stage. Pure.

Narrow formats cost learning, so tensors are narrow only where a step waits for them. The choice starts with the
narrowest format everywhere, as layouts are searched, and widens first gradient sums by stage, because narrow ones cost
most learning, then activations by cut. Each is judged together with all wider ones before it."""

import math

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, Workload
from shoal.protocol.topology import Topology
from shoal.protocol.wire_format import Formats

SPARED = 0.98
"""A wider format is accepted if the tokens/s with it are at least this share of those with the narrowest formats."""
KEPT = 0.95
"""The same share for a wider format that the live layout already uses."""
TRIES_MAX = 64
"""Maximum number of evaluations in one choice: a second of one core for 256 devices in 32 stages."""


def formats_of(
    topology: Topology, workload: Workload, placement: Placement, takes: FormatBytes, *, kept: Formats | None = None
) -> Formats:
    """Choose the widest formats with which the placement keeps at least `SPARED` (or `KEPT`) of its tokens/s with the
    narrowest formats. With the same figures the choice is stable, unless `TRIES_MAX` ends it. If the objective cannot
    predict the placement, all are the narrowest.
    Args: kept: the current formats of a live layout with these stages."""
    return _Choice(topology, workload, placement, takes, kept).widened()


class _Choice:
    """2 K - 1 *things* may be widened: number k is stage k's sums, number K + k the cut behind it."""

    def __init__(
        self, topology: Topology, workload: Workload, placement: Placement, takes: FormatBytes, kept: Formats | None
    ) -> None:
        self._topology, self._workload, self._placement = topology, workload, placement
        self._takes, self._stages = takes, len(placement.stages)
        self._cuts, self._sums = [*takes.cuts], [*takes.sums]
        thinnest = self._formats(frozenset())
        has = kept if kept is not None and _is_of(kept, self._stages) else thinnest
        forms = zip((*has.sums, *has.activations), (*thinnest.sums, *thinnest.activations), strict=True)
        self._tries = 0
        self._kept = {thing for thing, (now, thin) in enumerate(forms) if now != thin}
        self._most = self._tokens_per_s(frozenset())

    def widened(self) -> Formats:
        K, wide = self._stages, frozenset[int]()
        begin, end = 0 if len(self._sums) > 1 else K, 2 * K - 1 if len(self._cuts) > 1 else K
        return self._formats(self._with(wide, range(begin, end)) if self._most > 0.0 else wide)

    def _with(self, wide: frozenset[int], things: range) -> frozenset[int]:
        """Return `wide` and the accepted ones of `things`: all, or those of its halves."""
        if not things or self._tries >= TRIES_MAX:
            return wide
        least = KEPT if self._kept.issuperset(things) else SPARED
        if self._tokens_per_s(wide.union(things)) >= least * self._most:
            return wide.union(things)
        if len(things) == 1:
            return wide
        half = len(things) // 2
        return self._with(self._with(wide, things[:half]), things[half:])

    def _tokens_per_s(self, wide: frozenset[int]) -> float:
        """Return the predicted tokens/s; 0: the placement is impossible. If the control holds much back, the prediction
        exceeds the search's T, and more so with narrow formats, which no run has confirmed. So the shorter time of both
        counts."""
        self._tries += 1
        workload = self._workload
        objective = ThroughputObjective(self._topology, workload, self._takes.under(self._formats(wide)))
        cost = objective.cost(self._placement)
        if not math.isfinite(cost.seconds):
            return 0.0
        return workload.tokens_per_step / min(cost.parts["foreseen_s"], cost.parts["step_s"])

    def _formats(self, wide: frozenset[int]) -> Formats:
        K = self._stages
        return Formats(
            tuple(self._cuts[0 if K + k in wide else -1] for k in range(K - 1)),
            tuple(self._sums[0 if k in wide else -1] for k in range(K)),
        )


def _is_of(formats: Formats, num_stages: int) -> bool:
    return (len(formats.activations), len(formats.sums)) == (num_stages - 1, num_stages)
