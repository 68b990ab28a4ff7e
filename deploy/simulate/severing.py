"""Cuts between two devices during a run, while both reach all others. Pure.

Two peers behind routers may never connect, and a connected pair loses its path when a router forgets it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Topology


class Severing(NamedTuple):
    """Nothing passes between `one` and `other`, in either direction, from `at_s` until `until_s`."""

    at_s: float
    one: int
    other: int
    until_s: float = math.inf


def pairs_apart(topology: Topology) -> Iterable[tuple[int, int]]:
    """Yield the pairs without a path in the network, each once."""
    n = topology.num_devices
    for one in range(n):
        for other in range(one):
            if not (topology.bytes_per_s[one, other] > 0.0 and topology.bytes_per_s[other, one] > 0.0):
                yield one, other


def check_severings(topology: Topology, severings: Sequence[Severing]) -> None:
    """Check severings. Raises: LocalError: one names an unknown device, one device twice, or ends before it begins."""
    for severing in severings:
        strange = [device for device in severing[1:3] if not 0 <= device < topology.num_devices]
        if strange:
            raise LocalError(f"a severing names device {strange[0]}, the network has {topology.num_devices}")
        if severing.one == severing.other:
            raise LocalError(f"device {severing.one} cannot lose itself")
        if not severing.at_s < severing.until_s:
            raise LocalError(f"a severing lasts from {severing.at_s} to {severing.until_s} s")
