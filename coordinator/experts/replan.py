"""Decides, every `LOOK_STEPS` steps and at every failure, whether experts move now, and where to. Pure."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.experts.failure_records import rounded
from shoal.coordinator.experts.placement import PATIENCE, busiest_replica_load_ratio, mend, place, replica_counts
from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks, loss_probability

BUSIER = 1.25
"""A placement may stay only if its busiest replica is at most this many times as busy as in the best placement."""
RISKIER = 4.0
"""A placement may stay only if a loss is at most this many times as probable as in the best placement found."""
RISK_IGNORED = 1e-6
"""Lower probabilities of a loss count as this one, and a placement with no higher one may stay."""
PATIENCE_AT_A_LOOK = 15
"""The comparison search for a safer placement ends after this many tries without a gain: 10 ms with ten nodes."""


def replan(
    current: Mapping[str, Sequence[int]],
    loads: Sequence[float],
    failure_probability: Mapping[str, float],
    *,
    slots: int,
    min_replicas: int,
) -> dict[str, tuple[int, ...]]:
    """Keep the placement while it is good enough; otherwise repair it, or place anew with the fewest fetches.

    Args:
        current: the experts in the slots of each peer by the live plan, peers that have left included.
        loads: float [E], >= 0, measured and smoothed.
        failure_probability: the probability that each live peer fails before the next placement; it is rounded here to
            a power of two.
        slots: the slots of each peer, enough for `min_replicas` replicas of each expert.
        min_replicas: the least number of different holders of each expert, from 1 to the number of peers.
    Returns: the experts in the slots of each live peer; it does not depend on the order of the mappings."""
    peers = sorted(failure_probability)
    chances = [rounded(failure_probability[peer]) for peer in peers]
    sizes = [slots] * len(peers)
    replicas = replica_counts(loads, num_slots=sum(sizes), min_replicas=min_replicas)
    ratio_best = busiest_replica_load_ratio(loads, replicas)
    now = tuple(tuple(sorted(current.get(peer, ()))) for peer in peers)
    counts = [sum(part.count(expert) for part in now) for expert in range(len(loads))]

    def loss(placement: ExpertPlacement) -> float:
        return max(RISK_IGNORED, loss_probability(holder_masks(placement, len(loads)), chances).probability)

    def placed(patience: int) -> ExpertPlacement:
        return place(replicas, sizes, failure_probability=chances, min_replicas=min_replicas, patience=patience)

    may_stay = (
        peers == sorted(peer for peer, experts in current.items() if experts)
        and [len(part) for part in now] == sizes
        and min(map(int.bit_count, holder_masks(now, len(loads)))) >= min_replicas
        and busiest_replica_load_ratio(loads, counts) <= BUSIER * ratio_best
    )
    if may_stay and (loss(now) <= RISK_IGNORED or loss(now) <= RISKIER * loss(placed(PATIENCE_AT_A_LOOK))):
        return dict(zip(peers, now, strict=True))
    chosen = fewest_fetches(now, placed(PATIENCE), kinds=chances)
    if 2 * sum(counts) >= sum(sizes):
        # The limits here and below are halfway to the best, so that the next small change does not move experts again.
        ratio_max = ratio_best * (1.0 + BUSIER) / 2.0
        near = nearest_counts(counts, loads, num_slots=sum(sizes), min_replicas=min_replicas, ratio_max=ratio_max)
        mended = mend(now, near, sizes, failure_probability=chances, min_replicas=min_replicas)
        if (
            min(map(int.bit_count, holder_masks(mended, len(loads)))) >= min_replicas
            and loss(mended) <= math.sqrt(RISKIER) * loss(chosen)
            and num_fetches(now, mended) <= num_fetches(now, chosen)
        ):
            chosen = mended
    return dict(zip(peers, chosen, strict=True))


# --- placed anew, with the fewest fetches ---


def num_fetches(current: Sequence[Collection[int]], target: Sequence[Collection[int]]) -> int:
    """Count the copies of experts that nodes lack for `target`. Args: current, target: [N], each node's experts."""
    return sum(len(set(after) - set(before)) for before, after in zip(current, target, strict=True))


