"""Swarms in which some pairs of peers cannot reach each other: nobody relies on such a pair, and the run goes on."""

import numpy as np
import pytest
from hindered_swarm import Severing, check_severings, hindered

from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.logbook import SimLedger
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.protocol.errors import LocalError
from shoal.protocol.plan import Plan
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec
from shoal.protocol.topology import Topology, make_topology

TERM_S = 30.0


def spec_of(stages: int) -> RunSpec:
    return RunSpec(
        model=ModelSpec(dim=256, num_layers=6, ffn_dim=704, context=128),
        training=TrainingSpec(steps=100_000, microbatches_per_step=24, microbatch_size=1, keep="recompute"),
        optimizer=OptimizerSpec(warmup_steps=0),
        swarm=SwarmSpec(stages=stages, min_peers=1, term_s=TERM_S),
    )


def network(devices: int, *, apart: tuple[tuple[int, int], ...] = (), up_bytes_per_s: object = np.inf) -> Topology:
    """Equal devices, 10 ms and 100 MB/s from each other; a step takes 4 to 5 s."""
    workload = Workload.of(spec_of(1))
    between = 1.0 - np.eye(devices)
    rates = 1e8 * between
    for one, other in apart:
        rates[one, other] = rates[other, one] = 0.0
    return make_topology(
        0.01 * between,
        rates,
        flop_per_s=4e9,
        memory_bytes=1.5 * workload.resident_bytes(0, workload.num_layers, members=1),
        up_bytes_per_s=up_bytes_per_s,
    )


@pytest.fixture
def plans(monkeypatch) -> list[Plan]:
    """All plans that anybody obeyed, in order; each once for each obedience."""
    seen: list[Plan] = []
    before = SimLedger.obeyed
    monkeypatch.setattr(SimLedger, "obeyed", lambda self, plan: (seen.append(plan), before(self, plan))[1])
    return seen


def play(topology: Topology, stages: int, seconds: float, *severings: Severing, churn: tuple[Churn, ...] = ()):
    run = ModelledRun(
        topology=topology,
        spec=spec_of(stages),
        make_swarm=hindered(*severings),
        churn=churn,
        limits=RunLimits(seconds=seconds + 8.0),  # a step in flight counts in part only once it is over
    )
    result = run_modelled(run)
    assert result.failures == ()
    assert (result.given_up, result.duplicates) == (0, 0)
    return result


def rate(result: SimResult, from_s: float, to_s: float) -> float:
    return (result.tokens_by(to_s) - result.tokens_by(from_s)) / (to_s - from_s)


@pytest.mark.sim
@pytest.mark.parametrize("stages", [1, 2])
def test_two_pairs_that_never_meet_cost_a_swarm_of_six_no_more_than_their_places(plans, stages):
    """They are in no group together; with one stage each pair therefore has one member less to work with."""
    result = play(network(6, apart=((1, 2), (3, 4))), stages, 120.0)
    assert all(len(plan.members) == 6 for plan in plans), "and nobody is counted out"
    whole = play(network(6 if stages == 2 else 4), stages, 120.0)
    assert rate(result, 40.0, 120.0) >= 0.9 * rate(whole, 40.0, 120.0)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("stages", "pair", "kept"), [(1, (1, 4), 0.8), (2, (1, 4), 0.75), (2, (1, 2), 0.8), (2, (3, 2), 0.8)]
)
def test_a_pair_that_loses_each_other_costs_a_swarm_little_for_two_terms(plans, stages, pair, kept):
    """Whether they were in one group or next to each other; and all is as before when they meet again. The first pair
    of two stages is in the group of four that bounds the step: three are left."""
    lost_s, met_s, end_s = 70.0, 180.0, 290.0
    result = play(network(6), stages, end_s, Severing(lost_s, *pair, met_s))
    usual = rate(result, 30.0, lost_s)
    assert rate(result, lost_s + 2 * TERM_S, met_s) >= kept * usual
    assert rate(result, met_s + 2 * TERM_S, end_s) >= 0.9 * usual
    assert all(len(plan.members) == 6 for plan in plans), "both are heard by others, so neither is counted out"


@pytest.mark.sim
@pytest.mark.parametrize("who", ["has a line of 5 Mbit/s", "reaches half of the swarm"])
def test_a_newcomer_that_would_slow_the_others_down_is_a_spare(plans, who):
    up, apart = np.full(7, 2.5e6), ()
    if who == "has a line of 5 Mbit/s":
        up[6] = 0.625e6
    else:
        apart = ((6, 3), (6, 4), (6, 5))
    result = play(network(7, apart=apart, up_bytes_per_s=up), 2, 170.0, churn=(Churn(70.0, "add", 6),))
    assert rate(result, 90.0, 170.0) >= 0.9 * rate(result, 30.0, 70.0)
    assert len(plans[-1].members) == 7


@pytest.mark.parametrize(
    ("severing", "complaint"),
    [
        (Severing(1.0, 0, 3), "device 3"),
        (Severing(1.0, 1, 1), "itself"),
        (Severing(2.0, 0, 1, 2.0), "lasts from"),
    ],
)
def test_a_severing_that_cannot_be_is_refused(severing, complaint):
    with pytest.raises(LocalError, match=complaint):
        check_severings(network(2), [severing])
