"""Predicts seconds a step of the asynchronous pipeline on unequal GPUs: Shoal's own objective.

    T = (T_flow^4 + T_chain(s_max)^4)^(1/4);  nothing ahead: T = T_chain(0), if that is less

**T_flow** is the time of the busiest resource for one step's work when everything overlaps: M microbatches through
every stage and every pair of neighbouring stages, and the reduction of every stage, on the same cards. In T seconds
member d of a stage can take

    n_d(T) = min(T / job_d,  T out_d,  T in_d,  (T card_d - R_d) / (b away_d))          [microbatches]

    job_d    (1 + backward_per_forward) F / flop_per_s: forward and backward on the one device (1F1B); the last stage
             has both in one job and never recomputes: 3 F / flop_per_s                              [s]
    out_d    sum of its paths to the next stage; in_d: to the previous one. Each activation is answered by a gradient
             of its size, so a path counts with its slower direction and with stream credit
             (`path_rates.both_ways`)                                                             [microbatches/s]
    card_d   the slower direction of its network card; a shared card is split in proportion to load           [bytes/s]
    R_d      the reduction of S bytes among n: S sum over members on other cards of (p_d + p_e), where d adds up the
             part p_d (`path_rates.reduction_parts`, `peer/group/reduce.py`); at both ends of a tied model also the
             gradient of the shared matrix, both ways (`peer/group/tied.py`)                              [bytes]
    b away_d activation out, gradient back: each edge of the stage crosses the card once in each direction; away is
             the number of edges (2, at the ends 1) less the share within one card. If a plan has several formats,
             b is each edge's own, and S each stage's (`WireBytes`)                                     [bytes]

T_stage is the T at which the n_d add to M; T_pair = M / flow, the flow between two neighbouring stages if each member
sends and takes at capacity (`fill`); a path between two members needs S (p_d + p_e) / rate; a card needs R_d /
card_d.

**T_chain** is the longest dependency chain. A microbatch of step t begins when version t - s_max is available. So s_max
+ 1 steps together last at least as long as issuing M microbatches to an otherwise idle pipeline, the round trip of the
last one from stage k to the end and back, and the commit of stage k (reduction, four latencies of its vote, the
optimizer's step), for the worst k. With s_max = 0 that is the synchronous flush with fill, drain and reduction exposed;
otherwise the reduction gets the part of each card that the next step's activations leave.

    T_chain(s_max) = (M / rate - job_slowest + max_k (round trip_k + commit_k) + claim + job / 2) / (s_max + 1)

    rate     of the slowest stage or pair while no stage reduces                            [microbatches/s]
    job_slowest  of that stage: the last microbatch's own is in its round trip                              [s]
    claim    a latency of stage 0: the leader grants what its members make
    job / 2  of the largest stage with more than one member: M does not divide evenly
    commit_k max over d of R_d / (card_d - b away_d share_d M / T_flow), and its paths       [s]

A norm joins the two, because a pipeline that waits for the reduction of its cards is late for the next chain: where
both are near T, the larger alone is too low. The exponent is fitted to simulations (MEASURED.md).

Plans are compared by T. The **tokens/s** shown to people are a more exact prediction (`pacing.py`).

**Memory.** A member of stage k holds `Workload.resident_bytes` and, for each microbatch in flight, the inputs of its
backward. In flight are 1.5 (the window's gain, `peer/replica/flow.py`) x its rate x its round trip, and one more, but
never more than its share of s_max + 1 steps. A placement is impossible if it does not fit, has a stage without members
or layers, a member of stage 0 without the text, two members of a stage without a path between them, or a member without
a path to any member of a neighbouring stage.

**Staleness** s is the mean over microbatches and stages. A microbatch that starts at stage k between the last
microbatch of a step and its commit runs on an older version:

    s = mean over k of min(s_max, (round trip_k + commit_k) / T)

The pipeline's control weighs its cost in steps (`peer/replica/flow.py`, `protocol/staleness.py`); plans ignore it
([`DECISIONS.md`](DECISIONS.md)).

Source: ours; checked against the real drivers in virtual time (MEASURED.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shoal.coordinator.cost.bottleneck import Bottleneck, bottleneck
from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.pacing import (
    STEP_FLOP_PER_PARAMETER,
    WINDOW_GAIN,
    Flow,
    Pace,
    StageLoad,
    pace_of,
    predicted_step_s,
)
from shoal.coordinator.cost.path_rates import both_ways, exchange_s, reduction_parts, same_card
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.workload import WireBytes, Workload
from shoal.protocol.topology import Floats, Ints, Topology

ROUNDS = 6
"""Rounds of offering. The flow found is 94 % of the maximum in the median, 73 % at least (by linear programming, 200
random cases of up to 8 x 8 in which half of the paths are too slow)."""


class _Priced(NamedTuple):
    """The cost of a possible placement, with its terms."""

    cost: Cost
    flow: Flow
    pace: Pace
    stages_s: Sequence[float]
    pairs_s: Sequence[float]


class ThroughputObjective:
    """Implements `Objective`. Parts, in seconds a step unless said otherwise:

    step_s (T), flow_s, compute_s (the slowest stage's M / sum of 1 / job), stage_s, pair_s and reduce_s (the parts of
    T_flow), chain_s, round_trip_s (of one microbatch without waiting), commit_s (the longest), stale (s, 0 to s_max),
    foreseen_s (predicted with the control), tokens_per_s (from foreseen_s), slowest_stage (index), memory (largest
    needed / present).

    Args: wire: bytes of each cut and each reduction, for this number of stages; None: those of the workload."""

    def __init__(self, topology: Topology, workload: Workload, wire: WireBytes | None = None) -> None:
        self.topology = topology
        self.workload = workload
        self._wire = wire

    def shares(self, placement: Placement) -> tuple[tuple[float, ...], ...]:
        """Return each member's part of its stage's microbatches, positive; empty for an empty stage."""
        if any(not stage for stage in placement.stages):
            return tuple((1.0 / len(stage),) * len(stage) if stage else () for stage in placement.stages)
        stages = self._stages(placement)
        cards = self._cards(stages)
        shares = []
        for stage, card in zip(stages, cards, strict=True):
            _, taken = self._saturate(stage, card)
            floor = 1e-3 * taken.max() if taken.max() > 0.0 else 1.0
            part = np.maximum(taken, floor)
            shares.append(tuple(float(value) for value in part / part.sum()))
        return tuple(shares)

    def cost(self, placement: Placement) -> Cost:
        priced = self._priced(placement)
        return priced if isinstance(priced, Cost) else priced.cost

    def bottleneck(self, placement: Placement) -> Bottleneck | None:
        """Return what limits a step; None: the placement is impossible."""
        priced = self._priced(placement)
        if isinstance(priced, Cost):
            return None
        return bottleneck(self.workload, priced.flow, priced.pace, stages_s=priced.stages_s, pairs_s=priced.pairs_s)

    def _priced(self, placement: Placement) -> "_Priced | Cost":
        """Return the cost with its terms; a `Cost` alone: the placement is impossible."""
        if any(not stage for stage in placement.stages):
            return Cost.impossible(f"stage {next(i for i, s in enumerate(placement.stages) if not s)} has no member")
        if (empty := next((k for k, (a, b) in enumerate(pairwise(placement.bounds)) if a >= b), None)) is not None:
            return Cost.impossible(f"stage {empty} has no layer")
        if not self.topology.may_feed[list(placement.stages[0])].all():
            return Cost.impossible("a member of stage 0 does not have the text")
        w = self.workload
        stages = self._stages(placement)
        cards = self._cards(stages)
        saturated = [self._saturate(stage, card) for stage, card in zip(stages, cards, strict=True)]
        free_rates = [self._free_rate(stage, card) for stage, card in zip(stages, cards, strict=True)]
        stage_s = [seconds for seconds, _ in saturated]
        if not all(math.isfinite(seconds) for seconds in stage_s):
            return Cost.impossible(
                f"a member of stage {stage_s.index(math.inf)} has no path to its group peers or neighbours"
            )
        flows, hops_s = self._pairs(stages, [taken / s for s, taken in saturated])
        if any(flow <= 0.0 for flow in flows):
            return Cost.impossible(f"no path between stages {flows.index(0.0)} and {flows.index(0.0) + 1}")
        pairs_s = [w.microbatches / flow for flow in flows]
        pair_s = max(pairs_s, default=0.0)
        flow_s = max(*stage_s, pair_s)
        shares = [taken / taken.sum() for _, taken in saturated]
        jobs_s = [float(share @ stage.job_s) for share, stage in zip(shares, stages, strict=True)]
        trips_s = _round_trips(jobs_s, hops_s)
        slowest = int(np.argmin(free_rates))
        issue_s = w.microbatches / min(free_rates[slowest], *flows, math.inf) - jobs_s[slowest]
        flow = Flow(
            stages=stages,
            cards=cards,
            shares=shares,
            flow_s=flow_s,
            compute_s=max(w.microbatches / float((1.0 / stage.job_s).sum()) for stage in stages),
            issue_s=issue_s,
            trips_s=trips_s,
            jobs_s=jobs_s,
        )
        paces = (pace_of(w, flow, steps_ahead) for steps_ahead in dict.fromkeys((w.s_max, 0)))
        pace = min(paces, key=lambda pace: pace.step_s)
        step_s, foreseen = pace.step_s, self._foreseen_s(flow, pace)
        memory, tight = self._memory(placement, shares, trips_s, step_s)
        if memory > 1.0:
            return Cost.impossible(f"stage {tight} does not fit into the memory of a member ({memory:.2f} times)")
        parts = {
            "step_s": step_s,
            "flow_s": flow_s,
            "compute_s": flow.compute_s,
            "stage_s": max(stage_s),
            "pair_s": pair_s,
            "reduce_s": max(self._reduce_s(stage, card) for stage, card in zip(stages, cards, strict=True)),
            "chain_s": pace.chain_s,
            "round_trip_s": trips_s[0],
            "commit_s": pace.commit_s,
            "stale": pace.stale,
            "foreseen_s": foreseen,
            "tokens_per_s": w.tokens_per_step / foreseen,
            "slowest_stage": float(stage_s.index(max(stage_s))),
            "memory": memory,
        }
        return _Priced(Cost(seconds=step_s, parts=parts), flow, pace, stage_s, pairs_s)

    def sent_bytes(self, placement: Placement) -> tuple[tuple[float, ...], ...]:
        """Return the bytes that each member sends over its network card in a step, by stage; as many arrive."""
        w = self.workload
        return tuple(
            tuple(
                float(sent) for sent in np.asarray(shares) * w.microbatches * w.cut_bytes * stage.away + stage.reduced
            )
            for shares, stage in zip(self.shares(placement), self._stages(placement), strict=True)
        )

    def needed_bytes(self, placement: Placement, memory: StageMemory) -> tuple[tuple[float, ...], ...] | None:
        """Return the bytes of memory that each member needs, its microbatches in flight included; None: the placement
        is impossible. Args: memory: the terms; they may exceed `workload.memory`, which decides what is possible."""
        priced = self._priced(placement)
        if isinstance(priced, Cost):
            return None
        workload, flow = replace(self.workload, memory=memory), priced.flow
        needed = _needed_bytes(workload, placement, flow.shares, flow.trips_s, priced.pace.step_s)
        return tuple(tuple(map(float, each)) for each in needed)

    # --- stages ---

    def _stages(self, placement: Placement) -> list[StageLoad]:
        members = [np.asarray(stage, dtype=np.int64) for stage in placement.stages]
        wire = self._wire or WireBytes.same(self.workload, len(members))
        return [self._stage(placement, members, k, wire) for k in range(len(members))]

    def _stage(self, placement: Placement, groups: Sequence[Ints], k: int, wire: WireBytes) -> StageLoad:
        t, w, members = self.topology, self.workload, groups[k]
        first, last = placement.bounds[k], placement.bounds[k + 1]
        parameters = sum(w.layer_parameters[first:last])
        path_rate, away = np.full(len(members), np.inf), np.zeros(len(members))
        for neighbour, cut in ((k - 1, k - 1), (k + 1, k)):
            if 0 <= neighbour < len(groups):
                others, cut_bytes = groups[neighbour], wire.cuts[cut]
                rate = both_ways(t, members, others, cut_bytes) / cut_bytes
                path_rate = np.minimum(path_rate, rate.sum(axis=1))
                speed = t.flop_per_s[others]
                away += cut_bytes / w.cut_bytes * (1.0 - same_card(t, members, others) @ speed / speed.sum())
        gradient_bytes = wire.sums[k] * parameters
        parts = reduction_parts(t, members, w.cut_bytes)
        between = gradient_bytes * (parts[:, None] + parts[None, :])
        others_mask = ~np.eye(len(members), dtype=np.bool_)
        reduce_path_s = latency_s = 0.0
        if len(members) > 1:
            path = both_ways(t, members, members, w.cut_bytes)
            with np.errstate(divide="ignore"):
                reduce_path_s = float((between / path)[others_mask].max())
            latency_s = float(t.latency_s[np.ix_(members, members)][others_mask].max())
        reduced = np.where(same_card(t, members, members), 0.0, between).sum(axis=1)
        is_end = len(groups) > 1 and k in (0, len(groups) - 1)
        # Each end sends it in the format of its own reduction; the slower direction has the larger one.
        tied_bytes = max(wire.sums[0], wire.sums[-1]) * w.reduced.tied_parameters if is_end else 0.0
        if tied_bytes:
            end = groups[len(groups) - 1 - k]
            reduced = reduced + tied_bytes * max(1.0, len(end) / len(members))
            path = both_ways(t, members, end, w.cut_bytes).max(axis=1)
            with np.errstate(divide="ignore"):
                reduce_path_s += float((tied_bytes / path).max())
        return StageLoad(
            members=members,
            job_s=w.job_flop(first, last) / t.flop_per_s[members],
            path_rate=path_rate,
            away=away,
            reduced=reduced,
            reduce_path_s=reduce_path_s,
            latency_s=latency_s,
            step_s=STEP_FLOP_PER_PARAMETER * parameters / float(t.flop_per_s[members].min()),
        )

    def _cards(self, stages: Sequence[StageLoad]) -> list[Floats]:
        """Return bytes/s of each member's card in the slower direction; of a shared card the member's part."""
        t, w = self.topology, self.workload
        load = np.zeros(t.num_devices)
        for stage in stages:
            speed = t.flop_per_s[stage.members]
            load[stage.members] = w.microbatches * speed / speed.sum() * w.cut_bytes * stage.away + stage.reduced
        of_card = np.bincount(t.card, weights=load, minlength=t.num_devices)[t.card]
        rate = np.minimum(t.up_bytes_per_s, t.down_bytes_per_s)
        part = np.where(load > 0.0, load / np.where(of_card > 0.0, of_card, 1.0), 1.0)
        return [(rate * part)[stage.members] for stage in stages]

    def _saturate(self, stage: StageLoad, card: Floats) -> tuple[float, Floats]:
        """Return (T_stage, each member's part of M). Exact: Newton from the left on a concave, piecewise linear sum."""
        M, per_card = float(self.workload.microbatches), self.workload.cut_bytes * stage.away
        rate = np.minimum(1.0 / stage.job_s, stage.path_rate)
        limited = (per_card > 0.0) & np.isfinite(card)
        slope = np.where(limited, card / np.where(limited, per_card, 1.0), 0.0)
        offset = np.where(limited, stage.reduced / np.where(limited, per_card, 1.0), 0.0)
        seconds = self._reduce_s(stage, card)
        if not math.isfinite(seconds) or not (stage.path_rate > 0.0).all():
            return math.inf, np.zeros(len(card))
        for _ in range(2 * len(card) + 2):
            by_card = np.where(limited, slope * seconds - offset, np.inf)
            taken = np.maximum(np.minimum(rate * seconds, by_card), 0.0)
            if (lack := M - float(taken.sum())) <= 1e-12 * M:
                return seconds, taken
            gain = float(np.where(by_card < rate * seconds, slope, rate).sum())
            if gain <= 0.0:
                return math.inf, taken
            seconds += lack / gain
        return seconds, taken

    def _reduce_s(self, stage: StageLoad, card: Floats) -> float:
        return max(stage.reduce_path_s, float((stage.reduced / card).max()))

    def _free_rate(self, stage: StageLoad, card: Floats) -> float:
        per_card = self.workload.cut_bytes * stage.away
        by_card = np.where(per_card > 0.0, card / np.where(per_card > 0.0, per_card, 1.0), np.inf)
        return float(np.minimum(np.minimum(1.0 / stage.job_s, stage.path_rate), by_card).sum())

    # --- between stages ---

    def _pairs(self, stages: Sequence[StageLoad], rates: Sequence[Floats]) -> tuple[list[float], list[float]]:
        """Return, for each two neighbouring stages, the flow in microbatches/s and the mean seconds of a round trip."""
        wire = self._wire or WireBytes.same(self.workload, len(stages))
        flows, hops_s = [], []
        for k, (here, there) in enumerate(pairwise(stages)):
            b = wire.cuts[k]
            rate = both_ways(self.topology, here.members, there.members, b) / b
            flow = fill(rates[k], rates[k + 1], rate)
            hop_s = exchange_s(self.topology, here.members, there.members, b)
            total = float(flow.sum())
            flows.append(total)
            hops_s.append(float((flow * np.where(flow > 0.0, hop_s, 0.0)).sum()) / total if total > 0.0 else math.inf)
        return flows, hops_s

    def _foreseen_s(self, flow: Flow, pace: Pace) -> float:
        w = self.workload
        if w.control is None or pace.steps_ahead == 0:
            return pace.step_s
        return predicted_step_s(
            lambda steps_ahead: pace_of(w, flow, steps_ahead).tails,
            flow_s=flow.flow_s,
            round_trip_s=flow.trips_s[0],
            stages_s=[w.microbatches / float((1.0 / stage.job_s).sum()) for stage in flow.stages],
            commit_s=pace.commit_s,
            microbatches=w.microbatches,
            s_max=w.s_max,
            price=w.control,
        )

    def _memory(
        self, placement: Placement, shares: Sequence[Floats], trips_s: Sequence[float], step_s: float
    ) -> tuple[float, int]:
        """Return (largest needed / present, its stage)."""
        needed = _needed_bytes(self.workload, placement, shares, trips_s, step_s)
        present = (self.topology.memory_bytes[list(members)] for members in placement.stages)
        ratios = [float((bytes_ / there).max()) for bytes_, there in zip(needed, present, strict=True)]
        most = max(range(len(ratios)), key=ratios.__getitem__)
        return ratios[most], most


def _needed_bytes(
    w: Workload, placement: Placement, shares: Sequence[Floats], trips_s: Sequence[float], step_s: float
) -> list[Floats]:
    needed = []
    for k, (members, share) in enumerate(zip(placement.stages, shares, strict=True)):
        first, last = placement.bounds[k], placement.bounds[k + 1]
        admitted = (w.s_max + 1.0) * w.microbatches * share
        flying = np.minimum(WINDOW_GAIN * share * w.microbatches / step_s * trips_s[k] + 1.0, np.maximum(admitted, 1.0))
        resident = w.resident_bytes(first, last, members=len(members))
        needed.append(resident + flying * sum(w.layer_held_bytes[first:last]))
    return needed


def _round_trips(jobs_s: Sequence[float], hops_s: Sequence[float]) -> list[float]:
    trips_s = [0.0] * len(jobs_s)
    below_s = 0.0
    for k in range(len(jobs_s) - 1, -1, -1):
        below_s += jobs_s[k] + (hops_s[k] if k < len(hops_s) else 0.0)
        trips_s[k] = below_s
    return trips_s


def fill(supply: Floats, demand: Floats, path: Floats) -> Floats:
    """Return a flow [S, D] within each sender's supply [S], each receiver's demand [D] and each path's capacity [S, D],
    all in one unit of rate. Every sender first sends in proportion to the demands; what a path cannot carry is offered
    to receivers with room. The flow is never above the maximum flow, and equal to it if no path limits."""
    flow = np.zeros_like(path)
    left, room = supply.copy(), demand.copy()
    for _ in range(ROUNDS):
        offered = left.sum()
        taken = room.sum()
        if offered <= 0.0 or taken <= 0.0:
            break
        more = np.minimum(np.outer(left, room) / max(offered, taken), path - flow)
        if more.sum() <= 1e-9 * supply.sum():
            break
        flow += more
        left = np.maximum(supply - flow.sum(axis=1), 0.0)
        room = np.maximum(demand - flow.sum(axis=0), 0.0)
    return flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Each member's part of its stage's traffic and of its reduction, in the order of `Placement.stages`; each stage's
    numbers are positive and add to 1."""

    shares: tuple[tuple[float, ...], ...]
    parts: tuple[tuple[float, ...], ...]
    """The part of the stage's gradient that each member adds up for the others."""


def split(topology: Topology, workload: Workload, placement: Placement) -> Split:
    """Split a placement's work as the objective assumes it: shares follow each member's capacity for a step. Every plan
    is made with this. Empty stages give empty tuples."""
    return Split(
        shares=ThroughputObjective(topology, workload).shares(placement),
        parts=tuple(
            tuple(
                float(part) for part in reduction_parts(topology, np.asarray(stage, dtype=np.int64), workload.cut_bytes)
            )
            for stage in placement.stages
        ),
    )
