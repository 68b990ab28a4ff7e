"""Repair a placement of experts with few changes: copy lost experts, fill free slots, and move slots from the least
needed experts to the busiest until its load is within bounds. Pure."""

from collections.abc import Sequence

from shoal.coordinator.experts.allocation import busiest_replica_load_ratio
from shoal.coordinator.experts.recovery import ExpertPlacement


def mend(
    current: Sequence[Sequence[int]],
    slots: Sequence[int],
    loads: Sequence[float],
    *,
    min_replicas: int,
    ratio_max: float,
    failure_probability: Sequence[float],
) -> ExpertPlacement | None:
    """Repair a placement.

    Args:
        current: the experts of each live node, twice for two parts of the work; a node above its slots is cut.
        ratio_max: the `busiest_replica_load_ratio` at which moving ends.
    Returns: a placement with all slots full and each expert on `min_replicas` different nodes; None if single changes
    do not reach one."""
    table = _Table(current, slots, loads, failure_probability)
    while (scarce := table.scarcest(min_replicas)) is not None:
        if not table.add(scarce, min_replicas):
            return None
    table.fill()
    for _ in range(len(loads) + sum(slots) // 8):
        if busiest_replica_load_ratio(loads, table.counts) <= ratio_max or not table.relieve(min_replicas):
            break
    return tuple(tuple(sorted(held)) for held in table.held)


class _Table:
    def __init__(
        self, current: Sequence[Sequence[int]], slots: Sequence[int], loads: Sequence[float], chances: Sequence[float]
    ) -> None:
        self.slots, self.loads, self.chances = slots, loads, chances
        self.held = [[expert for expert in experts if expert < len(loads)] for experts in current]
        self.counts = [0] * len(loads)
        self.holders: list[set[int]] = [set() for _ in loads]
        for node, experts in enumerate(self.held):
            for expert in experts:
                self.counts[expert] += 1
                self.holders[expert].add(node)
        for node in range(len(slots)):
            while len(self.held[node]) > slots[node]:
                self._remove(min(self.held[node], key=lambda expert: (self._strain(expert), expert)), node)

    def scarcest(self, min_replicas: int) -> int | None:
        """Return the expert with the fewest holders, if it has too few; of equals the most loaded one."""
        scarce = [e for e, nodes in enumerate(self.holders) if len(nodes) < min_replicas]
        return min(scarce, key=lambda e: (len(self.holders[e]), -self.loads[e], e), default=None)

    def add(self, expert: int, min_replicas: int) -> bool:
        """Add one holder, in a free slot or in place of the least needed expert. Returns: False if impossible."""
        free = [
            (self.chances[node], len(held) - self.slots[node], node)
            for node, held in enumerate(self.held)
            if len(held) < self.slots[node] and node not in self.holders[expert]
        ]
        if free:
            self._put(expert, min(free)[2])
            return True
        for other in self._least_missed_first():
            if nodes := self._expendable_on(other, min_replicas) - self.holders[expert]:
                self._replace(other, expert, nodes)
                return True
        return False

    def fill(self) -> None:
        """Give free slots to the largest load per replica, on nodes without the expert if there are any."""
        free = [node for node in range(len(self.slots)) for _ in range(self.slots[node] - len(self.held[node]))]
        while free:
            best = min(
                (node in self.holders[expert], -self._load(expert), self.chances[node], expert, node)
                for node in sorted(set(free))
                for expert in range(len(self.loads))
            )
            *_, expert, node = best
            self._put(expert, node)
            free.remove(node)

    def relieve(self, min_replicas: int) -> bool:
        """Give the busiest expert one slot more. Returns: False if every other expert would become as busy."""
        busiest = max(range(len(self.loads)), key=lambda expert: (self._load(expert), -expert))
        for holders in (self.holders[busiest], set()):
            for other in self._least_missed_first():
                if self._strain(other) >= self._load(busiest):
                    break
                if other != busiest and (nodes := self._expendable_on(other, min_replicas) - holders):
                    self._replace(other, busiest, nodes)
                    return True
        return False

    def _least_missed_first(self) -> list[int]:
        return sorted(range(len(self.loads)), key=lambda expert: (self._strain(expert), expert))

    def _expendable_on(self, expert: int, min_replicas: int) -> set[int]:
        """Return the nodes that may give up one replica of the expert."""
        if len(self.holders[expert]) > min_replicas:
            return set(self.holders[expert])
        return {node for node in self.holders[expert] if self.held[node].count(expert) > 1}

    def _replace(self, expert: int, by: int, nodes: set[int]) -> None:
        node = min(nodes, key=lambda node: (self.chances[node], node))
        self._remove(expert, node)
        self._put(by, node)

    def _load(self, expert: int) -> float:
        return self.loads[expert] / self.counts[expert] if self.counts[expert] else self.loads[expert]

    def _strain(self, expert: int) -> float:
        """Return the load of each replica with one replica less."""
        return self.loads[expert] / max(1, self.counts[expert] - 1)

    def _put(self, expert: int, node: int) -> None:
        self.held[node].append(expert)
        self.counts[expert] += 1
        self.holders[expert].add(node)

    def _remove(self, expert: int, node: int) -> None:
        self.held[node].remove(expert)
        self.counts[expert] -= 1
        if expert not in self.held[node]:
            self.holders[expert].discard(node)
