"""Who does what when where one microbatch makes one update (regimes A and B): a list of actions, before any arithmetic.

Nothing here depends on what is computed, so a schedule is played first and its gradients are made afterwards, in the
order of the list; printed, `2F0` is stage 2's forward of microbatch 0. A stage updates its weights at the end of each
of its backwards.
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FORWARD_S = 1.0
BACKWARD_S = 2.0


class Action(NamedTuple):
    """`kind` F or B; at the last stage the F is followed by its B at once."""

    ended_at_s: float
    stage: int
    kind: Literal["F", "B"]
    microbatch: int
    staleness: int
    """Of a forward: updates of this stage between it and its own backward. Of a backward: 0."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def one_by_one(
    stages: int, microbatches: int, *, synchronous: bool = False, begins_synchronously: int = 0
) -> list[Action]:
    """1F1B without flush (PipeDream, 2019, figure 4): stage k does stages - k forwards, then a backward and a forward
    in turn. Its staleness is stages - 1 - k, and less for the first microbatches. No hop takes time.

    Args:
        synchronous: one microbatch at a time, no staleness.
        begins_synchronously: so for this many microbatches, and then as above.
    """
    alone = microbatches if synchronous else min(begins_synchronously, microbatches)
    played = [_one_by_one_order(stages - stage, microbatches, alone) for stage in range(stages)]
    ended: dict[tuple[int, str, int], float] = {}
    free_s, place = [0.0] * stages, [0] * stages
    remaining = 2 * stages * microbatches
    while remaining:
        for stage in range(stages):
            while place[stage] < len(played[stage]):
                kind, microbatch = played[stage][place[stage]]
                needs = _needs(stage, kind, microbatch, stages)
                if needs is not None and needs not in ended:
                    break
                ready_s = ended[needs] if needs is not None else 0.0
                took_s = FORWARD_S if kind == "F" else BACKWARD_S
                free_s[stage] = ended[stage, kind, microbatch] = max(free_s[stage], ready_s) + took_s
                place[stage] += 1
                remaining -= 1
    order = sorted((at_s, stage, kind, microbatch) for (stage, kind, microbatch), at_s in ended.items())
    return _with_staleness(order, stages)


def _one_by_one_order(ahead: int, microbatches: int, alone: int) -> list[tuple[str, int]]:
    """Of one stage; the first `alone` microbatches have it to themselves."""
    order = [(kind, microbatch) for microbatch in range(alone) for kind in "FB"]
    first = min(alone + ahead, microbatches)
    order += [("F", microbatch) for microbatch in range(alone, first)]
    for microbatch in range(alone, microbatches):
        order.append(("B", microbatch))
        if microbatch + ahead < microbatches:
            order.append(("F", microbatch + ahead))
    return order


def _needs(stage: int, kind: str, microbatch: int, stages: int) -> tuple[int, str, int] | None:
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage > 0 else None
    return (stage + 1, "B", microbatch) if stage < stages - 1 else (stage, "F", microbatch)


@dataclass(slots=True)
class _Device:
    """One stage's: works on what waits longest, backwards first."""

    forwards: deque[int] = field(default_factory=deque)
    backwards: deque[int] = field(default_factory=deque)
    is_busy: bool = False


def heavy_tailed(
    stages: int,
    microbatches: int,
    *,
    in_flight: int,
    hop_s: float,
    tail: float,
    seed: int,
    begins_synchronously: int = 0,
) -> list[Action]:
    """An event queue in virtual time: stage 0 begins a microbatch whenever fewer than `in_flight` are on their way, and
    each hop takes hop_s * Pareto(tail) seconds, whatever others take. The first `begins_synchronously` are alone."""
    rng = random.Random(f"hops {seed}")
    devices = [_Device() for _ in range(stages)]
    events: list[tuple[float, int, int, str, int, bool]] = []  # at, number, stage, kind, microbatch, has ended
    done: list[tuple[float, int, str, int]] = []
    issued = flying = numbered = 0

    def happen(at_s: float, stage: int, kind: str, microbatch: int, *, has_ended: bool) -> None:
        nonlocal numbered
        heapq.heappush(events, (at_s, numbered, stage, kind, microbatch, has_ended))
        numbered += 1

    def work(now_s: float, stage: int) -> None:
        nonlocal issued, flying
        device = devices[stage]
        if device.is_busy:
            return
        if device.backwards:
            kind, microbatch, took_s = "B", device.backwards.popleft(), BACKWARD_S
        elif device.forwards:
            kind, microbatch, took_s = "F", device.forwards.popleft(), FORWARD_S
        elif stage == 0 and issued < microbatches and flying < (in_flight if issued > begins_synchronously else 1):
            kind, microbatch, took_s = "F", issued, FORWARD_S
            issued, flying = issued + 1, flying + 1
        else:
            return
        device.is_busy = True
        happen(now_s + took_s, stage, kind, microbatch, has_ended=True)

    def next_hop(now_s: float, stage: int, kind: str, microbatch: int) -> None:
        nonlocal flying
        if kind == "F" and stage == stages - 1:
            devices[stage].backwards.appendleft(microbatch)  # the loss and its backward follow at once
        elif kind == "B" and stage == 0:
            flying -= 1
        else:
            there = stage + 1 if kind == "F" else stage - 1
            happen(now_s + hop_s * rng.paretovariate(tail), there, kind, microbatch, has_ended=False)

    work(0.0, 0)
    while events:
        now_s, _, stage, kind, microbatch, has_ended = heapq.heappop(events)
        device = devices[stage]
        if has_ended:
            done.append((now_s, stage, kind, microbatch))
            device.is_busy = False
            next_hop(now_s, stage, kind, microbatch)
        else:
            (device.forwards if kind == "F" else device.backwards).append(microbatch)
        work(now_s, stage)
    return _with_staleness(done, stages)


def _with_staleness(order: list[tuple[float, int, str, int]], stages: int) -> list[Action]:
    """In the order of their ends, each forward with the updates that its stage makes until its own backward."""
    updates = [0] * stages
    at_backward: dict[tuple[int, int], int] = {}
    for _, stage, kind, microbatch in order:
        if kind == "B":
            at_backward[stage, microbatch] = updates[stage]
            updates[stage] += 1
    actions, updates = [], [0] * stages
    for at_s, stage, kind, microbatch in order:
        staleness = at_backward[stage, microbatch] - updates[stage] if kind == "F" else 0
        actions.append(Action(at_s, stage, "F" if kind == "F" else "B", microbatch, staleness))
        updates[stage] += kind == "B"
    return actions


class MeanStaleness:
    """What each stage of `stages` expects of a forward: the mean of its last forwards whose backward has come."""

    MEMORY = 0.95

    def __init__(self, stages: int) -> None:
        self._mean = [0.0] * stages
        self._count = [0] * stages
        self._open: dict[tuple[int, int], int] = {}

    def __call__(self, action: Action) -> int:
        """Of a forward that begins. Call it for each."""
        self._open[action.stage, action.microbatch] = action.staleness
        return round(self._mean[action.stage])

    def ended(self, action: Action) -> None:
        """Its backward has come: by now the stage has counted."""
        stage = action.stage
        value = self._open.pop((stage, action.microbatch))
        self._count[stage] += 1
        weight = max(1 / self._count[stage], 1 - self.MEMORY)
        self._mean[stage] += weight * (value - self._mean[stage])
