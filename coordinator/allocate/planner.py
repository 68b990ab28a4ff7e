"""The throughput planner: decides which device holds which layers, alike on any machine.

Several numbers of stages get a short search each, and the most promising ones a longer one. A large swarm is searched
in several views (`hierarchy.py`), from the coarsest to the finest."""

import math
from dataclasses import dataclass, field

import numpy as np

from shoal.coordinator.allocate.at_once import one_a_stage
from shoal.coordinator.allocate.evolution import POPULATION, Assignment, evolve
from shoal.coordinator.allocate.hierarchy import Level, coarsen, levels
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
_FINALISTS = 2
"""The search goes on with this many numbers of stages after a first try of all."""
_RANKED = 4
"""This many of the best placements of a search are compared by the foreseen step."""


def default_work(num_devices: int) -> int:
    """Return the units for about half a second with 64 devices, 2 s with 1,000, 16 s with 10,000, on one core."""
    return 34_000_000 + 240_000 * num_devices


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
        current: the present placement. The search begins there, and the time of fetching other layers counts as lost
            work, spread over `horizon_s`.
        gain_min: the least relative gain of a change beyond that, else `current` is returned unchanged.
    Returns: (placement, its `ThroughputObjective` cost, without the cost of moving there).
    Raises: NoLayout: no placement on `num_stages` stages is possible."""
    objective = ThroughputObjective(topology, workload)
    if current is not None:
        num_stages = num_stages or len(current.stages)
    search = _Search(objective, seed=seed, current=current, horizon_s=horizon_s)
    found = search.each(num_stages, default_work(topology.num_devices) if work is None else work)[0]
    if current is not None:
        now = objective.cost(current)
        stays = found.placement is None or found.seconds > now.seconds * (1.0 - gain_min)
        if stays and math.isfinite(now.seconds):
            return current, now
    if found.placement is None:
        raise NoLayout(search.why_not(num_stages))
    cost = objective.cost(found.placement)
    if not math.isfinite(cost.seconds):
        raise NoLayout(cost.why)
    return found.placement, cost


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
    search = _Search(ThroughputObjective(topology, workload), seed=seed, bias=bias)
    best: dict[int, Placement] = {}
    for found in search.each(num_stages, work):
        if found.placement is not None:
            best.setdefault(len(found.placement.stages), found.placement)
    if not best:
        raise NoLayout(search.why_not(num_stages))
    return list(best.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """The result of a search with one number of stages."""

    num_stages: int
    placement: Placement | None = None
    """None: none is possible."""
    seconds: float = math.inf
    """The search's T, which is made for climbing, with the cost of moving."""
    foreseen_s: float = math.inf
    """The foreseen step, corrected by the bias seen in this run: it compares numbers of stages."""
    work: int = 0


@dataclass(kw_only=True, eq=False)
class _Search:
    objective: ThroughputObjective = field(kw_only=False)
    seed: int
    current: Placement | None = None
    horizon_s: float = math.inf
    bias: ForecastBias = UNBIASED

    def __post_init__(self) -> None:
        self._levels = levels(self.objective.topology, self.objective.workload)

    def each(self, num_stages: int | None, work: int) -> list[_Try]:
        """Return all tries, the best first."""
        if num_stages is not None:
            return [self._solve(num_stages, work)]
        choices = self._choices()
        tried = [self._solve(k, work // (3 * len(choices)), is_long=False) for k in choices]
        left = work - sum(each.work for each in tried)
        for index, best in enumerate(sorted(tried, key=lambda each: each.foreseen_s)[:_FINALISTS]):
            again = self._solve(best.num_stages, left // (_FINALISTS - index))
            left -= again.work
            tried.append(again)
        return sorted(tried, key=lambda each: each.foreseen_s)

    def why_not(self, num_stages: int | None) -> str:
        t, w = self.objective.topology, self.objective.workload
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
        most = min(self.objective.workload.num_layers, self.objective.topology.num_devices, STAGES_MAX)
        return [k for k in _STAGE_CHOICES if k < most] + [most]

    def _solve(self, num_stages: int, work: int, *, is_long: bool = True) -> _Try:
        t, w = self.objective.topology, self.objective.workload
        if num_stages > min(t.num_devices, w.num_layers) or not t.may_feed.any():
            return _Try(num_stages=num_stages)
        given = [one for one in (self.current, self._chain(num_stages)) if one is not None]
        known = [assignment_of(t.num_devices, placement) for placement in given]
        flat: list[Assignment] = []  # the result of the coarser level, by device
        spent = 0
        for index, level in enumerate(self._levels):
            is_finest = len(level.weight) == t.num_devices
            evaluator = ThroughputEvaluator(
                level.topology,
                w,
                num_stages,
                weight=level.weight,
                current=self.current if is_finest else None,  # only single devices have a cost of moving
                horizon_s=self.horizon_s,
            )
            start = [evaluator.repair(coarsen(each, level), seed=self.seed) for each in (*flat, *known)]
            budget = (work - spent) // (len(self._levels) - index)
            keep, share = (len(start), budget) if flat else (POPULATION, None)
            found = evolve(evaluator, seed=self.seed, work=budget, start=start, keep=keep, share=share)
            spent += found.work
            flat = [found.assignment[level.unit_of]]
        tries = [
            self._try(evaluator, level, assignment, spent)
            for assignment in (found.assignment, *found.others)[: _RANKED if is_long else 1]
        ]
        return min(tries, key=lambda each: each.foreseen_s)

    def _try(self, evaluator: ThroughputEvaluator, level: Level, assignment: Assignment, work: int) -> _Try:
        """Price what a search has found for the finest `level`."""
        K, seconds = evaluator.num_stages, evaluator.cost(assignment)
        flat = assignment[level.unit_of]
        stages = tuple(tuple(int(d) for d in np.flatnonzero(flat == k)) for k in range(K))
        if seconds >= IMPOSSIBLE or not all(stages):
            return _Try(num_stages=K, work=work)
        placement = Placement(stages=stages, bounds=evaluator.placement_of(assignment).bounds)
        cost = self.objective.cost(placement)
        foreseen_s = math.inf
        if math.isfinite(cost.seconds):
            foreseen_s = seconds * cost.parts["foreseen_s"] / cost.parts["step_s"] / self.bias.factor(K)
        return _Try(num_stages=K, placement=placement, seconds=seconds, foreseen_s=foreseen_s, work=work)

    def _chain(self, num_stages: int) -> Placement | None:
        """Return a feasible start where some devices do not reach others; None if all do, or none is found."""
        rate = self.objective.topology.bytes_per_s
        if int((rate > 0.0).sum()) >= len(rate) * (len(rate) - 1):
            return None
        try:
            return one_a_stage(self.objective, num_stages)
        except NoLayout:
            return None
