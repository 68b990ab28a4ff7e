"""Turns our model into a Hugging Face `config.json` and back: Llama, and Mixtral where there are experts.

Tensor names and shapes are theirs already (`peer/model/layout.py`), so nothing here says a weight's name.
"""

from collections.abc import Mapping
from typing import Any, Final

from shoal.deploy.words import printable
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import ModelSpec

_CONTEXT_MAX: Final = 1024
"""How many tokens a sample has by default, of models that could take more: activations grow with it."""
_SAID_CHARS_MAX: Final = 80
_IGNORED: Final = ("rotary_emb.inv_freq",)
"""Tensors to ignore: older files have the rotary frequencies, which follow from the config."""


def config_of(model: ModelSpec, *, dtype: str, begin_of_text: int | None, end_of_text: int | None) -> dict[str, Any]:
    """The content of the `config.json` that `transformers` reads."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        # Before version 5 the one, from then on the other.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": begin_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if model.num_experts:
        del config["mlp_bias"]
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_aux_loss_coef": model.router_aux_loss,
            "sliding_window": None,
        }
    return config


def generation_config_of(*, begin_of_text: int | None, end_of_text: int | None) -> dict[str, Any]:
    return {
        "bos_token_id": begin_of_text,
        "eos_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def tokenizer_config_of(model: ModelSpec, *, begin_of_text: str | None, end_of_text: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        "bos_token": begin_of_text,
        "eos_token": end_of_text,
    }


def model_of(config: Mapping[str, Any], *, context: int | None = None) -> ModelSpec:
    """The model that a `config.json` describes.

    Args:
        context: tokens of a sample; None: what the config allows, at most 1,024.
    Raises: LocalError: our model cannot be that one; the line says why.
    """
    kind = config.get("model_type")
    if kind not in ("llama", "mixtral"):
        raise LocalError(f"model_type {_said(kind)!r} is neither llama nor mixtral, which is what shoal trains")
    for name in ("num_attention_heads", "hidden_size", "head_dim"):
        if not isinstance(config.get(name, 0), int | None):
            raise LocalError(f"config.json cannot be read: {name} is {_said(config[name])}")
    for trouble in _troubles(config):
        raise LocalError(f"shoal cannot train this model: {trouble}")
    try:
        longest = int(config.get("max_position_embeddings") or _CONTEXT_MAX)
        heads = int(config["num_attention_heads"])
        fields: dict[str, Any] = {
            "vocab_size": int(config["vocab_size"]),
            "dim": int(config["hidden_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "ffn_dim": int(config["intermediate_size"]),
            "context": context or min(longest, _CONTEXT_MAX),
            "rope_theta": float(_rope(config).get("rope_theta") or 10_000.0),
            "norm_eps": float(config.get("rms_norm_eps") or 1e-6),
        }
        if kind == "mixtral":
            fields["num_experts"] = int(config["num_local_experts"])
            fields["experts_per_token"] = int(config.get("num_experts_per_tok") or 2)
            fields["router_aux_loss"] = float(config.get("router_aux_loss_coef") or 0.0)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LocalError(f"config.json cannot be read: {_said(error)}") from error
    if context is not None and context > longest:
        raise LocalError(f"the model was made for {longest} tokens, not for a context of {context}")
    try:
        return ModelSpec(**fields)
    except ValueError as error:
        raise LocalError(f"shoal cannot train this model: {error}") from error


def is_ignored(name: str) -> bool:
    """Whether a tensor of the file means nothing to a model."""
    return name.endswith(_IGNORED)


def _said(value: object) -> str:
    """A value of a file as a message shows it, no longer than a name."""
    return printable(value if isinstance(value, str) else repr(value))[:_SAID_CHARS_MAX]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_type`, wherever this version of `transformers` has put them."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(scaling) if isinstance(scaling, Mapping) else {}
    found.setdefault("rope_theta", config.get("rope_theta"))
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def _troubles(config: Mapping[str, Any]) -> list[str]:
    """The features of the config that our model does not have."""
    heads, dim = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    is_mixtral = config.get("model_type") == "mixtral"
    # Where a config says nothing `transformers` takes its own defaults: not tied, no biases.
    checks = [
        (config.get("tie_word_embeddings"), "its embedding and head are tied; ours are two layers of their own"),
        (
            _rope(config)["rope_type"] != "default",
            f"it scales its rotary positions ({_said(_rope(config)['rope_type'])})",
        ),
        (config.get("attention_bias"), "its attention has biases"),
        (config.get("mlp_bias"), "its feed-forward has biases"),
        (config.get("hidden_act", "silu") != "silu", f"its activation is {_said(config.get('hidden_act'))}, not silu"),
        (
            head_dim and heads and dim and head_dim * heads != dim,
            f"its {heads} heads of {head_dim} are not its width of {dim}",
        ),
        (is_mixtral and config.get("sliding_window"), "its attention looks back through a sliding window"),
    ]
    return [sentence for is_so, sentence in checks if is_so]
