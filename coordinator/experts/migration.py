"""From one placement to another: who takes which part of it, and in which order experts are fetched and dropped.

A placement says what *some* nodes hold. Nodes of one kind (slots, chance of failure) can take each other's part, and
experts with equally many replicas can change places, without touching anything that a placement is good for. So the
fewest fetches are an assignment of parts to nodes and of names to experts; each is solved exactly given the other.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.experts.recovery import Placement

_FORBIDDEN = -1e6
"""Worth of giving a part to a node of another kind: any number of fetches is better."""
SPARE_SLOTS = 1
"""Room beside a node's slots for the expert that is being fetched while the one it replaces is still needed."""
_RESTARTS, _NODES_RESTARTED_MAX = 16, 64
"""Of the turns, from random names, since they can stop short; half a millisecond each with ten nodes."""


def num_fetches(current: Sequence[Collection[int]], target: Sequence[Collection[int]]) -> int:
    """Copies that nodes lack. Args: both [N], experts on each node; twice on a node is one copy."""
    return sum(len(set(after) - set(before)) for before, after in zip(current, target, strict=True))


def assign_parts(
    current: Sequence[Collection[int]], target: Placement, *, kinds: Sequence[Hashable] | None = None
) -> Placement:
    """Give the parts of `target` to nodes so that the fewest copies are fetched; exact.

    Args: kinds: [N]; node i may take the part of node j if their kinds are equal. Default: if their slots are.
    Source: Kuhn-Munkres, in scipy as by Crouse (2016).
    """
    kinds = [len(part) for part in target] if kinds is None else kinds
    return _assigned(_held(current, target), target, kinds)


def fewest_fetches(
    current: Sequence[Collection[int]], target: Placement, *, kinds: Sequence[Hashable] | None = None
) -> Placement:
    """`assign_parts`, and experts with equally many replicas change names, in turns until neither helps.

    Returns: a placement as good as `target` in every respect, with the same replicas of each expert.
    """
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


def _held(current: Sequence[Collection[int]], target: Placement) -> NDArray[np.float64]:
    """float [N, E]: 1 where the node has a copy."""
    num_experts = 1 + max((expert for part in (*current, *target) for expert in part), default=-1)
    held_NE = np.zeros((len(target), num_experts))
    for node, experts in enumerate(current):
        held_NE[node, list(experts)] = 1.0
    return held_NE


def _assigned(held_NE: NDArray[np.float64], target: Placement, kinds: Sequence[Hashable]) -> Placement:
    part_NE = _table(target, held_NE.shape[1]) > 0
    worth_NN = held_NE @ part_NE.T
    number: dict[Hashable, int] = {}
    kind_N = np.array([number.setdefault(kind, len(number)) for kind in kinds])
    worth_NN[kind_N[:, None] != kind_N[None, :]] = _FORBIDDEN
    _, parts = _best_assignment(worth_NN)
    return tuple(target[part] for part in parts.tolist())


def _renamed(held_NE: NDArray[np.float64], target: Placement) -> Placement:
    times_NE = _table(target, held_NE.shape[1])
    worth_EE = held_NE.T @ (times_NE > 0)
    replicas_E = times_NE.sum(axis=0)
    worth_EE[replicas_E[:, None] != replicas_E[None, :]] = _FORBIDDEN
    names, places = _best_assignment(worth_EE)
    name_of = dict(zip(places.tolist(), names.tolist(), strict=True))
    return tuple(tuple(sorted(name_of[expert] for expert in part)) for part in target)


def _table(target: Placement, num_experts: int) -> NDArray[np.int64]:
    times_NE = np.zeros((len(target), num_experts), np.int64)
    for node, part in enumerate(target):
        for expert in part:
            times_NE[node, expert] += 1
    return times_NE


