"""The objective of the DT-FM paper, as an `Evaluator`, and its planner: equal stages, exact order, and no spares.

Seconds of communication a step (Yuan et al. 2022, arXiv 2206.01288, section 3):

    total = dp + 2 pp
    dp = max over stages S and members d of  sum over e in S \\ {d} of  2 (latency + G / (bandwidth |S|))
    pp = length of the shortest open path over the stages; the distance of two stages is the bottleneck (longest hop) of
         the perfect matching between them with the shortest bottleneck;  hop = latency + A / bandwidth

G is a stage's gradient, A a replica's activations of one step; the paper counts 10^9 bytes to a gigabyte. |S| is the
number of replicas. The formula contains no compute, memory or overlap.

Choices where the paper says nothing:
- **asymmetric links**: both directions are used once, so twice a one-way time becomes the sum of both ways.
- **stages of different size**: each member of the smaller has its own partner, and each remaining member of the larger
  shares the nearest. A is per replica as in the file, for any size.
- **more than `ORDER_EXACT_MAX` stages**: their order is that of the placement."""

import math
from random import Random
from typing import Any

import numpy as np

from shoal.coordinator.allocate.evolution import Assignment, Improved, evolve
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Floats, Topology, WorkloadEntry

NO_PATH_S = 1e9
"""Stands for infinity, since sums that contain it can be subtracted again."""
_GIGABYTE = 1e9
_SHARE = 2_000_000
_SHARE_PER_PAIR = 1_000
"""One local search may spend `_SHARE` + `_SHARE_PER_PAIR` N^2 units of work. With a third of that, a search of the same
time on 100 devices ends 2 % worse; with three times that, a search of one second has too few individuals."""
_HEAT = 0.3
"""The first temperature at heat 1, in mean changes of a trial; it scales with the square of the heat. 0.2 to 0.35 give
equal results, 1 is 1 % worse."""


def share_seconds(topology: Topology, workload: WorkloadEntry, replicas: int) -> Floats:
    """Return float64 [N, N], symmetric: what another member adds to dp; inf without a path, 0 to itself."""
    part = workload.gradient_gigabytes_per_stage * _GIGABYTE / replicas
    return _both_ways(topology, part)


def hop_seconds(topology: Topology, workload: WorkloadEntry) -> Floats:
    """Return float64 [N, N], symmetric: mean of both ways between neighbouring stages; inf without a path, 0 to
    itself."""
    return _both_ways(topology, workload.activation_gigabytes_per_replica * _GIGABYTE) / 2.0


def _both_ways(topology: Topology, size_bytes: float) -> Floats:
    with np.errstate(divide="ignore"):
        one_way = topology.latency_s + size_bytes / topology.bytes_per_s
    np.fill_diagonal(one_way, 0.0)
    both: Floats = one_way + one_way.T
    return both


class DtfmObjective:
    """Implements `placement.Objective`. `Cost.parts`: `dp_s` and `pp_s`, which is 2 pp; their sum is `seconds`."""

    def __init__(self, topology: Topology, workload: WorkloadEntry) -> None:
        from shoal.coordinator.allocate import dtfm_kernels  # numba takes a second to import

        self._kernels: Any = dtfm_kernels
        self._topology, self._workload = topology, workload
        self._hop = np.minimum(hop_seconds(topology, workload), NO_PATH_S)

    def cost(self, placement: Placement) -> Cost:
        if not all(placement.stages):
            return Cost.impossible("a stage has no device")
        stages = [np.array(stage, dtype=np.int64) for stage in placement.stages]
        dp = max(self._slowest_member(stage) for stage in stages)
        distances = np.zeros((len(stages), len(stages)))
        for k, stage in enumerate(stages):
            for other in range(k):
                bottleneck, _ = self._kernels.handover(self._hop, stages[other], stage)
                distances[k, other] = distances[other, k] = bottleneck
        pp = 2.0 * self._kernels.open_path(distances, np.zeros(len(stages), dtype=np.int64))
        if not dp + pp < NO_PATH_S:
            return Cost.impossible("two devices that must talk have no path between them")
        return Cost(seconds=dp + pp, parts={"dp_s": dp, "pp_s": pp})

    def _slowest_member(self, stage: Assignment) -> float:
        share = share_seconds(self._topology.take(stage), self._workload, len(stage))
        # fsum is exact, so the order of addition does not matter on any machine.
        return max(math.fsum(row) for row in share.tolist())


