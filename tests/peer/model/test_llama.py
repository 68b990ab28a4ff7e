"""B samples, T tokens, D width, V vocabulary, K head size."""

import math

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoal.peer.model.flop import forward_flop
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import Params, decoder_layer, embed, head, loss, rotary_tables, run_layers
from shoal.peer.model.mixture import Routing
from shoal.peer.model.rotary import rotate
from shoal.protocol.decoder import DecoderSpec
from shoal.protocol.spec import ModelSpec
from shoal.protocol.tensors import EXPERT_MATRICES, expert_name

MODEL = ModelSpec(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, context=16)
MIXTURE = ModelSpec(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, context=16, num_experts=4)
QWEN3 = msgspec.structs.replace(MODEL, head_size=12, decoder=DecoderSpec(qk_norm="head", attention_bias="all"))
KEYS = all_layer_keys(MODEL)


def params_of(model: ModelSpec) -> dict[str, Params]:
    return {key: layer_layout(model, key).views(init_layer(model, key, 0)) for key in all_layer_keys(model)}


def tokens(model: ModelSpec, num_samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocab_size, (num_samples, model.context), generator=generator)


def plain_attention_layer(model: ModelSpec, params: Params, x_TD: Tensor) -> Tensor:
    """Layer 0 on one sample by the definitions: loops, complex rotations and an explicit mask."""
    p = {name.removeprefix("model.layers.0.").removesuffix(".weight"): tensor for name, tensor in params.items()}

    def norm(x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return x_TD / (x_TD.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight_D

    def turn(x_TK: Tensor) -> Tensor:
        half = model.head_dim // 2
        pair = torch.complex(x_TK[:, :half], x_TK[:, half:])
        angle = torch.tensor(
            [[t * model.rope_theta ** (-2 * k / model.head_dim) for k in range(half)] for t in range(len(x_TK))]
        )
        turned = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=-1)

    T, K = len(x_TD), model.head_dim
    normed = norm(x_TD, p["input_layernorm"])
    outs = []
    for h in range(model.num_heads):
        g = h // (model.num_heads // model.num_kv_heads)
        query = turn(normed @ p["self_attn.q_proj"][h * K : (h + 1) * K].T)
        key = turn(normed @ p["self_attn.k_proj"][g * K : (g + 1) * K].T)
        value = normed @ p["self_attn.v_proj"][g * K : (g + 1) * K].T
        score = (query @ key.T / math.sqrt(K)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        outs.append(score.softmax(-1) @ value)
    x_TD = x_TD + torch.cat(outs, dim=-1) @ p["self_attn.o_proj"].T
    normed = norm(x_TD, p["post_attention_layernorm"])
    gate = normed @ p["mlp.gate_proj"].T
    return x_TD + (gate * gate.sigmoid() * (normed @ p["mlp.up_proj"].T)) @ p["mlp.down_proj"].T


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_decoder_layer_is_what_its_definition_says(num_kv_heads: int) -> None:
    model = ModelSpec(dim=32, num_layers=3, num_heads=4, num_kv_heads=num_kv_heads, ffn_dim=48, context=16)
    params = params_of(model)["layers.0"]
    x_BTD = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    got = decoder_layer(model, 0, params, x_BTD, rotary_tables(model))
    for x_TD, got_TD in zip(x_BTD, got, strict=True):
        torch.testing.assert_close(got_TD, plain_attention_layer(model, params, x_TD), rtol=1e-4, atol=1e-5)


def test_chained_layers_are_the_model_cut_anywhere() -> None:
    params, rotary, tokens_BT = params_of(MODEL), rotary_tables(MODEL), tokens(MODEL, 2)
    whole = run_layers(MODEL, KEYS, params, tokens_BT, rotary)
    x = embed(MODEL, params["embed"], tokens_BT)
    for index in range(3):
        x = decoder_layer(MODEL, index, params[f"layers.{index}"], x, rotary)
    assert torch.equal(whole, head(MODEL, params["head"], x))
    for cut in range(1, len(KEYS)):
        middle = run_layers(MODEL, KEYS[:cut], params, tokens_BT, rotary)
        assert torch.equal(whole, run_layers(MODEL, KEYS[cut:], params, middle, rotary))


def test_no_token_sees_the_future() -> None:
    params, rotary, tokens_BT = params_of(MODEL), rotary_tables(MODEL), tokens(MODEL, 1)
    changed_BT = tokens_BT.clone()
    changed_BT[0, 9] += 1
    before, after = (run_layers(MODEL, KEYS, params, x, rotary)[0] for x in (tokens_BT, changed_BT % 256))
    torch.testing.assert_close(before[:9], after[:9])
    assert not torch.allclose(before[9:], after[9:], atol=1e-3)


def test_a_shorter_sample_gives_the_beginning_of_a_longer_one() -> None:
    params, rotary, tokens_BT = params_of(MODEL), rotary_tables(MODEL), tokens(MODEL, 1)
    long, short = (run_layers(MODEL, KEYS, params, x, rotary) for x in (tokens_BT, tokens_BT[:, :5]))
    torch.testing.assert_close(long[:, :5], short, rtol=1e-4, atol=1e-5)


def test_rotation_depends_on_distance_only() -> None:
    """The score of two rotated vectors is the same wherever the pair stands."""
    cos_TK, turned_TK = rotary_tables(MODEL)
    a_K, b_K = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))

    def turned(x_K: Tensor, t: int) -> Tensor:
        return x_K * cos_TK[t] + torch.cat((x_K[4:], x_K[:4])) * turned_TK[t]

    scores = [float(turned(a_K, t + 3) @ turned(b_K, t)) for t in range(13)]
    assert scores == pytest.approx([scores[0]] * 13, abs=1e-5)


