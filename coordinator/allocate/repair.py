"""Repair a placement at once: fill empty stages, add spares where they help, and keep the boundaries.

Candidates are ranked by their speed per stage cost, and few are evaluated, so it takes milliseconds without compiled
code. Finding the best layout is the search's task."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np

from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology

_TRIES = 5
"""The limit on evaluations for joining spares; each takes 2 ms with 64 devices."""
GAIN_MIN = 1e-3
"""A device that shortens a step by less stays out: it costs a copy of the state, and it may leave."""


def take_in(topology: Topology, workload: Workload, objective: Objective, current: Placement) -> tuple[Placement, Cost]:
    """Return `current` with a member for every empty stage, and with spares where they shorten the step.
    Raises: NoLayout: a stage stays empty, or the result is infeasible."""
    stages = [list(stage) for stage in current.stages]
    stages[0] = [d for d in stages[0] if topology.may_feed[d]]
    mending = _Mending(topology, workload, current.bounds, stages)
    for k, stage in enumerate(stages):
        if not stage:
            mending.fill(k)
    best = mending.placement
    cost = objective.cost(best)
    for placement in islice(mending.with_a_spare(), _TRIES):
        tried = objective.cost(placement)
        if tried.seconds < cost.seconds * (1.0 - GAIN_MIN):
            best, cost = placement, tried
            mending.stages = [list(stage) for stage in best.stages]
    if not np.isfinite(cost.seconds):
        raise NoLayout(cost.why)
    return best, cost


class _Mending:
    """A placement under repair. `stages` may be replaced while `with_a_spare` is iterated."""

    def __init__(
        self, topology: Topology, workload: Workload, bounds: tuple[int, ...], stages: list[list[int]]
    ) -> None:
        self._topology = topology
        self._workload = workload
        self._bounds = bounds
        self.stages = stages
        self._flop = [sum(workload.layer_flop[a:b]) for a, b in pairwise(bounds)]

    @property
    def placement(self) -> Placement:
        return Placement(stages=tuple(tuple(sorted(stage)) for stage in self.stages), bounds=self._bounds)

    def fill(self, k: int) -> None:
        """Give the empty stage k the fastest spare, or the fastest member of the stage with the most spare speed.
        Raises: NoLayout: no device can hold it."""
        spares = [d for d in self._spares() if self._fits(d, k)]
        if spares:
            self.stages[k].append(max(spares, key=lambda d: (self._topology.flop_per_s[d], -d)))
            return
        for donor in sorted(range(len(self.stages)), key=self._headroom, reverse=True):
            able = [d for d in self.stages[donor] if self._fits(d, k)]
            if len(self.stages[donor]) > 1 and able:
                chosen = max(able, key=lambda d: (self._topology.flop_per_s[d], -d))
                self.stages[donor].remove(chosen)
                self.stages[k].append(chosen)
                return
        raise NoLayout(f"no device is left that can hold stage {k}")

    def with_a_spare(self) -> Iterator[Placement]:
        """Yield candidates, the most promising first: each adds one spare to the poorest stage that it fits into."""
        for standby in sorted(self._spares(), key=lambda d: (-self._topology.flop_per_s[d], d)):
            open_to = [k for k in range(len(self.stages)) if self._fits(standby, k)]
            if open_to and standby in self._spares():
                stages = [list(stage) for stage in self.stages]
                stages[min(open_to, key=self._headroom)].append(standby)
                yield Placement(stages=tuple(tuple(sorted(stage)) for stage in stages), bounds=self._bounds)

    def _headroom(self, k: int) -> float:
        return float(self._topology.flop_per_s[self.stages[k]].sum()) / self._flop[k] if self.stages[k] else 0.0

    def _spares(self) -> list[int]:
        placed = {d for stage in self.stages for d in stage}
        return [d for d in range(self._topology.num_devices) if d not in placed]

    def _fits(self, device: int, k: int) -> bool:
        first, last = self._bounds[k], self._bounds[k + 1]
        members = len(set(self.stages[k]) | {device})
        needed = self._workload.resident_bytes(first, last, members=members)
        enough = float(self._topology.memory_bytes[device]) > needed
        return enough and (k > 0 or bool(self._topology.may_feed[device])) and self._reaches(device, k)

    def _reaches(self, device: int, k: int) -> bool:
        """True if `device` has paths both ways to all of stage k and to a member of each neighbouring stage."""
        rate = self._topology.bytes_per_s
        meets = (rate[device] > 0.0) & (rate[:, device] > 0.0)
        near = [self.stages[n] for n in (k - 1, k + 1) if 0 <= n < len(self.stages) and self.stages[n]]
        mates = [d for d in self.stages[k] if d != device]
        return bool(meets[mates].all()) and all(any(meets[d] or d == device for d in members) for members in near)