def fewest_fetches(
    current: Sequence[Collection[int]], target: ExpertPlacement, *, kinds: Sequence[Hashable]
) -> ExpertPlacement:
    """Exchange nodes, and experts, in placement `target` so that few copies must be fetched.

    Nodes of one kind can exchange all their experts, and two experts with equally many replicas can exchange all their
    slots, without a change in load or safety. So there are two assignments: of nodes to the rows of `target`, and of
    experts to the sets of slots that one expert has in `target`. Each is solved exactly with the other fixed, in turns,
    until neither helps.

    Args: kinds: [N]; node i may take the row of node j if their kinds are equal and the rows equally long.
    Returns: a placement as good as `target` in every respect, with the same number of replicas of each expert.
    Source: Kuhn-Munkres, in scipy after Crouse (2016)."""
    num_experts = 1 + max((expert for part in (*current, *target) for expert in part), default=-1)
    held_NE = np.minimum(_times(current, num_experts), 1.0)
    kinds = [(kind, len(part)) for kind, part in zip(kinds, target, strict=True)]
    starts = [target, _renamed(held_NE, target)]
    # The turns can get stuck, so they also begin from random exchanges; not with many nodes, where that takes long.
    rng = np.random.default_rng(0)
    starts += [_renamed(rng.random(held_NE.shape), target) for _ in range(16 if len(target) <= 64 else 0)]
    found = []
    for placement in starts:
        fetches = num_fetches(current, placement) + 1
        while num_fetches(current, placement) < fetches:
            fetches = num_fetches(current, placement)
            parts = _assigned(held_NE @ (_times(placement, num_experts) > 0).T, kinds)
            placement = _renamed(held_NE, tuple(placement[part] for part in parts))
        found.append((fetches, placement))
    return min(found)[1]


def _renamed(held_NE: NDArray[np.float64], target: ExpertPlacement) -> ExpertPlacement:
    times_NE = _times(target, held_NE.shape[1])
    places = _assigned(held_NE.T @ (times_NE > 0), times_NE.sum(axis=0).tolist())
    name_of = {place: name for name, place in enumerate(places)}
    return tuple(tuple(sorted(name_of[expert] for expert in part)) for part in target)


def _times(placement: Sequence[Collection[int]], num_experts: int) -> NDArray[np.float64]:
    """Return float [N, E]: in how many of its slots each node holds each expert."""
    times_NE = np.zeros((len(placement), num_experts))
    for node, part in enumerate(placement):
        for expert in part:
            times_NE[node, expert] += 1.0
    return times_NE


def _assigned(worth_NN: NDArray[np.float64], kinds: Sequence[Hashable]) -> list[int]:
    """Return [N]: for each row its own column, of the same kind, so that the chosen `worth_NN` have the largest sum."""
    from scipy.optimize import linear_sum_assignment  # late: 37 MB and 0.5 s, which a dense run does not need

    number: dict[Hashable, int] = {}
    kind_N = np.array([number.setdefault(kind, len(number)) for kind in kinds])
    worth_NN = np.where(kind_N[:, None] == kind_N[None, :], worth_NN, -1e6)  # worse than any number of fetches
    _, columns = linear_sum_assignment(worth_NN, maximize=True)
    return [int(column) for column in columns]


# --- repaired ---


def nearest_counts(
    counts: Sequence[int], loads: Sequence[float], *, num_slots: int, min_replicas: int, ratio_max: float
) -> list[int]:
    """Change replica counts one by one, until they fill the slots and the busiest replica has at most `ratio_max` times
    a slot's mean load. Args: ratio_max: above that of the best counts; then each change leads towards these."""
    counts = [max(min_replicas, count) for count in counts]
    while sum(counts) != num_slots or busiest_replica_load_ratio(loads, counts) > ratio_max:
        if sum(counts) >= num_slots:
            spare = [expert for expert, count in enumerate(counts) if count > min_replicas]
            counts[min(spare, key=lambda expert: (loads[expert] / (counts[expert] - 1), expert))] -= 1
        if sum(counts) < num_slots:
            counts[max(range(len(counts)), key=lambda expert: (loads[expert] / counts[expert], -expert))] += 1
    return counts
