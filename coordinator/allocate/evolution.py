"""The search for any objective: iterated local search over a small population. A child is a perturbed individual,
improved by local search; the cheapest individuals survive.

An assignment is int64 [N]: the stage of each device, or `LEFT_OUT`. The objective is an `Evaluator`. It also knows
which assignments are feasible, and it does the local search, since only it can price a change for a fraction of an
evaluation.

**Budgets are work, not seconds.** A unit is about one number touched by a kernel's inner loop; the cost of a call is
counted, never timed. So the same evaluator, seed and work give the same assignment on any machine, bit for bit, and a
run with more work begins with the same steps as a run with less, except for the last step of the shorter one.

Source: iterated local search (Lourenço, Martin, Stützle 2003), with a population against the luck of one start."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Assignment = npt.NDArray[np.int64]

LEFT_OUT = -1
"""The device holds nothing, on purpose."""
HOMELESS = -2
"""The device lost its stage in a perturbation; `Evaluator.repair` finds another."""

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
    others: tuple[Assignment, ...] = ()
    """The rest of the population, the best first."""


class Evaluator(Protocol):
    """One objective over one topology. It is deterministic: no clock, no global randomness, sums in a fixed order."""

    num_devices: int
    num_stages: int
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
    population: list[tuple[float, bytes, Assignment]] = []
    spent = 0

    def add(cost: float, assignment: Assignment) -> None:
        """Add an individual, unless it is there; names of stages and alike devices make no other cost."""
        if not any(abs(cost - other) <= 1e-12 * abs(other) for other, _, _ in population):
            population.append((cost, assignment.tobytes(), assignment))
            population.sort(key=lambda member: member[:2])
            del population[keep:]

    def take(assignment: Assignment, heat: float) -> None:
        nonlocal spent
        budget = min(share, work - spent)
        found = evaluator.improve(assignment, seed=rng.getrandbits(63), work=budget, heat=heat)
        spent += found.work + child_work
        add(found.cost, found.assignment)

    def newcomer() -> Assignment:
        nonlocal spent
        drawn = [evaluator.random(rng.getrandbits(63))]
        while len(drawn) < evaluator.draws and work - spent > share // 4:  # else nothing is left to improve it
            drawn.append(evaluator.random(rng.getrandbits(63)))
            spent += child_work
        return min(drawn, key=evaluator.cost) if len(drawn) > 1 else drawn[0]

    for assignment in start:
        add(evaluator.cost(assignment), assignment)
    for assignment in start:
        if spent < work:
            take(assignment, 0.0)
    newcomers = keep - len(start)
    while spent < work or not population:
        if newcomers > 0:
            newcomers -= 1
            take(newcomer(), 1.0)
        else:
            parent = population[min(rng.randrange(len(population)) for _ in range(2))][2]
            child = evaluator.repair(perturbed(parent, evaluator.num_stages, rng), seed=rng.getrandbits(63))
            take(child, 0.5)  # at this heat it leaves its parent's local minimum, but keeps most of it
    cost, _, best = population[0]
    return Improved(assignment=best, cost=cost, work=spent, others=tuple(member[2] for member in population[1:]))


def perturbed(assignment: Assignment, num_stages: int, rng: random.Random) -> Assignment:
    """Exchange or relocate one to a few devices, or dissolve a stage and seed it anew. Devices may become
    `HOMELESS`."""
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
