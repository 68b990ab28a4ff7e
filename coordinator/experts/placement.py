"""Which node holds which expert: the fewest ways to lose one.

Where the nodes are alike and the paper's premise holds its placement is optimal and there is nothing to search.
Everywhere else: many constructed starts, the best few of them annealed. On up to 12 nodes costs are exact.
"""

import random
from collections.abc import Callable, Sequence

from shoal.coordinator.experts.allocation import attainable_min_replicas
from shoal.coordinator.experts.constructions import levelled, mixed, mro, mro_fits, spread
from shoal.coordinator.experts.recovery import Placement, holder_masks, loss_of_masks
from shoal.coordinator.experts.search import Cost, ExactCost, SummedCost, UniformCost, anneal, part_twins

NODES_SEARCHED_EXACTLY_MAX = 12
"""A cost takes about 10 us then; each node more doubles it."""
FAILURE_PROBABILITY_ASSUMED = 0.05
"""Of each node, where nobody says and the number of failures does not do."""

_ROUNDS = ((3, 1_500), (8, 1_500), (8, 6_000))
"""(starts, iterations of each). The later ones only while MRO or spread is better at some number of failures: 1,000
settings of up to 12 nodes needed the second 20 times and the third 4 times."""
_UNEQUAL_ROUND = (4, 2_500)
_LARGE_ROUND = (1, 1_500)


def place(
    replicas: Sequence[int],
    slots: Sequence[int],
    *,
    failure_probability: Sequence[float] | None = None,
    min_replicas: int,
    seed: int = 0,
) -> Placement:
    """Put every replica in a slot.

    Args:
        replicas: int [E], of each expert, >= 1; they fill the slots exactly.
        slots: int [N], of each node, >= 0.
        failure_probability: float [N], in [0, 1]; None: all nodes alike.
        min_replicas: each expert gets so many different nodes, or as many as all of them can have at once. So fewer
            failures than that lose nothing.
    Returns: no expert twice on one node unless its replicas are more than the nodes, or a slot would do harm elsewhere.
    """
    num_experts = len(replicas)
    promised = min(min_replicas, attainable_min_replicas(slots, num_experts), *replicas)
    chances = list(failure_probability) if failure_probability is not None else None
    nodes_fail_alike = chances is None or len(set(chances)) == 1
    rng = random.Random(seed)
    is_small = len(slots) <= NODES_SEARCHED_EXACTLY_MAX
    if nodes_fail_alike and mro_fits(replicas, slots):
        placement = mixed(replicas, slots, order=range(len(slots)), num_groups=None, packed=False)
    elif not is_small:
        chances = chances or [FAILURE_PROBABILITY_ASSUMED] * len(slots)
        return _place_large(replicas, slots, chances, promised, rng)
    elif nodes_fail_alike:
        placement = _place_alike(replicas, slots, promised, rng)
    else:
        assert chances is not None
        starts = _starts(replicas, slots, chances, promised)
        cost = ExactCost(chance=chances, promised=promised)
        return part_twins(_improved(starts, num_experts, cost, _UNEQUAL_ROUND, 0.5, rng)[0], num_experts, cost)
    if is_small:
        # Its own figures are what it may not fall behind.
        placement = part_twins(placement, num_experts, _uniform_cost([placement], num_experts, promised))
    return placement


def _place_alike(replicas: Sequence[int], slots: Sequence[int], promised: int, rng: random.Random) -> Placement:
    starts = _starts(replicas, slots, [0.0] * len(slots), promised)
    cost = _uniform_cost(starts[:2], len(replicas), promised)
    for effort in _ROUNDS:
        starts = [*_improved(starts, len(replicas), cost, effort, 0.05, rng), *starts]
        if cost.is_met(holder_masks(starts[0], len(replicas))):
            break
    return starts[0]


def _uniform_cost(baselines: Sequence[Placement], num_experts: int, promised: int) -> UniformCost:
    """As good as the better of the baselines at each number of failures, and the promise kept."""
    num_nodes = len(baselines[0])
    plain = UniformCost(num_nodes=num_nodes, promised=promised, wanted_K=[1 << num_nodes] * (num_nodes + 1))
    counts = [plain.counts(holder_masks(placement, num_experts)) for placement in baselines]
    wanted = [0 if k < promised else min(at_k) for k, at_k in enumerate(zip(*counts, strict=True))]
    return UniformCost(num_nodes=num_nodes, promised=promised, wanted_K=wanted)


def _improved(
    starts: Sequence[Placement],
    num_experts: int,
    cost: Cost,
    effort: tuple[int, int],
    temperature: float,
    rng: random.Random,
) -> list[Placement]:
    """Anneal from the best starts of different holders. Returns: what came of each, the best first."""
    num_starts, iterations = effort
    ranked: dict[tuple[int, ...], tuple[float, int, Placement]] = {}
    for i, placement in enumerate(starts):
        masks = holder_masks(placement, num_experts)
        if (key := tuple(sorted(masks))) not in ranked:
            ranked[key] = (cost(masks), i, placement)
    found = [
        anneal(placement, num_experts, cost, iterations=iterations, temperature=temperature, rng=rng)
        for _, _, placement in sorted(ranked.values())[:num_starts]
    ]
    return [placement for _, placement in sorted(found, key=lambda each: each[0])]


def _starts(replicas: Sequence[int], slots: Sequence[int], chances: Sequence[float], promised: int) -> list[Placement]:
    """The paper's and spread first, then what lies between them."""
    nodes = range(len(slots))
    orders = [
        list(nodes),
        sorted(nodes, key=lambda node: (chances[node], -slots[node], node)),
        sorted(nodes, key=lambda node: (-slots[node], chances[node], node)),
    ]
    starts = [mro(replicas, slots), spread(replicas, slots), levelled(replicas, slots, min_replicas=promised)]
    num_groups_max = -(-len(replicas) // max(1, min(slots)))
    for order in dict.fromkeys(map(tuple, orders)):
        for num_groups in range(min(num_groups_max, len(slots)) + 1):
            starts += [
                mixed(replicas, slots, order=order, num_groups=num_groups, packed=packed) for packed in (False, True)
            ]
    return starts


def _place_large(
    replicas: Sequence[int], slots: Sequence[int], chances: Sequence[float], promised: int, rng: random.Random
) -> Placement:
    nodes = range(len(slots))
    by_chance = sorted(nodes, key=lambda node: (chances[node], -slots[node], node))
    makers: list[Callable[[], Placement]] = [
        lambda: mro(replicas, slots, order=by_chance),
        lambda: mixed(replicas, slots, order=by_chance, num_groups=None, packed=False),
        lambda: spread(replicas, slots),
        lambda: levelled(replicas, slots, min_replicas=promised),
    ]
    starts = [make() for make in makers]
    cost = SummedCost(chance=chances, promised=promised)
    starts += _improved(starts, len(replicas), cost, _LARGE_ROUND, 0.5, rng)

    def keeps_promise_then_loss(placement: Placement) -> tuple[int, float]:
        masks = holder_masks(placement, len(replicas))
        return sum(mask.bit_count() < promised for mask in masks), loss_of_masks(masks, chances).high

    return min(starts, key=keeps_promise_then_loss)
