"""Computes which failures of nodes a placement of experts survives: each expert must keep a holder. Pure.

Here an expert is the set of its holders (a mask: bit j for node j). Only minimal sets matter: when all nodes of a
larger set fail, those of any set within it have failed. Sets that share nodes, directly or through other sets, form a
*component*. Components fail independently, so each is solved by itself: exactly if small, else by an upper bound."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ExpertPlacement = tuple[tuple[int, ...], ...]
"""The numbers of the experts in the slots of each of N nodes, ascending. A node with an expert in two slots keeps one
copy of it, and does two parts of its work."""

NODES_EXACT_MAX = 16
"""A component with at most this many nodes is solved exactly: 65,536 sets of failures, about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The probability that at least one expert loses all its holders."""

    probability: float
    is_exact: bool
    """False: the probability is an upper bound."""


def holder_masks(placement: Sequence[Iterable[int]], num_experts: int) -> list[int]:
    """Return the mask of holders of each expert, bit j for node j; 0: no holder."""
    masks = [0] * num_experts
    for node, experts in enumerate(placement):
        for expert in experts:
            masks[expert] |= 1 << node
    return masks


def minimal_masks(masks: Iterable[int]) -> list[int]:
    """Return those of `masks` that contain no other mask, without duplicates, the smallest first."""
    kept: list[int] = []
    for mask in sorted(set(masks), key=lambda mask: (mask.bit_count(), mask)):
        if not any(small & mask == small for small in kept):
            kept.append(mask)
    return kept


def loss_probability(masks: Iterable[int], failure_probability: Sequence[float]) -> Loss:
    """Return the probability that all nodes of at least one mask fail, if nodes fail independently.

    The bound for a large component treats its masks as independent. In truth the survival of one mask makes that of the
    others more probable (Harris 1960), so the true loss is not above the bound. Where losses are rare the difference is
    below 1 %."""
    smallest = minimal_masks(masks)
    if smallest and not smallest[0]:
        return Loss(probability=1.0, is_exact=True)
    independent: list[float] = []
    is_exact = True
    for nodes, local in _components(smallest):
        chance = tuple(failure_probability[node] for node in nodes)
        if len(local) > 1 and len(nodes) <= NODES_EXACT_MAX:
            independent.append(float(_set_weights(chance)[_losing_sets(local, len(nodes))].sum()))
        else:
            independent += [math.prod(chance[node] for node in _nodes_of(mask)) for mask in local]
            is_exact = is_exact and len(local) == 1
    if any(p >= 1.0 for p in independent):
        return Loss(probability=1.0, is_exact=True)
    # By logarithms, for losses as small as 1e-12.
    return Loss(probability=-math.expm1(math.fsum(math.log1p(-p) for p in independent)), is_exact=is_exact)


def recovery_by_failures(placement: Sequence[Sequence[int]], num_experts: int) -> tuple[float, ...] | None:
    """Return float [N + 1]: entry k is the probability that no expert is lost if k nodes fail and all sets of k nodes
    are equally probable. None: a component has more than `NODES_EXACT_MAX` nodes."""
    num_nodes = len(placement)
    masks = minimal_masks(holder_masks(placement, num_experts))
    if masks and not masks[0]:
        return (0.0,) * (num_nodes + 1)
    survivals = [1]
    """Entry k: how many sets of k nodes, from the components so far, can fail without the loss of an expert."""
    num_held = 0
    for nodes, local in _components(masks):
        if len(nodes) > NODES_EXACT_MAX:
            return None
        num_held += len(nodes)
        survived = np.flatnonzero(~_losing_sets(local, len(nodes)))
        survivals = _product(survivals, np.bincount(np.bitwise_count(survived), minlength=len(nodes) + 1).tolist())
    idle = num_nodes - num_held
    survivals = _product(survivals, [math.comb(idle, k) for k in range(idle + 1)])
    return tuple(count / math.comb(num_nodes, k) for k, count in enumerate(survivals))


def _components(masks: Iterable[int]) -> list[tuple[list[int], list[int]]]:
    """Return the components of `masks`, each as (its nodes, its masks with bit i for the i-th of its nodes)."""
    groups: list[tuple[int, list[int]]] = []
    for mask in masks:
        joined, members, apart = mask, [mask], []
        for union, group in groups:
            if union & mask:
                joined |= union
                members += group
            else:
                apart.append((union, group))
        groups = [*apart, (joined, members)]
    components = []
    for union, group in groups:
        nodes = _nodes_of(union)
        place = {node: 1 << i for i, node in enumerate(nodes)}
        components.append((nodes, [sum(place[node] for node in _nodes_of(mask)) for mask in group]))
    return components


def _nodes_of(mask: int) -> list[int]:
    nodes = []
    while mask:
        nodes.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return nodes


def _losing_sets(masks: Sequence[int], num_nodes: int) -> NDArray[np.bool_]:
    """Return bool [2^N], indexed by sets of nodes as masks: True if the set contains all nodes of one of `masks`."""
    lost = np.zeros(1 << num_nodes, np.bool_)
    lost[masks] = True
    for node in range(num_nodes):
        pairs = lost.reshape(-1, 2, 1 << node)  # without the node, and with it
        pairs[:, 1] |= pairs[:, 0]
    return lost


@lru_cache(maxsize=8)
def _set_weights(chance: tuple[float, ...]) -> NDArray[np.float64]:
    """Return float64 [2^N], indexed by sets of nodes as masks: the probability that exactly these nodes fail."""
    weights = np.ones(1)
    for p in chance:
        weights = np.concatenate([weights * (1.0 - p), weights * p])
    return weights


def _product(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Multiply two polynomials, given by their coefficients, in Python's integers: numpy's would overflow."""
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return product
