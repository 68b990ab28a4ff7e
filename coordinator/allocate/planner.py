"""The throughput planner: decides which device holds which layers, with the same result on any machine.

Each of several numbers of stages gets a short search, and the most promising numbers get a longer one.

A large swarm is searched at several levels, from the coarsest to the finest. At a coarse level, similar devices that
are near each other form one unit. The speeds and network cards of a unit add up, two units have a path for each pair of
their devices, and a unit's memory is the smallest of its devices. So a swarm of units looks like a swarm of fewer and
larger devices. Up to 256 devices there is one level, the single devices. Beyond that the search first runs on about 128
units, and then from that result on a finer level: single devices if there are at most `FLAT_MAX` (2,048), otherwise
about 1,024 units."""

import math
from dataclasses import dataclass, field

import numpy as np

from shoal.coordinator.allocate.at_once import one_a_stage
from shoal.coordinator.allocate.evolution import evolve
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.throughput_search import (
    Assignment,
    ThroughputEvaluator,
    assignment_of,
    put_back,
    stages_of,
)
from shoal.coordinator.cost.forecast_bias import UNBIASED, ForecastBias
from shoal.coordinator.cost.pipeline import IMPOSSIBLE
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.topology import Floats, Ints, Topology

_STAGE_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
_FINALISTS = 2
"""The number of stage counts that get a longer search: those that did best in short searches."""
_RANKED = 4
"""The number of best placements of a search that are compared once more, by the predicted seconds of a step."""
UNITS = 128
"""The number of units (clusters of devices) at the coarsest level, few enough for a good result within a second."""
FLAT_MAX = 2048
"""Only a swarm of at most this many devices is searched by single devices: a move in a stage of n costs n^2."""


def default_work(num_devices: int) -> int:
    """Return the default budget in units of work: on one core 0.1 s with 6 devices, 0.5 s with 64, 2 s with 1,000, 16 s
    with 10,000."""
    return round(min(1.0, num_devices / 32) * (34_000_000 + 240_000 * num_devices))


def plan(
    topology: Topology,
    workload: Workload,
    *,
    num_stages: int | None = None,
    seed: int = 0,
    work: int,
    current: Placement | None = None,
    horizon_s: float = 600.0,
    stayers: tuple[int, ...] = (),
) -> tuple[Placement, Cost]:
    """Search for the placement with the shortest predicted step.

    Args:
        num_stages: the number of stages; None: several are tried and the best is taken.
        work: the budget, in units of work (`evolution.WORK_PER_SECOND` a second).
        current: the present placement, on `num_stages` stages. The search begins there, and the time of fetching other
            layers counts as lost work, spread over `horizon_s`.
        stayers: the number of holders in `current` that each stage must keep, so that newcomers can fetch the state.
    Returns: (placement, its `ThroughputObjective` cost without the cost of moving state).
    Raises: NoLayout: no placement on `num_stages` stages is possible."""
    objective = ThroughputObjective(topology, workload)
    search = _Search(objective, seed=seed, current=current, horizon_s=horizon_s, stayers=stayers)
    found = search.each(num_stages, work)[0]
    if not math.isfinite(found.cost.seconds):
        raise NoLayout(found.cost.why)
    return found.placement, found.cost


