"""The throughput planner: decides which device holds which layers, alike on any machine."""

import math

import numpy as np

from shoal.coordinator.allocate.at_once import one_a_stage, take_in
from shoal.coordinator.allocate.evolution import POPULATION, Assignment, evolve
from shoal.coordinator.allocate.hierarchy import Level, coarsen, levels, refine
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator, assignment_of
from shoal.coordinator.cost.forecast_bias import UNBIASED, ForecastBias
from shoal.coordinator.cost.pipeline import IMPOSSIBLE
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.topology import Topology

_STAGE_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


def plan(
    topology: Topology,
    workload: Workload,
    *,
    num_stages: int | None = None,
    seed: int = 0,
    work: int | None = None,
    current: Placement | None = None,
    horizon_s: float = 600.0,
    gain_min: float = 0.02,
) -> tuple[Placement, Cost]:
    """Search for the placement with the shortest time to a given loss: tokens/s, less the cost of staleness.

    Args:
        num_stages: None: several are tried and the best is taken; with a `current`, its number.
        work: a budget in units of `evolution.WORK_PER_SECOND`; None: `default_work`.
        current: the present placement, empty stages allowed. The search begins there, and the time of fetching other
            layers counts as lost work, spread over `horizon_s`.
        gain_min: the least relative gain of a change beyond that, else `current` is returned unchanged.
    Returns: (placement, its `ThroughputObjective` cost, without the cost of moving there).
    Raises: NoLayout: no placement on `num_stages` stages is possible."""
    now = _with_newcomers(topology, workload, current)
    if num_stages is None and current is not None:
        num_stages = len(current.stages)
    start = None if now is None else now[0]
    search = _Search(topology, workload, seed=seed, current=start, horizon_s=horizon_s)
    found, seconds, _ = search.each(num_stages, default_work(topology.num_devices) if work is None else work)[0]
    if now is not None and (found is None or seconds > now[1].seconds * (1.0 - gain_min)):
        return now
    if found is None:
        raise NoLayout(search.why_not(num_stages))
    cost = ThroughputObjective(topology, workload).cost(found)
    if not math.isfinite(cost.seconds):
        raise NoLayout(cost.why)
    return found, cost


def plan_each(
    topology: Topology,
    workload: Workload,
    *,
    num_stages: int | None,
    seed: int,
    work: int,
    bias: ForecastBias = UNBIASED,
) -> list[Placement]:
    """Return the best placement found for each number of stages, the best of all first: moving to that may cost too
    much.

    Args: as of `plan`; bias: the objective's bias by number of stages, which corrects comparisons between numbers.
    Raises: NoLayout: there is none."""
    search = _Search(topology, workload, seed=seed, current=None, horizon_s=math.inf, bias=bias)
    found = [placement for placement, _, _ in search.each(num_stages, work) if placement is not None]
    if not found:
        raise NoLayout(search.why_not(num_stages))
    best: dict[int, Placement] = {}
    for placement in found:
        best.setdefault(len(placement.stages), placement)
    return list(best.values())


_FINALISTS = 2
"""The search goes on with this many numbers of stages after a first try of all."""


def default_work(num_devices: int) -> int:
    """Return the units for about half a second with 64 devices, 3 s with 1,000, 30 s with 10,000, on one core."""
    return 40_000_000 + 300_000 * num_devices


def _with_newcomers(topology: Topology, workload: Workload, current: Placement | None) -> tuple[Placement, Cost] | None:
    """Return `current` with newcomers and spares where they help; None if there is none or it cannot be repaired."""
    if current is None:
        return None
    try:
        return take_in(topology, workload, ThroughputObjective(topology, workload), current)
    except NoLayout:
        return None


