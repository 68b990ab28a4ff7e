"""The decoder as pure functions on dicts of tensors, in Hugging Face's conventions: Llama, varied by
`protocol/decoder.py`.

There are no torch modules: the caller passes the tensors of a layer in any version: current, stale or predicted.

B samples   T tokens   S keys: the T tokens and those before   D width   H query heads   G key and value heads
K head size   F hidden width   V vocabulary   W numbers that a layer adds to a token: D, or those of a subspace
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shoal.peer.model.documents import Documents
from shoal.peer.model.frozen import AdaptedLayer, linear
from shoal.peer.model.head_loss import head_loss
from shoal.peer.model.layout import EMBED, HEAD, layer_index
from shoal.peer.model.mixture import PLAIN, Mixture, mixture_layer
from shoal.peer.model.rotary import Rotary, rotate
from shoal.peer.model.rotary import rotary_tables as rotary_tables
from shoal.peer.model.subspace import BASIS, fixed_vectors
from shoal.protocol.spec import ModelSpec

Params = Mapping[str, Tensor]
"""Hugging Face tensor name -> tensor, of one layer; in a subspace model also the layer's constants (`subspace.py`)."""
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A cache: takes the keys and values of new tokens, [B, G, T, K] each, and returns those of all tokens so far, the new
ones last. The `rotary` tables passed together with a cache begin at the first new token."""


GROUPED_WITH_MASK = ("cpu",)
"""Device types on which torch documents fused attention with both a mask and grouped heads. On others, with a mask, we
repeat keys and values for each query head: unfused attention, with all its scores, would take more memory."""


def embed(model: ModelSpec, params: Params, tokens_BT: Tensor) -> Tensor:
    """Embed tokens: int64 [B, T] -> [B, T, D]."""
    if isinstance(params, AdaptedLayer):
        return _scaled_embedding(model, params.rows("model.embed_tokens.weight", tokens_BT))
    weight_VW = params["model.embed_tokens.weight"]
    if weight_VW.is_cpu and weight_VW.dtype == torch.bfloat16:
        # On a CPU torch would sum a token's gradients in bfloat16, and lose all but the first few hundred.
        x_BTW = functional.embedding(tokens_BT, weight_VW.float()).to(weight_VW.dtype)
    else:
        x_BTW = functional.embedding(tokens_BT, weight_VW)
    if model.subspace:
        return fixed_vectors(params, tokens_BT, x_BTW.dtype) + _spread(model, params, x_BTW)
    return _scaled_embedding(model, x_BTW)


def _scaled_embedding(model: ModelSpec, x_BTD: Tensor) -> Tensor:
    if model.decoder.scale_embedding:
        # Gemma was trained with the rounded factor.
        x_BTD = x_BTD * torch.tensor(math.sqrt(model.dim), dtype=x_BTD.dtype)
    return x_BTD


def decoder_layer(
    model: ModelSpec,
    index: int,
    params: Params,
    x_BTD: Tensor,
    rotary: Rotary,
    remember: Remember | None = None,
    *,
    mixture: Mixture = PLAIN,
    documents: Documents | None = None,
) -> Tensor:
    """Run attention and feed-forward (or experts) with residuals: [B, T, D] -> [B, T, D].

    T is at most the context; with a cache (`remember`) T is 1 after the first call.
    """
    x_BTD, normed_BTD = attend(model, index, params, x_BTD, rotary, remember, documents=documents)
    if model.num_experts:
        y_NW = mixture_layer(model, index, params, normed_BTD.flatten(0, 1), mixture)
        return x_BTD + _spread(model, params, y_NW).view_as(x_BTD)
    at = f"model.layers.{index}."
    out_BTW = _feed_forward(model, at + "mlp.", params, normed_BTD)
    if model.decoder.norms != "pre":
        out_BTW = _norm(model, params, at + "post_feedforward_layernorm", out_BTW)
    return x_BTD + _spread(model, params, out_BTW)


def attend(
    model: ModelSpec,
    index: int,
    params: Params,
    x_BTD: Tensor,
    rotary: Rotary,
    remember: Remember | None = None,
    *,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the first half of a layer, attention with its residual connection.

    Returns: the residual stream after it, and the normalised input of the second half; [B, T, D] each.
    """
    at, norms = f"model.layers.{index}.", model.decoder.norms
    normed_BTD = x_BTD if norms == "post" else _norm(model, params, at + "input_layernorm", x_BTD)
    out_BTW = _attention(model, index, params, normed_BTD, rotary, remember, documents)
    if norms == "pre":
        x_BTD = x_BTD + _spread(model, params, out_BTW)
        return x_BTD, _norm(model, params, at + "post_attention_layernorm", x_BTD)
    x_BTD = x_BTD + _norm(model, params, at + "post_attention_layernorm", out_BTW)
    return x_BTD, x_BTD if norms == "post" else _norm(model, params, at + "pre_feedforward_layernorm", x_BTD)


