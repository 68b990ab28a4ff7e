"""Chooses for a placement the formats in which its tensors travel, by cut and by stage. Pure.

Thin formats cost learning, so what no step waits for is not made thin. The choice begins with the thinnest format
everywhere, with which layouts are searched, and makes wider one after another: first sums, stage by stage, as thin ones
cost most learning, then activations, cut by cut. Each is judged together with all that are wider before it.
"""

import math

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, Workload
from shoal.protocol.topology import Topology
from shoal.protocol.wire_format import Formats

SPARED = 0.98
"""A wider format is taken if the tokens/s with it are at least this share of those with the thinnest everywhere."""
KEPT = 0.95
"""A wider format that a live layout has already is kept as long as the tokens/s are at least this share of them."""

TRIES_MAX = 64
"""A choice prices its placement so often at most, which takes a core a second for 256 devices in 32 stages."""


def formats_of(
    topology: Topology, workload: Workload, placement: Placement, takes: FormatBytes, *, kept: Formats | None = None
) -> Formats:
    """Choose the widest formats with which a step of the placement takes hardly longer than with the thinnest ones:
    tokens/s are at least `SPARED`, or `KEPT`, of those.

    With the same figures, formats that were chosen are chosen again, unless the stages are so many that `TRIES_MAX`
    ended the choice: what has not been tried is thin. Where the objective cannot say how fast the
    placement is, all are the thinnest.

    Args:
        takes: the formats among which to choose.
        kept: the formats that a live layout with these stages has now.
    """
    return _Choice(topology, workload, placement, takes, kept).widened()


class _Choice:
    """What may be made wider are 2 K - 1 *things*: stage k's sums are number k, the cut behind it is number K + k."""

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
        """`wide` and those of `things` that are judged good one after another. All are tried at once, then halves: what
        many leave fast enough, fewer do."""
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
        """0: the placement is impossible.

        Where the control is foreseen to hold much back, a step is foreseen to be longer than the search's T, and longer
        with thin formats than with wide ones, which no run has borne out. T never is. So the shorter of both counts.
        """
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
