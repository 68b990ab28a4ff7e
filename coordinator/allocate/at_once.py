"""Makes a layout by rule within a second and without compiled code, for use while the search is not ready. Pure.

The model is divided among the fewest devices that can hold it. Each other device, the fastest first, then joins a
stage, becomes a stage of its own, or is left out, whichever gives the shortest step by the throughput objective.
`deploy/planning/left_out.py` tries the same places (`joins`) to say what would make an unplaced device useful."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from shoal.coordinator.allocate.greedy import cheapest_cut
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.topology import Floats, Topology

GAIN_MIN = 1e-3
"""A device that shortens a step by less than this share stays out: it needs a copy of the state, and may leave soon."""

Move = Callable[[Placement], Iterable[Placement]]
"""A function that yields variants of a placement which differ in one respect, such as the place of one device."""


def climb(objective: Objective, start: Placement, moves: Sequence[Move], budget: int) -> tuple[Placement, Cost]:
    """Improve `start` until no move shortens the step by `GAIN_MIN`. A move yields variants of a placement. The moves
    take turns: all variants by one move are priced, and the best one becomes the new placement.

    Args: budget: the most placements to price.
    Returns: (the best placement found, its cost); the placement is `start` if no move helps."""
    best, cost = start, objective.cost(start)
    helped = True
    while helped and budget > 0:
        helped = False
        for move in moves:
            here = best
            for neighbour in islice(move(here), budget):
                budget -= 1
                tried = objective.cost(neighbour)
                if tried.seconds < cost.seconds * (1.0 - GAIN_MIN):
                    best, cost, helped = neighbour, tried, True
    return best, cost


def plan_at_once(topology: Topology, workload: Workload, *, num_stages: int | None = None) -> tuple[Placement, Cost]:
    """Make a layout without a search, by this module's rule. Args: num_stages: None: the rule chooses their number.
    Raises: NoLayout: these devices have no room for the model on `num_stages` stages, or none has the training text."""
    objective = ThroughputObjective(topology, workload)
    start = one_a_stage(objective, num_stages)

    def place(device: int, placement: Placement) -> Iterable[Placement]:
        is_placed = any(device in stage for stage in placement.stages)
        return () if is_placed else joins(topology, workload, placement, device, may_add_stage=num_stages is None)

    moves = [partial(place, device) for device in _fastest_first(topology)]
    budget = max(20, 16_000 // topology.num_devices)  # evaluations, of 1 to 3 ms for 16 devices
    return climb(objective, start, moves, budget)


def joins(
    topology: Topology, workload: Workload, placement: Placement, device: int, *, may_add_stage: bool = True
) -> Iterator[Placement]:
    """Yield each placement in which `device` joins a stage, then each in which it is a new stage. The layers are
    divided anew, by the stages' speed and memory; a device that joins a stage is also tried with the present bounds.
    Some placements may be infeasible."""
    stages = placement.stages
    for k in range(len(stages)):
        joined = placement.with_moves({device: k}).stages
        for bounds in dict.fromkeys((*_cuts(topology, workload, joined), placement.bounds)):
            yield Placement(stages=joined, bounds=bounds)
    if may_add_stage and len(stages) < min(workload.num_layers, STAGES_MAX):
        for k in range(len(stages) + 1):
            more = (*stages[:k], (device,), *stages[k:])
            for bounds in _cuts(topology, workload, more):
                yield Placement(stages=more, bounds=bounds)


def _cuts(topology: Topology, workload: Workload, stages: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return up to three divisions of the layers (bounds), for different assumed numbers of microbatches in memory."""
    found = (cut(topology, workload, stages, held=held) for held in (2.0, 8.0, 24.0))
    return list(dict.fromkeys(bounds for bounds in found if bounds is not None))


def cut(
    topology: Topology, workload: Workload, stages: Sequence[Sequence[int]], *, held: float
) -> tuple[int, ...] | None:
    """Divide the layers among the stages so that the slowest stage computes as briefly as possible. Links are ignored.
    Args: held: microbatches that each device holds in memory. Returns: the bounds [K + 1]; None: too little memory."""
    flop_to = np.cumsum((0.0, *workload.layer_flop))
    held_to = held * np.cumsum((0.0, *workload.layer_held_bytes))
    flop = flop_to[None, :] - flop_to[:, None]  # [first, last]
    times = np.full(workload.num_layers + 1, 1.0 + workload.backward_per_forward)
    times[-1] = workload.loss_per_forward
    seconds = []
    for stage in stages:
        members = list(stage)
        speed = float(topology.flop_per_s[members].sum())
        memory = float(topology.memory_bytes[members].min()) - workload.memory.workspace_bytes
        needed_to = held_to + _resident_to(workload, len(members))
        fits = (flop > 0.0) & (needed_to[None, :] - needed_to[:, None] <= memory)
        seconds.append(np.where(fits, flop * times[None, :] / speed, np.inf))
    return cheapest_cut(seconds)


def _resident_to(workload: Workload, members: int) -> Floats:
    """Return float64 [L + 1]: entry l: bytes of layers 0 to l - 1 in a stage of `members`, without workspace."""
    each = [workload.resident_bytes(at, at + 1, members=members) for at in range(workload.num_layers)]
    return np.cumsum([0.0] + [resident - workload.memory.workspace_bytes for resident in each])


def one_a_stage(objective: ThroughputObjective, num_stages: int | None) -> Placement:
    """Return the best placement of one device on each of `num_stages` stages (None: the fewest that hold the model). It
    tries the fastest devices and those with the most memory. Raises: NoLayout: none was found.
    """
    topology, workload = objective.topology, objective.workload
    most = min(topology.num_devices, workload.num_layers, STAGES_MAX)
    rows = _fastest_first(topology), sorted(_fastest_first(topology), key=lambda d: -topology.memory_bytes[d])
    why = f"the model does not fit into {num_stages or most} of these devices, one a stage"
    for count in range(1, most + 1) if num_stages is None else (num_stages,):
        found: list[tuple[Placement, Cost]] = []
        for stages in (stages for row in rows for stages in _chains(topology, row, count)):
            for bounds in _cuts(topology, workload, stages):
                placement = Placement(stages=stages, bounds=bounds)
                found.append((placement, objective.cost(placement)))
        best = min(found, key=lambda each: each[1].seconds, default=None)
        if best is not None and np.isfinite(best[1].seconds):
            return best[0]
        if found:
            why = found[0][1].why
    raise NoLayout(why)


def _chains(topology: Topology, row: Sequence[int], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield layouts of `count` stages with one device each, in which neighbours can send to each other. Stage 0 gets
    the first device of `row` that has the text, and each next stage the first unused device that the previous one can
    reach. If some devices cannot reach each other, the next seven devices with the text also begin a layout each."""
    meets = (topology.bytes_per_s > 0.0) & (topology.bytes_per_s.T > 0.0)
    np.fill_diagonal(meets, True)
    feeders = [device for device in row if topology.may_feed[device]]
    for first in feeders[: 1 if meets.all() else 8]:
        chain = [first]
        while len(chain) < count:
            after = next((d for d in row if d not in chain and meets[chain[-1], d]), None)
            if after is None:
                break
            chain.append(after)
        if len(chain) == count:
            yield tuple((d,) for d in chain)


def _fastest_first(topology: Topology) -> list[int]:
    return sorted(range(topology.num_devices), key=lambda d: (-topology.flop_per_s[d], -topology.memory_bytes[d], d))
