"""Prices and improves assignments of devices to stages on the throughput objective.

An assignment is int64 [N]: the stage of each device, as its position in the pipeline, or `LEFT_OUT`. It does not
contain the layers: the bounds are the best cut for the members of the stages, found by dynamic programming, or the
current plan's if a new cut gains less than moving state costs. Local search improves assignment and bounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.problem import problem_of, state_of
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Ints, Topology

Assignment = npt.NDArray[np.int64]

LEFT_OUT = -1
"""Marks a device that the assignment uses in no stage."""
HOMELESS = -2
"""Marks a device that lost its stage in a perturbation; `repair` finds another stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """The result of a search."""

    assignment: Assignment
    cost: float
    work: int
    others: tuple[Assignment, ...] = ()
    """The other assignments of the final population, the cheapest first."""


class ThroughputEvaluator:
    """Prices assignments of one topology. It is deterministic: no clock, no global randomness, sums in a fixed order.

    Args:
        weight: int64 [N], the number of devices in each unit of `topology` (`planner.Level`); None: 1 each. FLOP/s and
            cards of a unit are sums, memory and paths are those of one device.
        current: the placement in force; the cost of moving state to another placement is spread over `horizon_s`.
        stayers: the number of holders in `current` that each stage must keep; empty: none.
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
        stayers: Sequence[int] = (),
    ) -> None:
        from shoal.coordinator.allocate import throughput_kernels  # numba takes a second to import
        from shoal.coordinator.cost import compiled

        self._kernels: Any = throughput_kernels
        self.num_devices = topology.num_devices
        self.num_stages = num_stages
        self.topology = topology
        self._current = current
        self._home = assignment_of(topology.num_devices, current)
        self._stayers = np.array(stayers or (0,) * num_stages, dtype=np.int64)
        self.problem = problem_of(topology, workload, weight=weight, current=current, horizon_s=horizon_s)
        self._state, self._kept = (state_of(self.problem, workload, num_stages) for _ in range(2))
        self._even = np.linspace(0, workload.num_layers, num_stages + 1).astype(np.int64)
        self._known: dict[bytes, tuple[float, Ints]] = {}
        # Compiles the loops, which `ThroughputObjective` then uses to price single placements, too.
        compiled.build(self.problem, self._state, assignment_of(topology.num_devices, None), self._even)
        compiled.evaluate(self.problem, self._state, np.zeros(1, dtype=np.int64))
        p = self.problem
        card = p.card_rate[p.card] / np.bincount(p.card)[p.card]
        quality = np.minimum(card, np.median(p.q[0], axis=1) * p.cut_bytes[0]).tolist()
        self._best_connected = sorted(range(self.num_devices), key=lambda d: (-quality[d], d))
        """The devices, the best connected first: by the rate of the card or of the median path, whichever is lower."""
        self.draws = 16
        """The most random starts that are priced at a time; only the cheapest of them is improved."""
        self.share = 20_000 * topology.num_devices
        """The units of work that one call of `improve` can use: about as many as it takes to a good local minimum."""

    def cost(self, assignment: Assignment) -> float:
        """Return the objective of a feasible assignment, the cost of moving state included."""
        return self._cut_work(assignment)[0]

    def random(self, seed: int) -> Assignment:
        """Return a random start in which the stages have about equal speed. It divides a row of devices in which near
        devices stand together. Chance decides if near devices form whole stages or whole pipelines. In one start of
        four the row is random."""
        rng = Random(seed)
        row = self._able(self._row(rng), rng)
        num_blocks = rng.choice([1, 1, 2, 4, self.num_stages])
        assignment = np.full(self.num_devices, LEFT_OUT, dtype=np.int64)
        speed: list[float] = self.topology.flop_per_s.tolist()
        if rng.random() < 0.5:
            # Neighbours make up whole stages.
            total = float(self.topology.flop_per_s[row].sum())
            reached = 0.0
            for device in row:
                assignment[device] = min(self.num_stages - 1, int(self.num_stages * reached / total))
                reached += speed[device]
        else:
            # Neighbours make up whole pipelines: every block of the row holds all stages.
            size = -(-len(row) // num_blocks)
            for begin in range(0, len(row), size):
                given = [0.0] * self.num_stages
                block = sorted(row[begin : begin + size], key=lambda d: (-speed[d], rng.random()))
                for device in block:
                    k = given.index(min(given))
                    assignment[device] = k
                    given[k] += speed[device]
        return self.repair(assignment, seed=rng.getrandbits(63))

    def repair(self, assignment: Assignment, *, seed: int) -> Assignment:
        """Return a feasible copy of `assignment`. Devices that left a stage go back if the stage must keep more of its
        holders. Devices without a stage go to the slowest stage. An empty stage gets an unused device, or the slowest
        device of the fastest stage."""
        fixed = assignment.copy()
        feeds, speed = self.topology.may_feed, self.topology.flop_per_s
        fixed[(fixed == 0) & ~feeds] = HOMELESS
        put_back(fixed, self._home, self._stayers, seed)
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
        for k in sorted({*range(self.num_stages)}.difference(fixed.tolist())):
            self._find_one(fixed, k)
        return fixed

    def improve(self, assignment: Assignment, *, seed: int, work: int, heat: float) -> Improved:
        """Search locally from a feasible assignment.

        Args:
            work: the search stops soon after this number of units.
            heat: 0: accept improvements only, and never return anything worse than `assignment`. Above 0: accept some
                worse placements at first; 1 is for random starts.
        """
        before, bounds, spent = self._cut_work(assignment)
        stage, found_bounds = assignment.copy(), bounds.copy()
        limit = max(0, work - spent)
        found, did = self._kernels.improve(
            self.problem, self._state, self._kept, self._home, self._stayers, seed, limit, heat, stage, found_bounds
        )
        if not found < before and heat == 0.0:
            stage, found_bounds = assignment.copy(), bounds
        # Price it again with members in the order of devices, as `cost` does: the last bit of a sum depends on it.
        cost, _, again = self._cut_work(stage, found_bounds)
        return Improved(assignment=stage, cost=cost, work=spent + int(did) + again)

    def placement_of(self, assignment: Assignment) -> Placement:
        _, bounds, _ = self._cut_work(assignment)
        return Placement(stages=stages_of(assignment, self.num_stages), bounds=tuple(int(bound) for bound in bounds))

    def evaluate(self, assignment: Assignment, bounds: Sequence[int] | Ints) -> float:
        """Return the cost of `assignment` with `bounds`, the cost of moving state included."""
        return self._price(assignment, np.asarray(bounds, dtype=np.int64), False, np.zeros(1, dtype=np.int64))[0]

    # --- inside ---

    def _price(self, assignment: Assignment, bounds: Ints, is_cut: bool, work: Ints) -> tuple[float, Ints]:
        cost = self._kernels.price(self.problem, self._state, assignment, bounds, is_cut, work)
        return float(cost), self._state.bounds.copy()

    def _cut_work(self, assignment: Assignment, known: Ints | None = None) -> tuple[float, Ints, int]:
        """Return (cost, bounds, units of work used) for the cheapest of: best cut, current plan's bounds, `known`."""
        name, work = assignment.tobytes(), np.zeros(1, dtype=np.int64)
        priced = []
        if (best := self._known.get(name)) is None:
            priced.append(self._price(assignment, self._even, True, work))
            if self._current is not None and len(self._current.bounds) == self.num_stages + 1:
                priced.append(self._price(assignment, np.array(self._current.bounds, dtype=np.int64), False, work))
        if known is not None:
            priced.append(self._price(assignment, known, False, work))
        for each in priced:
            if best is None or each[0] < best[0]:
                best = each
        assert best is not None
        self._known[name] = best
        return *best, int(work[0])

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
        """Return all devices in a row: a random one, then always the nearest one left; one row in four is shuffled."""
        row = list(range(self.num_devices))
        if rng.random() < 0.25:
            rng.shuffle(row)
            return row
        at = rng.randrange(self.num_devices)
        jitter = np.array([rng.random() for _ in row])
        nearest_first: list[int] = self._kernels.row(self.problem.q[0], at, jitter).tolist()
        return nearest_first

    def _able(self, row: list[int], rng: Random) -> list[int]:
        """Return some devices of `row`, at random: all, its first part, or all but the worst-connected ones."""
        dice = rng.random()
        if dice < 0.25:
            # Take only the first devices of the row, which are near each other.
            return row[: rng.randint(self.num_stages, len(row))] if len(row) > self.num_stages else row
        if dice < 0.6:
            return row
        keep = max(2 * self.num_stages, round(len(row) * rng.uniform(0.2, 1.0)))
        chosen = set(self._best_connected[:keep])
        return [device for device in row if device in chosen]


def assignment_of(num_devices: int, placement: Placement | None) -> Assignment:
    assignment = np.full(num_devices, LEFT_OUT, dtype=np.int64)
    for k, stage in enumerate(placement.stages if placement is not None else ()):
        assignment[list(stage)] = k
    return assignment


def stages_of(assignment: Assignment, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each stage, in ascending order."""
    return tuple(tuple(int(device) for device in np.flatnonzero(assignment == k)) for k in range(num_stages))


def put_back(assignment: Assignment, home: Assignment, stayers: Sequence[int] | Ints, seed: int) -> None:
    """Send random devices back to the stage that they held in `home`, until stage k has `stayers[k]` of its holders
    again. Changes `assignment`."""
    rng = Random(seed)
    for k in np.flatnonzero(stayers).tolist():
        leavers = np.flatnonzero((home == k) & (assignment != k)).tolist()
        lacking = int(stayers[k]) - (int((home == k).sum()) - len(leavers))
        if lacking > 0:
            assignment[rng.sample(leavers, lacking)] = k
