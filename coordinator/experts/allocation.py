"""The number of replicas of each expert: slots follow the load, with at least `min_replicas` each. Pure.

A slot is a unit of work: r slots cut an expert's tokens in r parts, on any nodes. A node that holds an expert twice
keeps one copy of it and computes two parts."""

import heapq
import math
from collections.abc import Sequence

from shoal.protocol.errors import LocalError


def replica_counts(loads: Sequence[float], *, num_slots: int, min_replicas: int) -> tuple[int, ...]:
    """Give each slot beyond the minimum to the expert with the largest load per replica so far. No other counts have a
    less busy busiest replica: each slot was given at a load above the final largest one.

    Args:
        loads: tokens or any other measure of each expert, finite and >= 0.
        num_slots: all are given.
    Returns: int [E]; of equal loads the lower expert comes first.
    Raises: LocalError: a load is invalid, or there are too few slots."""
    _check(loads, num_slots, min_replicas)
    replicas = [min_replicas] * len(loads)
    waiting = [(-load / min_replicas, expert) for expert, load in enumerate(loads)]
    heapq.heapify(waiting)
    for _ in range(num_slots - min_replicas * len(loads)):
        _, expert = waiting[0]
        replicas[expert] += 1
        heapq.heapreplace(waiting, (-loads[expert] / replicas[expert], expert))
    return tuple(replicas)


def busiest_replica_load_ratio(loads: Sequence[float], replicas: Sequence[int]) -> float:
    """Return the largest load per replica, divided by the load of each slot if all were equal: 1 is ideal, also without
    load. Experts without replicas are ignored."""
    total, num_slots = math.fsum(loads), sum(replicas)
    if total <= 0.0 or num_slots == 0:
        return 1.0
    return max(load / count for load, count in zip(loads, replicas, strict=True) if count) * num_slots / total


def attainable_min_replicas(slots: Sequence[int], num_experts: int) -> int:
    """Return the largest number of different nodes that each of the experts can be on at once.

    A node with c slots holds at most min(c, E) experts, and E experts need f nodes each. By Gale and Ryser these two
    conditions and f <= N are sufficient, since all experts need the same number."""
    if num_experts == 0:
        return len(slots)
    return min(sum(1 for c in slots if c > 0), sum(min(c, num_experts) for c in slots) // num_experts)


def _check(loads: Sequence[float], num_slots: int, min_replicas: int) -> None:
    if not loads:
        raise LocalError("there are no experts: give each a load, 0 if it is unknown")
    if not all(math.isfinite(load) and load >= 0.0 for load in loads):
        raise LocalError("loads must be finite and not negative")
    if min_replicas < 1:
        raise LocalError("an expert needs at least one replica: min_replicas is below 1")
    if num_slots < min_replicas * len(loads):
        raise LocalError(
            f"{len(loads)} experts with {min_replicas} replicas each need {min_replicas * len(loads)} slots, "
            f"there are {num_slots}"
        )