class _Search:
    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        *,
        seed: int,
        current: Placement | None,
        horizon_s: float,
        bias: ForecastBias = UNBIASED,
    ) -> None:
        self._topology, self._workload = topology, workload
        self._seed, self._current, self._horizon_s, self._bias = seed, current, horizon_s, bias
        self._levels = levels(topology, workload)

    def each(self, num_stages: int | None, work: int) -> list[tuple[Placement | None, float, int]]:
        """Return all tries, the best first: (placement; None: none is possible, seconds with moving, work spent)."""
        if num_stages is not None:
            return [self._solve(num_stages, work)]
        choices = self._choices()
        tried = [self._solve(k, work // (3 * len(choices))) for k in choices]
        foreseen_s = [self._foreseen_s(found, seconds) for found, seconds, _ in tried]
        order = sorted(range(len(choices)), key=lambda i: (foreseen_s[i], choices[i]))
        for index in order[:_FINALISTS]:
            left = work - sum(did for _, _, did in tried)
            tried.append(self._solve(choices[index], left // (_FINALISTS + len(choices) - len(tried))))
        return sorted(tried, key=lambda each: self._foreseen_s(*each[:2]))

    def _foreseen_s(self, found: Placement | None, seconds: float) -> float:
        """Return the seconds that compare numbers of stages: the foreseen step, not the search's T, which is made for
        climbing, corrected by the bias seen in this run."""
        cost = None if found is None else ThroughputObjective(self._topology, self._workload).cost(found)
        if found is None or cost is None or not math.isfinite(cost.seconds):
            return math.inf
        return seconds * cost.parts["foreseen_s"] / cost.parts["step_s"] / self._bias.factor(len(found.stages))

    def why_not(self, num_stages: int | None) -> str:
        t, w = self._topology, self._workload
        k = num_stages or self._choices()[-1]
        if t.num_devices < k:
            return f"{t.num_devices} devices cannot hold {k} stages"
        if not t.may_feed.any():
            return "no device has the run's text to hold stage 0"
        have, need = float(t.memory_bytes.sum()) / 1e9, w.resident_bytes(0, w.num_layers, members=1) / 1e9
        return (
            f"the model does not fit: it takes {need:.1f} GB and activations in flight, all devices have {have:.1f} GB"
        )

    def _choices(self) -> list[int]:
        most = min(self._workload.num_layers, self._topology.num_devices, STAGES_MAX)
        return [k for k in _STAGE_CHOICES if k < most] + [most]

    def _solve(self, num_stages: int, work: int) -> tuple[Placement | None, float, int]:
        if num_stages > min(self._topology.num_devices, self._workload.num_layers) or not self._topology.may_feed.any():
            return None, math.inf, 0
        spent = 0
        start: Assignment | None = None
        for index, level in enumerate(self._levels):
            evaluator = self._evaluator(level, num_stages)
            begin = [] if start is None else [refine(start, self._levels[index - 1], level)]
            if self._current is not None:
                begin.append(coarsen(assignment_of(self._topology.num_devices, self._current), level))
            if (chain := self._chain(num_stages)) is not None:
                begin.append(coarsen(assignment_of(self._topology.num_devices, chain), level))
            begin = [evaluator.repair(each, seed=self._seed) for each in begin]
            budget = (work - spent) // (len(self._levels) - index)
            keep, share = (POPULATION, None) if start is None else (len(begin), budget)
            found = evolve(evaluator, seed=self._seed, work=budget, start=begin, keep=keep, share=share)
            spent += found.work
            start = found.assignment
        assert start is not None
        last = self._levels[-1]
        bounds = evaluator.placement_of(start).bounds
        flat = start[last.unit_of]
        stages = tuple(tuple(int(d) for d in np.flatnonzero(flat == k)) for k in range(num_stages))
        if found.cost >= IMPOSSIBLE or not all(stages):
            return None, math.inf, spent
        return Placement(stages=stages, bounds=bounds), found.cost, spent

    def _chain(self, num_stages: int) -> Placement | None:
        """Return a feasible start where some devices do not reach others; None if all do, or none is found."""
        t = self._topology
        num_paths = int((t.bytes_per_s > 0.0).sum())
        if num_paths >= t.num_devices * (t.num_devices - 1):
            return None
        try:
            found, _ = one_a_stage(t, self._workload, ThroughputObjective(t, self._workload), num_stages)
        except NoLayout:
            return None
        return found

    def _evaluator(self, level: Level, num_stages: int) -> ThroughputEvaluator:
        """Make the evaluator of one level; the cost of moving counts for single devices only."""
        flat = len(level.weight) == self._topology.num_devices
        return ThroughputEvaluator(
            level.topology,
            self._workload,
            num_stages,
            weight=None if flat else level.weight,
            current=self._current if flat else None,
            horizon_s=self._horizon_s,
        )
