"""The objective of the DT-FM paper (Yuan et al. 2022, arXiv 2206.01288, section 3): seconds of communication a step.

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

import numpy as np

from shoal.coordinator.cost.placement import Cost, Placement
from shoal.protocol.topology import Floats, Topology, WorkloadEntry

ORDER_EXACT_MAX = 13
"""Held and Karp's table has K 2^K entries, 106,496 at 13 stages."""
_GIGABYTE = 1e9


def share_seconds(topology: Topology, workload: WorkloadEntry, replicas: int) -> Floats:
    """float64 [N, N], symmetric: what another member adds to dp; inf without a path, 0 to itself."""
    part = workload.gradient_gigabytes_per_stage * _GIGABYTE / replicas
    return _both_ways(topology.latency_s, topology.bytes_per_s, part)


def hop_seconds(topology: Topology, workload: WorkloadEntry) -> Floats:
    """float64 [N, N], symmetric: mean of both ways between neighbouring stages; inf without a path, 0 to itself."""
    size = workload.activation_gigabytes_per_replica * _GIGABYTE
    return _both_ways(topology.latency_s, topology.bytes_per_s, size) / 2.0


def _both_ways(latency_s: Floats, bytes_per_s: Floats, size_bytes: float) -> Floats:
    with np.errstate(divide="ignore"):
        one_way = latency_s + size_bytes / bytes_per_s
    np.fill_diagonal(one_way, 0.0)
    return one_way + one_way.T


class DtfmObjective:
    """Implements `placement.Objective`. `Cost.parts`: `dp_s` and `pp_s`, which is 2 pp; their sum is `seconds`."""

    def __init__(self, topology: Topology, workload: WorkloadEntry) -> None:
        self.topology = topology
        self.workload = workload
        self._hop = hop_seconds(topology, workload)

    def cost(self, placement: Placement) -> Cost:
        if not all(placement.stages):
            return Cost.impossible("a stage has no device")
        dp = max(self._slowest_member(stage) for stage in placement.stages)
        pp = 2.0 * shortest_open_path(self._distances(placement))
        if not math.isfinite(dp + pp):
            return Cost.impossible("two devices that must talk have no path between them")
        return Cost(seconds=dp + pp, parts={"dp_s": dp, "pp_s": pp})

    def _slowest_member(self, stage: tuple[int, ...]) -> float:
        mates = np.ix_(stage, stage)
        part = self.workload.gradient_gigabytes_per_stage * _GIGABYTE / len(stage)
        share = _both_ways(self.topology.latency_s[mates], self.topology.bytes_per_s[mates], part)
        # fsum is exact, so the order of addition does not matter on any machine.
        return max(math.fsum(row) for row in share.tolist())

    def _distances(self, placement: Placement) -> Floats:
        """float64 [K, K]; only neighbouring stages if the order is given."""
        K = len(placement.stages)
        distances = np.full((K, K), np.inf)
        for k in range(K):
            for other in range(k + 1, K if K <= ORDER_EXACT_MAX else min(K, k + 2)):
                hop = self._hop[np.ix_(placement.stages[k], placement.stages[other])]
                distances[k, other] = distances[other, k] = bottleneck(hop)
        return distances


def bottleneck(hop: Floats) -> float:
    """Return the longest hop of the best matching between two stages, by binary search over all hops.
    Args: hop: float64 [P, Q]. Each member of the smaller side gets its own partner, each remaining one the nearest."""
    hop = hop if hop.shape[0] <= hop.shape[1] else hop.T
    values = np.unique(hop)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _matches(hop <= values[middle]):
            high = middle
        else:
            low = middle + 1
    return max(float(values[low]), float(hop.min(axis=0).max()))


def _matches(near: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> bool:
    """True if every row can have its own column."""
    from scipy.sparse import csr_array  # late: half a second, which only this objective needs
    from scipy.sparse.csgraph import maximum_bipartite_matching

    return bool((maximum_bipartite_matching(csr_array(near), perm_type="column") >= 0).all())


def shortest_open_path(distances: Floats) -> float:
    """Return the length of the shortest path through all nodes (Held and Karp 1962), or of the given one if there are
    many."""
    K = len(distances)
    if K > ORDER_EXACT_MAX:
        return float(sum(distances[k, k + 1] for k in range(K - 1)))
    best = np.full((1 << K, K), np.inf)
    best[1 << np.arange(K), np.arange(K)] = 0.0
    for visited in range(1, 1 << K):
        reach = (best[visited][:, None] + distances).min(axis=0)
        for node in range(K):
            if not visited >> node & 1:
                there = best[visited | 1 << node]
                there[node] = min(there[node], reach[node])
    return float(best[-1].min())