def test_the_rotation_is_rotate_half_bit_for_bit_and_its_gradient_too() -> None:
    """As Hugging Face has it, with the sines as they are and the sign at the half that comes to the front."""
    cos_TK, turned_TK = rotary_tables(MODEL)
    sin_TK = torch.cat((-turned_TK[:, :4], turned_TK[:, 4:]), dim=-1)
    x_BHTK, grad_BHTK = torch.randn(2, 2, 3, 9, 8, generator=torch.Generator().manual_seed(1))

    def rotate_half(x_BHTK: Tensor) -> Tensor:
        first, second = x_BHTK.chunk(2, dim=-1)
        return x_BHTK * cos_TK[:9] + torch.cat((-second, first), dim=-1) * sin_TK[:9]

    results = []
    for turn in (rotate_half, lambda x_BHTK: rotate(x_BHTK, (cos_TK, turned_TK))):
        x = x_BHTK.clone().requires_grad_()
        y = turn(x)
        torch.autograd.backward(y, grad_BHTK)
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    for wanted, found in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def test_loss_of_ignorance_is_the_logarithm_of_the_vocabulary() -> None:
    assert loss(torch.zeros(2, 5, 256), torch.zeros(2, 5, dtype=torch.long)).item() == pytest.approx(math.log(256))


def test_gradient_is_that_of_finite_differences() -> None:
    model = ModelSpec(vocab_size=11, dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=12, context=4)
    keys, rotary = all_layer_keys(model), rotary_tables(model, dtype=torch.float64)
    flats = {key: init_layer(model, key, 0).double() for key in keys}
    x, y = tokens(model, 2), tokens(model, 2, seed=1)

    def value(flat_N: Tensor, key: str) -> Tensor:
        params = {k: layer_layout(model, k).views(flat_N if k == key else flats[k]) for k in keys}
        return loss(run_layers(model, keys, params, x, rotary).double(), y)

    for key in keys:
        flat_N = flats[key].clone().requires_grad_()
        (gradient_N,) = torch.autograd.grad(value(flat_N, key), flat_N)
        direction_N = torch.randn(flat_N.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        h = 1e-4
        ends = [value(flats[key] + sign * h * direction_N, key).item() for sign in (1, -1)]
        # The loss is taken in float32, 1e-7 of 2.4: over 2h that is 1e-3.
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float(gradient_N @ direction_N), abs=3e-3)


@pytest.mark.parametrize("model", [MODEL, MIXTURE, QWEN3], ids=["dense", "experts", "qwen3"])
@pytest.mark.parametrize("key", KEYS)
def test_flop_are_those_that_torch_counts(key: str, model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    params, rotary, tokens_BT = params_of(model), rotary_tables(model), tokens(model, 2)
    x = tokens_BT if key == "embed" else torch.randn(2, 16, 32)
    monkeypatch.setattr("shoal.peer.model.mixture.local_experts", by_slices)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_layers(model, [key], params, x, rotary)
    # Only the plain attention is made of matmuls that torch can count. It counts the full square,
    # 4 N T H K; we count the causal part of it, 2 N (T + 1) H K.
    upper = 2 * 32 * model.num_heads * model.head_dim * (16 - 1) if key.startswith("layers") else 0
    assert forward_flop(model, key, 32) == counter.get_total_flops() - upper


def by_slices(model: ModelSpec, layer_index: int, params: dict[str, Tensor], x_ND: Tensor, routing: Routing) -> Tensor:
    """torch cannot count what our own products do: an expert at a time, and any order of rows will do."""
    for expert in range(model.num_experts):
        w1, w2, w3 = (params[expert_name(model, layer_index, expert, w)] for w in EXPERT_MATRICES)
        x_PD = x_ND[(routing.chosen_NK == expert).any(-1)]
        ((x_PD @ w1.T) * (x_PD @ w3.T)) @ w2.T
    return torch.zeros_like(x_ND)
