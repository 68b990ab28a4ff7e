"""A run begins with its host alone, and grows as peers come: the drivers of `shoal join` in virtual time."""

import msgspec
import numpy as np
import pytest

from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec
from shoal.protocol.topology import make_topology

SPEC = RunSpec(
    model=ModelSpec(dim=256, num_layers=6, ffn_dim=704, context=128),
    training=TrainingSpec(steps=100_000, microbatches_per_step=12, microbatch_size=1, keep="recompute"),
    optimizer=OptimizerSpec(warmup_steps=0),
)
COMES_S, ENDS_S = 60.0, 160.0


MIXTURE = RunSpec(
    model=msgspec.structs.replace(SPEC.model, num_layers=3, ffn_dim=704, num_experts=4),
    training=msgspec.structs.replace(SPEC.training, microbatches_per_step=6, microbatch_size=2),
    optimizer=SPEC.optimizer,
    swarm=SwarmSpec(expert_slots=2),
)


def grown(
    *, memory: float, devices: int = 2, leaves_s: float | None = None, base: RunSpec = SPEC, **swarm: int
) -> SimResult:
    """Devices of 20 GFLOP/s, 10 ms and 100 MB/s from each other, come a minute after each other.

    Args:
        memory: of each, as a part of what the model's state takes.
        leaves_s: when the one that came last says good-bye; None: it stays.
        base: the run spec but for its swarm, of which `swarm` is said.
    """
    workload, n = Workload.of(base), devices
    between = 1.0 - np.eye(n)
    topology = make_topology(
        0.01 * between,
        1e8 * between,
        flop_per_s=2e10,
        memory_bytes=memory * workload.resident_bytes(0, workload.num_layers, members=1),
        may_feed=[1.0] * n,
    )
    churn = [Churn(COMES_S * device, "add", device) for device in range(1, n)]
    if leaves_s is not None:
        churn.append(Churn(leaves_s, "leave", n - 1))
    spec = msgspec.structs.replace(base, swarm=msgspec.structs.replace(base.swarm, **swarm))
    return run_modelled(
        ModelledRun(topology=topology, spec=spec, churn=churn, limits=RunLimits(seconds=ENDS_S + COMES_S * (n - 2)))
    )


def rate(result: SimResult, from_s: float, to_s: float) -> float:
    """Steps a second between two moments."""
    return sum(from_s <= step.committed_at_s < to_s for step in result.steps) / (to_s - from_s)


@pytest.mark.sim
def test_a_host_trains_alone_and_a_second_peer_makes_it_nearly_twice_as_fast() -> None:
    result = grown(memory=20.0)
    assert result.failures == ()
    plans = [event.text for event in result.events if event.change == "plan"]
    assert plans[0] == "first plan: 1 peer on 1 stage"
    alone, both = rate(result, 10.0, COMES_S), rate(result, COMES_S + 20.0, ENDS_S)
    assert both > 1.6 * alone > 0.0
    assert (result.given_up, [event for event in result.events if event.change == "era"]) == (0, [])


@pytest.mark.sim
def test_a_model_too_large_for_its_host_waits_for_a_second_peer_and_is_divided_again_for_a_third() -> None:
    result = grown(memory=0.75, devices=3)
    assert result.failures == ()
    plans = [(event.at_s, event.text) for event in result.events if event.change == "plan"]
    assert COMES_S <= plans[0][0] < COMES_S + 5.0
    assert plans[0][1] == "first plan: 2 peers on 2 stages"
    (division,) = [event for event in result.events if event.change == "division"]
    assert division.text.startswith("2 stages became ")
    two, three = rate(result, COMES_S + 10.0, 2 * COMES_S), rate(result, division.at_s + 5.0, ENDS_S + COMES_S)
    assert three > 1.2 * two > 0.0
    assert (result.given_up, [event for event in result.events if event.change == "era"]) == (0, [])


@pytest.mark.sim
def test_a_number_of_stages_is_there_as_soon_as_so_many_peers_are_and_given_up_when_one_leaves() -> None:
    result = grown(memory=0.75, devices=3, leaves_s=170.0, stages=3)
    assert result.failures == ()
    plans = [(event.at_s, event.text) for event in result.events if event.change == "plan"]
    assert plans[0][1] == "first plan: 2 peers on 2 stages", "fewer than three are free"
    (division,) = [event for event in result.events if event.change == "division"]
    assert division.text.startswith("2 stages became 3 at step ")
    assert rate(result, 200.0, ENDS_S + COMES_S) > 0.0, "two go on"
    assert any("2 peers on 2 stages" in text for at_s, text in plans if at_s > 170.0)


@pytest.mark.sim
def test_placed_experts_follow_when_a_third_peer_makes_a_third_stage() -> None:
    result = grown(memory=0.9, devices=3, base=MIXTURE, stages=3)
    assert result.failures == ()
    (division,) = [event for event in result.events if event.change == "division"]
    assert division.text.startswith("2 stages became 3 at step ")
    two, three = rate(result, COMES_S + 10.0, 2 * COMES_S), rate(result, division.at_s + 5.0, ENDS_S + COMES_S)
    assert three > 1.2 * two > 0.0
    assert (result.given_up, [event for event in result.events if event.change == "era"]) == (0, [])
