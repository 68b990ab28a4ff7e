"""Devices that are as good in each other's places are exchanged for state that need not travel."""

import numpy as np
import pytest

from shoal.coordinator.allocate.adjustments import with_fewest_moves
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import make_topology

LAYERS = 6


def objective(*flop_per_s: float) -> ThroughputObjective:
    n = len(flop_per_s)
    topology = make_topology(np.full((n, n), 0.01), np.full((n, n), 1e9), flop_per_s=list(flop_per_s))
    return ThroughputObjective(topology, Workload.of(RunSpec()))


ALONE = Placement(stages=((0,),), bounds=(0, LAYERS))


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        pytest.param(((1,), (0,)), ((0,), (1,)), id="the first of two keeps the larger part"),
        pytest.param(((1,), (2,)), ((0,), (2,)), id="who has the state works in place of who has none"),
        pytest.param(((0,), (1,)), ((0,), (1,)), id="nothing is to be had"),
    ],
)
def test_of_like_devices_who_has_most_of_a_stage_keeps_it(
    found: tuple[tuple[int, ...], ...], kept: tuple[tuple[int, ...], ...]
) -> None:
    placement = Placement(stages=found, bounds=(0, 4, LAYERS))
    assert with_fewest_moves(objective(1e12, 1e12, 1e12), ALONE, placement).stages == kept


def test_nobody_is_exchanged_for_a_slower_device() -> None:
    placement = Placement(stages=((1,), (0,)), bounds=(0, 4, LAYERS))
    assert with_fewest_moves(objective(1e12, 2e12), ALONE, placement) == placement
