"""A base that is not trained: what is stored is what is computed with, and no gradient of it is ever made."""

import math

import msgspec
import pytest
import torch
from blake3 import blake3
from torch.nn import functional

from shoal.peer.model import frozen
from shoal.peer.model.frozen import AdaptedLayer, FrozenLayer, FrozenMatrix, base_numel, seed_base, stored_base
from shoal.peer.model.layout import all_layer_keys, init_layer, initial_parameters, layer_layout, state_layout
from shoal.peer.model.llama import loss_of_head, rotary_tables, run_layers
from shoal.peer.model.mixture import Mixture, mixture_layer
from shoal.protocol.spec import BaseFormat, RunSpec
from shoal.protocol.tensors import model_bytes, stored_tensors

CPU = torch.device("cpu")
FORMATS = ["fp32", "bf16", "int8", "nf4"]
MODEL = {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 96, "context": 16}
FAMILIES = {
    "llama": {},
    "biases": {"decoder": {"attention_bias": "all", "qk_norm": "head"}},
    "mixtral": {"num_experts": 4, "experts_per_token": 2},
    "qwen3-moe": {"num_experts": 6, "experts_per_token": 3, "decoder": {"qk_norm": "head"}},
}


def spec_with(base: str = "fp32", **adapter: object) -> RunSpec:
    tables = {"model": MODEL, "adapter": {"kind": "lora", "rank": 4, "alpha": 6.0, "base": base} | adapter}
    return msgspec.convert(tables, RunSpec)


def layers_of(spec: RunSpec, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, AdaptedLayer]:
    """B is not zero here."""
    assert spec.adapter is not None
    found = {}
    for number, key in enumerate(all_layer_keys(spec.model)):
        flat_N = initial_parameters(spec, key)
        flat_N += 0.05 * torch.randn(flat_N.shape, generator=torch.Generator().manual_seed(seed + number))
        frozen = FrozenLayer.of(spec, key, seed_base(spec, key), device=CPU, dtype=dtype)
        leaves = state_layout(spec, key).leaves(flat_N.to(dtype))
        found[key] = AdaptedLayer(frozen, leaves, scale=spec.adapter.scale)
    return found


