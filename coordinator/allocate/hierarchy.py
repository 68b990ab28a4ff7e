"""Large swarms are clustered, solved and refined. A swarm of clusters is again a swarm, of fewer and larger units.

Devices that are near each other and alike become one unit: their speeds and cards add up, two units have a path for
each pair of their devices, and the unit's memory is the smallest. The search runs on about a hundred units, then from
that result on eight times as many, and last on the devices themselves if they are not too many."""

from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.evolution import Assignment
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Floats, Ints, Topology

UNITS = 128
"""The number of units on the coarsest level, few enough for a good result within a second."""
FLAT_MAX = 2048
"""Up to this number the last level is the devices themselves: a move among n members of a stage costs n^2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """A view of a swarm as units."""

    topology: Topology
    """U units: the sums of FLOP/s and cards, the smallest memory, and the latency and paths of the first device."""
    weight: Ints
    unit_of: Ints
    """[N], the unit of each device."""


def levels(topology: Topology, workload: Workload) -> list[Level]:
    """Return the levels from the coarsest to the finest; a small swarm has only the level of single devices."""
    n = topology.num_devices
    near = _neighbourhoods(topology, workload.cut_bytes) if n > 2 * UNITS else np.zeros(n, dtype=np.int64)
    views = []
    units = UNITS
    while 2 * units < n and units <= FLAT_MAX:
        views.append(_coarse(topology, near, units))
        units *= 8
    if n <= FLAT_MAX:
        views.append(Level(topology=topology, weight=np.ones(n, dtype=np.int64), unit_of=np.arange(n)))
    return views


def coarsen(assignment: Assignment, level: Level) -> Assignment:
    """Return the stages of a level's units: each goes to the stage of most of its devices, the lowest among equals.
    Args: assignment: by device."""
    lowest = int(assignment.min())
    votes = np.zeros((len(level.weight), int(assignment.max()) - lowest + 1), dtype=np.int64)
    np.add.at(votes, (level.unit_of, assignment - lowest), 1)
    chosen: Assignment = votes.argmax(axis=1).astype(np.int64) + lowest
    return chosen


def _neighbourhoods(topology: Topology, frame_bytes: float) -> Ints:
    """Return [N], the neighbourhood of each device: that of the nearest leader, by the seconds of a frame there and
    back. Each leader is the device farthest from all before it (Gonzalez 1985)."""
    n = topology.num_devices
    distance = np.full(n, np.inf)
    nearest = np.zeros(n, dtype=np.int64)
    leader, reach = 0, 0.0
    for number in range(48):
        rate = np.minimum(topology.bytes_per_s[leader], topology.bytes_per_s[:, leader]).astype(np.float64)
        to_leader: Floats = topology.latency_s[leader].astype(np.float64) + topology.latency_s[:, leader]
        to_leader += 2.0 * frame_bytes / np.maximum(rate, 1.0)
        to_leader[leader] = 0.0
        closer = to_leader < distance
        nearest[closer] = number
        distance = np.minimum(distance, to_leader)
        if number == 0:
            reach = float(distance.max())
        leader = int(np.argmax(distance))
        if distance[leader] <= 0.05 * reach:  # all others are near to a leader
            break
    return nearest


def _coarse(topology: Topology, near: Ints, units: int) -> Level:
    """Cut each neighbourhood, ordered by text, memory, card and speed, into slices of about N / units devices."""
    n = topology.num_devices
    order = np.lexsort(
        (np.arange(n), topology.flop_per_s, topology.card, topology.memory_bytes, topology.may_feed, near)
    )
    unit_of = np.zeros(n, dtype=np.int64)
    number, size = 0, n / units
    for neighbourhood in range(int(near.max()) + 1):
        for feeds in (False, True):
            members = order[(near[order] == neighbourhood) & (topology.may_feed[order] == feeds)]
            if len(members):
                slices = max(1, round(len(members) / size))
                unit_of[members] = number + np.arange(len(members)) * slices // len(members)
                number += slices
    _, first = np.unique(unit_of, return_index=True)
    weight = np.bincount(unit_of)

    def summed(values: Floats) -> Floats:
        return np.bincount(unit_of, weights=values).astype(np.float64)

    behind = np.bincount(topology.card, minlength=int(topology.card.max()) + 1)[topology.card]
    memory = np.full(number, np.inf)
    np.minimum.at(memory, unit_of, topology.memory_bytes)
    square = np.ix_(first, first)
    return Level(
        topology=Topology(
            latency_s=topology.latency_s[square],
            bytes_per_s=topology.bytes_per_s[square],
            flop_per_s=summed(topology.flop_per_s),
            memory_bytes=memory,
            up_bytes_per_s=summed(topology.up_bytes_per_s / behind),
            down_bytes_per_s=summed(topology.down_bytes_per_s / behind),
            card=np.arange(number),
            names=tuple(topology.names[i] for i in first),
            regions=tuple(topology.regions[i] for i in first),
            may_feed=topology.may_feed[first],
        ),
        weight=weight,
        unit_of=unit_of,
    )
