"""N tokens, K experts a token, E experts, D width"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import decoder_layer, rotary_tables, run_layers
from shoal.peer.model.mixture import ExpertLoads, Mixture, Routing, mixture_layer, route
from shoal.protocol.spec import ModelSpec

MODEL = ModelSpec(
    dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, context=8, num_experts=4, router_aux_loss=0.5
)
E, K, D = 4, 2, 16
GATE = "model.layers.1.block_sparse_moe.gate.weight"


def params_of(key: str = "layers.1") -> dict[str, Tensor]:
    """Larger than at the start of training, so that no choice of a router is a close one."""
    return layer_layout(MODEL, key).leaves(10 * init_layer(MODEL, key, 0))


def tokens(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(seed))


def plain_mixture(params: dict[str, Tensor], x_ND: Tensor) -> Tensor:
    """Mixtral's formula, a token at a time."""
    p = {name.removesuffix(".weight"): tensor for name, tensor in params.items()}
    at, rows = "model.layers.1.block_sparse_moe.", []
    for x_D in x_ND:
        logits = (p[at + "gate"] @ x_D).tolist()
        top = sorted(range(E), key=lambda e: -logits[e])[:K]
        total = sum(math.exp(logits[e]) for e in top)
        y_D = torch.zeros(D)
        for e in top:
            expert = f"{at}experts.{e}."
            gate_F, up_F = p[expert + "w1"] @ x_D, p[expert + "w3"] @ x_D
            y_D = y_D + math.exp(logits[e]) / total * (p[expert + "w2"] @ (gate_F * gate_F.sigmoid() * up_F))
        rows.append(y_D)
    return torch.stack(rows)


def test_a_mixture_is_what_its_definition_says() -> None:
    params, x_ND = params_of(), tokens(20)
    got_ND = mixture_layer(MODEL, 1, params, x_ND, Mixture())
    torch.testing.assert_close(got_ND, plain_mixture(params, x_ND), rtol=1e-4, atol=1e-5)


def test_a_decoder_layer_has_the_mixture_in_the_swiglus_place(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of()
    x_BTD = tokens(16).view(2, 8, D)
    seen: list[Tensor] = []

    def nothing(model: ModelSpec, index: int, _: dict[str, Tensor], x_ND: Tensor, routing: Routing) -> Tensor:
        assert (index, routing.chosen_NK.shape, routing.weight_NK.shape) == (1, (16, K), (16, K))
        seen.append(x_ND)
        return torch.zeros_like(x_ND)

    rotary = rotary_tables(MODEL)
    whole_BTD = decoder_layer(MODEL, 1, params, x_BTD, rotary)
    monkeypatch.setattr("shoal.peer.model.mixture.local_experts", nothing)
    attended_BTD = decoder_layer(MODEL, 1, params, x_BTD, rotary)
    made_ND = plain_mixture(params, seen[0])
    torch.testing.assert_close(whole_BTD - attended_BTD, made_ND.view(2, 8, D), rtol=1e-4, atol=1e-5)


# --- the router ---


def test_weights_are_the_softmax_over_the_chosen_logits() -> None:
    logit_NE = torch.tensor([[0.0, 3.0, -1.0, 2.0], [5.0, 5.5, 9.0, 1.0]])
    routing = route(logit_NE, K)
    assert routing.chosen_NK.tolist() == [[1, 3], [2, 1]]
    torch.testing.assert_close(routing.weight_NK[0], torch.tensor([3.0, 2.0]).softmax(0))
    assert routing.counts_E.tolist() == [0, 2, 1, 1]


def test_the_balance_is_one_where_the_load_is_even_and_the_ratio_where_all_want_the_same() -> None:
    certain = 50.0
    pairs = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    even_NE = torch.zeros(4, E).scatter(1, pairs, certain)
    assert float(route(even_NE, K).balance) == pytest.approx(1.0)
    same_NE = torch.zeros(4, E).scatter(1, pairs[:1].expand(4, 2), certain)
    assert float(route(same_NE, K).balance) == pytest.approx(E / K)


def test_descending_the_balance_evens_the_load() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(200, D, generator=generator) + 1.0
    gate_ED = (0.3 * torch.randn(E, D, generator=generator)).requires_grad_()
    counts = []
    for _ in range(60):
        routing = route(x_ND @ gate_ED.T, K)
        counts.append(routing.counts_E.tolist())
        (gradient_ED,) = torch.autograd.grad(routing.balance, gate_ED)
        with torch.no_grad():
            gate_ED -= 0.1 * gradient_ED
    assert max(counts[0]) > 160
    assert max(counts[-1]) < 115


def test_no_tokens_have_a_balance_of_zero() -> None:
    assert float(route(torch.zeros(0, E), K).balance) == 0.0


# --- the balance enters where the layer is ---


def test_entering_locally_gives_the_gradients_of_adding_to_the_loss() -> None:
    x_ND = tokens(20).requires_grad_()
    grad_ND = tokens(20, seed=1)
    entering, adding = params_of(), params_of()
    mixture_layer(MODEL, 1, entering, x_ND, Mixture()).backward(grad_ND)  # type: ignore[no-untyped-call]
    assert x_ND.grad is not None
    of_x, x_ND.grad = x_ND.grad, None
    balances: list[Tensor] = []
    y_ND = mixture_layer(MODEL, 1, adding, x_ND, Mixture(balances=balances))
    ((y_ND * grad_ND).sum() + MODEL.router_aux_loss * balances[0]).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(of_x, x_ND.grad)
    for name, leaf in adding.items():
        torch.testing.assert_close(entering[name].grad, leaf.grad)
    with_none = params_of()
    model = ModelSpec(**{**{f: getattr(MODEL, f) for f in MODEL.__struct_fields__}, "router_aux_loss": 0.0})
    mixture_layer(model, 1, with_none, x_ND, Mixture()).backward(grad_ND)  # type: ignore[no-untyped-call]
    assert with_none[GATE].grad is not None
    assert entering[GATE].grad is not None
    assert not torch.allclose(with_none[GATE].grad, entering[GATE].grad, atol=1e-4)


def test_each_layer_gives_its_balance_once() -> None:
    keys = all_layer_keys(MODEL)
    params = {key: layer_layout(MODEL, key).views(init_layer(MODEL, key, 0)) for key in keys}
    balances: list[Tensor] = []
    run_layers(
        MODEL, keys, params, torch.zeros(1, 8, dtype=torch.int64), rotary_tables(MODEL),
        mixture=Mixture(balances=balances),
    )  # fmt: skip
    assert len(balances) == MODEL.num_layers


# --- what is counted ---


def test_loads_are_totals_by_layer_and_a_reading_stays_what_it_was() -> None:
    loads = ExpertLoads()
    mixture = Mixture(loads=loads)
    mixture_layer(MODEL, 1, params_of(), tokens(20), mixture)
    first = loads.totals()
    mixture_layer(MODEL, 1, params_of(), tokens(20), replace(mixture))
    assert first.keys() == {"layers.1"}
    assert sum(first["layers.1"]) == 20 * K
    assert loads.totals()["layers.1"] == tuple(2 * count for count in first["layers.1"])
