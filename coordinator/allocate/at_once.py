"""Make a layout by rule within a second and without compiled code, to show while the search is not ready yet. Pure.

The model is cut for the fewest devices that can hold it. The others are then added one by one, the fastest first, each
where the step gets shortest by the true objective: to a stage, or as a stage of its own, or not at all.
`deploy/planning/left_out.py` tries the same places (`joins`) to say what would make an unplaced device useful.

A present placement is repaired instead (`take_in`): empty stages are filled, spares join where they help, and the
boundaries stay. Candidates are ranked by their speed per stage cost, and few are evaluated: it takes milliseconds."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np

from shoal.coordinator.allocate.adjustments import with_device
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.topology import Floats, Topology

_TRIES = 5
"""The limit on evaluations for joining spares; each takes 2 ms with 64 devices."""
GAIN_MIN = 1e-3
"""A device that shortens a step by less stays out: it costs a copy of the state, and it may leave."""


def plan_at_once(topology: Topology, workload: Workload, *, num_stages: int | None = None) -> tuple[Placement, Cost]:
    """Make the layout. Args: num_stages: None: the rule chooses the number.
    Raises: NoLayout: the model does not fit into `num_stages` stages of these devices, or no device has the text."""
    objective = ThroughputObjective(topology, workload)
    best, cost = one_a_stage(topology, workload, objective, num_stages)
    left = max(20, 16_000 // topology.num_devices)  # evaluations, of 1 to 3 ms for 16 devices
    before = None
    while left > 0 and before is not best:
        before = best
        for device in _fastest_first(topology, best.spares(topology.num_devices)):
            found = best
            for placement in islice(joins(topology, workload, best, device, may_add_stage=num_stages is None), left):
                left -= 1
                tried = objective.cost(placement)
                if tried.seconds < cost.seconds * (1.0 - GAIN_MIN):
                    found, cost = placement, tried
            best = found
    return best, cost


def joins(
    topology: Topology, workload: Workload, placement: Placement, device: int, *, may_add_stage: bool = True
) -> Iterator[Placement]:
    """Yield every placement with `device` as one more member of a stage, then as one more stage. Bounds fit the stages'
    speed and memory; where only a member joins, the present bounds are tried, too. Some may be infeasible."""
    stages = placement.stages
    for k in range(len(stages)):
        joined = with_device(stages, k, device)
        for bounds in dict.fromkeys((*_cuts(topology, workload, joined), placement.bounds)):
            yield Placement(stages=joined, bounds=bounds)
    if may_add_stage and len(stages) < min(workload.num_layers, STAGES_MAX):
        for k in range(len(stages) + 1):
            more = (*stages[:k], (device,), *stages[k:])
            for bounds in _cuts(topology, workload, more):
                yield Placement(stages=more, bounds=bounds)


def _cuts(topology: Topology, workload: Workload, stages: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return one cut for each of a few numbers of held microbatches, since that number depends on the cut."""
    found = (cut(topology, workload, stages, held=held) for held in (2.0, 8.0, 24.0))
    return list(dict.fromkeys(bounds for bounds in found if bounds is not None))


