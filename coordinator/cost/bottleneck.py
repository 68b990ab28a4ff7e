"""Names the resource that limits a step, for a placement in steady state. Pure.

A step takes about the longer of T_flow and T_chain (`throughput.py`). If T_flow is longer, the bottleneck is the
slowest stage, or the slowest pair of neighbouring stages. Within a stage it is the resource with the longest time for a
step's work:

    compute    M / sum of 1 / job_d                  card, reduction    (activations + gradients) / sum of card_d
    paths      M / sum of path_rate_d                reduction          the slowest path between two members

A network card is named after the larger of its two loads. If T_chain is longer, the bottleneck is its longest part at
the stage with the longest chain: the commit (or its reduction, if that takes half of it), the round trip, or the issue
of the microbatches, which is again limited by a stage or a pair."""

from collections.abc import Sequence

import numpy as np

from shoal.coordinator.cost.pacing import Flow, Pace
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.plan import Bound

Bottleneck = tuple[Bound, int]
"""(kind, stage). Paths lead from the stage to the next one, or to the previous one if the stage is the last."""


def bottleneck(
    workload: Workload, flow: Flow, pace: Pace, *, stages_s: Sequence[float], pairs_s: Sequence[float]
) -> Bottleneck:
    """Return the bottleneck. Args: stages_s, pairs_s: T_stage of each stage and T_pair of each pair, s a step."""
    if pace.chain_s > flow.flow_s:
        chains_s = [tail.chain_s for tail in pace.tails]
        waited_for = chains_s.index(max(chains_s))
        trip_s, commit_s = flow.trips_s[waited_for], pace.commits_s[waited_for]
        if commit_s >= max(trip_s, flow.issue_s):
            stage, card = flow.stages[waited_for], flow.cards[waited_for]
            reduce_s = max(stage.reduce_path_s, float((stage.reduced / card).max()))
            return "reduction" if reduce_s >= commit_s / 2.0 else "commit", waited_for
        if trip_s >= flow.issue_s:
            return "round trip", waited_for
    # A pair equals its slower stage, to rounding, unless its paths carry less.
    if pairs_s and max(pairs_s) > (1.0 + 1e-6) * max(stages_s):
        return "paths", pairs_s.index(max(pairs_s))
    slowest = stages_s.index(max(stages_s))
    return _busiest(workload, flow, slowest), slowest


def _busiest(workload: Workload, flow: Flow, k: int) -> Bound:
    stage, card, share = flow.stages[k], flow.cards[k], flow.shares[k]
    microbatches = float(workload.microbatches)
    activations = microbatches * workload.cut_bytes * float(share @ stage.away)
    gradients = float(stage.reduced.sum())
    on_card: Bound = "reduction" if gradients > activations else "card"
    with np.errstate(divide="ignore"):
        takes_s: dict[Bound, float] = {
            "compute": microbatches / float((1.0 / stage.job_s).sum()),
            "paths": microbatches / float(stage.path_rate.sum()),
            "reduction": stage.reduce_path_s,
        }
    takes_s[on_card] = max(takes_s.get(on_card, 0.0), (activations + gradients) / float(card.sum()))
    return max(takes_s, key=lambda bound: takes_s[bound])
