"""N parameters of a layer"""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from shoal.peer.model.layout import all_layer_keys, layer_layout, unit_slices
from shoal.peer.model.state import LayerState, StageState, clipped, initial_state, step_layer, unit_spans
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
KEY = "layers.1"


def stepped(spec: RunSpec, steps: int) -> LayerState:
    """A layer that has seen `steps` random gradients."""
    layer = initial_state(spec, (KEY,), CPU).layers[KEY]
    for version in range(steps):
        grad_N = torch.randn(layer.param_N.shape, generator=torch.Generator().manual_seed(version))
        after = step_layer(spec, KEY, layer, grad_N, version)
        assert after is not None
        layer = after
    return layer


def test_the_first_state_is_a_function_of_the_seed_and_not_of_the_cut(tiny_spec: RunSpec) -> None:
    keys = all_layer_keys(tiny_spec.model)
    whole = initial_state(tiny_spec, keys, CPU)
    assert whole.version == 0
    assert whole.digest() == initial_state(tiny_spec, keys, CPU).digest()
    for key in keys:
        alone = initial_state(tiny_spec, (key,), CPU).layers[key]
        assert alone.digest() == whole.layers[key].digest()
        assert not alone.moment1_N.any()
        assert not alone.moment2_N.any()


@pytest.mark.parametrize("part", ["param_N", "moment1_N", "moment2_N"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_single_bit_anywhere_changes_the_digest(tiny_spec: RunSpec, part: str, place: int) -> None:
    layer = stepped(tiny_spec, 1)
    changed_N = getattr(layer, part).clone()
    changed_N.view(torch.int32)[place] ^= 1
    other = replace(layer, **{part: changed_N})
    assert other.digest() != layer.digest()
    states = [StageState(version=1, layers={KEY: each}) for each in (layer, other)]
    assert states[0].digest() != states[1].digest()


def test_layers_that_change_places_change_the_digest(tiny_spec: RunSpec) -> None:
    state = initial_state(tiny_spec, ("layers.0", "layers.1"), CPU)
    swapped = {"layers.0": state.layers["layers.1"], "layers.1": state.layers["layers.0"]}
    assert StageState(version=0, layers=swapped).digest() != state.digest()


def test_a_step_makes_new_tensors_and_leaves_the_old_ones_alone(tiny_spec: RunSpec) -> None:
    before = stepped(tiny_spec, 2)
    copies = [tensor.clone() for tensor in before.tensors]
    after = step_layer(tiny_spec, KEY, before, torch.ones_like(before.param_N), 2)
    assert after is not None
    for old, copy, new in zip(before.tensors, copies, after.tensors, strict=True):
        assert torch.equal(old, copy)
        assert not torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_no_optimizer_sees_a_gradient_whose_norm_is_not_finite(tiny_spec: RunSpec, value: float) -> None:
    layer = stepped(tiny_spec, 1)
    grad_N = torch.full_like(layer.param_N, 3e38) if value == 3e38 else torch.zeros_like(layer.param_N)
    grad_N[7] = value
    assert step_layer(tiny_spec, KEY, layer, grad_N, 1) is None


def test_sgd_keeps_no_second_moment_and_still_has_a_digest(tiny_spec: RunSpec) -> None:
    optimizer = msgspec.structs.replace(tiny_spec.optimizer, name="sgd")
    spec = msgspec.structs.replace(tiny_spec, optimizer=optimizer)
    layer = stepped(spec, 1)
    assert layer.moment2_N.numel() == 0
    assert layer.moment1_N.numel() == layer_layout(spec.model, KEY).numel
    assert layer.digest() == stepped(spec, 1).digest()


# --- units of a layer with experts ---


def with_experts(spec: RunSpec, optimizer: str = "adamw", **fields: Any) -> RunSpec:
    tables = msgspec.to_builtins(spec)
    tables["model"] |= {"num_experts": 3}
    tables["optimizer"] |= {"name": optimizer, "clip_norm": 0.5, **fields}
    return msgspec.convert(tables, RunSpec)


def part_of(spec: RunSpec, layer: LayerState, unit: str) -> LayerState:
    spans = unit_spans(spec, KEY, unit)
    tensors = [tensor[span] for tensor, span in zip(layer.tensors, spans, strict=True)]
    return LayerState(param_N=tensors[0], moment1_N=tensors[1], moment2_N=tensors[2])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "nadam", "muon"])
def test_a_step_of_a_layer_is_a_step_of_each_unit_by_itself(tiny_spec: RunSpec, optimizer: str) -> None:
    """Bit for bit: so whoever holds one expert steps it as its mates do who hold the layer."""
    spec = with_experts(tiny_spec, optimizer)
    slices = unit_slices(spec.model, KEY)
    assert len(slices) == 4
    layer = initial_state(spec, (KEY,), CPU).layers[KEY]
    units = initial_state(spec, tuple(slices), CPU).layers
    generator = torch.Generator().manual_seed(0)
    for version in range(3):
        grad_N = torch.randn(layer.param_N.shape, generator=generator)
        for i, span in enumerate(slices.values()):
            grad_N[span] *= 1e-4 * 10**i  # some are clipped, and some are not
        after = step_layer(spec, KEY, layer, grad_N, version)
        assert after is not None
        layer = after
        for unit, span in slices.items():
            assert part_of(spec, layer, unit).digest() != units[unit].digest()
            stepped_unit = step_layer(spec, unit, units[unit], grad_N[span], version)
            assert stepped_unit is not None
            units = {**units, unit: stepped_unit}
            assert part_of(spec, layer, unit).digest() == stepped_unit.digest(), unit


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("spoilt", ["layers.1.experts.0", "layers.1.experts.2", "layers.1.trunk"])
def test_a_unit_with_a_gradient_that_is_not_finite_stays_and_the_others_step(
    tiny_spec: RunSpec, spoilt: str, optimizer: str
) -> None:
    spec = with_experts(tiny_spec, optimizer)
    layer = stepped(spec, 1)
    grad_N = torch.ones_like(layer.param_N)
    grad_N[unit_slices(spec.model, KEY)[spoilt].start + 5] = float("nan")
    after = step_layer(spec, KEY, layer, grad_N, 1)
    assert after is not None
    assert all(bool(tensor.isfinite().all()) for tensor in after.tensors)
    same = [
        unit
        for unit in unit_slices(spec.model, KEY)
        if part_of(spec, after, unit).digest() == part_of(spec, layer, unit).digest()
    ]
    assert same == [spoilt]
    assert step_layer(spec, KEY, layer, torch.full_like(grad_N, float("inf")), 1) is None


def test_the_norm_before_clipping_leaves_out_units_that_are_not_finite(tiny_spec: RunSpec) -> None:
    spec = msgspec.convert(
        msgspec.to_builtins(tiny_spec) | {"model": {**msgspec.to_builtins(tiny_spec.model), "num_experts": 2}}, RunSpec
    )
    grad_N = torch.full_like(initial_state(spec, (KEY,), CPU).layers[KEY].param_N, 2.0)
    whole = clipped(spec, KEY, grad_N)
    assert whole.square == pytest.approx(4.0 * grad_N.numel())
    spans = unit_slices(spec.model, KEY)
    unit, span = list(spans.items())[-1]
    grad_N[span.start] = float("nan")
    part = clipped(spec, KEY, grad_N)
    assert part.spoilt == (unit,)
    assert part.square == pytest.approx(4.0 * (grad_N.numel() - (span.stop - span.start)))
