import msgspec
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.peer.model.layout import (
    all_layer_keys,
    expert_key,
    init_layer,
    layer_index,
    layer_layout,
    num_parameters,
    num_trained,
    stage_layer_keys,
    unit_keys,
    unit_slices,
)
from shoal.protocol.decoder import DecoderSpec
from shoal.protocol.spec import ModelSpec, RunSpec

MODEL = ModelSpec(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, context=16)


def test_the_stages_of_any_cut_make_the_whole_model() -> None:
    for cut in (1, 2, 3):
        assert stage_layer_keys(MODEL, 0, cut) + stage_layer_keys(MODEL, cut, 4) == all_layer_keys(MODEL)
    assert all_layer_keys(MODEL) == ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")


def test_hidden_matrices_are_a_layers_first_elements_and_embedding_and_head_have_none() -> None:
    layout = layer_layout(MODEL, "layers.1")
    assert [(rows, columns) for _, rows, columns in layout.matrices] == list(layout.shapes[:7])
    ends = [first + rows * columns for first, rows, columns in layout.matrices]
    assert [first for first, _, _ in layout.matrices] == [0, *ends[:-1]]
    assert sum(rows * columns for _, rows, columns in layout.matrices) == layout.num_decayed
    assert layer_layout(MODEL, "embed").matrices == layer_layout(MODEL, "head").matrices == ()


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 5)])
def test_a_range_outside_the_model_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="decoder layers"):
        stage_layer_keys(MODEL, first, last)


@pytest.mark.parametrize("key", ["layers.4", "layers.-1", "layers.x", "layers.", "tail", "../embed"])
def test_an_unknown_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="decoder layer"):
        layer_layout(MODEL, key)


def test_layer_index_is_the_number_in_the_key() -> None:
    assert layer_index("layers.12") == 12


@pytest.mark.parametrize("key", all_layer_keys(MODEL))
def test_tensors_fill_the_buffer_without_gap_matrices_first(key: str) -> None:
    layout = layer_layout(MODEL, key)
    views = layout.views(torch.arange(layout.numel, dtype=torch.float32))
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), torch.arange(float(layout.numel)))
    assert tuple(views) == layout.names
    for name, view in views.items():
        assert (view.ndim == 2) == bool(view.max() < layout.num_decayed), name


def test_views_share_memory_and_flatten_is_their_inverse() -> None:
    layout = layer_layout(MODEL, "layers.1")
    flat_N = init_layer(MODEL, "layers.1", 3)
    views = layout.views(flat_N)
    assert torch.equal(layout.flatten(views), flat_N)
    views["model.layers.1.mlp.up_proj.weight"].fill_(7)
    assert (flat_N == 7).sum() == 48 * 32


def test_flatten_refuses_what_is_not_the_layer() -> None:
    layout = layer_layout(MODEL, "head")
    views = layout.views(init_layer(MODEL, "head", 0))
    with pytest.raises(ValueError, match="wants"):
        layout.flatten({"lm_head.weight": views["lm_head.weight"]})
    with pytest.raises(ValueError, match="must have shape"):
        layout.flatten(views | {"model.norm.weight": torch.ones(3)})
    with pytest.raises(ValueError, match="elements"):
        layout.views(torch.ones(3))


def test_gradients_of_leaves_add_up_in_the_flat_buffer() -> None:
    layout = layer_layout(MODEL, "head")
    flat_N, gradient_N = init_layer(MODEL, "head", 0), torch.zeros(layout.numel)
    for _ in range(2):
        leaves = layout.leaves(flat_N, gradient_N)
        torch.autograd.backward(torch.stack([(leaf * leaf).sum() for leaf in leaves.values()]).sum())
    torch.testing.assert_close(gradient_N, 4 * flat_N)
    assert not flat_N.requires_grad


@settings(deadline=None)  # nothing here is about time, and the machine may be busy
@given(seed=st.integers(0, 2**63 - 1), key=st.sampled_from(all_layer_keys(MODEL)))
def test_init_is_a_pure_function_of_seed_and_key(seed: int, key: str) -> None:
    flat_N = init_layer(MODEL, key, seed)
    torch.manual_seed(seed % 1000)
    assert torch.equal(flat_N, init_layer(MODEL, key, seed))
    assert not torch.equal(flat_N, init_layer(MODEL, key, seed ^ 1))


def test_init_gives_the_same_bits_on_every_device() -> None:
    """Tried on CPUs with AVX512, with AVX2 and with neither."""
    flat_N = init_layer(ModelSpec(), "layers.1", 7)
    assert blake3(flat_N.numpy().tobytes()).hexdigest(length=8) == "c5eb5e4015a0368a"


def test_equal_layers_start_differently() -> None:
    assert not torch.equal(init_layer(MODEL, "layers.0", 0), init_layer(MODEL, "layers.1", 0))


def test_a_fresh_norm_multiplies_by_1_and_a_fresh_bias_adds_nothing() -> None:
    qwen = ModelSpec(num_layers=1, decoder=DecoderSpec(attention_bias="qkv"))
    gemma = ModelSpec(
        num_layers=1,
        decoder=DecoderSpec(norms="both", norm_plus_one=True, activation="gelu_tanh", scale_embedding=True),
    )
    for model, of_norms in ((qwen, 1.0), (gemma, 0.0)):
        layout = layer_layout(model, "layers.0")
        views = layout.views(init_layer(model, "layers.0", 0))
        vectors = {name: view for name, view in views.items() if view.ndim == 1}
        assert len(vectors) > 3
        for name, view in vectors.items():
            assert (view == (0.0 if name.endswith(".bias") else of_norms)).all(), name
        assert layout.num_decayed == sum(view.numel() for view in views.values() if view.ndim == 2)
    assert init_layer(gemma, "embed", 0).std().item() == pytest.approx(gemma.dim**-0.5, rel=0.05)


