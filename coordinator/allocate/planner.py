"""The throughput planner: a swarm and a workload in, who holds what out. Pure, and the same bit for bit anywhere.

`plan` searches, `repair` mends at once what a loss has left. Both score with `cost.throughput.ThroughputObjective`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from shoal.coordinator.allocate.genome import LEFT_OUT, Assignment
from shoal.coordinator.allocate.hierarchy import Level, coarsen, levels, refine
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.repair import mend
from shoal.coordinator.allocate.search import POPULATION, evolve
from shoal.coordinator.allocate.throughput_search import IMPOSSIBLE, ThroughputEvaluator
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.shares import split
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.topology import Topology

_STAGE_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A placement with what it gives. Devices are indexes of the topology that it was made for."""

    placement: Placement
    cost: Cost
    """As `ThroughputObjective` has it, without what moving there costs."""
    tokens_per_s: float
    shares: tuple[tuple[float, ...], ...]
    """Of its stage's microbatches that each member should get, in the order of `placement.stages`; each adds to 1."""
    parts: tuple[tuple[float, ...], ...]
    """Of its stage's gradient that each member should add up (`Member.bandwidth`); each adds to 1."""
    left_out: tuple[int, ...]
    """Devices that hold nothing: they would slow the others down, or nothing was found for them."""
    moving_s: float = 0.0
    """Seconds of the whole swarm's work that moving there from `current` costs."""
    work: int = 0
    """Units spent."""


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
) -> Planned:
    """The placement with the shortest time to a loss that the search finds: tokens/s, less what staleness costs.

    Args:
        num_stages: None: several are tried, the best is taken; with a `current`, its number.
        work: a budget in units of `search.WORK_PER_SECOND`, not in seconds; None: `default_work`.
        current: where everybody is, empty stages allowed; the search begins there, and what a device has to fetch to
            hold other layers counts as lost work, spread over `horizon_s`.
        gain_min: what a change must gain beyond that (relative), else `current` is returned as it is.
    Raises: NoLayout: no placement of so many stages is possible.
    """
    now = _now(topology, workload, current)
    if num_stages is None and current is not None:
        num_stages = len(current.stages)
    search = _Search(
        topology,
        workload,
        seed=seed,
        current=None if now is None else now.placement,
        horizon_s=horizon_s,
    )
    work = default_work(topology.num_devices) if work is None else work
    found, seconds, spent = search.best(num_stages, work)
    if now is not None and (found is None or seconds > now.cost.seconds * (1.0 - gain_min)):
        return replace(now, work=spent)
    if found is None:
        raise NoLayout(search.why_not(num_stages))
    result = planned(topology, workload, found)
    moving_s = (seconds / result.cost.seconds - 1.0) * horizon_s if current is not None else 0.0
    return replace(result, moving_s=max(0.0, moving_s), work=spent)


def repair(topology: Topology, workload: Workload, current: Placement, lost: Collection[int] = ()) -> Planned:
    """`current` without the devices `lost`, by few changes: a stage that nobody holds any more gets a spare or somebody
    from the richest, spares join and a member moves where that helps; boundaries stay. No search (`repair.py`).

    Raises: NoLayout: there are not enough devices, or the model does not fit into theirs.
    """
    placement, cost = mend(topology, workload, ThroughputObjective(topology, workload), current, lost=lost)
    result = _scored(topology, workload, placement, cost)
    return replace(result, left_out=tuple(d for d in result.left_out if d not in set(lost)))


def planned(topology: Topology, workload: Workload, placement: Placement) -> Planned:
    """Score a placement from anywhere. Raises: NoLayout: it is impossible, and why."""
    cost = ThroughputObjective(topology, workload).cost(placement)
    if not np.isfinite(cost.seconds):
        raise NoLayout(cost.why)
    return _scored(topology, workload, placement, cost)


_FINALISTS = 2
"""Numbers of stages that are searched on after all have been tried."""
WORK_64 = 60_000_000
"""Half a second of one core."""


