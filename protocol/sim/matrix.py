"""A network of any size from a `Topology`: two matrices, and a `LinkSpec` only for pairs that talk to each other."""

import numpy as np

from shoal.protocol.sim.network import LinkSpec, Network
from shoal.protocol.topology import Topology

_NO_PATH = LinkSpec(latency_s=1.0, rate_bytes_per_s=1e-3)
"""Whatever is sent there is on its way for longer than any run: calls time out, frames never leave."""


class MatrixNetwork(Network):
    """Device i of the topology is at place i. Of its network cards it knows nothing: a world's `add_peer` does."""

    def __init__(self, topology: Topology) -> None:
        self._latency_s = topology.latency_s
        self._bytes_per_s = topology.bytes_per_s
        self.num_places = topology.num_devices
        others_s = np.sort(self._latency_s[~np.eye(topology.num_devices, dtype=bool)])
        self.typical_latency_s = float(others_s[(len(others_s) - 1) // 2]) if len(others_s) else 0.0
        self._known: dict[tuple[int, int], LinkSpec] = {}
        self._of_kind: dict[tuple[float, float], LinkSpec] = {}
        """Regions have few kinds of links between them, and a thousand peers a million pairs."""

    def link(self, source: int, destination: int) -> LinkSpec:
        known = self._known.get((source, destination))
        if known is not None:
            return known
        kind = (float(self._latency_s[source, destination]), float(self._bytes_per_s[source, destination]))
        link = self._of_kind.get(kind)
        if link is None:
            latency_s, rate = kind
            link = LinkSpec(latency_s=latency_s, rate_bytes_per_s=rate) if rate > 0.0 else _NO_PATH
            self._of_kind[kind] = link
        self._known[source, destination] = link
        return link
