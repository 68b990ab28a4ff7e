"""The throughput objective as an `Evaluator`: labels of assignments are positions in the pipeline, cut by exact DP.

`evolve` treats individuals that differ only in the names of stages as one and keeps the cheaper. Here names are
positions, so it keeps the better order. Bounds are the exact cut for an individual's groups (or the current plan's,
where moving state costs more than a new cut gains), improved by local search."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.coordinator.allocate.evolution import HOMELESS, LEFT_OUT, Assignment, Improved
from shoal.coordinator.cost.path_rates import path_bytes_per_s
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.topology import Floats, Ints, Topology

if TYPE_CHECKING:
    from shoal.coordinator.allocate.throughput_kernels import PlacementState, SearchProblem

IMPOSSIBLE = 1e9
"""`throughput_kernels.IMPOSSIBLE`; that module takes a second to import, which only a search needs."""


class ThroughputEvaluator:
    """Implements `evolution.Evaluator`.

    Args:
        weight: int64 [N], the number of alike devices behind each of the topology's (`hierarchy.py`); 1 if None. With
            it flop_per_s and cards are sums, memory and paths those of one device.
        current: the placement in force: moving state costs, spread over `horizon_s`.
    """

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        num_stages: int,
        *,
        weight: Ints | None = None,
        current: Placement | None = None,
        horizon_s: float = 600.0,
    ) -> None:
        from shoal.coordinator.allocate import throughput_kernels

        self._kernels: Any = throughput_kernels
        self.num_devices = topology.num_devices
        self.num_stages = num_stages
        self.draws = 16
        self.share = 20_000 * topology.num_devices
        self.topology = topology
        self._weight = np.ones(topology.num_devices) if weight is None else weight.astype(np.float64)
        self._current = current
        self.problem = self._problem(workload, horizon_s)
        self._state = _state(self.problem, num_stages)
        self._kept = _state(self.problem, num_stages)
        self._known: dict[bytes, tuple[float, Ints]] = {}

    # --- Evaluator ---

    def cost(self, assignment: Assignment) -> float:
        return self._cut(assignment)[0]

    def random(self, seed: int) -> Assignment:
        """Return a random start. A row of devices, neighbours side by side, is dealt out stage by stage, or in turns,
        or both, so that each stage gets about equal speed. One start in four ignores distance."""
        rng = Random(seed)
        row = self._able(self._row(rng), rng)
        num_blocks = rng.choice([1, 1, 2, 4, self.num_stages])
        assignment = np.full(self.num_devices, LEFT_OUT, dtype=np.int64)
        speed = self.topology.flop_per_s
        if rng.random() < 0.5:
            # Neighbours make up whole stages.
            total = float(speed[row].sum())
            reached = 0.0
            for device in row:
                assignment[device] = min(self.num_stages - 1, int(self.num_stages * reached / total))
                reached += float(speed[device])
        else:
            # Neighbours make up whole pipelines: every block of the row holds all stages.
            size = -(-len(row) // num_blocks)
            for begin in range(0, len(row), size):
                given = [0.0] * self.num_stages
                block = sorted(row[begin : begin + size], key=lambda d: (-speed[d], rng.random()))
                for device in block:
                    k = given.index(min(given))
                    assignment[device] = k
                    given[k] += float(speed[device])
        return self.repair(assignment, seed=rng.getrandbits(63))

    def repair(self, assignment: Assignment, *, seed: int) -> Assignment:
        """Give homeless devices to the slowest stage, and empty stages the slowest device of the richest."""
        fixed = assignment.copy()
        feeds, speed = self.topology.may_feed, self.topology.flop_per_s
        fixed[(fixed == 0) & ~feeds] = HOMELESS
        rich = np.bincount(fixed[fixed >= 0], weights=speed[fixed >= 0], minlength=self.num_stages)
        rng = Random(seed)
        homeless = np.flatnonzero(fixed == HOMELESS).tolist()
        rng.shuffle(homeless)
        for device in homeless:
            open_to = range(self.num_stages) if feeds[device] else range(1, self.num_stages)
            k = min(open_to, key=lambda k: (rich[k], k), default=LEFT_OUT)
            fixed[device] = k
            if k >= 0:
                rich[k] += speed[device]
        for k in range(self.num_stages):
            if not (fixed == k).any():
                self._find_one(fixed, k)
        return fixed

    def improve(self, assignment: Assignment, *, seed: int, work: int, heat: float) -> Improved:
        before, bounds, spent = self._cut_work(assignment)
        stage, found_bounds = assignment.copy(), bounds.copy()
        self._kernels.build(self.problem, self._state, assignment, bounds)
        limit = max(0, work - spent)
        found, did = self._kernels.improve(
            self.problem, self._state, self._kept, seed, limit, heat, stage, found_bounds
        )
        if not found < before and heat == 0.0:
            stage, found_bounds = assignment.copy(), bounds
        # Members are in the order of devices, as in `cost`: the last bit of a sum depends on it.
        cost, _, again = self._cut_work(stage, found_bounds)
        return Improved(assignment=stage, cost=cost, work=spent + int(did) + again)

    # --- placements ---

    def placement_of(self, assignment: Assignment) -> Placement:
        _, bounds = self._cut(assignment)
        stages = tuple(tuple(int(d) for d in np.flatnonzero(assignment == k)) for k in range(self.num_stages))
        return Placement(stages=stages, bounds=tuple(int(bound) for bound in bounds))

    def evaluate(self, assignment: Assignment, bounds: Sequence[int] | Ints) -> float:
        """Return the cost with these bounds, moving included."""
        work = np.zeros(1, dtype=np.int64)
        self._kernels.build(self.problem, self._state, assignment, np.asarray(bounds, dtype=np.int64))
        cost, _ = self._kernels.evaluate(self.problem, self._state, work)
        return float(cost)

    # --- inside ---

    def _cut(self, assignment: Assignment) -> tuple[float, Ints]:
        self._cut_work(assignment)
        return self._known[assignment.tobytes()]

    def _cut_work(self, assignment: Assignment, known: Ints | None = None) -> tuple[float, Ints, int]:
        """Return (cost, bounds, work) by the cheapest of the exact cut, the current plan's and `known`."""
        name = assignment.tobytes()
        kernels, problem, state = self._kernels, self.problem, self._state
        work = np.zeros(1, dtype=np.int64)
        candidates = []
        if name not in self._known:
            even = np.linspace(0, problem.layers.shape[1] - 1, self.num_stages + 1).astype(np.int64)
            kernels.build(problem, state, assignment, even)
            kernels.evaluate(problem, state, work)
            if state.count.all():
                kernels.cut(problem, state, work)
            candidates.append(state.bounds.copy())
            if self._current is not None and len(self._current.bounds) == self.num_stages + 1:
                candidates.append(np.array(self._current.bounds, dtype=np.int64))
        if known is not None:
            candidates.append(known)
        for bounds in candidates:
            kernels.build(problem, state, assignment, bounds)
            cost, _ = kernels.evaluate(problem, state, work)
            if name not in self._known or cost < self._known[name][0]:
                self._known[name] = (float(cost), bounds.copy())
        cost, bounds = self._known[name]
        return cost, bounds, int(work[0])

    def _find_one(self, fixed: Assignment, k: int) -> None:
        speed = self.topology.flop_per_s
        able = np.ones(self.num_devices, dtype=np.bool_) if k > 0 else self.topology.may_feed.copy()
        for left in np.flatnonzero(able & (fixed == LEFT_OUT)):
            fixed[left] = k
            return
        sizes = np.bincount(fixed[fixed >= 0], minlength=self.num_stages)
        rich = np.bincount(fixed[fixed >= 0], weights=speed[fixed >= 0], minlength=self.num_stages)
        donors = [d for d in np.flatnonzero(able) if fixed[d] >= 0 and sizes[fixed[d]] > 1]
        if donors:
            fixed[min(donors, key=lambda d: (-rich[fixed[d]], speed[d], d))] = k

    def _row(self, rng: Random) -> list[int]:
        """Return a random device followed by always the nearest remaining one. One row in four is shuffled."""
        row = list(range(self.num_devices))
        if rng.random() < 0.25:
            rng.shuffle(row)
            return row
        q = self.problem.q
        at = rng.randrange(self.num_devices)
        left = np.ones(self.num_devices, dtype=np.bool_)
        jitter = np.array([rng.random() for _ in row])
        row = [at]
        left[at] = False
        for _ in range(self.num_devices - 1):
            at = int(np.argmax(np.where(left, q[at] * (1.0 + 0.1 * jitter), -1.0)))
            left[at] = False
            row.append(at)
        return row

    def _able(self, row: list[int], rng: Random) -> list[int]:
        """Often leave out the devices with the worst network: with several in one stage no single move helps."""
        dice = rng.random()
        if dice < 0.25:
            # Take a few that are near each other.
            return row[: rng.randint(self.num_stages, len(row))] if len(row) > self.num_stages else row
        if dice < 0.6:
            return row
        p = self.problem
        card = p.card_rate[p.card] / np.bincount(p.card)[p.card]
        quality = np.minimum(card, np.median(p.q, axis=1) * p.costs[self._kernels.CUT_BYTES])
        keep = max(2 * self.num_stages, round(len(row) * rng.uniform(0.2, 1.0)))
        chosen = set(sorted(row, key=lambda d: (-quality[d], d))[:keep])
        return [device for device in row if device in chosen]

    def _problem(self, workload: Workload, horizon_s: float) -> "SearchProblem":
        t, w, n = self.topology, workload, self.topology.num_devices
        cards, card = np.unique(t.card, return_inverse=True)
        slower = np.minimum(t.up_bytes_per_s, t.down_bytes_per_s)
        card_rate = np.zeros(len(cards))
        card_rate[card] = slower
        q = np.zeros((n, n), dtype=t.bytes_per_s.dtype)
        self._kernels.exchange_rates(
            t.latency_s, t.bytes_per_s, self._weight, w.cut_bytes, float(STREAM_CREDIT_BYTES), q
        )
        costs = (  # in the order of the kernels' positions
            w.microbatches,
            1.0 + w.backward_per_forward,
            w.loss_per_forward,
            w.s_max,
            horizon_s,
            w.cut_bytes,
            w.gradient_bytes_per_parameter,
            w.memory.resident_bytes_per_parameter,
            w.state_bytes_per_parameter,
            w.memory.workspace_bytes,
            w.gradient_bytes_per_parameter * w.reduced.tied_parameters,
        )
        weight = self._weight
        up, down = t.up_bytes_per_s / weight, t.down_bytes_per_s / weight
        home, fetch_rate, carries = _homes(t, w, self._current)
        none = (0.0,) * w.num_layers
        experts, fixed = w.experts.parameters if w.experts else none, w.memory.layer_fixed_bytes or none
        rows = (w.layer_flop, w.layer_parameters, w.layer_held_bytes, experts, fixed)
        stage_sizes = range(1, round(float(weight.sum())) + 1)
        beyond = [0, *(w.experts.beyond(devices) if w.experts else 0 for devices in stage_sizes)]
        problem: SearchProblem = self._kernels.SearchProblem(
            units=np.stack((t.flop_per_s, weight, t.memory_bytes, up, down, fetch_rate, carries)),
            home=home,
            card=card.astype(np.int64),
            card_rate=card_rate,
            shared_cards=bool(np.isfinite(slower).any()) and len(cards) < n,
            feeds=t.may_feed,
            latency=t.latency_s,
            rate=t.bytes_per_s,
            q=q,
            layers=np.array([np.cumsum((0.0, *of)) for of in rows]),
            beyond=np.array(beyond, dtype=np.float64),
            costs=np.array(costs, dtype=np.float64),
        )
        return problem


