"""Searches for DT-FM's best layout: stages of equally many devices, no spares, the order of stages solved exactly.

Seconds of communication a step (Yuan et al. 2022, arXiv 2206.01288, section 3):

    total = dp + 2 pp
    dp = max over stages S and members d of  sum over e in S \\ {d} of  2 (latency + G / (bandwidth |S|))
    pp = length of the shortest open path over the stages; the distance of two stages is the least bottleneck (longest
         hop) of any perfect matching between them;  hop = latency + A / bandwidth

G is the bytes of a stage's gradient, A the bytes of a replica's activations in one step, and |S| the number of
replicas. The paper's gigabyte is 10^9 bytes. The formula contains no compute, memory or overlap.

Our choices where the paper says nothing:
- **asymmetric links**: each direction is used once, so the sum of both ways replaces twice the one-way time.
- **stages of different size**: each member of the smaller stage has its own partner, and each remaining member of the
  larger stage shares the nearest partner. A is the file's value per replica, for any size.
- **more than `ORDER_EXACT_MAX` stages**: they keep the order of the placement."""

import math
from random import Random
from typing import Any

import numpy as np

from shoal.coordinator.allocate.throughput_search import Assignment
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Floats, Topology, WorkloadEntry

NO_PATH_S = 1e9
"""The seconds of a hop where there is no path. Not infinity: differences of such costs must be numbers."""
_GIGABYTE = 1e9
_HEAT = 0.3
"""First temperature / mean effect of a random change on the cost. 0.2 to 0.35 do equally well, 1 does 1 % worse."""


def share_seconds(topology: Topology, workload: WorkloadEntry, replicas: int) -> Floats:
    """Return float64 [N, N], symmetric: the seconds that device j in the same stage adds to the all-reduce (dp) of
    device i; inf without a path, 0 on the diagonal."""
    part = workload.gradient_gigabytes_per_stage * _GIGABYTE / replicas
    return _both_ways(topology, part)


def hop_seconds(topology: Topology, workload: WorkloadEntry) -> Floats:
    """Return float64 [N, N], symmetric: mean seconds of a hop there and back; inf: no path; 0 on the diagonal."""
    return _both_ways(topology, workload.activation_gigabytes_per_replica * _GIGABYTE) / 2.0


def _both_ways(topology: Topology, size_bytes: float) -> Floats:
    with np.errstate(divide="ignore"):
        one_way = topology.latency_s + size_bytes / topology.bytes_per_s
    np.fill_diagonal(one_way, 0.0)
    both: Floats = one_way + one_way.T
    return both


class DtfmObjective:
    """Implements `placement.Objective`. `Cost.parts`: `dp_s` for all-reduces in stages, `pp_s` for hops both ways."""

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
        # fsum is exact, so the order of addition does not matter.
        return max(math.fsum(row) for row in share.tolist())


class DtfmEvaluator:
    """Prices and anneals layouts of nearly equal stages: int64 [K, R] of devices, as in `dtfm_kernels.py`.

    N mod K stages hold one device more than the others. No device is left out. Any device may hold stage 0, since the
    paper ignores which devices have the training text.

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
        """The seconds of a hop between two devices: float64 [N, N], symmetric."""

    def random(self, seed: int) -> Assignment:
        """Return int64 [N], a random stage for each device; stage sizes differ by at most one."""
        assignment = np.arange(self.num_devices, dtype=np.int64) % self.num_stages
        order = list(range(self.num_devices))
        Random(seed).shuffle(order)
        return assignment[order]

    def layout(self, assignment: Assignment) -> Assignment:
        x = np.full((self.num_stages, self._places), -1, dtype=np.int64)
        for k in range(self.num_stages):
            members = np.flatnonzero(assignment == k)
            x[k, : len(members)] = members
        return x

    def settle(self, x: Assignment) -> tuple[float, int]:
        """Put the stages into the best order and match their members, in place. Returns: (cost, units of work used)."""
        dp, pp, work = self._kernels.settle(x, self._share, self.hop)
        return float(dp + 2.0 * pp), int(work)

    def improve(self, x: Assignment, *, seed: int, work: int) -> tuple[Assignment, float, int]:
        """Anneal `x`, then accept only improvements. Changes `x`. Returns: (layout, cost, units of work used)."""
        _, spent = self.settle(x)
        hot = work - work // 8 - spent  # the last eighth is without heat and starts from exact matching and order
        found, more = self._anneal(x, seed, hot, heat=_HEAT, smooth=1.0)
        best, spent = x.copy(), spent + more
        polished, more = self._anneal(x, seed + 1, work - spent, heat=0.0, smooth=0.0)
        return (x, polished, spent + more) if polished < found else (best, found, spent + more)

    def _anneal(self, x: Assignment, seed: int, work: int, *, heat: float, smooth: float) -> tuple[float, int]:
        """Anneal a layout of two stages or more, then `settle` it, in place. Returns: (cost, units of work used)."""
        spent = 0
        if self.num_stages > 1:
            spent = int(self._kernels.anneal(x, self._share, self.hop, np.uint64(seed), work, heat, smooth))
        cost, more = self.settle(x)
        return cost, spent + more

    def stages(self, x: Assignment) -> tuple[tuple[int, ...], ...]:
        """Return the stages of a layout in the best order, each with its devices in ascending order. Changes `x`."""
        self.settle(x)
        return tuple(tuple(sorted(int(device) for device in row if device >= 0)) for row in x)


def plan_dtfm(
    topology: Topology, workload: WorkloadEntry, *, num_stages: int, seed: int, work: int
) -> tuple[Placement, Cost]:
    """Search from several random starts, within `work` units, for the cheapest layout on the DT-FM objective. Its
    stages are in the best order, and layers are divided evenly.
    Raises: LocalError: more stages than devices."""
    evaluator, rng = DtfmEvaluator(topology, workload, num_stages), Random(seed)
    # With a third of this work for each start, a search of the same time on 100 devices ends 2 % worse; with three
    # times this work, a search of one second has too few starts.
    share = 2_000_000 + 1_000 * topology.num_devices**2
    best: Assignment = np.zeros((num_stages, 0), dtype=np.int64)
    lowest, spent = math.inf, 0
    while spent < work or lowest == math.inf:
        start = evaluator.layout(evaluator.random(rng.getrandbits(63)))
        x, cost, did = evaluator.improve(start, seed=rng.getrandbits(63), work=min(share, work - spent))
        spent += did + 20_000 + 200 * topology.num_devices  # the cost of one start in this Python loop
        if cost < lowest * (1.0 - 1e-12):  # layouts that differ only in stage names or like devices cost the same
            best, lowest = x, cost
    placement = even(evaluator.stages(best), workload.num_layers)
    return placement, DtfmObjective(topology, workload).cost(placement)


def even(stages: tuple[tuple[int, ...], ...], num_layers: int) -> Placement:
    """Return a placement with the layers divided evenly, at least one for each stage."""
    K = len(stages)
    layers = max(num_layers, K)
    return Placement(stages=stages, bounds=tuple(layers * k // K for k in range(K + 1)))
