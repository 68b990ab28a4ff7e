"""The failures that a placement of experts survives: no expert may lose all of its holders. Pure.

Here an expert is the set of its holders (a mask: bit j for node j), and only minimal sets matter: if a larger set is
lost, so is the smaller. Sets that share no node, directly or through others, fail independently. Each such component is
solved by itself, exactly if it is small, else within bounds.

Families of failure sets are bitsets in one large int: bit S is set if the set of nodes S belongs to the family."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ExpertPlacement = tuple[tuple[int, ...], ...]
"""[N][slots of the node]: the expert in each slot, ascending. Twice on a node is two parts of the work and one copy."""

NODES_EXACT_MAX = 16
"""The most nodes of a component that is solved exactly: 65,536 sets of failures, about a millisecond."""
MASKS_EXACT_MAX = 12
"""The most masks of a larger component that is solved exactly: inclusion and exclusion over 4,096 unions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The probability that some expert loses all of its holders; `low == high` if it is exact."""

    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


def holder_masks(placement: Sequence[Iterable[int]], num_experts: int) -> list[int]:
    """Return the mask of each expert, bit j for node j; 0 without holders."""
    masks = [0] * num_experts
    for node, experts in enumerate(placement):
        for expert in experts:
            masks[expert] |= 1 << node
    return masks


def minimal_masks(masks: Iterable[int]) -> list[int]:
    """Return the masks that contain no other, each once, smallest first."""
    kept: list[int] = []
    for mask in sorted(set(masks), key=lambda mask: (mask.bit_count(), mask)):
        if not any(small & mask == small for small in kept):
            kept.append(mask)
    return kept


def recovery_by_failures(placement: Sequence[Sequence[int]], num_experts: int) -> tuple[float, ...] | None:
    """Return float [N + 1]: entry k is the probability of no loss if k nodes fail, all sets of that size alike; None if
    a component has more than `NODES_EXACT_MAX` nodes."""
    num_nodes = len(placement)
    masks = minimal_masks(holder_masks(placement, num_experts))
    if masks and not masks[0]:
        return (0.0,) * (num_nodes + 1)
    survivals = [1]  # Index k: the number of sets of k failures that the components so far survive.
    num_held = 0
    for component in _components(masks):
        nodes, local = _compressed(component)
        if len(nodes) > NODES_EXACT_MAX:
            return None
        num_held += len(nodes)
        lost = losing_sets(local, len(nodes))
        survived = [math.comb(len(nodes), k) - (lost & level).bit_count() for k, level in enumerate(levels(len(nodes)))]
        survivals = _product(survivals, survived)
    idle = num_nodes - num_held
    survivals = _product(survivals, [math.comb(idle, k) for k in range(idle + 1)])
    return tuple(count / math.comb(num_nodes, k) for k, count in enumerate(survivals))


def loss_probability(
    placement: Sequence[Sequence[int]], num_experts: int, failure_probability: Sequence[float]
) -> Loss:
    """Return the probability of a loss if nodes fail independently, each with its own probability."""
    return loss_of_masks(holder_masks(placement, num_experts), failure_probability)


def loss_of_masks(masks: Iterable[int], failure_probability: Sequence[float]) -> Loss:
    """Return the probability that all nodes of some mask fail."""
    smallest = minimal_masks(masks)
    if smallest and not smallest[0]:
        return Loss(low=1.0, high=1.0)
    parts = [_component_loss(component, failure_probability) for component in _components(smallest)]
    return Loss(low=_any_of([part.low for part in parts]), high=_any_of([part.high for part in parts]))


def _any_of(probabilities: Sequence[float]) -> float:
    """Return the probability of any of independent events, by logarithms, for losses as small as 1e-12."""
    if any(p >= 1.0 for p in probabilities):
        return 1.0
    return -math.expm1(math.fsum(math.log1p(-p) for p in probabilities))


# --- components ---


def _components(masks: Sequence[int]) -> list[list[int]]:
    """Return groups of masks that share nodes, directly or through others."""
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
    return [members for _, members in groups]


def nodes_of(mask: int) -> list[int]:
    return [node for node in range(mask.bit_length()) if mask >> node & 1]


def _compressed(masks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the nodes that occur, and the masks over these alone."""
    union = 0
    for mask in masks:
        union |= mask
    nodes = nodes_of(union)
    place = {node: i for i, node in enumerate(nodes)}
    return nodes, [sum(1 << place[node] for node in nodes_of(mask)) for mask in masks]