class DtfmEvaluator:
    """Implements `evolution.Evaluator`.

    Stage sizes differ by at most one: N mod K stages hold one device more. No device is left out. Any device may hold
    stage 0, since the paper does not model access to the text.

    Raises: LocalError: more stages than devices."""

    def __init__(self, topology: Topology, workload: WorkloadEntry, num_stages: int) -> None:
        from shoal.coordinator.allocate import dtfm_kernels

        if not 0 < num_stages <= topology.num_devices:
            raise LocalError(f"{topology.num_devices} devices cannot form {num_stages} stages")
        self._kernels: Any = dtfm_kernels
        self.num_devices = topology.num_devices
        self.num_stages = num_stages
        self._places = -(-self.num_devices // num_stages)
        small = max(1, self._places - (self.num_devices % num_stages != 0))
        share = np.stack([share_seconds(topology, workload, size) for size in (small, self._places)])
        self._share: Floats = np.minimum(share, NO_PATH_S)
        self.hop: Floats = np.minimum(hop_seconds(topology, workload), NO_PATH_S)
        """float64 [N, N], symmetric, seconds."""
        self.draws = 1
        self.share = _SHARE + _SHARE_PER_PAIR * self.num_devices**2

    # --- Evaluator ---

    def cost(self, assignment: Assignment) -> float:
        return self._settle(self._layout(assignment))[0]

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
        found, spent = self._settle(x)
        best = x.copy()
        if heat > 0.0:
            hot = work - work // 8 - spent  # the last eighth starts from exact matching and order
            found, more = self._anneal(x, seed, hot, heat=_HEAT * heat**2, smooth=1.0)
            best, spent = x.copy(), spent + more
        polished, more = self._anneal(x, seed + 1, work - spent, heat=0.0, smooth=0.0)
        if polished < found:
            found, best = polished, x
        return Improved(assignment=self._assignment(best), cost=found, work=spent + more)

    # --- layouts: int64 [K, R], see dtfm_kernels.py ---

    def stages(self, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
        """Return the stages in the best order, each ascending."""
        x = self._layout(assignment)
        self._settle(x)
        return tuple(tuple(sorted(int(device) for device in row if device >= 0)) for row in x)

    def _layout(self, assignment: Assignment) -> Assignment:
        x = np.full((self.num_stages, self._places), -1, dtype=np.int64)
        for k in range(self.num_stages):
            members = np.flatnonzero(assignment == k)
            x[k, : len(members)] = members
        return x

    def _settle(self, x: Assignment) -> tuple[float, int]:
        """Order and match a layout, in place. Returns: (cost, work)."""
        dp, pp, work = self._kernels.settle(x, self._share, self.hop)
        return float(dp + 2.0 * pp), int(work)

    def _anneal(self, x: Assignment, seed: int, work: int, *, heat: float, smooth: float) -> tuple[float, int]:
        """Anneal a layout of two stages or more, and settle it, in place. Returns: (cost, work)."""
        spent = 0
        if self.num_stages > 1:
            spent = int(self._kernels.anneal(x, self._share, self.hop, np.uint64(seed), work, heat, smooth))
        cost, more = self._settle(x)
        return cost, spent + more

    def _assignment(self, x: Assignment) -> Assignment:
        assignment = np.empty(self.num_devices, dtype=np.int64)
        for k, row in enumerate(x):
            assignment[row[row >= 0]] = k
        return assignment


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
