"""Computes the duration of a step from the durations of its parts, for a placement in steady state. Pure.

`throughput.py` has the formulas and their terms, and computes the parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Floats, Ints

COMMIT_LATENCIES = 4.0
"""A commit takes this many latencies: progress to the leader, RoundStart, a part, its sum."""
STEP_FLOP_PER_PARAMETER = 20.0
"""The optimizer's FLOP, as in `step_flop` of `peer/pipeline/stage.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One stage with n members, each array [n]."""

    members: Ints
    job_s: Floats
    """The forward and backward of a microbatch."""
    path_rate: Floats
    """The microbatches/s that its paths to both neighbours carry."""
    away: Floats
    """The edges to neighbouring stages, less the share within one card; each is weighted by its bytes over
    `Workload.cut_bytes`: 1 unless the plan chooses another format."""
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
    """The pace of a placement with `steps_ahead` steps ahead."""

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
    stale = _stale(trips_s, commits_s, step_s, steps_ahead)
    return Pace(
        steps_ahead=steps_ahead,
        step_s=step_s,
        chain_s=chain_s,
        commit_s=max(commits_s),
        commits_s=commits_s,
        tails=[Tail(chain_s, crowded) for chain_s, (_, crowded) in zip(chains_s, commits, strict=True)],
        stale=stale,
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


def _stale(trips_s: Sequence[float], commits_s: Sequence[float], step_s: float, steps_ahead: int) -> float:
    stale = sum(min(float(steps_ahead), (t + c) / step_s) for t, c in zip(trips_s, commits_s, strict=True))
    return stale / len(trips_s)
