"""Mends a placement at once: holes are filled, spares join where they help, boundaries stay. No search, no compiling.

Candidates are ranked by what is known without evaluating them (speed for cost) and few are evaluated, so it takes
milliseconds: what is best is the search's business, which runs behind it.
"""

from collections.abc import Collection, Iterator
from itertools import islice, pairwise

import numpy as np

from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology

_TRIES = 5
"""Evaluations for joining spares and moving members; each takes 2 ms with 64 devices."""
_GAIN_MIN = 1e-3


def mend(
    topology: Topology,
    workload: Workload,
    objective: Objective,
    current: Placement,
    *,
    lost: Collection[int] = (),
    may_move: bool = True,
) -> tuple[Placement, Cost]:
    """`current` without `lost`, where every stage has a member that may hold it.

    Args: may_move: also take a member from the stage with most speed to spare for one that has become the slowest.
    Raises: NoLayout: a stage stays empty, or what results is impossible.
    """
    gone = set(lost)
    stages = [[d for d in stage if d not in gone] for stage in current.stages]
    stages[0] = [d for d in stages[0] if topology.may_feed[d]]
    mending = _Mending(topology, workload, current.bounds, stages, gone)
    for k, stage in enumerate(stages):
        if not stage:
            mending.fill(k)
    best = mending.placement
    cost = objective.cost(best)
    for placement in islice(mending.better(may_move=may_move), _TRIES):
        tried = objective.cost(placement)
        if tried.seconds < cost.seconds * (1.0 - _GAIN_MIN):
            best, cost = placement, tried
            mending.stages = [list(stage) for stage in best.stages]
    if not np.isfinite(cost.seconds):
        raise NoLayout(cost.why)
    return best, cost


class _Mending:
    """`stages` may be replaced while `better` is iterated."""

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        bounds: tuple[int, ...],
        stages: list[list[int]],
        gone: set[int],
    ) -> None:
        self._topology = topology
        self._workload = workload
        self._bounds = bounds
        self._gone = gone
        self.stages = stages
        self._flop = [sum(workload.layer_flop[a:b]) for a, b in pairwise(bounds)]
        self._resident = [workload.resident_bytes(a, b) for a, b in pairwise(bounds)]

    @property
    def placement(self) -> Placement:
        return Placement(stages=tuple(tuple(sorted(stage)) for stage in self.stages), bounds=self._bounds)

    def fill(self, k: int) -> None:
        """Somebody for the empty stage k: the fastest spare; else of the stage with most speed to spare the member
        that it misses least. Raises: NoLayout."""
        spares = [d for d in self._spares() if self._fits(d, k)]
        if spares:
            self.stages[k].append(max(spares, key=lambda d: (self._topology.flop_per_s[d], -d)))
            return
        for donor in sorted(range(len(self.stages)), key=self._wealth, reverse=True):
            able = [d for d in self.stages[donor] if self._fits(d, k)]
            if len(self.stages[donor]) > 1 and able:
                chosen = max(able, key=lambda d: (self._topology.flop_per_s[d], -d))
                self.stages[donor].remove(chosen)
                self.stages[k].append(chosen)
                return
        raise NoLayout(f"nobody is left who could hold stage {k}")

    def better(self, *, may_move: bool) -> Iterator[Placement]:
        """Candidates, the most promising first: each spare to the poorest stage, then a member of the richest."""
        for spare in sorted(self._spares(), key=lambda d: (-self._topology.flop_per_s[d], d)):
            open_to = [k for k in range(len(self.stages)) if self._fits(spare, k)]
            if open_to and spare in self._spares():
                yield self._moved(spare, None, min(open_to, key=self._wealth))
        while may_move and len(self.stages) > 1:
            order = sorted(range(len(self.stages)), key=self._wealth)
            poor, rich = order[0], order[-1]
            able = [d for d in self.stages[rich] if self._fits(d, poor)]
            if len(self.stages[rich]) < 2 or not able:
                return
            # The one after whose move the two are most alike.
            chosen = min(able, key=lambda d: (abs(self._gap(poor, rich, d)), d))
            before = self.stages
            yield self._moved(chosen, rich, poor)
            if self.stages is before:
                return

    def _moved(self, device: int, source: int | None, target: int) -> Placement:
        stages = [list(stage) for stage in self.stages]
        if source is not None:
            stages[source].remove(device)
        stages[target].append(device)
        return Placement(stages=tuple(tuple(sorted(stage)) for stage in stages), bounds=self._bounds)

    def _gap(self, poor: int, rich: int, device: int) -> float:
        speed = float(self._topology.flop_per_s[device])
        return self._wealth(rich) - speed / self._flop[rich] - self._wealth(poor) - speed / self._flop[poor]

    def _wealth(self, k: int) -> float:
        """Microbatch forwards a second."""
        return float(self._topology.flop_per_s[self.stages[k]].sum()) / self._flop[k] if self.stages[k] else 0.0

    def _spares(self) -> list[int]:
        placed = {d for stage in self.stages for d in stage} | self._gone
        return [d for d in range(self._topology.num_devices) if d not in placed]

    def _fits(self, device: int, k: int) -> bool:
        enough = float(self._topology.memory_bytes[device]) > self._resident[k]
        return enough and (k > 0 or bool(self._topology.may_feed[device]))
