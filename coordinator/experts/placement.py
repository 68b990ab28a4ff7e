"""Chooses the number of replicas of each expert, and the nodes that hold them, so that a loss is least probable. Pure.

A slot is a unit of work: an expert with r replicas, in r slots, has its tokens divided into r parts. A node that holds
an expert in two slots keeps one copy of it and computes two parts."""

import heapq
import math
import random
from collections.abc import Sequence

from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks, loss_probability
from shoal.protocol.errors import LocalError

FAILURE_PROBABILITY_ASSUMED = 0.05
"""The failure probability of each node, if none is given."""
SEARCHES = 3
"""The number of searches: each ends where no single change helps, often at a different placement."""
PATIENCE = 150
"""A search ends after this many tries without a gain."""
SLOTS_TRIED = 60
"""The number of slots above which a search ends after fewer tries, because each try takes longer."""


# --- how many ---


def replica_counts(loads: Sequence[float], *, num_slots: int, min_replicas: int) -> tuple[int, ...]:
    """Return the number of replicas of each expert that makes the busiest replica least busy. Each slot beyond the
    minimum goes to the expert with the largest load per replica so far. This is optimal: an expert that got a slot had
    at least the final largest load per replica at that time, so it needed the slot.

    Args:
        loads: the load of each expert, as tokens or any other measure, finite and >= 0.
        num_slots: the number of slots; all are used.
        min_replicas: the least number of replicas of each expert.
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


def busiest_replica_load_ratio(loads: Sequence[float], replicas: Sequence[int]) -> float:
    """Return the largest load per replica, divided by the mean load of a slot: 1 is ideal. Without any load the result
    is 1. Experts without replicas are ignored."""
    total, num_slots = math.fsum(loads), sum(replicas)
    if total <= 0.0 or num_slots == 0:
        return 1.0
    return max(load / count for load, count in zip(loads, replicas, strict=True) if count) * num_slots / total


def attainable_min_replicas(slots: Sequence[int], num_experts: int) -> int:
    """Return the largest number f for which each of the E experts can be on f different nodes.

    A node with c slots holds at most min(c, E) different experts. The sum of this over the nodes must be at least E f,
    and f at most the number of nodes. By Gale and Ryser this is enough, since all experts need equally many nodes."""
    return min(sum(1 for c in slots if c > 0), sum(min(c, num_experts) for c in slots) // num_experts)


# --- where, by rule ---


def mro(replicas: Sequence[int], slots: Sequence[int], *, order: Sequence[int] | None = None) -> ExpertPlacement:
    """Place replicas by the rule of maximum rank overlap; those left over fill the remaining slots in order.

    Experts come in ascending order of replicas, in groups. A group takes as many nodes as its rarest expert has
    replicas, and has as many experts as the smallest of those nodes has slots. So experts of the group are lost only if
    all its nodes fail.

    Args: order: the nodes, those for the rarest experts first; default: in ascending order.
    Source: Lazarus, arXiv 2407.04656, on expert placement. It does not say how the remaining slots are filled."""
    table = _Table(replicas, slots)
    nodes = [node for node in (range(len(slots)) if order is None else order) if slots[node]]
    experts = table.rarest_first
    while experts and nodes:
        block = nodes[: replicas[experts[0]]]
        group = experts[: min(slots[node] for node in block)]
        table.put_group(group, block)
        nodes, experts = nodes[len(block) :], experts[len(group) :]
    table.fill()
    return table.placement()


def spread(replicas: Sequence[int], slots: Sequence[int]) -> ExpertPlacement:
    """Deal the replicas to the nodes in turn, one expert after the other; the expert with most replicas comes first."""
    table = _Table(replicas, slots)
    nodes = [node for turn in range(max(slots)) for node, count in enumerate(slots) if turn < count]
    experts = [expert for expert in reversed(table.rarest_first) for _ in range(replicas[expert])]
    for expert, node in zip(experts, nodes, strict=True):
        table.put(expert, node)
    return table.placement()


def mend(
    current: Sequence[Sequence[int]],
    replicas: Sequence[int],
    slots: Sequence[int],
    *,
    failure_probability: Sequence[float],
    min_replicas: int,
) -> ExpertPlacement:
    """Repair `current`: nodes keep their experts as far as `replicas` and `slots` allow; the other replicas are dealt,
    reliable nodes first. A node keeps a second replica of an expert only if enough other replicas are left for
    `min_replicas` nodes. An expert may still end on fewer nodes, if too few have a free slot."""
    table = _Table(replicas, slots)
    order = sorted(range(len(slots)), key=lambda node: (failure_probability[node], node))
    for expert in table.rarest_first:
        for node in order:
            if expert in current[node] and table.room[node] and table.left[expert]:
                table.put(expert, node)
    for expert in table.rarest_first:
        needed = max(0, min_replicas - sum(expert in held for held in table.held))
        for node in order:
            for _ in range(current[node].count(expert) - 1):
                if table.room[node] and table.left[expert] > needed:
                    table.put(expert, node)
    table.deal(order, failure_probability)
    table.fill()
    return table.placement()


class _Table:
    """A placement under construction."""

    def __init__(self, replicas: Sequence[int], slots: Sequence[int]) -> None:
        assert sum(replicas) == sum(slots), "every slot holds a replica"
        self.left = list(replicas)
        self.room = list(slots)
        self.held: list[list[int]] = [[] for _ in slots]
        self.rarest_first = sorted(range(len(replicas)), key=lambda expert: (replicas[expert], expert))

    def placement(self) -> ExpertPlacement:
        return tuple(tuple(sorted(held)) for held in self.held)

    def put(self, expert: int, node: int) -> None:
        self.held[node].append(expert)
        self.room[node] -= 1
        self.left[expert] -= 1

    def put_group(self, group: Sequence[int], nodes: Sequence[int]) -> None:
        for node in nodes:
            for expert in group:
                self.put(expert, node)

    def put_groups(self, order: Sequence[int], *, size: int, num_groups: int) -> None:
        """Put groups of `size` experts, the rarest first, each on the first nodes of `order` that have room for the
        whole group. If too few nodes have such room, the group is smaller."""
        experts = self.rarest_first
        for _ in range(num_groups):
            rooms = sorted(filter(None, self.room), reverse=True)
            if not experts or not rooms:
                return
            count = min(self.left[experts[0]], len(rooms))
            fitting = min(size, rooms[count - 1])
            self.put_group(experts[:fitting], [node for node in order if self.room[node] >= fitting][:count])
            experts = experts[fitting:]

    def put_minimum(self, min_replicas: int) -> None:
        """Put each expert on the `min_replicas` nodes with most room. This works if any choice does (Gale, Ryser)."""
        for expert in self.rarest_first:
            for node in heapq.nsmallest(min_replicas, range(len(self.room)), key=lambda node: -self.room[node]):
                self.put(expert, node)

    def deal(self, order: Sequence[int], chances: Sequence[float]) -> None:
        """Put replicas one by one: always of the expert that is most probably lost so far, on the first node of `order`
        that has room and lacks this expert. Args: chances: the failure probability of each node."""
        lost = [1.0] * len(self.left)
        for node, held in enumerate(self.held):
            for expert in set(held):
                lost[expert] *= chances[node]
        waiting = [(-lost[expert], expert) for expert, left in enumerate(self.left) if left]
        heapq.heapify(waiting)
        nodes = [iter(order) for _ in self.left]  # a node that has no room, or has the expert, need not be tried again
        while waiting:
            p, expert = heapq.heappop(waiting)
            free = next((node for node in nodes[expert] if self.room[node] and expert not in self.held[node]), None)
            if free is not None:
                self.put(expert, free)
                if self.left[expert]:
                    heapq.heappush(waiting, (p * chances[free], expert))

    def fill(self) -> None:
        """Put the remaining replicas in the remaining slots, those of the rarest expert first."""
        experts = [expert for expert in self.rarest_first for _ in range(self.left[expert])]
        nodes = [node for node, room in enumerate(self.room) for _ in range(room)]
        for expert, node in zip(experts, nodes, strict=True):
            self.put(expert, node)


# --- where, by search ---


def place(
    replicas: Sequence[int],
    slots: Sequence[int],
    *,
    failure_probability: Sequence[float] | None = None,
    min_replicas: int,
    seed: int = 0,
    patience: int = PATIENCE,
) -> ExpertPlacement:
    """Put every replica in a slot, in the safest way found: `mro`, `spread`, or a mixture of groups and single experts.

    Args:
        replicas: int [E], the replicas of each expert, >= 1; they fill the slots exactly.
        slots: int [N], the slots of each node, >= 0.
        failure_probability: float [N], in [0, 1]; None: the same for all nodes.
        min_replicas: the least number of different nodes of each expert, at most `attainable_min_replicas`.
        patience: the search ends after this many tries without a gain.
    Returns: a placement with `min_replicas` nodes for each expert. Its probability of a loss is not above that of `mro`
    or `spread`, if these have `min_replicas` nodes for each expert, too."""
    chances = failure_probability or [FAILURE_PROBABILITY_ASSUMED] * len(slots)
    patience = min(patience, 1 + patience * SLOTS_TRIED // max(1, sum(slots)))
    rng = random.Random(seed)

    def built(order: Sequence[int], size: int, num_groups: int, *, minimum: int = 0) -> ExpertPlacement:
        table = _Table(replicas, slots)
        table.put_minimum(minimum)
        table.put_groups(order, size=size, num_groups=num_groups)
        table.deal(order, chances)
        table.fill()
        return table.placement()

    def rank(placement: ExpertPlacement) -> tuple[int, float, int]:
        """Return (number of experts on fewer than `min_replicas` nodes, probability of a loss, number of replicas on a
        node that already holds the expert): less is better."""
        masks = holder_masks(placement, len(replicas))
        holders = [mask.bit_count() for mask in masks]
        broken = sum(count < min_replicas for count in holders)
        return broken, loss_probability(masks, chances).probability, sum(slots) - sum(holders)

    reliable_first = sorted(range(len(slots)), key=lambda node: (chances[node], -slots[node], node))
    found = [mro(replicas, slots), spread(replicas, slots), built(reliable_first, 0, 0, minimum=min_replicas)]
    for _ in range(SEARCHES):
        order, size, num_groups = reliable_first, max(slots), len(replicas)
        found.append(built(order, size, num_groups))
        lowest, tries_left = rank(found[-1]), patience
        while tries_left:
            tries_left -= 1
            tried, tried_size, tried_groups = list(order), size, num_groups
            if rng.random() < 0.5:
                i, j = rng.randrange(len(order)), rng.randrange(len(order))
                tried[i], tried[j] = tried[j], tried[i]
            else:
                tried_size, tried_groups = rng.randint(1, max(slots)), rng.randint(0, len(replicas))
            placement = built(tried, tried_size, tried_groups)
            now = rank(placement)
            if now < lowest:
                tries_left = patience
            if now <= lowest:
                found[-1], lowest, order, size, num_groups = placement, now, tried, tried_size, tried_groups
    return min(found, key=rank)
