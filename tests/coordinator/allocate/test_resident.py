import math
import random

import numpy as np
import pytest

from shoal.coordinator.allocate.adjustments import best_with_stayers
from shoal.coordinator.allocate.planner import plan
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec
from shoal.protocol.topology import make_topology

STAGES = 3
WORKLOAD = Workload.of(RunSpec(model=ModelSpec(num_layers=STAGES), swarm=SwarmSpec(stages=STAGES)))


def three_cities(num_devices: int, seed: int):
    city = np.arange(num_devices) * 3 // num_devices
    near = city[:, None] == city[None, :]
    speeds = [random.Random(seed + d).uniform(1e10, 3e10) for d in range(num_devices)]
    return make_topology(np.where(near, 0.01, 0.1), np.where(near, 1e8, 3e5), flop_per_s=speeds)


@pytest.mark.parametrize("holders_min", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_enough_stay_and_it_is_never_worse_than_what_there_is(seed: int, holders_min: int) -> None:
    rng = random.Random(seed)
    topology = three_cities(12, seed)
    names = list(range(12))
    rng.shuffle(names)
    sizes = [2, 5, 5]
    stages = tuple(tuple(sorted(names[sum(sizes[:k]) : sum(sizes[: k + 1])])) for k in range(STAGES))
    current = Placement(stages=stages, bounds=(0, 1, 2, 3))
    found, _ = plan(topology, WORKLOAD, num_stages=STAGES, seed=seed, work=2_000_000, current=current)
    evaluator = ThroughputEvaluator(topology, WORKLOAD, STAGES, current=current)
    best, seconds = best_with_stayers(evaluator, current, found, stay=0.5, holders_min=holders_min)
    assert best.bounds == current.bounds
    for before, after in zip(current.stages, best.stages, strict=True):
        assert len(set(before) & set(after)) >= math.ceil(0.5 * len(before))
        assert len(set(before) & set(after)) >= min(holders_min, len(before))  # newcomers have no state yet
    objective = ThroughputObjective(topology, WORKLOAD)
    rounding = 1.0 + 1e-9
    assert objective.cost(best).seconds <= seconds * rounding <= objective.cost(current).seconds * rounding**2
    assert best_with_stayers(evaluator, current, found, stay=0.5, holders_min=holders_min) == (best, seconds)


def test_a_slow_crowd_elsewhere_leaves_nobody_alone_with_a_stage() -> None:
    topology = three_cities(8, 1)
    current = Placement(stages=((0, 1), (2, 3), (4, 5, 6, 7)), bounds=(0, 1, 2, 3))
    crowd = Placement(stages=((0,), (2,), (1, 3, 4, 5, 6, 7)), bounds=(0, 1, 2, 3))
    evaluator = ThroughputEvaluator(topology, WORKLOAD, STAGES, current=current)
    best, _ = best_with_stayers(evaluator, current, crowd, stay=0.5, holders_min=2)
    assert min(len(stage) for stage in best.stages) == 2


def test_what_a_search_has_found_is_taken_as_it_is_where_enough_stay() -> None:
    topology = three_cities(6, 1)
    current = Placement(stages=((0, 1), (2, 3), (4, 5)), bounds=(0, 1, 2, 3))
    evaluator = ThroughputEvaluator(topology, WORKLOAD, STAGES, current=current)
    best, seconds = best_with_stayers(evaluator, current, current, stay=1.0, holders_min=1)
    assert best == current
    assert seconds == pytest.approx(ThroughputObjective(topology, WORKLOAD).cost(current).seconds)
