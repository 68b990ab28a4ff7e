"""The DT-FM paper's own genetic algorithm, which the benchmark compares with our search (`dtfm_search.py`).

One label a device, equal stages; 100 random individuals. A child copies 5 random genes of one of two uniformly drawn
parents into the other and moves devices from overfull stages to the first underfull one; then comes one pass of cyclic
moves (`cyclic_moves.cyclic_pass`). A child that is better replaces the worse parent. 5,000 evaluations, matching and
order solved exactly at each.

Source: Yuan et al. 2022 (arXiv 2206.01288, section 3.3) after Kang and Moon 2000. Re-implemented, and compiled as our
own search is, so that comparing the two at equal CPU time is fair. On the paper's five cases it ends where their
released code does: 3.440, 49.504, 16.087, 34.802 and 49.218 s. Stages of unequal size are ours: the first N mod K
labels hold one device more.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import cyclic_moves
import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.dtfm_search import DtfmEvaluator, DtfmObjective, even
from shoal.coordinator.allocate.throughput_search import Assignment
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.protocol.topology import Topology, WorkloadEntry

POPULATION = 100
GENES = 5
EVALUATIONS = 5_000


def plan_dtfm_paper(
    topology: Topology, workload: WorkloadEntry, *, num_stages: int, seed: int, evaluations: int = EVALUATIONS
) -> tuple[Placement, Cost]:
    """Its best layout, stages in the best order. Raises: LocalError: more stages than devices."""
    evaluator = DtfmEvaluator(topology, workload, num_stages)
    done = 0

    def go_on() -> bool:
        nonlocal done
        done += 1
        return done <= evaluations

    best, _ = evolve_like_the_paper(evaluator, seed=seed, go_on=go_on)
    placement = even(evaluator.stages(evaluator.layout(best)), workload.num_layers)
    return placement, DtfmObjective(topology, workload).cost(placement)


def evolve_like_the_paper(
    evaluator: DtfmEvaluator, *, seed: int, go_on: Callable[[], bool]
) -> tuple[Assignment, float]:
    """Args: go_on: asked before each evaluation, those of the first individuals too. Returns: (the best, its cost)."""
    kernels: Any = cyclic_moves
    rng = Random(seed)
    N, K = evaluator.num_devices, evaluator.num_stages
    room = np.array([N // K + (k < N % K) for k in range(K)], dtype=np.int64)
    labels: npt.NDArray[np.int64] = np.repeat(np.arange(K), room)
    people: list[Assignment] = []
    costs: list[float] = []
    while len(people) < POPULATION and (go_on() or not people):
        people.append(labels[rng.sample(range(N), N)])
        costs.append(evaluator.settle(evaluator.layout(people[-1]))[0])
    while go_on():
        giver, taker = rng.randrange(len(people)), rng.randrange(len(people))
        child = people[taker].copy()
        genes = rng.sample(range(N), min(GENES, N))
        child[genes] = people[giver][genes]
        kernels.fill(child, room)
        kernels.cyclic_pass(child, evaluator.hop, K)
        cost, _ = evaluator.settle(evaluator.layout(child))
        worse = giver if costs[giver] >= costs[taker] else taker
        if cost < costs[worse]:
            people[worse], costs[worse] = child, cost
    best = min(range(len(people)), key=lambda index: (costs[index], index))
    return people[best], costs[best]