def merged(spec: RunSpec, layers: dict[str, AdaptedLayer]) -> dict[str, dict[str, torch.Tensor]]:
    """W + (alpha / rank) B A, of the base as it is stored, and with "dora" rows of the length of W's, and of m more."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, layer in layers.items():
        names = layer_layout(spec.model, key).names
        found[key] = {name: layer[name] if name in layer else layer.matrix(name).clone() for name in names}
        for name in found[key]:
            of = name.removesuffix(".weight")
            lengths = found[key][name].norm(dim=-1, keepdim=True)
            if f"{of}.lora_A.weight" in layer:
                found[key][name] += 1.5 * layer[f"{of}.lora_B.weight"] @ layer[f"{of}.lora_A.weight"]
            if f"{of}.lora_magnitude_vector" in layer:
                lengths += layer[f"{of}.lora_magnitude_vector"][:, None]
                found[key][name] *= lengths / found[key][name].norm(dim=-1, keepdim=True)
    return found


def test_what_trains_are_a_and_b_of_the_targets_and_nothing_of_embedding_and_head() -> None:
    spec = spec_with(targets=["v_proj", "down_proj"])
    at = "model.layers.1."
    assert dict(zip(*(getattr(state_layout(spec, "layers.1"), of) for of in ("names", "shapes")), strict=True)) == {
        at + "self_attn.v_proj.lora_A.weight": (4, 64),
        at + "self_attn.v_proj.lora_B.weight": (32, 4),
        at + "mlp.down_proj.lora_A.weight": (4, 96),
        at + "mlp.down_proj.lora_B.weight": (64, 4),
    }
    for key in ("embed", "head"):
        layout = state_layout(spec, key)
        assert (layout.numel, layout.names, layout.views(torch.empty(0))) == (0, (), {})
        assert layout.flatten({}).shape == (0,)


def test_a_begins_uniform_and_b_zero_the_same_at_every_peer() -> None:
    spec = spec_with()
    views = state_layout(spec, "layers.0").views(initial_parameters(spec, "layers.0"))
    for name, view in views.items():
        bound = 1 / math.sqrt(view.shape[1])
        assert (view.abs().max() <= bound and view.std() > bound / 2) if "lora_A" in name else not view.any()
    digest = blake3(initial_parameters(spec, "layers.0").numpy().tobytes()).hexdigest(length=8)
    assert digest == "dac057dbbbadb594"
    other = msgspec.structs.replace(spec, seed=1)
    assert not torch.equal(initial_parameters(other, "layers.0"), initial_parameters(spec, "layers.0"))


@pytest.mark.parametrize(("base", "worst"), [("fp32", 0.0), ("bf16", 2**-8), ("int8", 0.02), ("nf4", 0.3)])
def test_a_stored_layer_is_near_the_layer(base: str, worst: float) -> None:
    spec = spec_with(base)
    for key in all_layer_keys(spec.model):
        stored = seed_base(spec, key)
        assert stored.shape == (base_numel(spec, key),)
        frozen = FrozenLayer.of(spec, key, stored, device=CPU, dtype=torch.float32)
        for name, view in layer_layout(spec.model, key).views(init_layer(spec.model, key, spec.seed)).items():
            found = frozen.vectors[name] if view.ndim == 1 else frozen.matrices[name].dense(torch.float32)
            assert (found - view).abs().max() <= worst * view.abs().max()
    assert sum(4 * base_numel(spec, key) for key in all_layer_keys(spec.model)) == model_bytes(spec.model, base)  # type: ignore[arg-type]


def test_the_bytes_of_a_base_are_these() -> None:
    """Peers compare them: a change of one bit would be another base."""
    found = [blake3(seed_base(spec_with(base), "layers.0").numpy().tobytes()).hexdigest(length=4) for base in FORMATS]
    assert found == ["33ccb63f", "b4e15ecb", "27c97df1", "c304be47"]


def test_eight_billion_parameters_take_less_than_five_gigabytes_in_four_bits() -> None:
    llama = {"dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}
    spec = msgspec.convert({"model": llama, "adapter": {"kind": "lora", "base": "nf4"}}, RunSpec)
    assert 4.5e9 < model_bytes(spec.model, "nf4") < 5e9


@pytest.mark.parametrize("base", FORMATS)
def test_a_product_with_a_stored_matrix_and_its_gradient_are_those_of_the_dense_one(base: str) -> None:
    spec = spec_with(base)
    frozen = FrozenLayer.of(spec, "layers.0", seed_base(spec, "layers.0"), device=CPU, dtype=torch.bfloat16)
    matrix: FrozenMatrix = frozen.matrices["model.layers.0.mlp.up_proj.weight"]
    x, y = (torch.randn(3, 64, generator=torch.Generator().manual_seed(5)).requires_grad_() for _ in range(2))
    weight = matrix.dense(torch.float32).requires_grad_()
    product, wanted = matrix.times(x), functional.linear(y, weight)
    assert torch.equal(product, wanted)
    torch.autograd.backward(product.square().sum())
    torch.autograd.backward(wanted.square().sum())
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_layer_with_adapters_is_the_layer_that_they_make(base: str, family: str, kind: str) -> None:
    spec = spec_with(base, kind=kind)
    spec = msgspec.convert(msgspec.to_builtins(spec) | {"model": MODEL | FAMILIES[family]}, RunSpec)
    layers, keys = layers_of(spec), all_layer_keys(spec.model)
    tokens_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    rotary = rotary_tables(spec.model)
    logits = run_layers(spec.model, keys, layers, tokens_BT, rotary)
    assert torch.allclose(logits, run_layers(spec.model, keys, merged(spec, layers), tokens_BT, rotary), atol=2e-4)


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("shape", [(50, 128), (50, 96)])
def test_rows_are_those_of_the_dense_matrix_and_its_parts_fit_together(
    base: BaseFormat, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x_RC = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    matrix = FrozenMatrix(frozen._encoded(x_RC, base), shape, base)
    whole_RC = matrix.dense(torch.float32)
    assert torch.equal(matrix.dense(torch.bfloat16), whole_RC.to(torch.bfloat16))
    monkeypatch.setattr(frozen, "_CHUNK", 128)
    assert torch.equal(matrix.dense(torch.float32), whole_RC)
    index = torch.tensor([[3, 49, 0], [3, 7, 12]])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(matrix.rows(index, dtype), whole_RC[index].to(dtype))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_and_routers_have_no_adapters(family: str) -> None:
    """And a router, which is small, is not stored in few bits: a token that it sends elsewhere is another model's."""
    spec = msgspec.convert(msgspec.to_builtins(spec_with("nf4")) | {"model": MODEL | FAMILIES[family]}, RunSpec)
    names = state_layout(spec, "layers.1").names
    assert {name.split(".")[4] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    forms = {name: form for name, _, form, _, _ in stored_tensors(spec.model, "nf4", "layers.1")}
    assert {form for name, form in forms.items() if ".experts." in name} == {"nf4"}
    assert [form for name, form in forms.items() if name.endswith(".gate.weight")] == ["bf16"]


@pytest.mark.parametrize("base", FORMATS)
def test_the_gradient_through_stored_experts_is_that_through_dense_ones(base: str) -> None:
    spec = msgspec.convert(msgspec.to_builtins(spec_with(base)) | {"model": MODEL | FAMILIES["mixtral"]}, RunSpec)
    layer, at = layers_of(spec)["layers.0"], "layers.0"
    dense = {name: layer.get(name, None) for name in layer_layout(spec.model, at).names}
    dense |= {name: layer.matrix(name) for name, tensor in dense.items() if tensor is None}
    x_ND, y_ND = (torch.randn(40, 64, generator=torch.Generator().manual_seed(7)).requires_grad_() for _ in range(2))
    narrow, wide = (
        mixture_layer(spec.model, 0, params, x, Mixture(balances=[])) for params, x in ((layer, x_ND), (dense, y_ND))
    )
    assert torch.allclose(narrow, wide, atol=1e-5)
    torch.autograd.backward(narrow.square().sum())
    torch.autograd.backward(wide.square().sum())
    assert x_ND.grad is not None
    assert y_ND.grad is not None
    assert x_ND.grad.any()
    assert torch.allclose(x_ND.grad, y_ND.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize(("kind", "family"), [("lora", "llama"), ("dora", "biases"), ("lora", "mixtral")])
def test_only_adapters_get_gradients(base: str, dtype: torch.dtype, kind: str, family: str) -> None:
    spec = spec_with(base, kind=kind)
    spec = msgspec.convert(msgspec.to_builtins(spec) | {"model": MODEL | FAMILIES[family]}, RunSpec)
    layers = layers_of(spec, dtype=dtype)
    tokens_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    x_BTD = run_layers(spec.model, all_layer_keys(spec.model)[:-1], layers, tokens_BT, rotary_tables(spec.model))
    loss = loss_of_head(spec.model, layers["head"], x_BTD, tokens_BT)
    torch.autograd.backward(loss)
    for key, layer in layers.items():
        trained = set(state_layout(spec, key).names)
        assert {name for name, tensor in layer.items() if tensor.requires_grad} == trained
        assert all(layer[name].grad is not None and layer[name].grad.any() for name in trained)  # type: ignore[union-attr]
        assert all(layer[name].grad is None for name in set(layer) - trained)


def test_a_base_is_packed_from_a_layer_of_the_model_and_from_no_other() -> None:
    with pytest.raises(ValueError, match="elements"):
        stored_base(spec_with(), "layers.0", torch.zeros(5))
