"""The DT-FM objective as an `Evaluator`, and its planner: equal stages, exact order, and no spares."""

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.evolution import Assignment, Improved, evolve
from shoal.coordinator.cost.dtfm import DtfmObjective, hop_seconds, share_seconds
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Floats, Topology, WorkloadEntry

NO_PATH_S = 1e9
"""Stands for infinity, since sums that contain it can be subtracted again."""
_SHARE = 2_000_000
_SHARE_PER_PAIR = 1_000
"""One local search may spend `_SHARE` + `_SHARE_PER_PAIR` N^2 units of work. With a third of that, a search of the same
time on 100 devices ends 2 % worse; with three times that, a search of one second has too few individuals."""
_KERNEL_UNITS = 2
"""The kernel's own units in one unit of `evolution.WORK_PER_SECOND`: the kernel does more than 200 million a second."""
_HEAT = 0.3
"""The first temperature at heat 1, in mean changes of a trial; it scales with the square of the heat. 0.2 to 0.35 give
equal results, 1 is 1 % worse."""


class DtfmEvaluator:
    """Implements `evolution.Evaluator`.

    Stage sizes differ by at most one: N mod K stages hold one device more. No device is left out. Any device may hold
    stage 0, since the paper does not model access to the text.

    Raises: LocalError: more stages than devices."""

    def __init__(self, topology: Topology, workload: WorkloadEntry, num_stages: int) -> None:
        from shoal.coordinator.allocate import dtfm_kernels, matching  # numba takes a second to import

        if not 0 < num_stages <= topology.num_devices:
            raise LocalError(f"{topology.num_devices} devices cannot form {num_stages} stages")
        self._kernels: Any = dtfm_kernels
        self._matching: Any = matching
        self.num_devices = topology.num_devices
        self.num_stages = num_stages
        self.places = -(-self.num_devices // num_stages)
        """R, the places of the largest stage."""
        small = max(1, self.places - (self.num_devices % num_stages != 0))
        share = np.stack([share_seconds(topology, workload, size) for size in (small, self.places)])
        self._share: Floats = np.minimum(share, NO_PATH_S)
        self.hop: Floats = np.minimum(hop_seconds(topology, workload), NO_PATH_S)
        """float64 [N, N], symmetric, seconds."""
        self.classes = interchangeable(share[1], self.hop)
        self._links = dtfm_kernels.LinkTables(self._share, self.hop, self.classes)
        self._scratch = tuple(
            np.empty(shape, dtype=np.int64) for shape in ((num_stages, self.places), num_stages, num_stages)
        )
        self.draws = 1
        self.share = _SHARE + _SHARE_PER_PAIR * self.num_devices**2

    # --- Evaluator ---

    def cost(self, assignment: Assignment) -> float:
        dp, pp = self._matching.price(self._layout(assignment), self._share, self.hop, *self._scratch)
        return float(dp + 2.0 * pp)

    def random(self, seed: int) -> Assignment:
        assignment = np.arange(self.num_devices, dtype=np.int64) % self.num_stages
        order = list(range(self.num_devices))
        Random(seed).shuffle(order)
        return assignment[order]

    def repair(self, assignment: Assignment, *, seed: int) -> Assignment:
        """Fill too small stages with homeless devices and with random devices of too large stages."""
        rng, K = Random(seed), self.num_stages
        result = assignment.copy()
        floor, extra = divmod(self.num_devices, K)
        sizes = np.bincount(result[result >= 0], minlength=K)
        # The largest stages get the extra device, since that takes the fewest moves.
        room = np.full(K, floor)
        room[sorted(range(K), key=lambda k: (-sizes[k], k))[:extra]] += 1
        loose = np.flatnonzero(result < 0).tolist()
        for k in np.flatnonzero(sizes > room):
            loose += rng.sample(np.flatnonzero(result == k).tolist(), int(sizes[k] - room[k]))
        rng.shuffle(loose)
        holes = np.repeat(np.arange(K), np.maximum(room - sizes, 0))
        result[loose] = holes
        return result

    def improve(self, assignment: Assignment, *, seed: int, work: int, heat: float) -> Improved:
        x = self._layout(assignment)
        before, spent = self._settle(x)
        if self.num_stages == 1:
            return Improved(assignment=assignment, cost=before, work=spent // _KERNEL_UNITS)
        budget = work * _KERNEL_UNITS
        found, best = before, x.copy()
        if heat > 0.0:
            hot = budget - budget // 8 - spent  # the last eighth starts from exact matching and order
            spent += self._kernels.anneal(x, self._links, np.uint64(seed), hot, _HEAT * heat * heat, 1.0)
            found, more = self._settle(x)
            best = x.copy()
            spent += more
        spent += self._kernels.anneal(x, self._links, np.uint64(seed + 1), budget - spent, 0.0, 0.0)
        polished, more = self._settle(x)
        if polished < found:
            found, best = polished, x
        return Improved(assignment=self._assignment(best), cost=found, work=(spent + more) // _KERNEL_UNITS)

    # --- layouts: int64 [K, R], see matching.py ---

    def stages(self, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
        """Return the stages in the best order, each ascending."""
        x = self._layout(assignment)
        self._settle(x)
        return tuple(tuple(sorted(int(device) for device in row if device >= 0)) for row in x)

    def _layout(self, assignment: Assignment) -> Assignment:
        x = np.full(self.num_stages * self.places, -1, dtype=np.int64)
        order = np.argsort(assignment, kind="stable")
        sizes = np.bincount(assignment, minlength=self.num_stages)
        place = np.arange(self.num_devices) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        x[assignment[order] * self.places + place] = order
        return x.reshape(self.num_stages, self.places)

    def _settle(self, x: Assignment) -> tuple[float, int]:
        """Order and match a layout, in place. Returns: (cost, work)."""
        dp, pp, work = self._matching.settle(x, self._share, self.hop)
        return float(dp + 2.0 * pp), int(work)

    def _assignment(self, x: Assignment) -> Assignment:
        assignment = np.empty(self.num_devices, dtype=np.int64)
        for k, row in enumerate(x):
            assignment[row[row >= 0]] = k
        return assignment


def interchangeable(*costs: Floats) -> npt.NDArray[np.int64]:
    """Return int64 [N], classes of devices that have equal costs with all others and with each other, by first
    appearance.
    Args: costs: each float64 [N, N], symmetric."""
    N = len(costs[0])
    classes = np.full(N, -1, dtype=np.int64)
    alike: dict[bytes, list[int]] = {}
    count = 0
    for device in range(N):
        # Interchangeable devices have the same costs in some order, so only such devices are compared one by one.
        others = alike.setdefault(b"".join(np.sort(cost[device]).tobytes() for cost in costs), [])
        for other in others:
            rest = np.ones(N, dtype=np.bool_)
            rest[device] = rest[other] = False
            if all(np.array_equal(cost[device, rest], cost[other, rest]) for cost in costs):
                classes[device] = classes[other]
                break
        else:
            others.append(device)
            classes[device] = count
            count += 1
    return classes


def plan_dtfm(
    topology: Topology, workload: WorkloadEntry, *, num_stages: int, seed: int, work: int
) -> tuple[Placement, Cost]:
    """Find the cheapest layout on the DT-FM objective within `work` units: stages in the best order, layers dealt
    evenly.
    Raises: LocalError: more stages than devices."""
    evaluator = DtfmEvaluator(topology, workload, num_stages)
    # With 8 individuals, making them takes all of a one-second search.
    found = evolve(evaluator, seed=seed, work=work, keep=5)
    placement = even(evaluator.stages(found.assignment), workload.num_layers)
    return placement, DtfmObjective(topology, workload).cost(placement)


def even(stages: tuple[tuple[int, ...], ...], num_layers: int) -> Placement:
    """Return a placement with layers dealt evenly, at least one for each stage."""
    K = len(stages)
    layers = max(num_layers, K)
    return Placement(stages=stages, bounds=tuple(layers * k // K for k in range(K + 1)))