def head(model: ModelSpec, params: Params, x_BTD: Tensor) -> Tensor:
    """Apply the final norm and the output projection: [B, T, D] -> logits [B, T, V]."""
    x_BTD = _norm(model, params, "model.norm", x_BTD)
    logits_BTV = functional.linear(x_BTD, _head_matrix(params))
    cap = model.decoder.logit_softcap
    return (logits_BTV / cap).tanh() * cap if cap else logits_BTV


def loss_of_head(
    model: ModelSpec, params: Params, x_BTD: Tensor, targets_BT: Tensor, counted: int | None = None
) -> Tensor:
    """Return `loss(head(...), targets_BT)` without ever holding all logits (`head_loss.py`).

    Args: counted: the number of targets that are not negative; None: no target is negative.
    """
    x_BTD = _norm(model, params, "model.norm", x_BTD)
    weight_VD, cap = _head_matrix(params), model.decoder.logit_softcap
    return head_loss(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), cap, counted)


def _head_matrix(params: Params) -> Tensor:
    name = "lm_head.weight"
    return params.matrix(name) if isinstance(params, AdaptedLayer) else params[name]


def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross entropy in nats a token, a float32 scalar. Tokens with the target -100 do not count."""
    return functional.cross_entropy(logits_BTV.flatten(0, -2).float(), targets_BT.flatten())


def run_layers(
    model: ModelSpec,
    keys: Sequence[str],
    params_by_key: Mapping[str, Params],
    x: Tensor,
    rotary: Rotary,
    remember: Mapping[str, Remember] | None = None,
    *,
    mixture: Mixture = PLAIN,
    documents: Documents | None = None,
) -> Tensor:
    """Run the layers `keys` in order: the forward of a stage, or of a whole model.

    Args:
        x: int64 tokens [B, T] if keys[0] is "embed", otherwise [B, T, D].
        remember: caches by layer, for sampling.
        documents: if given, a token attends only to its own document; `rotary` then comes from `Documents.of`, too.
    Returns: logits [B, T, V] if keys[-1] is "head", otherwise [B, T, D].
    """
    for key in keys:
        params = params_by_key[key]
        if key == EMBED:
            x = embed(model, params, x)
        elif key == HEAD:
            x = head(model, params, x)
        else:
            remembered = remember[key] if remember else None
            x = decoder_layer(
                model, layer_index(key), params, x, rotary, remembered, mixture=mixture, documents=documents
            )
    return x


def _norm(model: ModelSpec, params: Params, name: str, x: Tensor) -> Tensor:
    """Apply RMSNorm to the last dimension with the weights `name`."""
    weight = params[name + ".weight"]
    if not model.decoder.norm_plus_one:
        return functional.rms_norm(x, weight.shape, weight, model.norm_eps)
    # In bfloat16 1 + w would lose most of w.
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), model.norm_eps).to(x.dtype)


def _spread(model: ModelSpec, params: Params, y: Tensor) -> Tensor:
    """Widen a layer's output to the residual stream, [..., W] -> [..., D]; a no-op without a subspace."""
    return functional.linear(y, params[BASIS]) if model.subspace else y


def _feed_forward(model: ModelSpec, at: str, params: Params, x_BTD: Tensor) -> Tensor:
    gate_BTF = linear(params, at + "gate_proj", x_BTD)
    up_BTF = linear(params, at + "up_proj", x_BTD)
    if model.decoder.activation == "silu":
        gate_BTF = functional.silu(gate_BTF)
    else:
        gate_BTF = functional.gelu(gate_BTF, approximate="tanh")
    return linear(params, at + "down_proj", gate_BTF * up_BTF)


