import math
import random

import numpy as np
import pytest

from shoal.coordinator.allocate.planner import plan
from shoal.coordinator.allocate.throughput_search import HOMELESS, LEFT_OUT, put_back
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
    stayers = tuple(max(math.ceil(len(stage) / 2), min(len(stage), holders_min)) for stage in stages)

    def searched():
        return plan(topology, WORKLOAD, num_stages=STAGES, seed=seed, work=2_000_000, current=current, stayers=stayers)

    best, cost = searched()
    assert best.bounds == current.bounds
    for before, after, num_stayers in zip(current.stages, best.stages, stayers, strict=True):
        assert len(set(before) & set(after)) >= num_stayers  # newcomers have no state yet
    assert cost.seconds <= ThroughputObjective(topology, WORKLOAD).cost(current).seconds * (1.0 + 1e-9)
    assert searched() == (best, cost)


def test_holders_that_left_come_back_until_enough_are_there() -> None:
    home = np.array([0, 0, 1, 1, 2, 2, 2, LEFT_OUT])
    for seed in range(20):
        crowd = np.array([0, 2, 2, 1, 2, HOMELESS, 0, 2])
        put_back(crowd, home, (2, 2, 2), seed)
        assert (crowd[:4] == [0, 0, 1, 1]).all()
        assert (crowd[4:7] == 2).sum() == 2, "no more than are needed"
        assert crowd[7] == 2


def test_where_all_must_stay_nobody_moves() -> None:
    topology = three_cities(6, 1)
    current = Placement(stages=((0, 3), (1, 4), (2, 5)), bounds=(0, 1, 2, 3))
    found, _ = plan(topology, WORKLOAD, num_stages=STAGES, seed=1, work=500_000, current=current, stayers=(2, 2, 2))
    assert found == current
