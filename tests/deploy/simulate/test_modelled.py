import dataclasses
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.peer.model.flop import forward_flop
from shoal.peer.model.layout import all_layer_keys, num_parameters
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec, WireSpec
from shoal.protocol.tensors import BACKWARD_PER_FORWARD
from shoal.protocol.topology import make_topology

RATE = 50e12


def spec_of(**training: Any) -> RunSpec:
    """A model of 1.2 G parameters that nobody here could hold six times."""
    return msgspec.convert(
        {
            "model": {
                "dim": 2048,
                "num_layers": 24,
                "num_heads": 16,
                "num_kv_heads": 16,
                "ffn_dim": 5504,
                "context": 2048,
            },
            "training": {"steps": 6, "microbatches_per_step": 24, "microbatch_size": 1} | training,
            "optimizer": {"warmup_steps": 0},
            "swarm": {"stages": 3, "min_peers": 3},
        },
        RunSpec,
    )


def made(
    num_stages: int, replicas: int, *, steps: int | None = None, seconds: float = 600.0, **options: Any
) -> ModelledRun:
    limits = RunLimits(steps=steps, seconds=seconds)
    n = num_stages * replicas
    topology = make_topology(np.full((n, n), 1e-3), np.full((n, n), 1.25e9), flop_per_s=RATE)
    stages = tuple(tuple(range(k, n, num_stages)) for k in range(num_stages))
    bounds = tuple(24 * k // num_stages for k in range(num_stages + 1))
    placement = Placement(stages=stages, bounds=bounds)
    base = ModelledRun(topology=topology, spec=spec_of(), stages=placement, limits=limits, chunk_bytes=32 << 20)
    return dataclasses.replace(base, **options)


def job_flop(spec: RunSpec) -> float:
    """Of all layers, forth and back, for one microbatch."""
    tokens = spec.training.microbatch_size * spec.model.context
    keys = all_layer_keys(spec.model)
    return sum((1 + BACKWARD_PER_FORWARD) * forward_flop(spec.model, key, tokens) for key in keys)


def test_a_lone_stage_takes_what_its_arithmetic_takes() -> None:
    result = run_modelled(made(1, 1))
    spec = spec_of()
    alone_s = (24 * job_flop(spec) + 20.0 * num_parameters(spec.model)) / RATE
    assert len(result.steps) == 6
    assert result.step_s == pytest.approx(alone_s, rel=1e-3)
    assert result.tokens_per_s == pytest.approx(24 * 2048 / alone_s, rel=1e-3)
    assert not result.traffic_bytes.any()
    assert not result.failures


@pytest.mark.parametrize("subspace", [0, 256])
def test_between_stages_a_modelled_run_moves_what_its_model_writes(subspace: int) -> None:
    spec = spec_of(validation_interval_steps=0)
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, subspace=subspace))
    result = run_modelled(made(3, 1, spec=spec))
    assert not result.failures
    activations = 6 * 24 * (2 * 2048 * (subspace or 2048) + 4 * (2048 + (1 if subspace else 0)))
    # Copies of a stage's state go over some of the links as well.
    assert min(result.traffic_bytes[0, 1], result.traffic_bytes[1, 2]) == pytest.approx(activations, rel=0.01)


@pytest.mark.parametrize(("flop_per_s", "is_wide"), [(RATE / 100, True), (RATE, False)])
def test_where_plans_choose_the_format_sums_are_in_four_bits_only_if_a_step_waits_for_them(
    flop_per_s: float, is_wide: bool
) -> None:
    """By the coordinator's own plans for a layout that is held, of two stages of three members. Links that nobody has
    measured yet are taken for slow, so the first steps have four bits in any case."""
    spec = msgspec.structs.replace(spec_of(steps=12), wire=WireSpec(activations="int8", gradients="auto"))
    topology = make_topology(np.full((6, 6), 1e-3), np.full((6, 6), 1.25e9), flop_per_s=flop_per_s)
    result = run_modelled(made(2, 3, steps=12, seconds=60_000.0, spec=spec, topology=topology))
    assert not result.failures
    cut_bytes = 66 / 64 * 2048 * 2048
    activations = 2 * 24 * cut_bytes + 24 * 4 * 2048  # with the targets
    numbers = 2 * (3 - 1) * num_parameters(spec.model)
    bytes_per_number = (result.traffic_bytes.sum() / 12 - activations) / numbers
    thin, wide = 34 / 64, 66 / 64
    assert 0.98 * thin < bytes_per_number < 1.02 * wide
    assert (bytes_per_number > (thin + wide) / 2) == is_wide


