"""The evolutionary search, for any objective. It keeps a small population, children inherit whole stages, and each
child is improved by local search.

An assignment is int64 [N]: the stage of each device, or `LEFT_OUT`. Two assignments are the same individual, with equal
`key`, if they differ only in the names of their stages or by an exchange of interchangeable devices. `align` renames
one assignment to agree as much as possible with another, so that the child of two good parents is not noise (Falkenauer
1992 on grouping problems: inherit groups, not genes).

The objective is an `Evaluator`. It also knows which assignments are feasible, and it does the local search, since only
it can price a change for a fraction of an evaluation.

**Budgets are work, not seconds.** A unit is about one number touched by a kernel's inner loop; the cost of a call is
counted, never timed. So the same evaluator, seed and work give the same assignment on any machine, bit for bit, and a
run with more work begins with the same steps as a run with less, except for the last step of the shorter one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Assignment = npt.NDArray[np.int64]

LEFT_OUT = -1
"""The device holds nothing, on purpose."""
HOMELESS = -2
"""The device lost its stage in a crossover or mutation; `Evaluator.repair` finds another."""

WORK_PER_SECOND = 100_000_000
"""Kernels do more units in a second of one core (MEASURED.md), so a budget of S seconds takes at most S."""
POPULATION = 8
"""A smaller one lacks alternatives; a larger one leaves each individual too little of a one-second search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """The result of a search."""

    assignment: Assignment
    cost: float
    work: int


class Evaluator(Protocol):
    """One objective over one topology. It is deterministic: no clock, no global randomness, sums in a fixed order."""

    num_devices: int
    num_stages: int
    classes: Assignment
    """int64 [N]. Devices with equal numbers are interchangeable at no cost. All different is always safe."""
    draws: int
    """The number of random starts of which the cheapest is improved; more pay where the start decides much."""
    share: int
    """The useful work for one call of `improve`: about as much as it needs to reach a good local minimum."""

    def cost(self, assignment: Assignment) -> float:
        """Return the exact true objective of a feasible assignment; inf if it is impossible."""

    def random(self, seed: int) -> Assignment:
        """Return a feasible start; different seeds should give very different starts."""

    def repair(self, assignment: Assignment, *, seed: int) -> Assignment:
        """Make an assignment feasible with few changes: stages for the `HOMELESS`, stage sizes, and stage 0.

        Args: assignment: of stages, `LEFT_OUT` and `HOMELESS`; any sizes, empty stages too."""

    def improve(self, assignment: Assignment, *, seed: int, work: int, heat: float) -> Improved:
        """Search locally on the true objective, from a feasible assignment.

        Args:
            work: stop soon after this number of units.
            heat: 0 accepts improvements only and never returns anything worse than `assignment`; 1 is for random
                starts.
        """


@dataclass(slots=True)
class _Population:
    """The individuals, at most `size`, best first. No two are the same up to names."""

    evaluator: Evaluator
    size: int
    members: list[tuple[float, bytes, Assignment]] = field(default_factory=list)

    def add(self, cost: float, assignment: Assignment) -> None:
        name = key(assignment, self.evaluator.classes, self.evaluator.num_stages)
        twin = next((index for index, member in enumerate(self.members) if member[1] == name), None)
        if twin is not None:
            if self.members[twin][0] <= cost:
                return
            del self.members[twin]
        self.members.append((cost, name, assignment))
        self.members.sort(key=lambda member: member[:2])
        del self.members[self.size :]

    def parent(self, rng: random.Random) -> Assignment:
        return self.members[min(rng.randrange(len(self.members)) for _ in range(2))][2]


def evolve(
    evaluator: Evaluator,
    *,
    seed: int,
    work: int,
    start: Sequence[Assignment] = (),
    keep: int = POPULATION,
    share: int | None = None,
) -> Improved:
    """Search until `work` units are spent, or a little more: the last local search is cut to the work left.

    Args:
        start: feasible assignments to begin with, such as the current plan, each first improved without heat. The
            result is never worse than the best of them.
        keep: size of the population.
        share: work for one child, `evaluator.share` if None.
    """
    rng = random.Random(seed)
    share = evaluator.share if share is None else share
    child_work = 20_000 + 200 * evaluator.num_devices  # what one child costs this loop, which is Python
    population = _Population(evaluator, keep)
    spent = 0

    def take(assignment: Assignment, heat: float) -> None:
        nonlocal spent
        budget = min(share, work - spent)
        found = evaluator.improve(assignment, seed=rng.getrandbits(63), work=budget, heat=heat)
        spent += found.work + child_work
        population.add(found.cost, found.assignment)

    def newcomer() -> Assignment:
        nonlocal spent
        drawn = [evaluator.random(rng.getrandbits(63))]
        while len(drawn) < evaluator.draws and work - spent > share // 4:  # else nothing is left to improve it
            drawn.append(evaluator.random(rng.getrandbits(63)))
            spent += child_work
        return min(drawn, key=evaluator.cost) if len(drawn) > 1 else drawn[0]

    for assignment in start:
        population.add(evaluator.cost(assignment), assignment)
    for assignment in start:
        if spent < work:
            take(assignment, 0.0)
    newcomers = keep - len(start)
    while spent < work or not population.members:
        if newcomers > 0 or len(population.members) < 2:
            newcomers -= 1
            take(newcomer(), 1.0)
        else:
            # At this heat it leaves its parents' local minimum, but keeps what was inherited.
            take(_child(population, rng), 0.5)
    cost, _, best = population.members[0]
    return Improved(assignment=best, cost=cost, work=spent)


