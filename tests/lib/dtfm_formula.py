"""The DT-FM objective in plain words, slowly: what the compiled one is tested against."""

import math

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from shoal.coordinator.allocate.dtfm_kernels import ORDER_EXACT_MAX
from shoal.coordinator.allocate.dtfm_search import hop_seconds, share_seconds
from shoal.protocol.topology import Floats, Topology, WorkloadEntry


def plain_cost(topology: Topology, workload: WorkloadEntry, stages: tuple[tuple[int, ...], ...]) -> float:
    """Seconds of communication a step; inf: no path."""
    hop = hop_seconds(topology, workload)
    dp = 0.0
    for stage in stages:
        share = share_seconds(topology, workload, len(stage))[np.ix_(stage, stage)]
        dp = max(dp, *(math.fsum(row) for row in share.tolist()))
    distances = np.array([[bottleneck(hop[np.ix_(a, b)]) if a != b else 0.0 for b in stages] for a in stages])
    return dp + 2.0 * shortest_open_path(distances)


def bottleneck(hop: Floats) -> float:
    """Return the longest hop of the best matching between two stages, by binary search over all hops.
    Args: hop: float64 [P, Q]. Each member of the smaller side gets its own partner, each remaining one the nearest."""
    hop = hop if hop.shape[0] <= hop.shape[1] else hop.T
    values = np.unique(hop)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        near = csr_array(hop <= values[middle])
        if (maximum_bipartite_matching(near, perm_type="column") >= 0).all():
            high = middle
        else:
            low = middle + 1
    return max(float(values[low]), float(hop.min(axis=0).max()))


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