def default_work(num_devices: int) -> int:
    """Units for about half a second with 64 devices, 3 s with 1,000, 30 s with 10,000, on one core."""
    return 40_000_000 + 300_000 * num_devices


def _scored(topology: Topology, workload: Workload, placement: Placement, cost: Cost) -> Planned:
    shares = split(topology, workload, placement)
    return Planned(
        placement=placement,
        cost=cost,
        tokens_per_s=cost.parts["tokens_per_s"],
        shares=shares.shares,
        parts=shares.parts,
        left_out=placement.spares(topology.num_devices),
    )


def _now(topology: Topology, workload: Workload, current: Placement | None) -> Planned | None:
    """Where everybody is, with newcomers and spares where they help, but nobody moved; None if that cannot be."""
    if current is None:
        return None
    objective = ThroughputObjective(topology, workload)
    try:
        placement, cost = mend(topology, workload, objective, current, may_move=False)
    except NoLayout:
        return None
    return _scored(topology, workload, placement, cost)


class _Search:
    """One call of `plan`."""

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        *,
        seed: int,
        current: Placement | None,
        horizon_s: float,
    ) -> None:
        self._topology = topology
        self._workload = workload
        self._seed = seed
        self._current = current
        self._horizon_s = horizon_s
        self._levels = levels(topology, workload)

    def best(self, num_stages: int | None, work: int) -> tuple[Placement | None, float, int]:
        """(placement, seconds with moving, work spent); None if none is possible."""
        if num_stages is not None:
            return self._solve(num_stages, work)
        choices = self._choices()
        tried = [self._solve(k, work // (3 * len(choices))) for k in choices]
        foreseen_s = [self._foreseen_s(found, seconds) for found, seconds, _ in tried]
        order = sorted(range(len(choices)), key=lambda i: (foreseen_s[i], choices[i]))
        for index in order[:_FINALISTS]:
            left = work - sum(did for _, _, did in tried)
            tried.append(self._solve(choices[index], left // (_FINALISTS + len(choices) - len(tried))))
        found, seconds, _ = min(tried, key=lambda each: self._foreseen_s(*each[:2]))
        return found, seconds, sum(did for _, _, did in tried)

    def _foreseen_s(self, found: Placement | None, seconds: float) -> float:
        """Between numbers of stages what is foreseen decides: the search's own T is one to climb by."""
        if found is None:
            return math.inf
        parts = ThroughputObjective(self._topology, self._workload).cost(found).parts
        return seconds * parts["foreseen_s"] / parts["step_s"]

    def why_not(self, num_stages: int | None) -> str:
        t, w = self._topology, self._workload
        k = num_stages or self._choices()[-1]
        if t.num_devices < k:
            return f"{t.num_devices} devices cannot hold {k} stages"
        if not t.may_feed.any():
            return "nobody has the run's text to hold stage 0"
        have, need = float(t.memory_bytes.sum()) / 1e9, w.resident_bytes(0, w.num_layers) / 1e9
        return f"the model does not fit: it takes {need:.1f} GB and what is in flight, all devices have {have:.1f} GB"

    def _choices(self) -> list[int]:
        """Numbers of stages that are tried."""
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
                begin.append(coarsen(_assignment(self._topology.num_devices, self._current), level))
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

    def _evaluator(self, level: Level, num_stages: int) -> ThroughputEvaluator:
        """Moving is counted for single devices only."""
        flat = len(level.weight) == self._topology.num_devices
        return ThroughputEvaluator(
            level.topology,
            self._workload,
            num_stages,
            weight=None if flat else level.weight,
            current=self._current if flat else None,
            horizon_s=self._horizon_s,
        )


def _assignment(num_devices: int, placement: Placement) -> Assignment:
    assignment = np.full(num_devices, LEFT_OUT, dtype=np.int64)
    for k, stage in enumerate(placement.stages):
        assignment[list(stage)] = k
    return assignment