def _attention(
    model: ModelSpec,
    index: int,
    params: Params,
    x_BTD: Tensor,
    rotary: Rotary,
    remember: Remember | None,
    documents: Documents | None,
) -> Tensor:
    B, T, _ = x_BTD.shape
    at, decoder, window = f"model.layers.{index}.self_attn.", model.decoder, model.window_of(index)
    query_BTH = linear(params, at + "q_proj", x_BTD)
    key_BTG = linear(params, at + "k_proj", x_BTD)
    if decoder.qk_norm == "projection":
        query_BTH = _norm(model, params, at + "q_norm", query_BTH)
        key_BTG = _norm(model, params, at + "k_norm", key_BTG)
    query_BHTK, key_BGTK = _heads(query_BTH, model.num_heads), _heads(key_BTG, model.num_kv_heads)
    value_BGTK = _heads(linear(params, at + "v_proj", x_BTD), model.num_kv_heads)
    if decoder.qk_norm == "head":
        query_BHTK = _norm(model, params, at + "q_norm", query_BHTK)
        key_BGTK = _norm(model, params, at + "k_norm", key_BGTK)
    query_BHTK, key_BGTK = (rotate(x, rotary, windowed=window > 0) for x in (query_BHTK, key_BGTK))
    if remember is not None:
        key_BGTK, value_BGTK = remember(key_BGTK, value_BGTK)
    if T == 1 and window:
        key_BGTK, value_BGTK = key_BGTK[:, :, -window:], value_BGTK[:, :, -window:]
    mask = None if documents is None else documents.mask(window, query_BHTK.dtype)
    out_BHTK = _attend(model, query_BHTK, key_BGTK, value_BGTK, window, mask)
    return linear(params, at + "o_proj", out_BHTK.transpose(1, 2).reshape(B, T, -1))


def _attend(
    model: ModelSpec, query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, window: int, mask_B1TS: Tensor | None
) -> Tensor:
    """Let each query attend to the key of its own token and to earlier keys, `window` keys in all (0: no limit). If
    `mask_B1TS` is given, its elements, 0 (attend) or -inf, replace this rule."""
    T, S = query_BHTK.shape[2], key_BGSK.shape[2]
    decoder = model.decoder
    scale = None if decoder.score_dim is None else decoder.score_dim**-0.5
    is_grouped = model.num_heads != model.num_kv_heads
    cap = decoder.attention_softcap
    if not cap and mask_B1TS is None and T in (1, S) and (not window or window >= S):
        return functional.scaled_dot_product_attention(
            query_BHTK, key_BGSK, value_BGSK, is_causal=S == T, scale=scale, enable_gqa=is_grouped
        )
    mask = _mask(T, S, window, query_BHTK.device) if mask_B1TS is None else mask_B1TS
    if not cap and mask_B1TS is not None and is_grouped and query_BHTK.device.type not in GROUPED_WITH_MASK:
        times, is_grouped = model.num_heads // model.num_kv_heads, False
        key_BGSK, value_BGSK = (x.repeat_interleave(times, dim=1) for x in (key_BGSK, value_BGSK))
    if not cap:
        return functional.scaled_dot_product_attention(
            query_BHTK, key_BGSK, value_BGSK, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
    # torch has no fused attention with a cap.
    B, H, _, K = query_BHTK.shape
    G = model.num_kv_heads
    query_BGHTK: Tensor = query_BHTK.view(B, G, H // G, T, K) * (K**-0.5 if scale is None else scale)
    score_BGHTS: Tensor = query_BGHTK @ key_BGSK.unsqueeze(2).transpose(-1, -2)
    score_BGHTS = cap * (score_BGHTS / cap).tanh()
    wide = torch.promote_types(score_BGHTS.dtype, torch.float32)
    if mask_B1TS is None:
        score_BGHTS = score_BGHTS.masked_fill(~mask, -math.inf)
    else:
        score_BGHTS = score_BGHTS + mask_B1TS.unsqueeze(2)
    share_BGHTS: Tensor = score_BGHTS.softmax(-1, dtype=wide).to(value_BGSK.dtype)
    out_BGHTK: Tensor = share_BGHTS @ value_BGSK.unsqueeze(2)
    return out_BGHTK.view(B, H, T, K)


def _mask(T: int, S: int, window: int, device: torch.device) -> Tensor:
    """Return bool [T, S]: True where one of the last T of S tokens attends to a key."""
    back_TS = torch.arange(S - T, S, device=device)[:, None] - torch.arange(S, device=device)
    mask_TS = back_TS >= 0
    return mask_TS & (back_TS < window) if window else mask_TS


def _heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)
