"""Turn a search result into moves that one plan may make: enough holders of each stage stay in it.

A newcomer to a stage does not count as a holder until it has fetched the state from the stayers. The search ignores
this, and its result with some devices put back may be worse than the current placement. So a hill climb starts from
there, and one from the current placement, over moves that keep enough holders. A later plan can do the rest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.allocate.evolution import LEFT_OUT, Assignment
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator, assignment_of
from shoal.coordinator.cost.placement import Placement

EVALUATIONS_MAX = 4000
"""The evaluations of a climb with up to `DEVICES` devices, 0.2 s of one core; proportionally fewer with more."""
DEVICES = 64
TRIED_DEVICES = 128
"""The limit on devices up to which all are tried; above it the fastest goes back."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """The holders that one plan must keep, by stage."""

    home: Assignment
    stayers: tuple[int, ...]

    def broken(self, at: Assignment, k: int) -> bool:
        """True if too few holders of stage k stay in `at`."""
        return int(((self.home == k) & (at == k)).sum()) < self.stayers[k]

    def keep(self, at: Assignment, device: int) -> bool:
        """True if the stage of `device` in `at` cannot let it go."""
        k = int(at[device])
        return int(self.home[device]) == k and int(((self.home == k) & (at == k)).sum()) <= self.stayers[k]


def best_with_stayers(
    evaluator: ThroughputEvaluator, current: Placement, found: Placement, *, stay: float, holders_min: int
) -> tuple[Placement, float]:
    """Return the best placement that keeps enough holders.

    Args:
        evaluator: of the swarm, with `current` as its current placement.
        stay: the part of each stage's holders that stays, rounded up.
        holders_min: a stage with this many holders keeps at least as many, even until newcomers have its state.
    Returns: (placement with the bounds of `current`, its seconds a step, the cost of moving included)."""
    home = assignment_of(evaluator.num_devices, current)
    needs = _Needs(
        home,
        tuple(max(math.ceil(stay * len(stage)), min(len(stage), holders_min)) for stage in current.stages),
    )
    goal = assignment_of(evaluator.num_devices, found)
    _put_back(evaluator, goal, needs, current.bounds)
    climbed = [_climb(evaluator, start, needs, current.bounds) for start in (goal, home.copy())]
    seconds, best = min(climbed, key=lambda one: one[0])
    stages = tuple(tuple(int(d) for d in (best == k).nonzero()[0]) for k in range(len(current.stages)))
    return Placement(stages=stages, bounds=current.bounds), seconds


def _put_back(evaluator: ThroughputEvaluator, goal: Assignment, needs: _Needs, bounds: Sequence[int]) -> None:
    """Send leavers back home while their stage lacks holders, the one that costs least first. `goal` is changed. A
    device that went back never leaves home again, so the loop ends."""
    while lacking := [k for k in range(len(needs.stayers)) if needs.broken(goal, k)]:
        for k in lacking:
            leavers = [int(d) for d in ((needs.home == k) & (goal != k)).nonzero()[0]]
            while needs.broken(goal, k):
                back = min(leavers, key=lambda d: (_price(evaluator, goal, d, k, bounds), d))
                leavers.remove(back)
                goal[back] = k


def _price(evaluator: ThroughputEvaluator, at: Assignment, device: int, k: int, bounds: Sequence[int]) -> float:
    if len(at) > TRIED_DEVICES:
        return -float(evaluator.topology.flop_per_s[device])
    return _moved(evaluator, at, device, k, bounds)


def _moved(evaluator: ThroughputEvaluator, at: Assignment, device: int, k: int, bounds: Sequence[int]) -> float:
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
