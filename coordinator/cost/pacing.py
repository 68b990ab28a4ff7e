"""Computes the duration of a step from the durations of its parts, for a placement in steady state. Pure.

`throughput.py` has the formulas and their terms, and computes the parts. Searches compare placements by them; the time
that a step will take (`predicted_step_s`) is closer to reality, but a bad search objective: it finds slower plans
(simulated: data centre 6.53 s for 6.40, home GPUs 58.9 for 55.8).

**Control.** Searches assume that everything runs ahead that `s_max` admits, with the window's whole gain. The control
(`peer/replica/flow.py`) admits less where staleness costs more steps than it saves seconds. Devices are then busy for a
part e(g) of the time in which they work ahead, not e(window):

    r = e(window) / e(g)
    T_compute' = T_compute (1 + x (r - 1)),     x = min(1, idle / work)
    T_chain'(k) = T_chain(k) + (r - 1) T_compute / (k + 1)

**Waiting.** A device that has waited for a version cannot recover that time; a line can, because it carries the
reduction meanwhile. So compute time adds to the chain. If activations share the card, the duration of commits varies,
and a device that waits for the long ones gains nothing from the short ones unless it is idle anyway. For stage j, let q
be the share of the card bounding its commit that activations take, T_j the time of its devices without waiting, and
T_chain'(k, j) its chain. With the 4-norm |a, b|:

    c_j = q T_j / T_flow
    L_j = max(T_compute', T_chain'(k, j))
    T   = max(T_flow, max over j of L_j + c_j / 0.4 (|T_compute', T_chain'(k, j)| - L_j))

Source: ours; e, x, idle and the choice of (k, g) are those of `protocol/running_ahead.py`. Figures are in MEASURED.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.cost.workload import Workload
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.staleness import Price
from shoal.protocol.topology import Floats, Ints

COMMIT_LATENCIES = 4.0
"""A commit takes this many latencies: progress to the leader, RoundStart, a part, its sum."""
STEP_FLOP_PER_PARAMETER = 20.0
"""The optimizer's FLOP, as in `step_flop` of `peer/pipeline/stage.py`."""
WINDOW_GAIN = 1.5
"""Equal to `Window.gain` of `peer/replica/flow.py`."""
_CROWDED = 0.4
"""The c at which the full norm applies; fitted to the five shipped scenarios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One stage with n members, each array [n]."""

    members: Ints
    job_s: Floats
    """The forward and backward of a microbatch."""
    path_rate: Floats
    """The microbatches/s that its paths to both neighbours carry."""
    away: Floats
    """The edges to neighbouring stages, less the share within one card, weighted by their bytes."""
    reduced: Floats
    """R_d, the bytes of the reduction over each member's card."""
    reduce_path_s: float
    """The seconds of the reduction over the slowest path between two members."""
    latency_s: float
    """The largest latency between two members, one way."""
    step_s: float
    """The seconds of the optimizer's step at the slowest member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The flow through a placement in steady state."""

    stages: Sequence[StageLoad]
    cards: Sequence[Floats]
    """[n] for each stage: bytes/s of each member's card in its slower direction; of a shared card the member's part."""
    shares: Sequence[Floats]
    """[n] for each stage: each member's share of the microbatches; the shares sum to 1."""
    flow_s: float
    """T_flow, s a step."""
    compute_s: float
    """T_compute, s a step: of the slowest stage, without waiting."""
    issue_s: float
    """The seconds to issue a step's microbatches, without the last one's own job."""
    trips_s: Sequence[float]
    """The seconds from each stage to the end and back."""
    jobs_s: Sequence[float]
    """The mean seconds of each stage's jobs."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The time after the last microbatch of a step at one stage."""

    chain_s: float
    """T_chain, s a step, if this stage had the longest chain."""
    crowded: float
    """The share of the card bounding its commit that carries activations meanwhile, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    steps_ahead: int
    step_s: float
    chain_s: float
    commit_s: float
    """The longest commit of all stages."""
    commits_s: Sequence[float]
    tails: Sequence[Tail]
    stale: float
    """The staleness in steps, the mean of all stages."""


def pace_of(workload: Workload, flow: Flow, steps_ahead: int) -> Pace:
    """Return the pace with `steps_ahead` steps ahead of the versions."""
    trips_s = flow.trips_s
    commits = [
        _commit(workload, stage, card, share, flow.flow_s if steps_ahead else math.inf)
        for stage, card, share in zip(flow.stages, flow.cards, flow.shares, strict=True)
    ]
    commits_s = [seconds for seconds, _ in commits]
    chains_s = _chains_s(flow, commits_s, steps_ahead)
    chain_s = max(chains_s)
    step_s = joined(flow.flow_s, chain_s) if steps_ahead else chain_s
    stale = sum(min(float(steps_ahead), (t + c) / step_s) for t, c in zip(trips_s, commits_s, strict=True))
    return Pace(
        steps_ahead=steps_ahead,
        step_s=step_s,
        chain_s=chain_s,
        commit_s=max(commits_s),
        commits_s=commits_s,
        tails=[Tail(chain_s, crowded) for chain_s, (_, crowded) in zip(chains_s, commits, strict=True)],
        stale=stale / len(trips_s),
    )


def joined(a: float, b: float) -> float:
    """Return the 4-norm; square roots are the same on every machine, powers are not."""
    larger = max(a, b)
    square = (min(a, b) / larger) ** 2
    return larger * math.sqrt(math.sqrt(1.0 + square * square))


def _commit(workload: Workload, stage: StageLoad, card: Floats, share: Floats, flow_s: float) -> tuple[float, float]:
    """Return (seconds from the last contribution to the new version, share of the bounding card taken by activations).
    Args: flow_s: inf: no other step's activations are in flight."""
    busy = np.zeros(len(card))
    free = card
    if flow_s < math.inf:
        busy = workload.cut_bytes * stage.away * share * workload.microbatches / flow_s
        # No less than the share that the flow counts with, so that rounding cannot leave nothing.
        free = np.maximum(card - busy, stage.reduced / flow_s)
    by_card_s = np.where(stage.reduced > 0.0, stage.reduced / np.maximum(free, 1e-300), 0.0)
    slowest = int(np.argmax(by_card_s))
    reduce_s, crowded = stage.reduce_path_s, 0.0
    if by_card_s[slowest] > reduce_s:
        reduce_s, crowded = float(by_card_s[slowest]), min(1.0, float(busy[slowest] / card[slowest]))
    return reduce_s + COMMIT_LATENCIES * stage.latency_s + stage.step_s, crowded


