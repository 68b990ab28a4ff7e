"""Decide whether to move experts now, and to where: every `LOOK_STEPS` steps and at every failure. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.experts.allocation import attainable_min_replicas, busiest_replica_load_ratio, replica_counts
from shoal.coordinator.experts.expert_placement import FAILURE_PROBABILITY_ASSUMED, place
from shoal.coordinator.experts.failure_records import rounded
from shoal.coordinator.experts.migration import fewest_fetches, num_fetches
from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks, loss_of_masks

BUSIER = 1.25
"""The placement stays while the busiest replica is at most this many times as busy as necessary."""
RISKIER = 4.0
"""The placement stays while a loss is at most this many times as probable as necessary."""
RISK_IGNORED = 1e-6
"""A loss less probable than this is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNode:
    """A live peer as a holder of experts."""

    slots: int
    """The limit on its experts; 0: it holds none after the next plan."""
    failure_probability: float = FAILURE_PROBABILITY_ASSUMED
    """The probability of failure before the next placement (`failure_records`), rounded to a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    placement: Mapping[str, tuple[int, ...]]
    """The experts in each peer's slots. An expert twice is two parts of the work and one copy."""
    min_replicas: int
    """The number of different holders of each held expert: as requested, or as the slots allow."""
    reason: str


def replan(
    current: Mapping[str, Sequence[int]],
    loads: Sequence[float],
    nodes: Mapping[str, ExpertNode],
    *,
    min_replicas: int,
    seed: int = 0,
) -> Replan:
    """Keep the placement while it is good enough; else repair it; else place anew with the fewest fetches.

    The result is deterministic and independent of the order of the mappings.

    Args:
        current: the experts in the slots of each peer, by the live plan; peers that are not in `nodes` are dead.
        loads: float [E], >= 0, measured and smoothed.
        min_replicas: different holders of each expert, >= 1; fewer if there are too few slots.
    """
    return _Decision(current, loads, nodes, min_replicas, seed).made()


class _Decision:
    def __init__(
        self,
        current: Mapping[str, Sequence[int]],
        loads: Sequence[float],
        nodes: Mapping[str, ExpertNode],
        min_replicas: int,
        seed: int,
    ) -> None:
        self.seed = seed
        self.peers = sorted(peer for peer in nodes if nodes[peer].slots > 0)
        self.slots = [nodes[peer].slots for peer in self.peers]
        self.chances = [rounded(nodes[peer].failure_probability) for peer in self.peers]
        self.live = {peer: tuple(experts) for peer, experts in current.items() if peer in nodes}
        self.experts = _kept(self.live, loads, self.slots)
        """The held experts, in order; from here on an expert is its index in this list."""
        self.loads = [loads[expert] for expert in self.experts]
        self.promised = min(min_replicas, attainable_min_replicas(self.slots, len(self.experts)))
        index = {expert: i for i, expert in enumerate(self.experts)}
        self.now = tuple(
            tuple(sorted(index[expert] for expert in self.live.get(peer, ()) if expert in index)) for peer in self.peers
        )
        self.was_at = {peer for peer, experts in current.items() if experts}

    def made(self) -> Replan:
        if not self.experts:
            return self._result(((),) * len(self.peers), "there are no slots for experts")
        replicas = replica_counts(self.loads, num_slots=sum(self.slots), min_replicas=self.promised)
        ratio = busiest_replica_load_ratio(self.loads, replicas)
        why = self._why_not_stay(ratio * BUSIER)
        if not why and self._loss(self.now) <= RISK_IGNORED:
            return self._result(self.now, "nothing to gain")
        glance = self._fresh(replicas, 0.1)  # a few ms, at every look: how safe could it be?
        if not why:
            if self._loss(self.now) <= self._loss_max(glance, RISKIER):
                return self._result(self.now, "nothing to gain")
            why = "a loss is needlessly probable"
        # The glance competes, too, or the placement found now could look bad at the next glance.
        fresh = min(self._fresh(replicas, 1.0), glance, key=self._loss)
        mended = self._mended(ratio)
        if (
            mended is not None
            and self._ratio(mended) <= ratio * BUSIER
            and self._loss(mended) <= self._loss_max(fresh, math.sqrt(RISKIER))
            and num_fetches(self.now, mended) <= num_fetches(self.now, fresh)
        ):
            return self._result(mended, f"{why}: mended")
        return self._result(fresh, f"{why}: placed anew")

    def _why_not_stay(self, ratio_max: float) -> str:
        """Return the reason why the placement must change; empty: it may stay."""
        if self.was_at != set(self.peers):
            return "peers came or went"
        if any(len(part) != count for part, count in zip(self.now, self.slots, strict=True)):
            return "slots changed"
        holders = [mask.bit_count() for mask in holder_masks(self.now, len(self.experts))]
        if min(holders) < self.promised:
            return "an expert has too few holders"
        if self._ratio(self.now) > ratio_max:
            return "the load moved"
        return ""

    def _loss_max(self, fresh: ExpertPlacement, riskier: float) -> float:
        return max(RISK_IGNORED, riskier * self._loss(fresh))

    def _fresh(self, replicas: Sequence[int], effort: float) -> ExpertPlacement:
        chances, least = self.chances, self.promised
        target = place(
            replicas, self.slots, failure_probability=chances, min_replicas=least, seed=self.seed, effort=effort
        )
        return fewest_fetches(self.now, target, kinds=list(zip(self.slots, self.chances, strict=True)))

    def _mended(self, ratio: float) -> ExpertPlacement | None:
        if 2 * sum(map(len, self.now)) < sum(self.slots):
            return None  # filling slots one by one is for few slots
        return mend(
            self.now,
            self.slots,
            self.loads,
            min_replicas=self.promised,
            # Halfway to the best, as for the loss: the next small change is then no reason to move again.
            ratio_max=ratio * (1.0 + BUSIER) / 2.0,
            failure_probability=self.chances,
        )

    def _ratio(self, placement: ExpertPlacement) -> float:
        counts = [0] * len(self.experts)
        for part in placement:
            for expert in part:
                counts[expert] += 1
        return busiest_replica_load_ratio(self.loads, counts)

    def _loss(self, placement: ExpertPlacement) -> float:
        return loss_of_masks(holder_masks(placement, len(self.experts)), self.chances).high

    def _result(self, placement: ExpertPlacement, reason: str) -> Replan:
        target = {
            peer: tuple(self.experts[expert] for expert in part)
            for peer, part in zip(self.peers, placement, strict=True)
        }
        return Replan(placement=target, min_replicas=self.promised, reason=reason)


def _kept(live: Mapping[str, Sequence[int]], loads: Sequence[float], slots: Sequence[int]) -> list[int]:
    """Return the experts to hold if there are fewer slots than experts: held ones first, then the most loaded."""
    held = {expert for experts in live.values() for expert in experts}
    ranked = sorted(range(len(loads)), key=lambda expert: (expert not in held, -loads[expert], expert))
    return sorted(ranked[: sum(slots)])


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
    table = _Mending(current, slots, loads, failure_probability)
    while (scarce := table.scarcest(min_replicas)) is not None:
        if not table.add(scarce, min_replicas):
            return None
    table.fill()
    for _ in range(len(loads) + sum(slots) // 8):
        if busiest_replica_load_ratio(loads, table.counts) <= ratio_max or not table.relieve(min_replicas):
            break
    return tuple(tuple(sorted(held)) for held in table.held)


class _Mending:
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
