"""A member becomes slow in mid-run: soon the swarm is no slower than it would be without that member."""

import numpy as np
import pytest
from hindered_swarm import Slowing, hindered

from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.modelled import ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.protocol.spec import AUTO_STAGES, ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec
from shoal.protocol.topology import make_topology

SPEC = RunSpec(
    model=ModelSpec(dim=256, num_layers=6, ffn_dim=704, context=128),
    training=TrainingSpec(steps=100_000, microbatches_per_step=24, microbatch_size=1, keep="recompute"),
    optimizer=OptimizerSpec(warmup_steps=0),
    swarm=SwarmSpec(stages=AUTO_STAGES, min_peers=1, term_s=30.0),
)
END_S = 124.0 + 6.0 * SPEC.swarm.term_s
"""A term after the last moment that is looked at: a step that is in flight then counts in part only once it is over."""


def played(devices: int, *slowings: Slowing) -> SimResult:
    """Devices that hold four of the six layers each, 10 ms and 100 MB/s from each other; a step takes 10 s."""
    workload, n = Workload.of(SPEC), devices
    between = 1.0 - np.eye(n)
    topology = make_topology(
        0.01 * between,
        1e8 * between,
        flop_per_s=4e9,
        memory_bytes=0.85 * workload.resident_bytes(0, workload.num_layers, members=1),
    )
    limits = RunLimits(seconds=END_S)
    return run_modelled(ModelledRun(topology=topology, spec=SPEC, make_swarm=hindered(*slowings), limits=limits))


def rate(result: SimResult, from_s: float, to_s: float) -> float:
    return (result.tokens_by(to_s) - result.tokens_by(from_s)) / (to_s - from_s)


@pytest.mark.sim
@pytest.mark.parametrize("slow_s", [112.0, 116.0, 120.0, 124.0])
def test_a_member_that_becomes_slow_costs_no_more_for_long_than_that_it_is_missing(slow_s: float) -> None:
    """One of two devices of a stage becomes eight times slower, early or late in a step."""
    term_s = SPEC.swarm.term_s
    without, result = played(2), played(3, Slowing(slow_s, 1, 8.0))
    assert result.failures == ()
    usual, then = rate(without, slow_s, slow_s + 5 * term_s), rate(result, slow_s + 2 * term_s, slow_s + 5 * term_s)
    assert then > usual