def plan_each(
    topology: Topology,
    workload: Workload,
    *,
    num_stages: int | None,
    seed: int,
    work: int,
    bias: ForecastBias = UNBIASED,
) -> list[Placement]:
    """Return the best placement found for each number of stages, the best of all first. The caller needs several
    placements, since a move to the best may cost too much.

    Args: as for `plan`; bias: the objective's bias by number of stages, which corrects comparisons between numbers.
    Raises: NoLayout: there is no placement."""
    search = _Search(ThroughputObjective(topology, workload), seed=seed, bias=bias)
    return [found.placement for found in search.each(num_stages, work)]


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a search with one number of stages."""

    placement: Placement
    cost: Cost
    """The cost without that of moving state; infinite: a placement found on units is impossible on single devices."""
    foreseen_s: float
    """The predicted seconds of a step, with the cost of moving, corrected by the bias measured in this run. This figure
    decides between numbers of stages. The search with one number minimises another figure, T of `cost/pipeline.py`."""


@dataclass(kw_only=True, eq=False)
class _Search:
    objective: ThroughputObjective = field(kw_only=False)
    seed: int
    current: Placement | None = None
    horizon_s: float = math.inf
    stayers: tuple[int, ...] = ()
    bias: ForecastBias = UNBIASED

    def __post_init__(self) -> None:
        self._levels = levels(self.objective.topology, self.objective.workload)

    def each(self, num_stages: int | None, work: int) -> list[_Found]:
        """Return the best placement found for each number of stages, the best of all first. Raises: NoLayout."""
        best: dict[int, _Found] = {}
        if num_stages is not None:
            self._solve(num_stages, work, best)
        else:
            choices = self._choices()
            left = work - sum(self._solve(k, work // (3 * len(choices)), best, ranked=1) for k in choices)
            finalists = sorted(choices, key=lambda k: best[k].foreseen_s if k in best else math.inf)[:_FINALISTS]
            for index, k in enumerate(finalists):
                left -= self._solve(k, left // (len(finalists) - index), best)
        if not best:
            raise NoLayout(self._why_not(num_stages))
        return sorted(best.values(), key=lambda found: found.foreseen_s)

    def _why_not(self, num_stages: int | None) -> str:
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

    def _solve(self, num_stages: int, work: int, best: dict[int, _Found], *, ranked: int = _RANKED) -> int:
        """Search on `num_stages` stages. Put the result into `best` if it is better than the entry for this number.
        Args: ranked: how many placements are compared by the predicted step. Returns: the units of work used."""
        t, w = self.objective.topology, self.objective.workload
        if num_stages > min(t.num_devices, w.num_layers) or not t.may_feed.any():
            return 0
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
                stayers=self.stayers if is_finest else (),
            )
            start = [evaluator.repair(coarsen(each, level), seed=self.seed) for each in (*flat, *known)]
            budget = (work - spent) // (len(self._levels) - index)
            if flat:
                begin = min(start, key=evaluator.cost)
                found = evaluator.improve(begin, seed=self.seed, work=budget, heat=0.0)
            else:
                found = evolve(evaluator, seed=self.seed, work=budget, start=start)
            spent += found.work
            flat = [found.assignment[level.unit_of]]
        for assignment in (found.assignment, *found.others)[:ranked]:
            seconds = evaluator.cost(assignment)
            by_device = assignment[level.unit_of]
            # At the level of units the search does not know which devices are holders that must stay.
            put_back(by_device, assignment_of(t.num_devices, self.current), self.stayers, self.seed)
            stages = stages_of(by_device, num_stages)
            if seconds >= IMPOSSIBLE or not all(stages):
                continue
            placement = Placement(stages=stages, bounds=evaluator.placement_of(assignment).bounds)
            cost, foreseen_s = self.objective.cost(placement), math.inf
            if math.isfinite(cost.seconds):
                foreseen_s = seconds * cost.parts["foreseen_s"] / cost.parts["step_s"] / self.bias.factor(num_stages)
            if num_stages not in best or foreseen_s < best[num_stages].foreseen_s:
                best[num_stages] = _Found(placement, cost, foreseen_s)
        return spent

    def _chain(self, num_stages: int) -> Placement | None:
        """Return a first placement, one device a stage; None: all devices reach each other, or none was found."""
        rate = self.objective.topology.bytes_per_s
        if int((rate > 0.0).sum()) >= len(rate) * (len(rate) - 1):
            return None
        try:
            return one_a_stage(self.objective, num_stages)
        except NoLayout:
            return None


# --- the views of a large swarm ---


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """A swarm seen as units, each of one or more similar devices."""

    topology: Topology
    """The U units as devices. The FLOP/s and network card of a unit are sums over its devices, its memory is the
    smallest of theirs, and its latency and paths are those of its first device."""
    weight: Ints
    """[U], the number of devices in each unit."""
    unit_of: Ints
    """[N], the unit of each device."""


def levels(topology: Topology, workload: Workload) -> list[Level]:
    """Return the levels, the coarsest first; up to 2 x `UNITS` devices there is only that of single devices."""
    n = topology.num_devices
    near = _neighbourhoods(topology, workload.cut_bytes) if n > 2 * UNITS else np.zeros(n, dtype=np.int64)
    views = []
    units = UNITS
    while 2 * units < n and units <= FLAT_MAX:
        views.append(_coarse(topology, near, units))
        units *= 8
    if n <= FLAT_MAX:
        views.append(Level(topology=topology, weight=np.ones(n, dtype=np.int64), unit_of=np.arange(n)))
    return views


def coarsen(assignment: Assignment, level: Level) -> Assignment:
    """Return the stage of each unit of a level: the stage of most of the unit's devices, the lowest stage if several
    have equally many. Args: assignment: the stage of each device."""
    lowest = int(assignment.min())
    votes = np.zeros((len(level.weight), int(assignment.max()) - lowest + 1), dtype=np.int64)
    np.add.at(votes, (level.unit_of, assignment - lowest), 1)
    chosen: Assignment = votes.argmax(axis=1).astype(np.int64) + lowest
    return chosen


def _neighbourhoods(topology: Topology, frame_bytes: float) -> Ints:
    """Return [N], the neighbourhood of each device: the number of its nearest centre. A distance is the seconds of a
    frame there and back. Each new centre is the device farthest from all earlier centres (Gonzalez 1985)."""
    n = topology.num_devices
    distance = np.full(n, np.inf)
    nearest = np.zeros(n, dtype=np.int64)
    leader, reach = 0, 0.0
    for number in range(48):
        rate = np.minimum(topology.bytes_per_s[leader], topology.bytes_per_s[:, leader]).astype(np.float64)
        to_leader: Floats = topology.latency_s[leader].astype(np.float64) + topology.latency_s[:, leader]
        to_leader += 2.0 * frame_bytes / np.maximum(rate, 1.0)
        to_leader[leader] = 0.0
        closer = to_leader < distance
        nearest[closer] = number
        distance = np.minimum(distance, to_leader)
        if number == 0:
            reach = float(distance.max())
        leader = int(np.argmax(distance))
        if distance[leader] <= 0.05 * reach:  # every device is near a centre
            break
    return nearest


def _coarse(topology: Topology, near: Ints, units: int) -> Level:
    """Return a level of about `units` units. Each neighbourhood's devices are sorted by text, memory, card and speed,
    and cut into slices of about N / units devices. Args: near: int64 [N], the neighbourhood of each device."""
    n = topology.num_devices
    order = np.lexsort(
        (np.arange(n), topology.flop_per_s, topology.card, topology.memory_bytes, topology.may_feed, near)
    )
    unit_of = np.zeros(n, dtype=np.int64)
    number, size = 0, n / units
    for neighbourhood in range(int(near.max()) + 1):
        for feeds in (False, True):
            members = order[(near[order] == neighbourhood) & (topology.may_feed[order] == feeds)]
            if len(members):
                slices = max(1, round(len(members) / size))
                unit_of[members] = number + np.arange(len(members)) * slices // len(members)
                number += slices
    _, first = np.unique(unit_of, return_index=True)
    weight = np.bincount(unit_of)

    def summed(values: Floats) -> Floats:
        return np.bincount(unit_of, weights=values).astype(np.float64)

    behind = np.bincount(topology.card, minlength=int(topology.card.max()) + 1)[topology.card]
    memory = np.full(number, np.inf)
    np.minimum.at(memory, unit_of, topology.memory_bytes)
    square = np.ix_(first, first)
    return Level(
        topology=Topology(
            latency_s=topology.latency_s[square],
            bytes_per_s=topology.bytes_per_s[square],
            flop_per_s=summed(topology.flop_per_s),
            memory_bytes=memory,
            up_bytes_per_s=summed(topology.up_bytes_per_s / behind),
            down_bytes_per_s=summed(topology.down_bytes_per_s / behind),
            card=np.arange(number),
            names=tuple(topology.names[i] for i in first),
            regions=tuple(topology.regions[i] for i in first),
            may_feed=topology.may_feed[first],
        ),
        weight=weight,
        unit_of=unit_of,
    )