def assignment_of(num_devices: int, placement: Placement) -> Assignment:
    assignment = np.full(num_devices, LEFT_OUT, dtype=np.int64)
    for k, stage in enumerate(placement.stages):
        assignment[list(stage)] = k
    return assignment


def _homes(topology: Topology, workload: Workload, current: Placement | None) -> tuple[Ints, Floats, Floats]:
    """Return (each device's layers [2, N], its rate of fetching others [N], its share of its stage's work [N])."""
    n = topology.num_devices
    home, fetch_rate, carries = np.zeros((2, n), dtype=np.int64), np.ones(n), np.zeros(n)
    if current is None:
        return home, fetch_rate, carries
    for members, bounds in zip(current.stages, pairwise(current.bounds), strict=True):
        for device in members:
            home[:, device] = bounds
            carries[device] = topology.flop_per_s[device] / topology.flop_per_s[list(members)].sum()
    placed = np.array(sorted(device for stage in current.stages for device in stage), dtype=np.int64)
    for device in placed:
        best = float(path_bytes_per_s(topology, placed, np.array([device]), workload.cut_bytes).max())
        fetch_rate[device] = max(1.0, min(best, float(topology.down_bytes_per_s[device])))
    return home, fetch_rate, carries


def _state(problem: "SearchProblem", num_stages: int) -> "PlacementState":
    """Return an empty placement on `num_stages` stages, with all values dirty."""
    from shoal.coordinator.allocate.throughput_kernels import CARD, HOP, PAIRS, PlacementState

    n, K = len(problem.card), num_stages
    return PlacementState(
        stage=np.full(n, -1, dtype=np.int64),
        at=np.zeros(n, dtype=np.int64),
        members=np.zeros((K, n), dtype=np.int64),
        count=np.zeros(K, dtype=np.int64),
        bounds=np.zeros(K + 1, dtype=np.int64),
        loads=np.zeros((CARD + 1, n)),
        times=np.zeros((HOP + 1, K)),
        dirty=np.ones((PAIRS + 1, K), dtype=np.bool_),
        card_load=np.zeros(len(problem.card_rate)),
    )
