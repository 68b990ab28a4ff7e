"""Turns what a search has found into what a live swarm can do in one plan: enough holders of each stage stay in it.

A peer that comes to a stage fetches its state from those that stay, in seconds to minutes, and a stage whose last
holder dies takes the whole run back to a snapshot: newcomers do not count until they have the state. The search knows
nothing of that, and its result with some devices put back may be worse than what there is. So moves that keep enough
holders are climbed from there, and from the current placement, by the compiled objective. What one plan may not do a
later one can.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.allocate.genome import LEFT_OUT, Assignment
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement

EVALUATIONS_MAX = 4000
"""Each climb with up to `DEVICES` devices takes so many evaluations, 0.2 s of one core; with more devices, in
proportion fewer."""
DEVICES = 64
TRIED_DEVICES = 128
"""Where there are more devices, the fastest one goes back and no other is tried."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """What one plan must keep, by stage."""

    home: Assignment
    stayers: tuple[int, ...]
    """How many holders of each stage's state must stay."""

    def broken(self, at: Assignment, k: int) -> bool:
        """Whether too few holders of stage k stay in `at`."""
        return int(((self.home == k) & (at == k)).sum()) < self.stayers[k]

    def keep(self, at: Assignment, device: int) -> bool:
        """Whether the stage that `device` has in `at` cannot let it go."""
        k = int(at[device])
        return int(self.home[device]) == k and int(((self.home == k) & (at == k)).sum()) <= self.stayers[k]


def best_with_stayers(
    evaluator: ThroughputEvaluator, current: Placement, found: Placement, *, stay: float, holders_min: int = 1
) -> tuple[Placement, float]:
    """The best placement that keeps enough holders.

    Args:
        evaluator: of the swarm, with `current` as its current placement.
        stay: the part of each stage's holders that stays there, rounded up.
        holders_min: no stage that has as many holders may be left with fewer, not even until newcomers have its state.
    Returns: (placement with the bounds of `current`, its seconds a step, what moving costs included).
    """
    home = evaluator.assignment_of(current)
    needs = _Needs(
        home,
        tuple(max(math.ceil(stay * len(stage)), min(len(stage), holders_min)) for stage in current.stages),
    )
    goal = evaluator.assignment_of(found)
    _put_back(evaluator, goal, needs, current.bounds)
    climbed = [_climb(evaluator, start, needs, current.bounds) for start in (goal, home.copy())]
    seconds, best = min(climbed, key=lambda one: one[0])
    stages = tuple(tuple(int(d) for d in (best == k).nonzero()[0]) for k in range(len(current.stages)))
    return Placement(stages=stages, bounds=current.bounds), seconds


def _put_back(evaluator: ThroughputEvaluator, goal: Assignment, needs: _Needs, bounds: Sequence[int]) -> None:
    """Send leavers back home while their stage lacks holders, each time the one that costs least. `goal` is changed.

    A device that goes back may be missed at the stage that it leaves. It never leaves home again, so this loop ends.
    """
    while lacking := [k for k in range(len(needs.stayers)) if needs.broken(goal, k)]:
        for k in lacking:
            leavers = [int(d) for d in ((needs.home == k) & (goal != k)).nonzero()[0]]
            while needs.broken(goal, k):
                back = min(leavers, key=lambda d: (_price(evaluator, goal, d, k, bounds), d))
                leavers.remove(back)
                goal[back] = k


def _price(evaluator: ThroughputEvaluator, at: Assignment, device: int, k: int, bounds: Sequence[int]) -> float:
    """What it costs to send `device` back to stage k."""
    if len(at) > TRIED_DEVICES:
        return -float(evaluator.topology.flop_per_s[device])
    return _moved(evaluator, at, device, k, bounds)


def _moved(evaluator: ThroughputEvaluator, at: Assignment, device: int, k: int, bounds: Sequence[int]) -> float:
    """The seconds a step with `device` in stage `k`."""
    before, at[device] = int(at[device]), k
    seconds = evaluator.evaluate(at, bounds)
    at[device] = before
    return seconds


def _climb(
    evaluator: ThroughputEvaluator, at: Assignment, needs: _Needs, bounds: Sequence[int]
) -> tuple[float, Assignment]:
    """Make single moves, to another stage or to none, always the first that helps, until none does. `at` is changed."""
    seconds, left = evaluator.evaluate(at, bounds), EVALUATIONS_MAX * DEVICES // max(DEVICES, len(at))
    helped = True
    while helped and left > 0:
        helped = False
        for device in range(len(at)):
            here = int(at[device])
            if here >= 0 and needs.keep(at, device):
                continue
            for k in (*range(len(needs.stayers)), LEFT_OUT):
                if k == here or (here >= 0 and needs.keep(at, device)):
                    continue
                left -= 1
                moved_s = _moved(evaluator, at, device, k, bounds)
                if moved_s < seconds:
                    at[device], here, seconds, helped = k, k, moved_s, True
            if left <= 0:
                break
    return seconds, at
