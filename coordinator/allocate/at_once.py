"""Make a layout by rule within a second and without compiled code, to show while the search is not ready yet. Pure.

The model is cut for the fewest devices that can hold it. The others are then added one by one, the fastest first, each
where the step gets shortest by the true objective: to a stage, or as a stage of its own, or not at all.
`deploy/planning/left_out.py` tries the same places (`joins`) to say what would make an unplaced device useful."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from shoal.coordinator.allocate.adjustments import with_device
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.repair import GAIN_MIN
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.topology import Floats, Topology

_HELD = (2.0, 8.0, 24.0)
_CHAINS = 8
_EVALUATIONS = 16_000
"""The limit on evaluations times devices: 1,000 evaluations of 1 to 3 ms for 16 devices."""


def plan_at_once(topology: Topology, workload: Workload, *, num_stages: int | None = None) -> tuple[Placement, Cost]:
    """Make the layout. Args: num_stages: None: the rule chooses the number.
    Raises: NoLayout: the model does not fit into `num_stages` stages of these devices, or no device has the text."""
    objective = ThroughputObjective(topology, workload)
    best, cost = one_a_stage(topology, workload, objective, num_stages)
    left = max(20, _EVALUATIONS // topology.num_devices)
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
    """Return one cut for each number of held microbatches in `_HELD`, since that number depends on the cut."""
    found = (cut(topology, workload, stages, held=held) for held in _HELD)
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
    """Make a placement with one device a stage, on the fewest devices that hold the model: the fastest, those with the
    most memory, or chains of devices with paths to each other."""
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
    if all devices can. A chain begins with one of the first `_CHAINS` devices of `row` that have the text, and goes on
    with the first device of `row` that has a path to its last."""
    meets = (topology.bytes_per_s > 0.0) & (topology.bytes_per_s.T > 0.0)
    np.fill_diagonal(meets, True)
    if meets.all():
        return
    for first in [d for d in row if topology.may_feed[d]][:_CHAINS]:
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
