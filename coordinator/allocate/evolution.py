"""The search: iterated local search over a small population of assignments. A child is a perturbed individual, improved
by local search; the cheapest individuals survive.

**Budgets are work, not seconds.** A unit of work is about one number that a kernel's inner loop reads; work is counted,
never timed. So the same evaluator, seed and work give the same assignment on any machine, bit for bit. A longer search
begins with the same steps as a shorter one, except for the last step of the shorter one.

Source: iterated local search (Lourenço, Martin, Stützle 2003); a population depends less on one start."""

import random
from collections.abc import Sequence

import numpy as np

from shoal.coordinator.allocate.throughput_search import HOMELESS, Assignment, Improved, ThroughputEvaluator

WORK_PER_SECOND = 100_000_000
"""The units of work in a budget of one second. One core does more per second (MEASURED.md), so a search ends sooner."""
POPULATION = 8
"""The number of individuals: fewer have too little variety; more get too little search each within one second."""


def evolve(
    evaluator: ThroughputEvaluator,
    *,
    seed: int,
    work: int,
    start: Sequence[Assignment] = (),
) -> Improved:
    """Search until `work` units are spent, or slightly more: the last local search gets only the work that is left.

    Args:
        start: feasible assignments to begin with, such as the current plan. Each is first improved without accepting
            worse ones, so the result is never worse than the best of them."""
    rng = random.Random(seed)
    child_work = 20_000 + 200 * evaluator.num_devices  # the cost of one child in this Python loop
    population: list[tuple[float, bytes, Assignment]] = []
    spent = 0

    def add(cost: float, assignment: Assignment) -> None:
        """Add an individual if none has its cost: two of one cost probably differ by a swap of equal devices."""
        if not any(abs(cost - other) <= 1e-12 * abs(other) for other, _, _ in population):
            population.append((cost, assignment.tobytes(), assignment))
            population.sort(key=lambda member: member[:2])
            del population[POPULATION:]

    def take(assignment: Assignment, heat: float) -> None:
        nonlocal spent
        budget = min(evaluator.share, work - spent)
        found = evaluator.improve(assignment, seed=rng.getrandbits(63), work=budget, heat=heat)
        spent += found.work + child_work
        add(found.cost, found.assignment)

    def newcomer() -> Assignment:
        nonlocal spent
        drawn = [evaluator.random(rng.getrandbits(63))]
        # keep some work for improving the chosen draw
        while len(drawn) < evaluator.draws and work - spent > evaluator.share // 4:
            drawn.append(evaluator.random(rng.getrandbits(63)))
            spent += child_work
        return min(drawn, key=evaluator.cost) if len(drawn) > 1 else drawn[0]

    for assignment in start:
        add(evaluator.cost(assignment), assignment)
    for assignment in start:
        if spent < work:
            take(assignment, 0.0)
    newcomers = POPULATION - len(start)
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
    """Return a copy of `assignment` with a random change: a few devices exchanged, a few moved, or one or two stages
    emptied and given a new first device. Devices may become `HOMELESS` (without a stage)."""
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