def test_where_plans_choose_only_the_cut_on_a_slow_line_has_eight_bits() -> None:
    """By the coordinator's own plans, too. The last of three lone stages has a line that whole activations would fill
    for longer than a stage computes."""
    spec = msgspec.structs.replace(spec_of(steps=16), wire=WireSpec(activations="auto"))
    bytes_per_s = np.full((3, 3), 1.25e9)
    bytes_per_s[2, :] = bytes_per_s[:, 2] = 2e7
    topology = make_topology(np.full((3, 3), 1e-3), bytes_per_s, flop_per_s=RATE, memory_bytes=64e9)
    result = run_modelled(made(3, 1, steps=16, seconds=60_000.0, spec=spec, topology=topology))
    assert not result.failures
    thin, whole = (size * 2048 * 2048 + 4 * 2048 for size in (66 / 64, 2))
    first, second = (result.traffic_bytes[k, k + 1] / 16 / 24 for k in (0, 1))
    assert thin < second < 1.1 * thin, "what measures the line is in it, too"
    assert (thin + whole) / 2 < first < 1.02 * whole, "links that nobody has measured yet are taken for slow"


def test_every_byte_of_a_step_is_on_the_wire() -> None:
    result = run_modelled(made(2, 2, steps=4))
    spec = spec_of()
    cut_bytes = 2 * 2048 * 2048
    activations = 2 * 24 * cut_bytes + 24 * 4 * 2048  # with the targets
    sums = 2 * 4 * num_parameters(spec.model)  # each of two stages' members sends half of its sum and half of the mean
    assert result.traffic_bytes.sum() == pytest.approx(4 * (activations + sums), rel=0.01)


def test_the_same_seed_is_the_same_run_event_for_event() -> None:
    first, again, other = (run_modelled(made(3, 2, seed=seed, steps=3)) for seed in (1, 1, 2))
    assert first.trace_hash == again.trace_hash
    assert first.steps == again.steps
    assert first.trace_hash != other.trace_hash


def test_a_mate_that_falls_costs_time_and_no_microbatch() -> None:
    calm = run_modelled(made(2, 3, steps=6))
    fallen = run_modelled(made(2, 3, steps=6, churn=(Churn(5.0, "remove", 4), Churn(12.0, "add", 4))))
    assert [step.step for step in fallen.steps] == list(range(6))
    assert fallen.given_up == 0
    assert fallen.steps[-1].committed_at_s > calm.steps[-1].committed_at_s
    assert [event.change for event in fallen.events if event.device == 4] == ["joined", "left", "joined"]
    assert not fallen.failures


def test_who_comes_later_is_given_the_state_over_the_wire() -> None:
    state_bytes = 3 * 4 * num_parameters(spec_of().model) / 2
    before, after = (run_modelled(made(2, 2, seconds=s, churn=(Churn(4.0, "add", 3),))) for s in (5.0, 14.0))
    assert before.traffic_bytes[1, 3] < 0.5 * state_bytes
    assert after.traffic_bytes[1, 3] > state_bytes
    assert not after.failures


def test_who_leaves_says_good_bye_and_the_others_need_not_miss_it() -> None:
    """A device that falls is missed for as long as its peers are patient."""
    left, fallen = (
        run_modelled(made(2, 2, seconds=16.0, churn=(Churn(5.0, kind, 3),))) for kind in ("leave", "remove")
    )
    for result in (left, fallen):
        assert [event.change for event in result.events if event.device == 3] == ["joined", "left"]
        assert not result.failures
        assert result.given_up == 0
    assert len(left.steps) >= len(fallen.steps)
    assert left.standstill_s <= fallen.standstill_s


def test_who_has_left_may_come_back() -> None:
    churn = (Churn(3.0, "leave", 3), Churn(3.5, "add", 3), Churn(40.0, "add", 3))
    result = run_modelled(made(2, 2, steps=40, seconds=50.0, churn=churn))
    assert [event.change for event in result.events if event.device == 3] == ["joined", "left", "joined"]
    assert not result.failures


def test_the_timeline_is_what_devices_did() -> None:
    result = run_modelled(made(2, 1, steps=3, record_timeline=True))
    assert len(result.timeline) == 2
    for device, spans in enumerate(result.timeline):
        assert sum(span.ended_s - span.started_s for span in spans) == pytest.approx(result.busy_s[device])
        assert all(a.ended_s <= b.started_s for a, b in pairwise(spans))
    assert {span.kind for span in result.timeline[0]} == {"forward", "backward", "step"}


def test_without_a_placement_the_swarm_decides() -> None:
    result = run_modelled(made(3, 2, stages=None, steps=3))
    assert len(result.steps) == 3
    assert any(event.change == "plan" for event in result.events)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(LocalError, match="the churn names device 9, the network has 4"):
        run_modelled(made(2, 2, churn=(Churn(1.0, "remove", 9),)))
