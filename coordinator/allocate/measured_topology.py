"""A snapshot as the topology that objectives and searches work on: measured where it was, estimated where not.

| unknown                  | estimate                                                                                |
|--------------------------|-----------------------------------------------------------------------------------------|
| latency i -> j           | the larger of i's and j's median latencies: the middle of what the triangle allows when |
|                          | both were measured towards one third, as everybody is towards the coordinator           |
| rate i -> j              | the smaller of i's median rate out and j's median rate in                               |
| a peer without figures   | what it claims; else the swarm's median; else `DEFAULT_LATENCY_S`, `DEFAULT_BYTES_PER_S`|
| rate of a network card   | the best of its paths: a volunteer's line, not its path, is what limits it              |

Memory is a claim: nobody else can measure it.
"""

import numpy as np

from shoal.coordinator.allocate.interface import Snapshot
from shoal.coordinator.measured import CLAIM_MIN
from shoal.protocol.topology import Floats, Topology, make_topology

DEFAULT_LATENCY_S = 0.05
DEFAULT_BYTES_PER_S = 1.25e9
"""10 Gbit/s, so that compute and memory decide where nothing is known of any link. (Lost: 100 Mbit/s, by which a first
plan had better not replicate large stages: two peers of 32 equal ones got 20 of 24 layers, and boundaries stay.)"""


def topology_of(snapshot: Snapshot) -> Topology:
    """The topology of a snapshot; devices are in the order of `snapshot.peers`. Raises: LocalError."""
    peers, network = snapshot.peers, snapshot.network
    assert network is not None
    claims = np.array([peer.upload_bytes_per_s for peer in peers])
    claims[claims < CLAIM_MIN] = np.nan
    out = _or(_medians(network.bytes_per_s), claims, DEFAULT_BYTES_PER_S)
    into = _or(_medians(network.bytes_per_s.T), np.full(len(peers), np.nan), float(np.median(out)))
    near = _or(_medians(network.latency_s), np.full(len(peers), np.nan), DEFAULT_LATENCY_S)
    rate = np.where(np.isnan(network.bytes_per_s), np.minimum(out[:, None], into[None, :]), network.bytes_per_s)
    latency = np.where(np.isnan(network.latency_s), np.maximum(near[:, None], near[None, :]), network.latency_s)
    np.fill_diagonal(rate, 0.0)
    return make_topology(
        latency,
        rate,
        flop_per_s=[peer.flop_per_s for peer in peers],
        memory_bytes=[max(1.0, float(peer.memory_bytes)) for peer in peers],
        up_bytes_per_s=rate.max(axis=1) if len(peers) > 1 else np.inf,
        down_bytes_per_s=rate.max(axis=0) if len(peers) > 1 else np.inf,
        names=tuple(peer.peer for peer in peers),
        may_feed=[float(peer.has_data) for peer in peers],
    )


def _medians(matrix: Floats) -> Floats:
    """[N], the median of what is known of each row; NaN where nothing is."""
    medians = np.full(len(matrix), np.nan)
    known = ~np.isnan(matrix).all(axis=1)
    if known.any():
        medians[known] = np.nanmedian(matrix[known], axis=1)
    return medians


def _or(values: Floats, claims: Floats, default: float) -> Floats:
    """Fill gaps: `values`, then `claims`, then the median of what is known, then `default`."""
    known = values[~np.isnan(values)]
    values = np.where(np.isnan(values), claims, values)
    return np.where(np.isnan(values), float(np.median(known)) if len(known) else default, values)
