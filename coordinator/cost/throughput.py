"""Prices one placement by shoal's own objective, the seconds a step of the asynchronous pipeline (`pipeline.py`).

A placement is **impossible** if it does not fit into memory, if a stage has no members or layers, if a member of stage
0 lacks the text, if two members of a stage have no path between them, or if a member has no path to any member of a
neighbouring stage.

**Staleness** s is the mean over microbatches and stages. A microbatch that starts at stage k after the last microbatch
of a step, but before the commit of that step, runs on an older version:

    s = mean over k of min(s_max, (round trip_k + commit_k) / T)

The control of the pipeline (`peer/replica/flow.py`) weighs the steps that staleness costs (`protocol/staleness.py`)
against the time that it saves; plans ignore those steps ([`DECISIONS.md`](DECISIONS.md)).

**What limits a step.** If T_flow is longer than T_chain, the slowest stage or the slowest pair of neighbouring stages
limits it. Within a stage it is the resource with the longest time for a step's work:

    compute    M / sum of 1 / job_d                  card, reduction    (activations + gradients) / sum of card_d
    paths      M / sum of path_rate_d                reduction          the slowest path between two members

A limit by network cards is named after the larger of their two loads: `card` or `reduction`. If T_chain is longer, the
longest part of the chain limits the step, at the stage with the longest chain: the commit (or its reduction, if that is
at least half of the commit), the round trip, or the issue of the microbatches, which a stage or a pair limits as above.

**The prediction** (`predicted_step_s`) is the seconds that a step will take. People see it, as tokens/s; searches
compare placements by T. The prediction is closer to reality, but searches that minimise it find slower plans
(simulated: data centre 6.53 s in place of 6.40 s, home GPUs 58.9 s in place of 55.8 s). It differs from T in two ways.

*Control.* T assumes that as much runs ahead as `s_max` admits, with the whole gain of the window. The control admits
less where staleness costs more steps than it saves seconds. With the gain g of its choice, devices are busy for a part
e(g) of the time in which they work ahead, not e(window):

    r = e(window) / e(g)
    T_compute' = T_compute (1 + x (r - 1)),     x = min(1, idle / work)
    T_chain'(k) = T_chain(k) + (r - 1) T_compute / (k + 1)

*Waiting.* A device that has waited for a version cannot recover that time; a line can, because it carries the
reduction meanwhile. So compute time adds to the chain. If activations and the reduction share a card, commits vary in
length: a device loses time in long ones, but gains none in short ones unless it is idle anyway. For stage j, let q be
the share that activations take of the card that limits its commit, T_j the time of its devices without waiting, and
T_chain'(k, j) its chain. With the 4-norm |a, b|:

    c_j = q T_j / T_flow
    L_j = max(T_compute', T_chain'(k, j))
    T   = max(T_flow, max over j of L_j + c_j / 0.4 (|T_compute', T_chain'(k, j)| - L_j))

Source: ours; `protocol/running_ahead.py` defines e, x, idle, work and the choice of k steps ahead and gain g. Figures
are in MEASURED.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from shoal.coordinator.cost import pipeline
from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.pipeline import PipelineInput, PipelineState
from shoal.coordinator.cost.placement import Bottleneck, Cost, Placement
from shoal.coordinator.cost.problem import problem_of, state_of
from shoal.coordinator.cost.workload import WireBytes, Workload
from shoal.protocol.plan import Bound
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.topology import Floats, Topology

_CROWDED = 0.4
"""The c_j (see the module's formulas) at which the prediction is the full 4-norm; fitted to five scenarios."""
LARGE = 256
"""More devices than this are always evaluated by the compiled loops: with 200, plain Python takes 30 ms."""


class ThroughputObjective:
    """Implements `Objective`. `Cost.parts`, in seconds a step unless said otherwise:

    step_s (T), flow_s (T_flow), compute_s (the slowest stage's M / sum of 1 / job), stage_s, pair_s and reduce_s (the
    parts of T_flow), chain_s (T_chain), round_trip_s (of one microbatch without waiting), commit_s (the longest), stale
    (s, from 0 to s_max), foreseen_s (the prediction), tokens_per_s (from foreseen_s), slowest_stage (its index), memory
    (the largest ratio of needed to present memory)."""

    def __init__(self, topology: Topology, workload: Workload) -> None:
        self.topology = topology
        self.workload = workload
        self._problems: dict[frozenset[float], PipelineInput] = {}
        """{activation sizes (bytes) besides the workload's own: the tables of `pipeline.py` for these sizes}."""

    def cost(self, placement: Placement, wire: WireBytes | None = None) -> Cost:
        """Return the cost of a placement. Args: wire: bytes of tensors between stages and in reductions; None: as in
        the workload."""
        if why := self._obstacle(placement):
            return Cost.impossible(why)
        return self._evaluated(placement, wire).cost()

    def step_s(self, placement: Placement) -> float:
        """Return only T (seconds), in a fifth of the time of `cost`; inf: the placement is impossible."""
        seconds = np.inf if self._obstacle(placement) else self._evaluated(placement).seconds
        return seconds if seconds < pipeline.IMPOSSIBLE else np.inf

    def sent_bytes(self, placement: Placement) -> tuple[tuple[float, ...], ...]:
        """Return the bytes that each member, by stage, sends over its network card in a step. It receives as many."""
        evaluation = self._evaluated(placement)
        return tuple(tuple(evaluation.sent_bytes(k).tolist()) for k in range(len(placement.stages)))

    def needed_bytes(self, placement: Placement, memory: StageMemory) -> tuple[tuple[float, ...], ...] | None:
        """Return the bytes of memory that each member needs, with its microbatches in flight; None: the placement is
        impossible. Args: memory: the terms to count; `workload.memory` still decides if the placement is possible."""
        if self.cost(placement).why:
            return None
        other = ThroughputObjective(self.topology, replace(self.workload, memory=memory))
        needed = other._evaluated(placement).state.loads[pipeline.NEEDED]
        return tuple(tuple(needed[list(members)].tolist()) for members in placement.stages)

    def split(self, placement: Placement) -> "Split":
        """Return the shares of the work that the objective assumes, in proportion to each member's capacity in a step.
        Every plan gets these shares. No stage may be empty."""
        evaluation = self._evaluated(placement)
        return Split(shares=tuple(map(evaluation.shares, range(len(placement.stages)))), parts=evaluation.parts)

    def _obstacle(self, placement: Placement) -> str:
        """Return why the placement is impossible, if that is clear before an evaluation; empty: it may be possible."""
        if (empty := next((k for k, stage in enumerate(placement.stages) if not stage), None)) is not None:
            return f"stage {empty} has no member"
        if (empty := next((k for k, (a, b) in enumerate(pairwise(placement.bounds)) if a >= b), None)) is not None:
            return f"stage {empty} has no layer"
        if not self.topology.may_feed[list(placement.stages[0])].all():
            return "a member of stage 0 does not have the text"
        return ""

    def _evaluated(self, placement: Placement, wire: WireBytes | None = None) -> "_Evaluation":
        n = self.topology.num_devices
        cuts = frozenset(wire.cuts if wire is not None else ()) - {self.workload.cut_bytes}
        if (problem := self._problems.get(cuts)) is None:
            problem = self._problems[cuts] = problem_of(self.topology, self.workload, cuts=sorted(cuts))
        state = state_of(problem, self.workload, len(placement.stages), wire)
        stage_of = np.full(n, -1, dtype=np.int64)
        for k, members in enumerate(placement.stages):
            stage_of[list(members)] = k
        loops = _loops(n)
        with np.errstate(all="ignore"):
            loops.build(problem, state, stage_of, np.array(placement.bounds, dtype=np.int64))
            seconds, _ = loops.evaluate(problem, state, np.zeros(1, dtype=np.int64))
        return _Evaluation(self.topology, self.workload, placement, state, float(seconds))


class _Evaluation:
    """A placement after its evaluation: `state` has the computed values."""

    def __init__(
        self, topology: Topology, workload: Workload, placement: Placement, state: PipelineState, seconds: float
    ) -> None:
        self.state, self.seconds = state, seconds
        self._topology, self._workload, self._bounds = topology, workload, placement.bounds
        self._of = [list(members) for members in placement.stages]

    @cached_property
    def _computes_s(self) -> list[float]:
        """[K], the seconds that each stage computes in a step if its members share the work by speed."""
        M, flop_per_s = self._workload.microbatches, self._topology.flop_per_s
        jobs = [self._workload.job_flop(first, last) for first, last in pairwise(self._bounds)]
        return [M * job / float(flop_per_s[of].sum()) for job, of in zip(jobs, self._of, strict=True)]

    @property
    def parts(self) -> tuple[tuple[float, ...], ...]:
        """The part of its stage's gradient that each member adds up, by stage."""
        return tuple(tuple(self.state.loads[pipeline.PART, members].tolist()) for members in self._of)

    def shares(self, k: int) -> tuple[float, ...]:
        taken = self.state.loads[pipeline.TAKEN, self._of[k]]
        part = np.maximum(taken, 1e-3 * taken.max() if taken.max() > 0.0 else 1.0)
        return tuple((part / part.sum()).tolist())

    def sent_bytes(self, k: int) -> Floats:
        reduced: Floats = self.state.loads[pipeline.REDUCED, self._of[k]]
        return self._activation_bytes(k, np.array(self.shares(k))) + reduced

    def cost(self) -> Cost:
        w, state, times = self._workload, self.state, self.state.times
        ratios = state.loads[pipeline.NEEDED] / self._topology.memory_bytes
        memory = [float(ratios[of].max()) for of in self._of]
        if why := self._flaw(memory):
            return Cost.impossible(why)
        step_s, flow_s, chain_s = state.step[: pipeline.CHAIN_S + 1].tolist()
        ahead, trips_s = state.step[pipeline.AHEAD], times[pipeline.TRIP]
        commits_s = times[pipeline.BESIDE if ahead else pipeline.ALONE]
        stages_s = times[pipeline.SECONDS].tolist()
        pairs_s = [w.microbatches / float(flow) for flow in times[pipeline.FLOW, :-1]]
        foreseen_s = predicted_step_s(w, state, self._computes_s)
        parts = {
            "step_s": step_s,
            "flow_s": flow_s,
            "compute_s": max(self._computes_s),
            "stage_s": max(stages_s),
            "pair_s": max(pairs_s, default=0.0),
            "reduce_s": float(times[pipeline.REDUCE].max()),
            "chain_s": chain_s,
            "round_trip_s": float(trips_s[0]),
            "commit_s": float(commits_s.max()),
            "stale": float(np.minimum(ahead, (trips_s + commits_s) / step_s).mean()),
            "foreseen_s": foreseen_s,
            "tokens_per_s": w.tokens_per_step / foreseen_s,
            "slowest_stage": float(stages_s.index(max(stages_s))),
            "memory": max(memory),
        }
        return Cost(seconds=step_s, parts=parts, bound=self._bound(stages_s, pairs_s, commits_s))

    def _flaw(self, memory: list[float]) -> str:
        """Return why the placement is impossible; empty: it is possible. Args: memory: the largest ratio of needed to
        present memory, for each stage."""
        for k, seconds in enumerate(self.state.times[pipeline.SECONDS]):
            if not seconds < np.inf:
                return f"a member of stage {k} has no path to its group peers or neighbours"
        for k, flow in enumerate(self.state.times[pipeline.FLOW, :-1]):
            if flow <= 0.0:
                return f"no path between stages {k} and {k + 1}"
        if max(memory) > 1.0:
            tight = memory.index(max(memory))
            return f"stage {tight} does not fit into the memory of a member ({max(memory):.2f} times)"
        return ""

    def _bound(self, stages_s: list[float], pairs_s: list[float], commits_s: Floats) -> Bottleneck:
        step, trips_s = self.state.step, self.state.times[pipeline.TRIP]
        if step[pipeline.CHAIN_S] > step[pipeline.FLOW_S]:
            k, issue_s = int((trips_s + commits_s).argmax()), step[pipeline.ISSUE_S]
            if commits_s[k] >= max(trips_s[k], issue_s):
                return "reduction" if self.state.times[pipeline.REDUCE, k] >= commits_s[k] / 2.0 else "commit", k
            if trips_s[k] >= issue_s:
                return "round trip", k
        # A pair takes as long as its slower stage (up to rounding), unless its paths carry less.
        if pairs_s and max(pairs_s) > (1.0 + 1e-6) * max(stages_s):
            return "paths", pairs_s.index(max(pairs_s))
        slowest = stages_s.index(max(stages_s))
        return self._busiest(slowest), slowest

    def _busiest(self, k: int) -> Bound:
        loads = self.state.loads[:, self._of[k]]
        activations = float(self._activation_bytes(k, loads[pipeline.TAKEN] / loads[pipeline.TAKEN].sum()).sum())
        gradients = float(loads[pipeline.REDUCED].sum())
        takes_s: dict[Bound, float] = {
            "compute": self._computes_s[k],
            "paths": self._workload.microbatches / float(loads[pipeline.PATH_RATE].sum()),
            "reduction": float(self.state.times[pipeline.BY_PATH, k]),
        }
        on_card: Bound = "reduction" if gradients > activations else "card"
        takes_s[on_card] = max(takes_s.get(on_card, 0.0), (activations + gradients) / float(loads[pipeline.CARD].sum()))
        return max(takes_s, key=lambda bound: takes_s[bound])

    def _activation_bytes(self, k: int, shares: Floats) -> Floats:
        w, away = self._workload, self.state.loads[pipeline.AWAY, self._of[k]]
        sent: Floats = shares * w.microbatches * w.cut_bytes * away
        return sent


def predicted_step_s(workload: Workload, state: PipelineState, computes_s: Sequence[float]) -> float:
    """Return the seconds that a step will take. Args: computes_s: the compute time of each stage, seconds a step."""
    step_s, flow_s = float(state.step[pipeline.STEP_S]), float(state.step[pipeline.FLOW_S])
    if workload.control is None or not state.step[pipeline.AHEAD]:
        return step_s
    M, trips_s, beside_s = workload.microbatches, state.times[pipeline.TRIP], state.times[pipeline.BESIDE]
    measured = Measured(
        rate_per_s=M / flow_s, round_trip_s=float(trips_s[0]), commit_s=float(beside_s.max()), microbatches=M
    )
    choice = choose(measured, s_max=workload.s_max, price=workload.control, gain_max=pipeline.WINDOW_GAIN)
    commits_s = beside_s if choice.steps_ahead else state.times[pipeline.ALONE]
    chains_s = pipeline.chain_s(state, trips_s + commits_s, choice.steps_ahead)
    if choice.steps_ahead == 0:
        return float(chains_s.max())
    longer = busy(pipeline.WINDOW_GAIN) / busy(choice.gain) - 1.0
    ahead = min(1.0, measured.idle_s / measured.work_s)
    works_s = max(computes_s) * (1.0 + ahead * longer)
    predicted_s = flow_s
    for k, chain_s in enumerate(chains_s.tolist()):
        follows_s = chain_s + longer * max(computes_s) / (choice.steps_ahead + 1.0)
        least_s = max(works_s, follows_s)
        scatters = float(state.times[pipeline.CROWDED, k]) * computes_s[k] / flow_s / _CROWDED
        predicted_s = max(predicted_s, least_s + scatters * (float(pipeline.joined(works_s, follows_s)) - least_s))
    return predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Each member's part of its stage's work, in the order of `Placement.stages`. They are positive and add to 1."""

    shares: tuple[tuple[float, ...], ...]
    """The part of its stage's microbatches that each member takes."""
    parts: tuple[tuple[float, ...], ...]
    """The part of its stage's gradient that each member adds up for the others."""


def split(topology: Topology, workload: Workload, placement: Placement) -> Split:
    return ThroughputObjective(topology, workload).split(placement)


def _loops(num_devices: int) -> Any:
    """Return the module `pipeline`, or its compiled twin (same bits) if that is ready or the swarm is large."""
    # Another thread may be importing the module, which then lacks its functions.
    is_ready = getattr(sys.modules.get("shoal.coordinator.cost.compiled"), "is_ready", None)
    if num_devices <= LARGE and not (is_ready and is_ready()):
        return pipeline
    from shoal.coordinator.cost import compiled  # numba takes a second to import

    return compiled
