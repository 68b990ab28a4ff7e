"""Choose which node holds which expert, so that the fewest sets of failures lose an expert. Pure.

Where the nodes are alike and the paper's premise holds, its placement is optimal. Elsewhere many placements are
constructed and the best few are annealed. On up to 12 nodes costs are exact."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.experts.allocation import attainable_min_replicas
from shoal.coordinator.experts.annealing import Cost, ExactCost, SummedCost, UniformCost, anneal, part_twins
from shoal.coordinator.experts.constructions import levelled, mixed, mro, mro_fits, spread
from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks, loss_of_masks

NODES_SEARCHED_EXACTLY_MAX = 12
"""A cost takes about 10 us for 12 nodes; each further node doubles the time."""
FAILURE_PROBABILITY_ASSUMED = 0.05
"""The failure probability of each node where none is given and one is needed."""

_ROUNDS = ((3, 1_500), (8, 1_500), (8, 1_500), (8, 4_000), (16, 4_000), (16, 4_000))
"""(starts, iterations of each). The later rounds run only while MRO or spread is better at some number of failures: 2
of 3,000 random settings needed the second, none more than the third."""


def place(
    replicas: Sequence[int],
    slots: Sequence[int],
    *,
    failure_probability: Sequence[float] | None = None,
    min_replicas: int,
    seed: int = 0,
    effort: float = 1.0,
) -> ExpertPlacement:
    """Put every replica in a slot.

    Args:
        replicas: int [E], of each expert, >= 1; they fill the slots exactly.
        slots: int [N], of each node, >= 0.
        failure_probability: float [N], in [0, 1]; None: all nodes alike.
        min_replicas: each expert gets this number of different nodes, or the largest that all can have at once.
        effort: >= 0, of the search; 0: rules only.
    Returns: a placement with no expert twice on one node, unless it has more replicas than there are nodes or
    separating them would do harm elsewhere."""
    chances = None if failure_probability is None else list(failure_probability)
    task = _Task(
        replicas=replicas,
        slots=slots,
        chances=chances or [FAILURE_PROBABILITY_ASSUMED] * len(slots),
        promised=min(min_replicas, attainable_min_replicas(slots, len(replicas)), *replicas),
        effort=effort,
        rng=random.Random(seed),
    )
    nodes_fail_alike = len(set(task.chances)) == 1
    is_small = len(slots) <= NODES_SEARCHED_EXACTLY_MAX
    if nodes_fail_alike and mro_fits(replicas, slots):
        fitting = task.mixed(range(len(slots)), None)
        # It may not fall behind its own figures.
        return part_twins(fitting, len(replicas), task.uniform_cost([fitting])) if is_small else fitting
    if not is_small:
        return _place_large(task)
    return _place_alike(task) if nodes_fail_alike else _place_unequal(task)


def _place_alike(task: "_Task") -> ExpertPlacement:
    """Place on nodes that fail alike: no worse than both rules at any number of failures, then better on average."""
    starts = [*task.rules(), *task.between()]
    cost = task.uniform_cost(starts[:2])
    found: list[ExpertPlacement] = []
    for round_ in _ROUNDS:
        # Each round starts from the same placements, since a new draw can escape where one got stuck.
        found += task.improved(starts, cost, round_, 0.05)
        if cost.is_met(task.masks(best := min(found, key=lambda placement: cost(task.masks(placement))))):
            break
    return part_twins(best, len(task.replicas), task.uniform_cost([best]))


def _place_unequal(task: "_Task") -> ExpertPlacement:
    """Place on few nodes that differ in slots or failure probability."""
    cost = ExactCost(chance=task.chances, promised=task.promised)
    starts = [*task.rules(), *task.between()]
    starts.append(task.ordered(cost))
    return part_twins(task.improved(starts, cost, (4, 2_500), 0.5)[0], len(task.replicas), cost)


def _place_large(task: "_Task") -> ExpertPlacement:
    """Place on many nodes: few starts, a sum as cost, and the bound of the loss for the final choice."""
    starts = task.rules()
    starts += [mro(task.replicas, task.slots, order=task.by_chance()), task.mixed(task.by_chance(), None)]
    starts += task.improved(starts, SummedCost(chance=task.chances, promised=task.promised), (1, 600), 0.5)

    def broken_then_loss(placement: ExpertPlacement) -> tuple[int, float]:
        masks = task.masks(placement)
        return sum(mask.bit_count() < task.promised for mask in masks), loss_of_masks(masks, task.chances).high

    return min(starts, key=broken_then_loss)


@dataclass(frozen=True, kw_only=True)
class _Task:
    replicas: Sequence[int]
    slots: Sequence[int]
    chances: Sequence[float]
    promised: int
    effort: float
    rng: random.Random

    def masks(self, placement: ExpertPlacement) -> list[int]:
        return holder_masks(placement, len(self.replicas))

    def mixed(self, order: Sequence[int], num_groups: int | None, *, packed: bool = False) -> ExpertPlacement:
        return mixed(self.replicas, self.slots, order=order, num_groups=num_groups, packed=packed)

    def by_chance(self) -> list[int]:
        return sorted(range(len(self.slots)), key=lambda node: (self.chances[node], -self.slots[node], node))

    def rules(self) -> list[ExpertPlacement]:
        """Return the paper's placement, spread, and the one that keeps the promise."""
        return [
            mro(self.replicas, self.slots),
            spread(self.replicas, self.slots),
            levelled(self.replicas, self.slots, min_replicas=self.promised),
        ]

    def between(self) -> list[ExpertPlacement]:
        """Return placements with the first groups as in MRO, for each number of groups, and the other experts apart."""
        nodes = range(len(self.slots))
        by_slots = sorted(nodes, key=lambda node: (-self.slots[node], self.chances[node], node))
        return [
            self.mixed(order, num_groups, packed=packed)
            for order in dict.fromkeys([tuple(nodes), tuple(self.by_chance()), tuple(by_slots)])
            for num_groups in range(self.num_groups_max() + 1)
            for packed in (False, True)
        ]

    def num_groups_max(self) -> int:
        return min(len(self.slots), -(-len(self.replicas) // max(1, min(self.slots))))

    def ordered(self, cost: Cost) -> ExpertPlacement:
        """Return the placement with the best order of nodes and number of groups found by exchanges of two nodes."""
        order, num_groups = self.by_chance(), self.num_groups_max()
        best = self.mixed(order, num_groups)
        lowest = cost(self.masks(best))
        for _ in range(round(300 * self.effort)):
            i, j = (int(self.rng.random() * len(order)) for _ in range(2))
            changed = list(order)
            changed[i], changed[j] = order[j], order[i]
            groups = int(self.rng.random() * (self.num_groups_max() + 1)) if i == j else num_groups
            placement = self.mixed(changed, groups)
            if (now := cost(self.masks(placement))) <= lowest:
                best, lowest, order, num_groups = placement, now, changed, groups
        return best

    def uniform_cost(self, baselines: Sequence[ExpertPlacement]) -> UniformCost:
        """Return a cost that wants the better of the baselines at each number of failures, and the promise."""
        size = len(self.slots)
        plain = UniformCost(num_nodes=size, promised=self.promised, wanted_K=[1 << size] * (size + 1))
        counts = [plain.counts(self.masks(placement)) for placement in baselines]
        wanted = [0 if k < self.promised else min(at_k) for k, at_k in enumerate(zip(*counts, strict=True))]
        return UniformCost(num_nodes=size, promised=self.promised, wanted_K=wanted)

    def improved(
        self, starts: Sequence[ExpertPlacement], cost: Cost, round_: tuple[int, int], temperature: float
    ) -> list[ExpertPlacement]:
        """Anneal from the best starts with different holders. Returns: the results, the best first."""
        num_starts, iterations = round_
        iterations = round(self.effort * min(iterations, 60 * sum(self.slots)))  # small cases are solved long before
        ranked: dict[tuple[int, ...], tuple[float, int, ExpertPlacement]] = {}
        for i, placement in enumerate(starts):
            masks = self.masks(placement)
            if (key := tuple(sorted(masks))) not in ranked:
                ranked[key] = (cost(masks), i, placement)
        found = [
            anneal(placement, len(self.replicas), cost, iterations=iterations, temperature=temperature, rng=self.rng)
            for _, _, placement in sorted(ranked.values())[:num_starts]
        ]
        return [placement for _, placement in sorted(found, key=lambda each: each[0])]
