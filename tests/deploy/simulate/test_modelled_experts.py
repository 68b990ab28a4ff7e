import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.routing import SimulatedRouting
from shoal.peer.model.flop import expert_flop, trunk_flop
from shoal.peer.model.layout import layer_layout, num_parameters
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.errors import LocalError
from shoal.protocol.layers import expert_keys, stage_layer_keys, trunk_keys
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import make_topology

RATE = 10e12
LAYERS, DIM, CONTEXT = 3, 1024, 1024
EXPERTS, PER_TOKEN = 4, 2


def spec_of(*, slots: int, replicas: int = 2, experts: int = EXPERTS, **training: Any) -> RunSpec:
    return msgspec.convert(
        {
            "model": {
                "dim": DIM,
                "num_layers": LAYERS,
                "num_heads": 16,
                "num_kv_heads": 16,
                "ffn_dim": 2816,
                "context": CONTEXT,
                "num_experts": experts,
                "experts_per_token": PER_TOKEN,
            },
            "training": {"steps": 5, "microbatches_per_step": 12, "microbatch_size": 1, "s_max": 0} | training,
            "optimizer": {"warmup_steps": 0},
            "swarm": {"stages": 1, "min_peers": 1, "expert_slots": slots, "expert_replicas": replicas},
        },
        RunSpec,
    )


def made(n: int, spec: RunSpec, *, steps: int | None = None, **options: Any) -> ModelledRun:
    limits = RunLimits(steps=steps, seconds=600.0)
    topology = make_topology(np.full((n, n), 1e-4), np.full((n, n), 12.5e9), flop_per_s=RATE)
    everybody = Placement(stages=(tuple(range(n)),), bounds=(0, LAYERS))
    base = ModelledRun(topology=topology, spec=spec, stages=everybody, limits=limits, chunk_bytes=32 << 20)
    return dataclasses.replace(base, **options)


def flop_of_a_step(spec: RunSpec) -> float:
    """Of its microbatches, wherever they are computed; experts run their forward once more."""
    trunk = sum(trunk_flop(spec.model, key, CONTEXT) for key in stage_layer_keys(spec.model, 0, LAYERS))
    experts = LAYERS * expert_flop(spec.model, CONTEXT * PER_TOKEN)
    return spec.training.microbatches_per_step * (3.0 * trunk + 4.0 * experts)


def parameters(spec: RunSpec, keys: tuple[str, ...]) -> int:
    return sum(layer_layout(spec.model, key).numel for key in keys)


def test_a_lone_holder_takes_what_its_arithmetic_takes() -> None:
    spec = spec_of(slots=EXPERTS)
    result = run_modelled(made(1, spec))
    alone_s = (flop_of_a_step(spec) + 20.0 * num_parameters(spec.model)) / RATE
    assert result.step_s == pytest.approx(alone_s, rel=0.01)
    assert not result.failures


def test_every_token_of_a_step_is_on_the_wire() -> None:
    """Two experts, one at each of two peers: half of all rows cross, two times forth and back three times."""
    spec = spec_of(slots=1, replicas=1, experts=2)
    result = run_modelled(made(2, spec, steps=4))
    rows = spec.training.microbatches_per_step * LAYERS * CONTEXT * PER_TOKEN / 2
    tokens = 5 * rows * 2 * DIM
    sums = 2 * 4 * parameters(spec, trunk_keys(spec.model, 0, LAYERS))  # the experts are each one's own
    assert result.traffic_bytes.sum() == pytest.approx(4 * (tokens + sums), rel=0.02)
    assert sum(result.busy_s) * RATE == pytest.approx(
        4 * (flop_of_a_step(spec) + 20.0 * (num_parameters(spec.model) + sums / 8)), rel=0.03
    )


def test_a_holder_that_dies_costs_time_and_no_microbatch() -> None:
    churn = (Churn(2.0, "remove", 2),)
    spec = spec_of(slots=3, steps=12)
    result = run_modelled(made(4, spec, churn=churn, expert_loads=(3.0, 1.0, 1.0, 1.0)))
    assert [step.step for step in result.steps] == list(range(12))
    assert result.given_up == result.duplicates == 0
    assert not any(event.change == "era" for event in result.events)
    assert not result.failures
    assert result.steps[-1].committed_at_s > 2.0, "the death came too late"


def test_who_comes_later_is_given_experts_over_the_wire() -> None:
    spec = spec_of(slots=2, steps=16)
    result = run_modelled(made(3, spec, churn=(Churn(1.0, "add", 2),)))
    state = 3 * 4 * (parameters(spec, trunk_keys(spec.model, 0, LAYERS)) + parameters(spec, expert_keys(0, LAYERS, 0)))
    assert result.traffic_bytes[:2, 2].sum() > state
    assert result.busy_s[2] > 0.0
    assert not result.failures


def test_the_same_seed_is_the_same_run_event_for_event() -> None:
    spec = spec_of(slots=2, steps=3)
    first, again = (run_modelled(made(3, spec, expert_loads=(2.0, 1.0, 1.0, 1.0))) for _ in range(2))
    assert first.trace_hash == again.trace_hash


def test_routed_rows_follow_the_loads_and_never_send_a_token_to_an_expert_twice() -> None:
    spec = spec_of(slots=2)
    routing = SimulatedRouting(spec, (5.0, 1.0, 1.0, 0.0))
    drawn = [routing.counts_of(Microbatch(step, 0), layer) for step in range(50) for layer in range(LAYERS)]
    assert {sum(counts) for counts in drawn} == {CONTEXT * PER_TOKEN}
    assert max(max(counts) for counts in drawn) == CONTEXT
    assert drawn == [
        SimulatedRouting(spec, (5.0, 1.0, 1.0, 0.0)).counts_of(Microbatch(s, 0), i) for s in range(50) for i in range(3)
    ]
    means = np.mean(drawn, axis=0) / (CONTEXT * PER_TOKEN)
    # Five sevenths want the first, which can have a half: the others share what is beyond in the order of their loads.
    assert means[0] == 0.5
    assert means[1] > means[2] == pytest.approx(1 / 7, rel=0.05)
    assert len(routing.tokens) == CONTEXT * PER_TOKEN * 2 * DIM


@pytest.mark.parametrize("loads", [(1.0, 1.0), (1.0, 1.0, 1.0, -1.0), (0.0,) * 4])
def test_loads_that_are_not_those_of_the_experts_are_refused(loads: tuple[float, ...]) -> None:
    with pytest.raises(LocalError, match="the loads of 4 experts"):
        run_modelled(made(2, spec_of(slots=2), expert_loads=loads))