def _child(population: _Population, rng: random.Random) -> Assignment:
    evaluator = population.evaluator
    first = population.parent(rng)
    if rng.random() < 0.35:
        child = mutate(first, evaluator.num_stages, rng)
    else:
        second = align(first, population.parent(rng), evaluator.classes, evaluator.num_stages)
        child = crossover(first, second, evaluator.num_stages, rng)
    return evaluator.repair(child, seed=rng.getrandbits(63))


# --- operators ---


def key(assignment: Assignment, classes: Assignment, num_stages: int) -> bytes:
    """Return a name that is equal for assignments that are the same individual. Args: classes: as of `Evaluator`."""
    placed = assignment >= 0
    stages = sorted(np.sort(classes[placed & (assignment == stage)]).tobytes() for stage in range(num_stages))
    return b"/".join([*stages, np.sort(classes[~placed]).tobytes()])


def align(first: Assignment, second: Assignment, classes: Assignment, num_stages: int) -> Assignment:
    """Return `second` with its stages renumbered, and devices of one class exchanged, so that most devices have the
    stage that they have in `first`.

    Stages are paired by largest overlap first. This does not always give the largest total overlap, but it keeps the
    most similar stages together, as a crossover needs, and it takes N + K^2 log K."""
    num_classes = int(classes.max()) + 1
    counts = [_counts(parent, classes, num_stages, num_classes) for parent in (first, second)]
    overlap = np.array([np.minimum(row, counts[1]).sum(axis=1) for row in counts[0]])
    names = np.full(num_stages, -1, dtype=np.int64)
    taken = np.zeros(num_stages, dtype=np.bool_)
    for pair in np.argsort(-overlap, axis=None, kind="stable"):
        mine, theirs = divmod(int(pair), num_stages)
        if not taken[mine] and names[theirs] < 0:
            names[theirs] = mine
            taken[mine] = True
    renamed = np.where(second >= 0, names[np.maximum(second, 0)], second)
    return _exchange(first, renamed, classes)


def _counts(assignment: Assignment, classes: Assignment, num_stages: int, num_classes: int) -> Assignment:
    placed = assignment >= 0
    flat = assignment[placed] * num_classes + classes[placed]
    counts: Assignment = np.bincount(flat, minlength=num_stages * num_classes).reshape(num_stages, num_classes)
    return counts


def _exchange(first: Assignment, second: Assignment, classes: Assignment) -> Assignment:
    """Exchange devices inside each class of `second`, so that most are where `first` has them."""
    result = second.copy()
    order = np.argsort(classes, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        if len(members) == 1:
            continue
        places: dict[int, int] = {}
        for place in second[members]:
            places[int(place)] = places.get(int(place), 0) + 1
        rest = []
        for device in members:
            wish = int(first[device])
            if places.get(wish, 0) > 0:
                places[wish] -= 1
                result[device] = wish
            else:
                rest.append(device)
        left = [place for place in sorted(places) for _ in range(places[place])]
        result[rest] = left
    return result


def crossover(first: Assignment, second: Assignment, num_stages: int, rng: random.Random) -> Assignment:
    """Take some stages of `first` whole, and the others from `second`, which must be aligned to it. A device for which
    that gives both its stages or none is `HOMELESS`."""
    kept = np.zeros(num_stages, dtype=np.bool_)
    kept[rng.sample(range(num_stages), rng.randint(1, max(1, num_stages - 1)))] = True
    from_first = (first >= 0) & kept[np.maximum(first, 0)]
    clash = (second >= 0) & kept[np.maximum(second, 0)]
    child: Assignment = np.where(from_first, first, np.where(clash, HOMELESS, second))
    return child


def mutate(assignment: Assignment, num_stages: int, rng: random.Random) -> Assignment:
    """Exchange or move one to a few devices, or dissolve a stage and seed it anew. Devices may become `HOMELESS`."""
    child = assignment.copy()
    devices = len(child)
    kind = rng.randrange(3)
    if kind == 0:
        for _ in range(rng.randint(1, max(1, devices // 8))):
            a, b = rng.randrange(devices), rng.randrange(devices)
            child[a], child[b] = child[b], child[a]
    elif kind == 1:
        for _ in range(rng.randint(1, max(1, devices // 16))):
            child[rng.randrange(devices)] = rng.randrange(num_stages)
    else:
        dissolved = rng.sample(range(num_stages), min(num_stages, rng.randint(1, 2)))
        child[np.isin(child, dissolved)] = HOMELESS
        seeds = rng.sample(range(devices), min(devices, len(dissolved)))
        child[seeds] = dissolved[: len(seeds)]
    return child