def _component_loss(masks: Sequence[int], failure_probability: Sequence[float]) -> Loss:
    nodes, local = _compressed(masks)
    chance = [failure_probability[node] for node in nodes]
    if len(nodes) <= NODES_EXACT_MAX:
        exact = weigh(losing_sets(local, len(nodes)), set_weights(chance))
        return Loss(low=exact, high=exact)
    if len(masks) <= MASKS_EXACT_MAX:
        exact = min(1.0, max(0.0, _inclusion_exclusion(local, chance)))
        return Loss(low=exact, high=exact)
    return _bounds(local, chance)


def _inclusion_exclusion(masks: Sequence[int], chance: Sequence[float]) -> float:
    terms = []
    for chosen in range(1, 1 << len(masks)):
        union = 0
        for i in nodes_of(chosen):
            union |= masks[i]
        sign = 1.0 if chosen.bit_count() % 2 else -1.0
        terms.append(sign * math.prod(chance[node] for node in nodes_of(union)))
    return math.fsum(terms)


def _bounds(masks: Sequence[int], chance: Sequence[float]) -> Loss:
    """Return bounds of the loss. Above: losses of experts only help each other (Harris 1960), so surviving all is at
    least the product. Below: de Caen (1997), sum of P(i)^2 / sum over j of P(i and j), or Bonferroni."""
    holds_EN = np.array([[mask >> node & 1 for node in range(len(chance))] for mask in masks], dtype=float)
    log_N = np.log(np.maximum(np.array(chance), 1e-300))
    log_E = holds_EN @ log_N
    both_EE = np.exp(log_E[:, None] + log_E[None, :] - (holds_EN * log_N) @ holds_EN.T)
    loss_E = np.exp(log_E)
    first = float(loss_E.sum())
    second = float((both_EE.sum() - np.trace(both_EE)) / 2.0)
    caen = float((loss_E**2 / np.maximum(both_EE.sum(axis=1), 1e-300)).sum())
    low = max(caen, first - second, float(loss_E.max()))
    high = _any_of([float(p) for p in loss_E])
    return Loss(low=min(low, high), high=high)


# --- sets of failures, as bits of one int ---


@lru_cache(maxsize=NODES_EXACT_MAX + 1)
def levels(num_nodes: int) -> tuple[int, ...]:
    """Return [N + 1]: entry k is the family of all sets of k nodes."""
    if num_nodes == 0:
        return (1,)
    below = levels(num_nodes - 1)
    half = 1 << (num_nodes - 1)
    # A set is without the last node, or with it: the latter are the upper half of the bits.
    return tuple(
        (below[k] if k < num_nodes else 0) | (below[k - 1] << half if k > 0 else 0) for k in range(num_nodes + 1)
    )


@lru_cache(maxsize=NODES_EXACT_MAX + 1)
def _containing(num_nodes: int) -> tuple[int, ...]:
    """Return [N]: entry j is the family of all sets with node j."""
    families = []
    for node in range(num_nodes):
        width = 1 << node
        family = ((1 << width) - 1) << width
        for larger in range(node + 1, num_nodes):
            family |= family << (1 << larger)
        families.append(family)
    return tuple(families)


def supersets(mask: int, num_nodes: int) -> int:
    """Return the family of all failure sets that contain every node of the mask."""
    family = (1 << (1 << num_nodes)) - 1
    containing = _containing(num_nodes)
    for node in nodes_of(mask):
        family &= containing[node]
    return family


def losing_sets(masks: Iterable[int], num_nodes: int) -> int:
    """Return the family of all failure sets that contain every node of some mask."""
    family = 0
    for mask in masks:
        family |= supersets(mask, num_nodes)
    return family


def set_weights(chance: Sequence[float]) -> NDArray[np.float64]:
    """Return float64 [2^N]: the probability that exactly the nodes of set S fail."""
    weights = np.ones(1)
    for p in chance:
        weights = np.concatenate([weights * (1.0 - p), weights * p])
    return weights


def weigh(family: int, weights: NDArray[np.float64]) -> float:
    raw = np.frombuffer(family.to_bytes((len(weights) + 7) // 8, "little"), dtype=np.uint8)
    return float(weights[np.unpackbits(raw, bitorder="little", count=len(weights)).astype(bool)].sum())


def _product(a: Sequence[int], b: Sequence[int]) -> list[int]:
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return product