def cut(
    topology: Topology, workload: Workload, stages: Sequence[Sequence[int]], *, held: float
) -> tuple[int, ...] | None:
    """Return the bounds [K + 1] of the cut that minimises the longest compute time of a stage, among those that fit
    into memory with `held` microbatches; None if no cut fits. Links are ignored."""
    L, K = workload.num_layers, len(stages)
    flop_to = np.cumsum((0.0, *workload.layer_flop))
    held_to = held * np.cumsum((0.0, *workload.layer_held_bytes))
    reached: Floats = np.full(L + 1, np.inf)
    reached[0] = 0.0
    since = np.zeros((K, L + 1), dtype=np.int64)
    for k, stage in enumerate(stages):
        members = list(stage)
        speed = float(topology.flop_per_s[members].sum())
        memory = float(topology.memory_bytes[members].min()) - workload.memory.workspace_bytes
        needed_to = held_to + _resident_to(workload, len(members))
        flop = flop_to[None, :] - flop_to[:, None]  # [first, last]
        times = np.full(L + 1, 1.0 + workload.backward_per_forward)
        times[L] = workload.loss_per_forward
        seconds = np.where(flop > 0.0, flop * times[None, :] / speed, np.inf)
        seconds = np.where(needed_to[None, :] - needed_to[:, None] <= memory, seconds, np.inf)
        slowest = np.maximum(reached[:, None], seconds)
        since[k] = slowest.argmin(axis=0)
        reached = slowest.min(axis=0)
    if not np.isfinite(reached[L]):
        return None
    bounds = [L]
    for k in range(K - 1, -1, -1):
        bounds.append(int(since[k, bounds[-1]]))
    return tuple(reversed(bounds))


def _resident_to(workload: Workload, members: int) -> Floats:
    """Return float64 [L + 1]: the bytes of the layers before each bound, on one of `members` members, without
    workspace."""
    each = [workload.resident_bytes(at, at + 1, members=members) for at in range(workload.num_layers)]
    return np.cumsum([0.0] + [resident - workload.memory.workspace_bytes for resident in each])


def one_a_stage(
    topology: Topology, workload: Workload, objective: ThroughputObjective, num_stages: int | None
) -> tuple[Placement, Cost]:
    """Return the best placement with one device a stage and as few stages as hold the model, and its cost. It tries the
    fastest devices, those with the most memory, and chains in which each device has a path to the next."""
    most = min(topology.num_devices, workload.num_layers, STAGES_MAX)
    rows = (
        _fastest_first(topology, range(topology.num_devices)),
        sorted(range(topology.num_devices), key=lambda d: (-topology.memory_bytes[d], -topology.flop_per_s[d], d)),
    )
    why = f"the model does not fit into {num_stages or most} of these devices, one a stage"
    for count in range(1, most + 1) if num_stages is None else (num_stages,):
        found: list[tuple[Placement, Cost]] = []
        in_line = [stages for row in rows for stages in _chains(topology, row, count)]
        for stages in [*(_with_text_first(topology, row[:count]) for row in rows), *in_line]:
            for bounds in _cuts(topology, workload, stages) if len(stages) == count else ():
                placement = Placement(stages=stages, bounds=bounds)
                found.append((placement, objective.cost(placement)))
        possible = [each for each in found if np.isfinite(each[1].seconds)]
        if possible:
            return min(possible, key=lambda each: each[1].seconds)
        if found:
            why = found[0][1].why
    raise NoLayout(why)


def _chains(topology: Topology, row: Sequence[int], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield layouts of `count` stages with one device each, in which neighbouring stages can send to each other; none
    if all devices can. A chain begins with one of the first eight devices of `row` that have the text, and goes on
    with the first device of `row` that has a path to its last."""
    meets = (topology.bytes_per_s > 0.0) & (topology.bytes_per_s.T > 0.0)
    np.fill_diagonal(meets, True)
    if meets.all():
        return
    for first in [d for d in row if topology.may_feed[d]][:8]:
        chain = [first]
        while len(chain) < count:
            after = next((d for d in row if d not in chain and meets[chain[-1], d]), None)
            if after is None:
                break
            chain.append(after)
        if len(chain) == count:
            yield tuple((d,) for d in chain)


def _fastest_first(topology: Topology, devices: Sequence[int]) -> list[int]:
    return sorted(devices, key=lambda d: (-topology.flop_per_s[d], -topology.memory_bytes[d], d))


def _with_text_first(topology: Topology, devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return one device for each stage, stage 0 with one that has the text; empty if no device has it."""
    first = next((d for d in devices if topology.may_feed[d]), None)
    if first is None:
        return ()
    return ((first,), *((d,) for d in devices if d != first))


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
