"""Go from one placement of experts to another with few fetches, by choosing which node takes which part.

Nodes of one kind (slots, failure probability) can exchange their parts, and experts with equally many replicas their
places, without a change in load or safety. So the fewest fetches are an assignment of parts to nodes and of names to
experts; each is solved exactly given the other."""

from collections.abc import Collection, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.experts.recovery import ExpertPlacement

_FORBIDDEN = -1e6
"""The worth of giving a part to a node of another kind: any number of fetches is better."""
_RESTARTS, _NODES_RESTARTED_MAX = 16, 64
"""The alternation can stop early, so it restarts from random names on up to this many nodes."""


def num_fetches(current: Sequence[Collection[int]], target: Sequence[Collection[int]]) -> int:
    """Count the copies that nodes lack. Args: both [N], experts on each node; twice on a node is one copy."""
    return sum(len(set(after) - set(before)) for before, after in zip(current, target, strict=True))


def fewest_fetches(
    current: Sequence[Collection[int]], target: ExpertPlacement, *, kinds: Sequence[Hashable] | None = None
) -> ExpertPlacement:
    """Give the parts of `target` to nodes, and its names to experts, in turns until neither helps.

    Args: kinds: [N]; node i may take the part of node j if their kinds are equal. Default: their slots.
    Returns: a placement as good as `target` in every respect, with the same number of replicas of each expert.
    Source: Kuhn-Munkres, in scipy as by Crouse (2016)."""
    kinds = [len(part) for part in target] if kinds is None else kinds
    held, rng = _held(current, target), np.random.default_rng(0)
    found = []
    starts = [target, _renamed(held, target)]
    if len(target) <= _NODES_RESTARTED_MAX:
        starts += [_renamed(rng.random(held.shape), target) for _ in range(_RESTARTS)]
    for placement in starts:
        fetches = num_fetches(current, placement) + 1
        while num_fetches(current, placement) < fetches:
            fetches = num_fetches(current, placement)
            placement = _renamed(held, _assigned(held, placement, kinds))
        found.append((fetches, placement))
        if not fetches:
            break
    return min(found)[1]


def _held(current: Sequence[Collection[int]], target: ExpertPlacement) -> NDArray[np.float64]:
    """Return float [N, E]: 1 if the node has a copy."""
    num_experts = 1 + max((expert for part in (*current, *target) for expert in part), default=-1)
    held_NE = np.zeros((len(target), num_experts))
    for node, experts in enumerate(current):
        held_NE[node, list(experts)] = 1.0
    return held_NE


def _assigned(held_NE: NDArray[np.float64], target: ExpertPlacement, kinds: Sequence[Hashable]) -> ExpertPlacement:
    part_NE = _table(target, held_NE.shape[1]) > 0
    worth_NN = held_NE @ part_NE.T
    number: dict[Hashable, int] = {}
    kind_N = np.array([number.setdefault(kind, len(number)) for kind in kinds])
    worth_NN[kind_N[:, None] != kind_N[None, :]] = _FORBIDDEN
    _, parts = _best_assignment(worth_NN)
    return tuple(target[part] for part in parts.tolist())


def _renamed(held_NE: NDArray[np.float64], target: ExpertPlacement) -> ExpertPlacement:
    times_NE = _table(target, held_NE.shape[1])
    worth_EE = held_NE.T @ (times_NE > 0)
    replicas_E = times_NE.sum(axis=0)
    worth_EE[replicas_E[:, None] != replicas_E[None, :]] = _FORBIDDEN
    names, places = _best_assignment(worth_EE)
    name_of = dict(zip(places.tolist(), names.tolist(), strict=True))
    return tuple(tuple(sorted(name_of[expert] for expert in part)) for part in target)


def _table(target: ExpertPlacement, num_experts: int) -> NDArray[np.int64]:
    times_NE = np.zeros((len(target), num_experts), np.int64)
    for node, part in enumerate(target):
        for expert in part:
            times_NE[node, expert] += 1
    return times_NE


def _best_assignment(worth_NN: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    from scipy.optimize import linear_sum_assignment  # late: 37 MB and 0.5 s, which a dense run does not need

    rows, columns = linear_sum_assignment(worth_NN, maximize=True)
    return rows, columns
