"""From what a search has found to what a live swarm can do in one plan: enough holders of each stage stay in it.

Who comes to a stage fetches its state from those who stay. The search knows nothing of that, and what it found with
some put back may be worse than what there is; so moves that keep enough are climbed from there, and from the current
placement, by the compiled objective. What one plan may not do a later one can.
"""

import math
from collections.abc import Sequence

from shoal.coordinator.allocate.genome import LEFT_OUT, Assignment
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement

EVALUATIONS_MAX = 4000
"""Of each climb with up to `DEVICES` devices, 0.2 s of one core; in proportion fewer with more."""
DEVICES = 64
TRIED_DEVICES = 128
"""Among more, who goes back is the fastest, untried."""


def best_with_stayers(
    evaluator: ThroughputEvaluator, current: Placement, found: Placement, *, stay: float
) -> tuple[Placement, float]:
    """Args:
        evaluator: of the swarm, with `current` as its current placement.
        stay: the part of each stage's holders that stays there, rounded up.
    Returns: (placement with the bounds of `current`, its seconds a step, what moving costs included).
    """
    home = evaluator.assignment_of(current)
    needed = [math.ceil(stay * len(stage)) for stage in current.stages]
    goal = evaluator.assignment_of(found)
    _put_back(evaluator, home, goal, needed, current.bounds)
    climbed = [_climb(evaluator, home, start, needed, current.bounds) for start in (goal, home.copy())]
    seconds, best = min(climbed, key=lambda one: one[0])
    stages = tuple(tuple(int(d) for d in (best == k).nonzero()[0]) for k in range(len(current.stages)))
    return Placement(stages=stages, bounds=current.bounds), seconds


def _put_back(
    evaluator: ThroughputEvaluator, home: Assignment, goal: Assignment, needed: Sequence[int], bounds: Sequence[int]
) -> None:
    """In `goal`, one leaver after the other back home while too few stay there, each time the one that costs least."""
    for k, least in enumerate(needed):
        leavers = [int(d) for d in ((home == k) & (goal != k)).nonzero()[0]]
        while int(((home == k) & (goal == k)).sum()) < least:
            back = min(leavers, key=lambda d: (_price(evaluator, goal, d, k, bounds), d))
            leavers.remove(back)
            goal[back] = k


def _price(evaluator: ThroughputEvaluator, at: Assignment, device: int, k: int, bounds: Sequence[int]) -> float:
    if len(at) > TRIED_DEVICES:
        return -float(evaluator.topology.flop_per_s[device])
    return _moved(evaluator, at, device, k, bounds)


def _moved(evaluator: ThroughputEvaluator, at: Assignment, device: int, k: int, bounds: Sequence[int]) -> float:
    """Seconds a step with `device` in stage `k`."""
    before, at[device] = int(at[device]), k
    seconds = evaluator.evaluate(at, bounds)
    at[device] = before
    return seconds


def _climb(
    evaluator: ThroughputEvaluator, home: Assignment, at: Assignment, needed: Sequence[int], bounds: Sequence[int]
) -> tuple[float, Assignment]:
    """Single moves, to another stage or to none, the first that helps, until none does. `at` is changed."""
    seconds, left = evaluator.evaluate(at, bounds), EVALUATIONS_MAX * DEVICES // max(DEVICES, len(at))
    helped = True
    while helped and left > 0:
        helped = False
        for device in range(len(at)):
            here = int(at[device])
            if here >= 0 and _is_needed(home, at, device, needed):
                continue
            for k in (*range(len(needed)), LEFT_OUT):
                if k == here or (here >= 0 and int((at == here).sum()) == 1):
                    continue
                left -= 1
                moved_s = _moved(evaluator, at, device, k, bounds)
                if moved_s < seconds:
                    at[device], here, seconds, helped = k, k, moved_s, True
            if left <= 0:
                break
    return seconds, at


def _is_needed(home: Assignment, at: Assignment, device: int, needed: Sequence[int]) -> bool:
    """Whether its stage could not let it go: so many of those who hold its state must stay."""
    k = int(at[device])
    return int(home[device]) == k and int(((home == k) & (at == k)).sum()) <= needed[k]
