"""Simulated annealing over placements of experts, and its cost functions. Pure.

Counts and slots are fixed, so every move exchanges replicas between nodes: one pair, the pairs that give one expert the
holders of another, or all replicas of two nodes. (Losses coincide where all holders are shared; moving there one
replica at a time leads through worse placements.) A cost sees only the experts' holders, as masks. Budgets are
iterations, never seconds: the same seed gives the same placement on any machine."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.experts.recovery import (
    ExpertPlacement,
    holder_masks,
    levels,
    nodes_of,
    set_weights,
    supersets,
    weigh,
)

BROKEN = 1e3
"""The cost of each distinct set of holders below the promised size: more than any gain elsewhere."""
SHORT = 10.0
"""The cost of exceeding the wanted losses at some number of failures, per unit of probability."""
TWICE = 1e-6
"""The cost of an expert that is twice on one node: less than any set of failures, so it only breaks ties."""
ALIGN_SHARE, TRADE_SHARE = 0.3, 0.1
"""The shares of these moves; all others are single exchanges."""

Cost = Callable[[Sequence[int]], float]
"""(the holders of each expert, as masks) -> a finite cost."""


@dataclass(kw_only=True)
class UniformCost:
    """The probability of a loss if all nodes fail alike, averaged over the number of failed nodes; at most 12 nodes.
    Exceeding `wanted_K` costs extra: entry k is the largest wanted number of sets of k nodes with a loss."""

    num_nodes: int
    promised: int
    wanted_K: Sequence[int]
    _sets: dict[int, int] = field(default_factory=dict, repr=False)

    def __call__(self, masks: Sequence[int]) -> float:
        cost = 0.0
        for k, count in enumerate(self.counts(masks)):
            if count and 0 < k < self.num_nodes:
                number = math.comb(self.num_nodes, k)
                cost += count / number + SHORT * max(0, count - self.wanted_K[k]) / number
        return cost + BROKEN * _broken(masks, self.promised)

    def counts(self, masks: Sequence[int]) -> list[int]:
        """Return [N + 1]: entry k is the number of sets of k failed nodes with a loss."""
        lost = _losing(masks, self.num_nodes, self._sets)
        return [(lost & level).bit_count() for level in levels(self.num_nodes)]

    def is_met(self, masks: Sequence[int]) -> bool:
        counts = self.counts(masks)
        return all(counts[k] <= self.wanted_K[k] for k in range(self.num_nodes)) and not _broken(masks, self.promised)


@dataclass(kw_only=True)
class ExactCost:
    """The logarithm of the probability of a loss, for at most 12 nodes, each with its own failure probability."""

    chance: Sequence[float]
    promised: int
    _weights: NDArray[np.float64] = field(init=False, repr=False)
    _sets: dict[int, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._weights = set_weights(self.chance)

    def __call__(self, masks: Sequence[int]) -> float:
        lost = _losing(masks, len(self.chance), self._sets)
        return math.log(weigh(lost, self._weights) + 1e-300) + BROKEN * _broken(masks, self.promised)


@dataclass(kw_only=True)
class SummedCost:
    """The logarithm of the sum over distinct sets of holders: an upper bound, close where losses are rare."""

    chance: Sequence[float]
    promised: int
    _terms: dict[int, float] = field(default_factory=dict, repr=False)

    def __call__(self, masks: Sequence[int]) -> float:
        total, terms = 1e-300, self._terms
        broken = 0
        for mask in set(masks):
            term = terms.get(mask)
            if term is None:
                term = terms[mask] = self._term(mask)
            if term > 1.0:
                broken += 1
            else:
                total += term
        return math.log(total) + BROKEN * broken

    def _term(self, mask: int) -> float:
        if mask.bit_count() < self.promised:
            return 2.0  # larger than any probability
        return math.prod(self.chance[node] for node in nodes_of(mask))


def _losing(masks: Sequence[int], num_nodes: int, known: dict[int, int]) -> int:
    """Return the family of failure sets with a loss. Args: known: mask -> the sets that contain it, filled."""
    lost = 0
    for mask in set(masks):
        family = known.get(mask)
        if family is None:
            family = known[mask] = supersets(mask, num_nodes)
        lost |= family
    return lost


def _broken(masks: Sequence[int], promised: int) -> int:
    return sum(mask.bit_count() < promised for mask in set(masks))


def anneal(
    placement: ExpertPlacement, num_experts: int, cost: Cost, *, iterations: int, temperature: float, rng: random.Random
) -> tuple[float, ExpertPlacement]:
    """Search from `placement`. Returns: (cost with `TWICE`, placement) of the best one met, the start included."""
    table = _Table(placement, num_experts)
    if len(placement) < 2 or num_experts < 2:
        return cost(table.masks) + TWICE * table.num_twice(), placement
    now = best = cost(table.masks) + TWICE * table.num_twice()
    since_best: list[_Exchange] = []  # undone at the end, which is cheaper than a copy at every improvement
    for i in range(iterations):
        moves = table.propose(rng)
        if not moves:
            continue
        after = cost(table.masks) + TWICE * table.num_twice()
        heat = temperature * (1.0 - i / iterations) ** 2
        if after <= now or (heat > 0.0 and rng.random() < math.exp((now - after) / heat)):
            now = after
            since_best += moves
            if now < best - 1e-12:
                best = now
                since_best.clear()
        else:
            table.undo(moves)
    table.undo(since_best)
    return best, table.placement()


def part_twins(placement: ExpertPlacement, num_experts: int, cost: Cost) -> ExpertPlacement:
    """Separate experts that are twice on a node, by single exchanges that cost nothing."""
    table = _Table(placement, num_experts)
    now = cost(table.masks)
    for i, a in [(i, a) for i, experts in enumerate(placement) for a in sorted(set(experts)) if experts.count(a) > 1]:
        if table.times[a][i] > 1:
            for j, b in table.exchanges_apart(i, a):
                before = table.num_twice()
                table.exchange(i, a, j, b)
                if table.num_twice() < before and (after := cost(table.masks)) <= now + 1e-12:
                    now = min(now, after)
                    break
                table.exchange(i, b, j, a)
    return table.placement()


_Exchange = tuple[int, int, int, int]
"""(node, the expert it gives away, other node, the expert that it gives away)"""


class _Table:
    def __init__(self, placement: ExpertPlacement, num_experts: int) -> None:
        self.slots = [list(experts) for experts in placement]
        self.times = [[0] * len(placement) for _ in range(num_experts)]
        """[E][N]: the number of times that a node holds an expert."""
        for node, experts in enumerate(placement):
            for expert in experts:
                self.times[expert][node] += 1
        self.masks = holder_masks(placement, num_experts)
        self._num_slots = sum(map(len, placement))
        self._num_copies = sum(mask.bit_count() for mask in self.masks)

    def placement(self) -> ExpertPlacement:
        return tuple(tuple(sorted(slots)) for slots in self.slots)

    def num_twice(self) -> int:
        return self._num_slots - self._num_copies

    def propose(self, rng: random.Random) -> list[_Exchange]:
        """Make a random move. Returns: its exchanges, for `undo`; empty if there is nothing to exchange."""
        moves: list[_Exchange] = []
        kind = rng.random()
        if kind < ALIGN_SHARE:
            a, b = (int(rng.random() * len(self.masks)) for _ in range(2))
            if self.masks[a] != self.masks[b]:
                self._align(a, b, rng, moves)
            return moves
        i, j = (int(rng.random() * len(self.slots)) for _ in range(2))
        if i != j and kind < ALIGN_SHARE + TRADE_SHARE:
            self._trade(i, j, rng, moves)
        elif i != j and self.slots[i] and self.slots[j]:
            a, b = _any(self.slots[i], rng), _any(self.slots[j], rng)
            if a != b:
                self.exchange(i, a, j, b)
                moves.append((i, a, j, b))
        return moves

    def undo(self, moves: Sequence[_Exchange]) -> None:
        for i, a, j, b in reversed(moves):
            self.exchange(i, b, j, a)

    def exchanges_apart(self, i: int, a: int) -> list[tuple[int, int]]:
        """Return (node, expert): the exchanges for `a` on `i` after which neither expert is twice on its node."""
        return [
            (j, b)
            for j, held in enumerate(self.slots)
            if not self.masks[a] >> j & 1
            for b in sorted(set(held))
            if not self.masks[b] >> i & 1
        ]

    def _align(self, a: int, b: int, rng: random.Random, moves: list[_Exchange]) -> None:
        """Give `a` the holders of `b` as far as its replicas go; a displaced expert goes where `a` was."""
        leaving = nodes_of(self.masks[a] & ~self.masks[b])
        entering = nodes_of(self.masks[b] & ~self.masks[a])
        rng.shuffle(leaving)
        rng.shuffle(entering)
        for i, j in zip(leaving, entering, strict=False):
            others = [expert for expert in self.slots[j] if expert not in (a, b)]
            lacking = [expert for expert in others if not self.masks[expert] >> i & 1]
            if others:
                displaced = _any(lacking or others, rng)
                self.exchange(i, a, j, displaced)
                moves.append((i, a, j, displaced))

    def _trade(self, i: int, j: int, rng: random.Random, moves: list[_Exchange]) -> None:
        """Exchange all replicas of two nodes, up to the smaller one's slots."""
        mine, theirs = list(self.slots[i]), list(self.slots[j])
        rng.shuffle(mine)
        rng.shuffle(theirs)
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                self.exchange(i, a, j, b)
                moves.append((i, a, j, b))

    def exchange(self, i: int, a: int, j: int, b: int) -> None:
        self.slots[i][self.slots[i].index(a)] = b
        self.slots[j][self.slots[j].index(b)] = a
        self._shift(a, i, j)
        self._shift(b, j, i)

    def _shift(self, expert: int, giver: int, taker: int) -> None:
        times = self.times[expert]
        times[giver] -= 1
        if not times[giver]:
            self.masks[expert] &= ~(1 << giver)
            self._num_copies -= 1
        if not times[taker]:
            self.masks[expert] |= 1 << taker
            self._num_copies += 1
        times[taker] += 1


def _any(experts: Sequence[int], rng: random.Random) -> int:
    return experts[int(rng.random() * len(experts))]
