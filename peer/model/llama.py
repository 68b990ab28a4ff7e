"""The decoder as pure functions on dicts of tensors, in Hugging Face's Llama (with experts: Mixtral) conventions.

No modules: a layer's tensors are whatever version of them the caller hands in, stale, predicted or fresh.

B samples   T tokens   D width   H query heads   G key and value heads   K head size   F hidden width   V vocabulary
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shoal.peer.model.head_loss import head_loss
from shoal.peer.model.layout import EMBED, HEAD, layer_index
from shoal.peer.model.mixture import LOCAL, Mixture, mixture_layer
from shoal.protocol.spec import ModelSpec

Params = Mapping[str, Tensor]
"""Hugging Face tensor name -> tensor, of one layer."""
Rotary = tuple[Tensor, Tensor]
"""(cos_TK, turned_TK), see `rotary_tables`."""
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the keys and values of new tokens, [B, G, T, K] each; returns those of all tokens so far, the new ones last.

With it a forward of one more token looks at those before it without their forward; `rotary` begins at the new ones."""


def rotary_tables(model: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Rotary:
    """(cos, sin) of every position's angles, each [context, K]. The second half of K repeats the first, in which the
    sines have the other sign."""
    half = torch.arange(0, model.head_dim, 2, dtype=torch.float64)
    frequency = model.rope_theta ** -(half / model.head_dim)
    angle = torch.outer(torch.arange(model.context, dtype=torch.float64), frequency)
    angle_TK = torch.cat((angle, angle), dim=-1)
    turned_TK = angle_TK.sin()
    turned_TK[:, : model.head_dim // 2].neg_()
    return angle_TK.cos().to(device, dtype), turned_TK.to(device, dtype)


def embed(model: ModelSpec, params: Params, tokens_BT: Tensor) -> Tensor:
    """int64 [B, T] -> [B, T, D]."""
    weight_VD = params["model.embed_tokens.weight"]
    if weight_VD.is_cpu and weight_VD.dtype == torch.bfloat16:
        # On a CPU torch would add up a token's gradients in bfloat16, which loses all but the first few hundred.
        return functional.embedding(tokens_BT, weight_VD.float()).to(weight_VD.dtype)
    return functional.embedding(tokens_BT, weight_VD)


def decoder_layer(
    model: ModelSpec,
    index: int,
    params: Params,
    x_BTD: Tensor,
    rotary: Rotary,
    remember: Remember | None = None,
    *,
    mixture: Mixture = LOCAL,
) -> Tensor:
    """Attention and SwiGLU, or a mixture of them, with residuals: [B, T, D] -> [B, T, D]. T is at most the context, and
    with what is remembered 1 after the first call."""
    at = f"model.layers.{index}."
    x_BTD, normed_BTD = attend(model, index, params, x_BTD, rotary, remember)
    if model.num_experts:
        return x_BTD + mixture_layer(model, index, params, normed_BTD.flatten(0, 1), mixture).view_as(x_BTD)
    gate_BTF = functional.linear(normed_BTD, params[at + "mlp.gate_proj.weight"])
    up_BTF = functional.linear(normed_BTD, params[at + "mlp.up_proj.weight"])
    return x_BTD + functional.linear(functional.silu(gate_BTF) * up_BTF, params[at + "mlp.down_proj.weight"])


def attend(
    model: ModelSpec, index: int, params: Params, x_BTD: Tensor, rotary: Rotary, remember: Remember | None = None
) -> tuple[Tensor, Tensor]:
    """The first half of a layer. Returns: ([B, T, D] with the residual, that normalised for the second half)."""
    at = f"model.layers.{index}."
    normed_BTD = functional.rms_norm(x_BTD, (model.dim,), params[at + "input_layernorm.weight"], model.norm_eps)
    x_BTD = x_BTD + _attention(model, at + "self_attn.", params, normed_BTD, rotary, remember)
    weight_D = params[at + "post_attention_layernorm.weight"]
    return x_BTD, functional.rms_norm(x_BTD, (model.dim,), weight_D, model.norm_eps)


def head(model: ModelSpec, params: Params, x_BTD: Tensor) -> Tensor:
    """Final norm and output projection: [B, T, D] -> logits [B, T, V]."""
    return functional.linear(_final_norm(model, params, x_BTD), params["lm_head.weight"])


def loss_of_head(model: ModelSpec, params: Params, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Final norm, output projection and mean cross entropy: [B, T, D] and int64 targets [B, T] -> float32 scalar, in
    nats a token. The same as `loss(head(...), targets_BT)`, but never holds all logits (`head_loss.py`)."""
    x_BTD = _final_norm(model, params, x_BTD)
    return head_loss(x_BTD.flatten(0, 1), params["lm_head.weight"], targets_BT.flatten())


def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats a token, float32 scalar."""
    return functional.cross_entropy(logits_BTV.flatten(0, -2).float(), targets_BT.flatten())


def run_layers(
    model: ModelSpec,
    keys: Sequence[str],
    params_by_key: Mapping[str, Params],
    x: Tensor,
    rotary: Rotary,
    remember: Mapping[str, Remember] | None = None,
    *,
    mixture: Mixture = LOCAL,
) -> Tensor:
    """Chain the layers `keys`: a stage's forward. `remember`: by layer, for sampling.

    `x` is int64 tokens [B, T] if keys[0] is "embed", otherwise [B, T, D]; the result is logits [B, T, V] if keys[-1]
    is "head", otherwise [B, T, D].
    """
    for key in keys:
        params = params_by_key[key]
        if key == EMBED:
            x = embed(model, params, x)
        elif key == HEAD:
            x = head(model, params, x)
        else:
            remembered = remember[key] if remember else None
            x = decoder_layer(model, layer_index(key), params, x, rotary, remembered, mixture=mixture)
    return x


def _final_norm(model: ModelSpec, params: Params, x_BTD: Tensor) -> Tensor:
    return functional.rms_norm(x_BTD, (model.dim,), params["model.norm.weight"], model.norm_eps)


def _attention(
    model: ModelSpec, at: str, params: Params, x_BTD: Tensor, rotary: Rotary, remember: Remember | None
) -> Tensor:
    B, T, D = x_BTD.shape
    query_BHTK = _heads(functional.linear(x_BTD, params[at + "q_proj.weight"]), model.num_heads)
    key_BGTK = _heads(functional.linear(x_BTD, params[at + "k_proj.weight"]), model.num_kv_heads)
    value_BGTK = _heads(functional.linear(x_BTD, params[at + "v_proj.weight"]), model.num_kv_heads)
    query_BHTK, key_BGTK = _rotate(query_BHTK, rotary), _rotate(key_BGTK, rotary)
    if remember is not None:
        key_BGTK, value_BGTK = remember(key_BGTK, value_BGTK)
    out_BHTK = functional.scaled_dot_product_attention(
        query_BHTK,
        key_BGTK,
        value_BGTK,
        is_causal=key_BGTK.shape[2] == T,
        enable_gqa=model.num_heads != model.num_kv_heads,
    )
    return functional.linear(out_BHTK.transpose(1, 2).reshape(B, T, D), params[at + "o_proj.weight"])


def _heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)


def _rotate(x_BHTK: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (k, k + K/2) by its position's angle: Hugging Face's `rotate_half`, the same bits. The sign of the
    half that comes to the front is in the table: one operation for the exchange of the halves, where it was three."""
    T, K = x_BHTK.shape[2:]
    cos_TK, turned_TK = rotary[0][:T], rotary[1][:T]
    return (x_BHTK * cos_TK + x_BHTK.roll(K // 2, dims=-1) * turned_TK).to(x_BHTK.dtype)
