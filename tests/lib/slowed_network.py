"""The network after slowdowns in mid-run."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.deploy.simulate.slowing import Slowing, check_slowings, link_bytes_per_s
from shoal.protocol.topology import Topology


def after(topology: Topology, slowings: Iterable[Slowing]) -> Topology:
    """Return the network after all slowings. Raises: LocalError: as `check_slowings`."""
    flop_per_s, bytes_per_s = topology.flop_per_s.copy(), topology.bytes_per_s.copy()
    ordered = sorted(slowings, key=lambda slowing: slowing.at_s)
    check_slowings(topology, ordered)
    for slowing in ordered:
        if not slowing.others:
            flop_per_s[slowing.device] = topology.flop_per_s[slowing.device] / slowing.times
        for source, destination in slowing.links():
            bytes_per_s[source, destination] = link_bytes_per_s(topology, source, destination) / slowing.times
    return replace(topology, flop_per_s=flop_per_s, bytes_per_s=bytes_per_s)