def test_init_has_the_documented_deviations() -> None:
    model = ModelSpec()
    views = layer_layout(model, "layers.2").views(init_layer(model, "layers.2", 0))
    at = "model.layers.2."
    assert views[at + "mlp.gate_proj.weight"].std().item() == pytest.approx(model.dim**-0.5, rel=0.02)
    assert views[at + "mlp.gate_proj.weight"].mean().abs().item() < 0.05 * model.dim**-0.5
    assert views[at + "mlp.down_proj.weight"].std().item() == pytest.approx((12 * model.ffn_dim) ** -0.5, rel=0.02)
    assert views[at + "self_attn.o_proj.weight"].std().item() == pytest.approx((12 * model.dim) ** -0.5, rel=0.02)
    assert views[at + "input_layernorm.weight"].eq(1).all()
    assert init_layer(model, "embed", 0).std().item() == pytest.approx(1, rel=0.02)
    head = layer_layout(model, "head").views(init_layer(model, "head", 0))
    assert head["lm_head.weight"].std().item() == pytest.approx(model.dim**-0.5, rel=0.02)


def test_num_parameters_counts_every_layer() -> None:
    per_layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
    assert num_parameters(MODEL) == 4 * per_layer + 2 * 256 * 32 + 32


def test_a_matrix_that_is_embedding_and_head_counts_once() -> None:
    tied = msgspec.structs.replace(MODEL, tied=True)
    assert num_parameters(tied) == num_parameters(MODEL) - 256 * 32 == num_trained(RunSpec(model=tied))
    assert num_trained(RunSpec(model=MODEL)) == num_parameters(MODEL)


# --- layers with experts ---

MIXTURE = ModelSpec(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, context=16, num_experts=3)


def test_experts_are_units_one_behind_the_other_and_the_trunk_is_the_rest() -> None:
    assert unit_keys(MIXTURE, "layers.1") == (*(f"layers.1.experts.{e}" for e in range(3)), "layers.1.trunk")
    slices = unit_slices(MIXTURE, "layers.1")
    size = 3 * 48 * 32
    assert [slices[key] for key in unit_keys(MIXTURE, "layers.1")[:3]] == [
        slice(0, size),
        slice(size, 2 * size),
        slice(2 * size, 3 * size),
    ]
    assert slices["layers.1.trunk"] == slice(3 * size, layer_layout(MIXTURE, "layers.1").numel)
    for key in ("embed", "head"):
        assert unit_slices(MIXTURE, key) == {key: slice(0, layer_layout(MIXTURE, key).numel)}
    assert unit_keys(MODEL, "layers.1") == ("layers.1",)


def test_a_unit_has_the_layout_and_the_first_values_of_its_part_of_the_layer() -> None:
    layer = layer_layout(MIXTURE, "layers.1")
    flat_N = init_layer(MIXTURE, "layers.1", 5)
    views = layer.views(flat_N)
    names: list[str] = []
    for unit, span in unit_slices(MIXTURE, "layers.1").items():
        layout = layer_layout(MIXTURE, unit)
        assert torch.equal(flat_N[span], init_layer(MIXTURE, unit, 5))
        for name, view in layout.views(flat_N[span]).items():
            assert view.data_ptr() == views[name].data_ptr()
        is_expert = ".experts." in unit
        assert layout.num_decayed == (layout.numel if is_expert else layout.numel - 64)
        assert sum(rows * columns for _, rows, columns in layout.matrices) == layout.num_decayed
        names += layout.names
    assert tuple(names) == layer.names
    assert sum(rows * columns for _, rows, columns in layer.matrices) == layer.num_decayed


def test_names_and_shapes_are_mixtrals() -> None:
    shapes = dict(zip(layer_layout(MIXTURE, "layers.0").names, layer_layout(MIXTURE, "layers.0").shapes, strict=True))
    at = "model.layers.0.block_sparse_moe."
    assert shapes[at + "gate.weight"] == (3, 32)
    assert [shapes[f"{at}experts.2.{w}.weight"] for w in ("w1", "w2", "w3")] == [(48, 32), (32, 48), (48, 32)]
    assert not [name for name in shapes if ".mlp." in name]
    assert len(shapes) == 4 + 1 + 9 + 2


def test_experts_start_differently_and_those_that_write_into_the_residual_small() -> None:
    model = ModelSpec(num_experts=2)
    first, second = (init_layer(model, expert_key("layers.2", expert), 0) for expert in range(2))
    assert not torch.equal(first, second)
    views = layer_layout(model, "layers.2.experts.1").views(second)
    deviations = {name.split(".")[-2]: view.std().item() for name, view in views.items()}
    assert deviations["w1"] == pytest.approx(model.dim**-0.5, rel=0.02)
    assert deviations["w3"] == pytest.approx(model.dim**-0.5, rel=0.02)
    assert deviations["w2"] == pytest.approx((12 * model.ffn_dim) ** -0.5, rel=0.02)
    trunk = layer_layout(model, "layers.2.trunk").views(init_layer(model, "layers.2.trunk", 0))
    assert trunk["model.layers.2.block_sparse_moe.gate.weight"].std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "key", ["layers.0.experts.3", "layers.0.experts.-1", "layers.0.experts.01", "layers.0.experts", "layers.0.x",
            "layers.2.trunk", "layers.0.", "embed.trunk"],
)  # fmt: skip
def test_an_unknown_unit_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="decoder layer"):
        layer_layout(MIXTURE, key)


def test_a_dense_model_has_no_units() -> None:
    for key in ("layers.0.trunk", "layers.0.experts.0"):
        with pytest.raises(ValueError, match="0 experts"):
            layer_layout(MODEL, key)
