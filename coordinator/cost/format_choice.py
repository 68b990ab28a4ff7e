"""Chooses the wire formats of a placement's tensors: of gradient sums for each stage, of activations for each cut.
Pure.

Narrow formats slow learning, so tensors are narrow only where a step waits for them. The choice starts with the
narrowest formats everywhere, which the search of layouts assumes. It widens gradient sums first, because narrow sums
slow learning most, then activations. Each widening is judged together with the widenings accepted before."""

import math

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, Workload
from shoal.protocol.topology import Topology
from shoal.protocol.wire_format import Formats

SPARED = 0.98
"""A wider format is accepted if it leaves at least this share of the tokens/s with the narrowest formats."""
KEPT = 0.95
"""A wider format that is in use stays if it leaves at least this share of the tokens/s with the narrowest formats."""
TRIES_MAX = 64
"""The limit on evaluations in one choice: a second of one core for 256 devices in 32 stages."""


def formats_of(
    topology: Topology, workload: Workload, placement: Placement, takes: FormatBytes, *, kept: Formats | None = None
) -> Formats:
    """Choose the widest formats that leave the placement at least `SPARED` (or `KEPT`) of the tokens/s that it has with
    the narrowest formats. A second call with the same figures and the first result as `kept` chooses the same, unless
    `TRIES_MAX` ended the first. If the objective cannot predict the placement, all formats are the narrowest.
    Args: takes: the bytes in each format. kept: the current formats of a live layout with these stages."""
    K, cuts, sums = len(placement.stages), [*takes.cuts], [*takes.sums]
    objective = ThroughputObjective(topology, workload)
    tries = 0
    thinnest = takes.thinnest(K)
    has = kept if kept is not None and (len(kept.sums), len(kept.activations)) == (K, K - 1) else thinnest
    forms = zip((*has.sums, *has.activations), (*thinnest.sums, *thinnest.activations), strict=True)
    # 2 K - 1 things may be widened: number k is the gradient sums of stage k, number K + k the cut behind stage k.
    has_wide = {thing for thing, (now, thin) in enumerate(forms) if now != thin}

    def formats(wide: frozenset[int]) -> Formats:
        return Formats(
            tuple(cuts[0 if K + k in wide else -1] for k in range(K - 1)),
            tuple(sums[0 if k in wide else -1] for k in range(K)),
        )

    def step_s(wide: frozenset[int]) -> float:
        """Return the seconds of a step: the prediction or the simpler estimate T of layout searches, whichever is
        shorter. If the pipeline's control lets little run ahead, the prediction exceeds T, with narrow formats even
        more. No run has confirmed that excess."""
        nonlocal tries
        tries += 1
        cost = objective.cost(placement, takes.under(formats(wide)))
        return min(cost.parts["foreseen_s"], cost.parts["step_s"]) if math.isfinite(cost.seconds) else math.inf

    def widened(wide: frozenset[int], things: range) -> frozenset[int]:
        """Return `wide` plus the stages or cuts of `things` that may be wide, too; if not all may, halves are tried."""
        if not things or tries >= TRIES_MAX:
            return wide
        least = KEPT if has_wide.issuperset(things) else SPARED
        if least * step_s(wide.union(things)) <= shortest_s:
            return wide.union(things)
        if len(things) == 1:
            return wide
        half = len(things) // 2
        return widened(widened(wide, things[:half]), things[half:])

    shortest_s = step_s(frozenset())
    if shortest_s == math.inf:
        return thinnest
    return formats(widened(frozenset(), range(0 if len(sums) > 1 else K, 2 * K - 1 if len(cuts) > 1 else K)))