def _chains_s(flow: Flow, commits_s: Sequence[float], steps_ahead: int) -> list[float]:
    uneven = (job_s / 2.0 for job_s, stage in zip(flow.jobs_s, flow.stages, strict=True) if len(stage.members) > 1)
    head_s = flow.issue_s + flow.stages[0].latency_s + max(uneven, default=0.0)
    tails_s = (trip_s + commit_s for trip_s, commit_s in zip(flow.trips_s, commits_s, strict=True))
    return [(head_s + tail_s) / (steps_ahead + 1.0) for tail_s in tails_s]


def predicted_step_s(
    tails: Callable[[int], Sequence[Tail]],
    *,
    flow_s: float,
    stages_s: Sequence[float],
    round_trip_s: float,
    commit_s: float,
    microbatches: int,
    s_max: int,
    price: Price,
) -> float:
    """Return the seconds that a step will take.

    Args:
        tails: steps ahead -> tail of each stage.
        flow_s: T_flow, s a step.
        stages_s: T_compute of each stage, s a step: the time of its devices without waiting.
        round_trip_s: of one microbatch without waiting.
        commit_s: the longest.
        price: of staleness, by which the control chooses.
    """
    measured = Measured(
        rate_per_s=microbatches / flow_s, round_trip_s=round_trip_s, commit_s=commit_s, microbatches=microbatches
    )
    choice = choose(measured, s_max=s_max, price=price, gain_max=WINDOW_GAIN)
    if choice.steps_ahead == 0:
        return max(tail.chain_s for tail in tails(0))
    longer = busy(WINDOW_GAIN) / busy(choice.gain) - 1.0
    ahead = min(1.0, measured.idle_s / measured.work_s)
    compute_s = max(stages_s)
    works_s = compute_s * (1.0 + ahead * longer)
    step_s = flow_s
    for stage_s, tail in zip(stages_s, tails(choice.steps_ahead), strict=True):
        follows_s = tail.chain_s + longer * compute_s / (choice.steps_ahead + 1.0)
        least_s = max(works_s, follows_s)
        scatters = tail.crowded * stage_s / flow_s / _CROWDED
        step_s = max(step_s, least_s + scatters * (joined(works_s, follows_s) - least_s))
    return step_s
