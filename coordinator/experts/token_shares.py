"""Divides each expert's tokens among its holders so that no node is busier than necessary. Pure."""

import math
from collections.abc import Sequence

from shoal.coordinator.experts.recovery import ExpertPlacement


def token_shares(
    placement: ExpertPlacement, loads: Sequence[float], speeds: Sequence[float]
) -> tuple[dict[int, float], ...]:
    """Return the shares that minimise the sum over nodes of work^2 / speed, which also minimises the load of the
    busiest node. Each expert's load in turn is divided anew so that its holders' work / speed becomes equal, given
    their work for other experts (water filling), until nothing changes. The objective is convex and smooth, so this
    ends at its minimum.

    Args:
        placement: the experts on each of N nodes.
        loads: float [E], >= 0.
        speeds: float [N], > 0, the work that a node does in a unit of time.
    Returns: for each expert {node: share}, shares > 0 that sum to 1; empty if the expert has no holder."""
    holders: list[list[int]] = [[] for _ in loads]
    for node, experts in enumerate(placement):
        for expert in sorted(set(experts)):
            holders[expert].append(node)
    parts = [{node: load / len(nodes) for node in nodes} for load, nodes in zip(loads, holders, strict=True)]
    work = [0.0] * len(placement)
    for part in parts:
        for node, amount in part.items():
            work[node] += amount
    for _ in range(200):
        moved = 0.0
        for expert, load in enumerate(loads):
            if load > 0.0 and len(holders[expert]) > 1:
                moved = max(moved, _pour(parts[expert], load, work, speeds) / load)
        if moved <= 1e-4:
            break
    return tuple(_normed(part, load) for part, load in zip(parts, loads, strict=True))


def busiest_node_load_ratio(
    placement: ExpertPlacement, loads: Sequence[float], speeds: Sequence[float], shares: Sequence[dict[int, float]]
) -> float:
    """Return the time of the busiest node / the time if all nodes worked equally long: 1 is ideal."""
    held = [load if share else 0.0 for load, share in zip(loads, shares, strict=True)]
    if math.fsum(held) <= 0.0:
        return 1.0
    work = [0.0] * len(placement)
    for load, share in zip(loads, shares, strict=True):
        for node, part in share.items():
            work[node] += load * part
    longest = max(amount / speed for amount, speed in zip(work, speeds, strict=True))
    return longest * math.fsum(speeds) / math.fsum(held)


def _pour(part: dict[int, float], load: float, work: list[float], speeds: Sequence[float]) -> float:
    """Divide one expert's load anew among its holders, the keys of `part`, so that all that get some of it have equal
    work / speed. Changes `part` and `work`. Returns: the largest change of a holder's part."""
    others = {node: max(0.0, work[node] - amount) for node, amount in part.items()}
    order = sorted(part, key=lambda node: (others[node] / speeds[node], node))
    level, water, speed = 0.0, load, 0.0
    for i, node in enumerate(order):
        water += others[node]
        speed += speeds[node]
        level = water / speed
        if i + 1 == len(order) or level <= others[order[i + 1]] / speeds[order[i + 1]]:
            break
    moved = 0.0
    for node in order:
        amount = max(0.0, level * speeds[node] - others[node])
        moved = max(moved, abs(amount - part[node]))
        part[node] = amount
        work[node] = others[node] + amount
    return moved


def _normed(part: dict[int, float], load: float) -> dict[int, float]:
    if load <= 0.0:
        return {node: 1.0 / len(part) for node in part}
    total = math.fsum(part.values())
    return {node: amount / total for node, amount in part.items() if amount > 0.0}
