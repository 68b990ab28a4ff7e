"""Documents that share a sample do not see each other: each comes to what it comes to alone.

B samples   T tokens
"""

from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional

from shoal.peer.model.documents import Documents
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.llama import rotary_tables, run_layers
from shoal.protocol.spec import ModelSpec

CONTEXT = 24
LENGTHS = [[5, 1, 11, 7], [24], [2, 2, 20]]
PLAIN = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "context": CONTEXT}
MODELS = {
    "llama": {},
    "mistral, a window": {"decoder": {"window": 4}},
    "qwen2, windows in some": {"decoder": {"attention_bias": "qkv", "window": 4, "full_layers": [0]}},
    "gemma2, capped scores": {
        "decoder": {
            "norms": "both",
            "norm_plus_one": True,
            "activation": "gelu_tanh",
            "scale_embedding": True,
            "score_dim": 8,
            "attention_softcap": 5.0,
            "logit_softcap": 3.0,
            "window": 4,
            "full_layers": [1],
        }
    },
    "gemma3, two rotary bases": {
        "decoder": {
            "norms": "both",
            "norm_plus_one": True,
            "activation": "gelu_tanh",
            "scale_embedding": True,
            "qk_norm": "head",
            "score_dim": 8,
            "window": 4,
            "full_layers": [1],
            "window_rope_theta": 100.0,
        }
    },
}


def begins_BT(lengths: list[list[int]]) -> torch.Tensor:
    begins = torch.zeros(len(lengths), CONTEXT, dtype=torch.bool)
    for row, sizes in enumerate(lengths):
        begins[row, torch.tensor([0, *sizes[:-1]]).cumsum(0)] = True
    return begins


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_logits_of_packed_documents_are_those_of_each_alone(changes: dict) -> None:
    model = msgspec.convert(PLAIN | changes, ModelSpec)
    keys, rotary = all_layer_keys(model), rotary_tables(model)
    params = {key: layer_layout(model, key).views(init_layer(model, key, 3)) for key in keys}
    tokens_BT = torch.randint(model.vocab_size, (len(LENGTHS), CONTEXT), generator=torch.Generator().manual_seed(1))
    documents, positioned = Documents.of(begins_BT(LENGTHS), rotary)
    packed = run_layers(model, keys, params, tokens_BT, positioned, documents=documents)
    unmasked = run_layers(model, keys, params, tokens_BT, rotary)
    for row, sizes in enumerate(LENGTHS):
        at = 0
        for size in sizes:
            alone = run_layers(model, keys, params, tokens_BT[row : row + 1, at : at + size], rotary)
            torch.testing.assert_close(packed[row, at : at + size], alone[0], atol=1e-5, rtol=0)
            at += size
    assert (unmasked[0] - packed[0]).abs().max() > 1e-3, "without documents they would see each other"
    torch.testing.assert_close(unmasked[1], packed[1], atol=1e-5, rtol=0)


def test_where_no_kernel_takes_grouped_heads_with_a_mask_they_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = msgspec.convert(PLAIN, ModelSpec)
    keys = all_layer_keys(model)
    documents, rotary = Documents.of(begins_BT(LENGTHS), rotary_tables(model))
    params = {key: layer_layout(model, key).views(init_layer(model, key, 3)) for key in keys}
    tokens_BT = torch.randint(model.vocab_size, (len(LENGTHS), CONTEXT), generator=torch.Generator().manual_seed(1))
    grouped = run_layers(model, keys, params, tokens_BT, rotary, documents=documents)
    seen = []
    plain = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor, **how: Any) -> torch.Tensor:
        seen.append((key.shape[1], how["enable_gqa"]))
        return plain(query, key, *rest, **how)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr("shoal.peer.model.llama.GROUPED_WITH_MASK", ())
    repeated = run_layers(model, keys, params, tokens_BT, rotary, documents=documents)
    torch.testing.assert_close(repeated, grouped, atol=1e-5, rtol=0)
    assert seen == [(model.num_heads, False)] * model.num_layers


def test_gradients_do_not_cross_a_documents_end() -> None:
    model = msgspec.convert(PLAIN, ModelSpec)
    keys = all_layer_keys(model)[1:-1]
    documents, rotary = Documents.of(begins_BT([[9, 15]]), rotary_tables(model))
    params = {key: layer_layout(model, key).views(init_layer(model, key, 3)) for key in keys}
    x_BTD = torch.randn(1, CONTEXT, model.dim, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y_BTD = run_layers(model, keys, params, x_BTD, rotary, documents=documents)
    torch.autograd.backward(y_BTD[0, 9:].square().sum())
    assert x_BTD.grad is not None
    assert not x_BTD.grad[0, :9].any()
    assert x_BTD.grad[0, 9:].any(dim=1).all()


def test_all_layers_share_one_mask() -> None:
    documents = Documents(begins_BT(LENGTHS))
    assert documents.mask(0, torch.float32) is documents.mask(0, torch.float32)
    assert documents.mask(4, torch.float32) is not documents.mask(0, torch.float32)
    assert documents.position_BT[0].tolist() == [*range(5), 0, *range(11), *range(7)]
