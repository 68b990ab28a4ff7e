"""Slowdowns of a device or its links during a run. Pure.

A device slows down because it is hot, or its owner plays a game; a link because others use it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Topology


class Slowing(NamedTuple):
    """A device, or each link between it and `others`, is `times` slower from `at_s` on than at the beginning.

    The last slowing of a device or link counts; a factor of 1 ends it.
    """

    at_s: float
    device: int
    times: float
    others: tuple[int, ...] = ()
    """The other ends of the links; empty: the device itself computes more slowly."""

    def links(self) -> Iterable[tuple[int, int]]:
        """Yield (from, to) of each link, both ways."""
        for other in self.others:
            yield self.device, other
            yield other, self.device


def link_bytes_per_s(topology: Topology, source: int, destination: int) -> float:
    """Return the rate of an idle link: that of the path, or of the slower card at its ends."""
    path = float(topology.bytes_per_s[source, destination])
    return min(path, float(topology.up_bytes_per_s[source]), float(topology.down_bytes_per_s[destination]))


def check_slowings(topology: Topology, slowings: Sequence[Slowing]) -> None:
    """Check slowings. Raises: LocalError: an unknown device, a link of a device to itself, or an impossible factor."""
    for slowing in slowings:
        devices = (slowing.device, *slowing.others)
        strange = [device for device in devices if not 0 <= device < topology.num_devices]
        if strange:
            raise LocalError(f"a slowing names device {strange[0]}, the network has {topology.num_devices}")
        if slowing.device in slowing.others:
            raise LocalError(f"device {slowing.device} has no link to itself that could slow down")
        if not 0.0 < slowing.times < float("inf"):
            raise LocalError(f"a device or link cannot be {slowing.times} times slower")
