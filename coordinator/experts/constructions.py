"""Placements of experts by rule: starts and baselines of the search. Pure.

`mro` is the paper's. It takes experts in ascending order of replicas, in groups as large as a node has slots. Each
group takes as many whole nodes as its rarest expert has replicas, so one set of nodes, and no other, loses the whole
group. `spread` deals the replicas of one expert after the other round the nodes. `levelled` gives each expert
`min_replicas` different holders wherever that is possible."""

import heapq
from collections.abc import Sequence

from shoal.coordinator.experts.recovery import ExpertPlacement


def mro_fits(replicas: Sequence[int], slots: Sequence[int]) -> bool:
    """True if the premise of the paper's proof holds: each group finds as many nodes as its rarest expert has replicas,
    and all slots are equal."""
    if len(set(slots)) != 1 or slots[0] == 0:
        return False
    return sum(sorted(replicas)[:: slots[0]]) <= len(slots)


def mro(replicas: Sequence[int], slots: Sequence[int], *, order: Sequence[int] | None = None) -> ExpertPlacement:
    """Place by maximum rank overlap; the remaining replicas fill the remaining slots in order. With unequal slots a
    group is as large as the smallest of its nodes.

    Args: order: the nodes, those for the rarest experts first; default: as they are.
    Source: Lazarus, arXiv 2407.04656, on expert placement. It does not say how the remaining slots are filled."""
    table = _Table(replicas, slots)
    table.put_groups(range(len(slots)) if order is None else order)
    node = 0
    for expert in _rarest_first(replicas):
        while table.left[expert]:
            while not table.room[node]:
                node += 1
            table.put(expert, node)
    return table.placement()


def mixed(
    replicas: Sequence[int], slots: Sequence[int], *, order: Sequence[int], num_groups: int | None, packed: bool
) -> ExpertPlacement:
    """Place the first `num_groups` groups (None: all) as `mro` does, and the other experts apart from each other.
    Args: packed: each replica goes to the fullest node that lacks the expert, not to the emptiest."""
    table = _Table(replicas, slots)
    table.put_groups(order, num_groups)
    table.deal(packed=packed)
    return table.placement()


def spread(replicas: Sequence[int], slots: Sequence[int]) -> ExpertPlacement:
    """Place one expert after the other, most replicas first, each replica on the next node with room."""
    table = _Table(replicas, slots)
    node = 0
    for expert in reversed(_rarest_first(replicas)):
        while table.left[expert]:
            while not table.room[node]:
                node = (node + 1) % len(slots)
            table.put(expert, node)
            node = (node + 1) % len(slots)
    return table.placement()


def levelled(replicas: Sequence[int], slots: Sequence[int], *, min_replicas: int) -> ExpertPlacement:
    """Place the minimum of each expert, then the rest, each replica on the node with the most room that lacks it. By
    Gale and Ryser this gives all experts `min_replicas` different holders if they can have them."""
    table = _Table(replicas, slots)
    for expert, count in enumerate(replicas):
        table.deal_one(expert, min(min_replicas, count), packed=False)
    table.deal(packed=False)
    return table.placement()


class _Table:
    def __init__(self, replicas: Sequence[int], slots: Sequence[int]) -> None:
        assert sum(replicas) == sum(slots), "every slot holds a replica"
        self.replicas = replicas
        self.left = list(replicas)
        self.room = list(slots)
        self.held: list[dict[int, int]] = [{} for _ in slots]
        """[N] of expert -> the number of times that the node holds it."""
        self.settled: list[set[int]] = [set() for _ in slots]
        """[N], the experts of each node that came in groups; they must stay."""

    def put(self, expert: int, node: int) -> None:
        self.held[node][expert] = self.held[node].get(expert, 0) + 1
        self.room[node] -= 1
        self.left[expert] -= 1

    def put_groups(self, order: Sequence[int], num_groups: int | None = None) -> None:
        nodes = [node for node in order if self.room[node]]
        experts = _rarest_first(self.replicas)
        while experts and nodes and num_groups != 0:
            block = nodes[: self.replicas[experts[0]]]
            size = min(self.room[node] for node in block)
            for node in block:
                for expert in experts[:size]:
                    self.put(expert, node)
                self.settled[node].update(experts[:size])
            nodes, experts = nodes[len(block) :], experts[size:]
            num_groups = None if num_groups is None else num_groups - 1

    def deal(self, *, packed: bool) -> None:
        """Place the remaining replicas, most replicas first: these experts have the least choice."""
        for expert in reversed(_rarest_first(self.replicas)):
            self.deal_one(expert, self.left[expert], packed=packed)
        for expert in range(len(self.left)):
            while self.left[expert]:
                self._squeeze_in(expert)

    def deal_one(self, expert: int, count: int, *, packed: bool) -> None:
        sign = 1 if packed else -1
        lacking = [(sign * room, node) for node, room in enumerate(self.room) if room and expert not in self.held[node]]
        for _, node in heapq.nsmallest(count, lacking):
            self.put(expert, node)

    def _squeeze_in(self, expert: int) -> None:
        """Place a replica where all nodes with room hold its expert: in another node's slot, or twice."""
        node = max(range(len(self.room)), key=lambda node: (self.room[node], -node))
        for other, held in enumerate(self.held):
            if expert not in held:
                for moved in sorted(held.keys() - self.held[node].keys() - self.settled[other]):
                    self._take(moved, other)
                    self.put(moved, node)
                    self.put(expert, other)
                    return
        self.put(expert, node)

    def _take(self, expert: int, node: int) -> None:
        self.held[node][expert] -= 1
        if not self.held[node][expert]:
            del self.held[node][expert]
        self.room[node] += 1
        self.left[expert] += 1

    def placement(self) -> ExpertPlacement:
        return tuple(tuple(expert for expert in sorted(held) for _ in range(held[expert])) for held in self.held)


def _rarest_first(replicas: Sequence[int]) -> list[int]:
    return sorted(range(len(replicas)), key=lambda expert: (replicas[expert], expert))