# --- make before break ---


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Fetch:
    expert: int
    to: str
    source: str | None
    """Who has it by then; None: nobody alive, take it from a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Drop:
    expert: int
    peer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """All fetches at once, at most one a peer; when they are done, the drops."""

    fetches: tuple[Fetch, ...]
    drops: tuple[Drop, ...]


def transition(
    current: Mapping[str, Collection[int]],
    target: Mapping[str, Collection[int]],
    *,
    slots: Mapping[str, int],
    min_replicas: int,
) -> tuple[Wave, ...]:
    """In which order to get there while everything goes on.

    At every moment each expert has at least as many holders as the least of: before, after, `min_replicas`. Scarce
    experts come first. A peer holds at most `SPARE_SLOTS` more than its slots, unless all wait for each other.

    Args: current: what live peers hold; who is not in `target` goes and drops everything. slots: of each peer.
    """
    moving = _Moving(current, target, slots, min_replicas)
    waves = []
    while moving.lacking or moving.surplus:
        fetches = moving.fetch(SPARE_SLOTS)
        drops = moving.drop()
        if not fetches and not drops:
            fetches, drops = moving.fetch_one(), moving.drop()
        waves.append(Wave(fetches=tuple(fetches), drops=tuple(drops)))
    return tuple(waves)


class _Moving:
    def __init__(
        self,
        current: Mapping[str, Collection[int]],
        target: Mapping[str, Collection[int]],
        slots: Mapping[str, int],
        min_replicas: int,
    ) -> None:
        peers = sorted({*current, *target})
        now = {peer: set(current.get(peer, ())) for peer in peers}
        then = {peer: set(target.get(peer, ())) for peer in peers}
        self.room = {peer: slots.get(peer, 0) - len(now[peer]) for peer in peers}
        self.lacking = {peer: lacks for peer in peers if (lacks := then[peer] - now[peer])}
        self.surplus = {(expert, peer) for peer in peers for expert in now[peer] - then[peer]}
        experts = sorted(set().union(*now.values(), *then.values()))
        self.holders = {e: {peer for peer in peers if e in now[peer]} for e in experts}
        self.needed = {e: min(min_replicas, sum(e in then[peer] for peer in peers)) for e in experts}
        self.waiting = Counter(expert for expert, _ in self.surplus)
        self.uploads = dict.fromkeys(peers, 0)

    def fetch(self, spare: int) -> list[Fetch]:
        """Each peer with room takes what is scarcest, then what most others wait to drop."""
        ready = {expert: sorted(holders) for expert, holders in self.holders.items()}
        wanted = [peer for peer in sorted(self.lacking) if self.room[peer] + spare > 0]
        return [self._take(min(self.lacking[peer], key=self._urgency), peer, ready) for peer in wanted]

    def fetch_one(self) -> list[Fetch]:
        """All are full and wait for each other: somebody makes room for one more."""
        _, expert, peer = min(
            (self._urgency(expert), expert, peer) for peer, lacks in self.lacking.items() for expert in lacks
        )
        return [self._take(expert, peer, {e: sorted(holders) for e, holders in self.holders.items()})]

    def _urgency(self, expert: int) -> tuple[int, int, int]:
        return min(len(self.holders[expert]), self.needed[expert]), -self.waiting[expert], expert

    def _take(self, expert: int, peer: str, ready: Mapping[int, Sequence[str]]) -> Fetch:
        source = min(ready[expert], key=lambda holder: (self.uploads[holder], holder), default=None)
        if source is not None:
            self.uploads[source] += 1
        self.holders[expert].add(peer)
        self.room[peer] -= 1
        self.lacking[peer].discard(expert)
        if not self.lacking[peer]:
            del self.lacking[peer]
        return Fetch(expert=expert, to=peer, source=source)

    def drop(self) -> list[Drop]:
        """Whatever others hold often enough, the fullest peers first."""
        dropped = []
        for expert, peer in sorted(self.surplus, key=lambda each: (self.room[each[1]], each)):
            if len(self.holders[expert]) > self.needed[expert]:
                self.holders[expert].discard(peer)
                self.surplus.discard((expert, peer))
                self.waiting[expert] -= 1
                self.room[peer] += 1
                dropped.append(Drop(expert=expert, peer_id=peer))
        return dropped


def _best_assignment(worth_NN: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows and columns of the pairs whose worth adds up to most."""
    from scipy.optimize import linear_sum_assignment  # late: 37 MB and 0.5 s, which a dense run has no use for

    rows, columns = linear_sum_assignment(worth_NN, maximize=True)
    return rows, columns
