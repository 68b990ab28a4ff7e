"""Exchange equally good devices of a placement so that less state travels. Pure.

A search for another division minimises the step time, for which two equal devices are the same. But the device that has
held the first eight of twelve layers should keep them, so that fewer bytes travel.
"""

from dataclasses import replace

import numpy as np

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.protocol.topology import Floats, Ints

TRIED = 64
"""The limit on tried exchanges, those that save most first: each costs an evaluation."""
AS_GOOD = 1.001
"""The limit on step time, relative to the step before all exchanges: two measured devices are never quite equal."""


def with_fewest_moves(objective: ThroughputObjective, current: Placement, found: Placement) -> Placement:
    """Exchange devices between stages of `found`, and with spares, while that saves bytes of state.

    Args: current: the present placement, over the devices of the topology of `objective`.
    Returns: a placement with the bounds of `found`; its steps take at most `AS_GOOD` times as long.
    """
    lacks = _lacking_bytes(objective, current, found)
    limit_s = AS_GOOD * objective.cost(found).seconds
    at = np.full(objective.topology.num_devices, len(found.stages), dtype=np.int64)
    for stage, members in enumerate(found.stages):
        at[list(members)] = stage
    refused: set[tuple[int, int]] = set()
    for _ in range(TRIED):
        here = lacks[np.arange(len(at)), at]
        there = lacks[:, at]  # the bytes that each would lack in the other's place
        saves = np.triu(here[:, None] + here[None, :] - there - there.T, 1)
        for pair in refused:
            saves[pair] = 0.0
        a, b = (int(device) for device in np.unravel_index(int(saves.argmax()), saves.shape))
        if saves[a, b] <= 0.0:
            break
        at[a], at[b] = at[b], at[a]
        exchanged = replace(found, stages=_stages(at, len(found.stages)))
        if objective.cost(exchanged).seconds <= limit_s:
            found, refused = exchanged, set()
        else:
            at[a], at[b] = at[b], at[a]
            refused.add((a, b))
    return found


def _lacking_bytes(objective: ThroughputObjective, current: Placement, found: Placement) -> Floats:
    """Return float [N, K + 1]: the bytes of state that each device would have to fetch for each stage of `found`. The
    last column is for a device without a stage: zeros."""
    layer_bytes: Floats = np.array(objective.workload.layer_state_bytes)
    held = np.zeros((objective.topology.num_devices, len(layer_bytes)))
    for stage, first, last in zip(current.stages, current.bounds, current.bounds[1:], strict=False):
        held[list(stage), first:last] = 1.0
    wanted = np.zeros((len(found.stages) + 1, len(layer_bytes)))
    for index, (first, last) in enumerate(zip(found.bounds, found.bounds[1:], strict=False)):
        wanted[index, first:last] = 1.0
    lacking: Floats = (1.0 - held) @ (wanted * layer_bytes).T
    return lacking


def _stages(at: Ints, num_stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in np.flatnonzero(at == stage)) for stage in range(num_stages))
