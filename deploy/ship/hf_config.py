"""Converts between our `ModelSpec` and a Hugging Face `config.json`, for all families of `protocol/decoder.py`.

`protocol/decoder.py` lists the switches (fields of `DecoderSpec`) of each family; `_READ` reads them,
`_switches_written` writes them. Tensors need no conversion: ours have Hugging Face's names and shapes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from shoal.deploy.base.words import printable
from shoal.protocol.decoder import EXPERT_FAMILIES, FAMILIES, DecoderSpec, RopeScaling, yarn_factor
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import LAYERS_MAX
from shoal.protocol.spec import ModelSpec

_CONTEXT_MAX: Final = 1024
"""The largest context that an import chooses by itself, since the memory for activations grows with the context."""
_SWITCHES: Final[Mapping[str, Mapping[str, Any]]] = {**FAMILIES, **EXPERT_FAMILIES}
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_GEMMA: Final = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN: Final = {"sliding_window": 4096, "max_window_layers": 28}
_SILENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "olmo2": {"rms_norm_eps": 1e-5},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.001},
    "qwen3_moe": {"sliding_window": 4096, "router_aux_loss_coef": 0.001, "norm_topk_prob": False},
}
"""Family -> {config field: the value that `transformers` assumes if the config lacks it}, where families differ."""
_ROPE_KINDS: Final = ("linear", "llama3", "yarn")
_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"


def config_of(model: ModelSpec, *, dtype: str, begin_of_text: int | None, end_of_text: int | None) -> dict[str, Any]:
    """Return the content of a `config.json` for `transformers`."""
    family = model.family
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": _ACTIVATIONS[model.decoder.activation],
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": begin_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        **_rope_written(model),
        **_switches_written(model),
        **_experts_written(model),
    }


def model_of(config: Mapping[str, Any], *, context: int | None = None, untie: bool = False) -> ModelSpec:
    """Return the model that a `config.json` describes.

    Args:
        context: tokens of a sample; None: as many as the config allows, at most 1,024.
        untie: if the head is tied to the embedding, make it a layer of its own.
    Raises: LocalError: our model lacks a feature of the config; the text says which.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _SWITCHES:
        raise LocalError(f"shoal does not train models of model_type {_said(kind)!r}, only {', '.join(_SWITCHES)}")
    for name in ("num_attention_heads", "hidden_size", "head_dim"):
        if not isinstance(config.get(name, 0), int | None):
            raise LocalError(f"config.json cannot be read: {name} is {_said(config[name])}")
    said = _Said(config)
    try:
        troubles = _troubles(said)
        longest = int(said("max_position_embeddings") or _CONTEXT_MAX)
        fields = {} if troubles else _fields(said, context or min(longest, _CONTEXT_MAX))
        fields["tied"] = is_tied(config) and not untie
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise LocalError(f"config.json cannot be read: {_said(error)}") from error
    for trouble in troubles:
        raise LocalError(f"shoal cannot train this model: {trouble}")
    if context is not None and context > longest:
        raise LocalError(f"the model was made for {longest} tokens, not for a context of {context}")
    try:
        return ModelSpec(**fields)
    except ValueError as error:
        raise LocalError(f"shoal cannot train this model: {error}") from error


def is_tied(config: Mapping[str, Any]) -> bool:
    """True if head and embedding share one matrix."""
    return bool(_Said(config)("tie_word_embeddings"))


class _Said:
    """Looks up a config's fields; an omitted field has the default of `transformers` for the model family."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.kind = str(config.get("model_type"))
        self.switches: Mapping[str, Any] = _SWITCHES.get(self.kind, {})
        self._config = config
        self._silent = _SILENT.get(self.kind, {})

    def __call__(self, name: str) -> Any:
        return self._config[name] if name in self._config else self._silent.get(name)

    @property
    def num_layers(self) -> int:
        return int(self._config["num_hidden_layers"])

    def rope(self, layers: str = _FULL) -> dict[str, Any]:
        """Return the RoPE fields for layers of this type, from a config of any version of `transformers`."""
        found = self("rope_parameters") or self("rope_scaling") or {}
        found = dict(found) if isinstance(found, Mapping) else {}
        if isinstance(found.get(_FULL), Mapping) or isinstance(found.get(_SLIDING), Mapping):
            found = dict(found.get(layers) or {})
        elif layers == _SLIDING:
            found = {}
        theta = "rope_theta" if layers == _FULL else "rope_local_base_freq"
        found["rope_theta"] = float(found.get("rope_theta") or self(theta) or 10_000.0)
        found.setdefault("rope_type", found.get("type", "default"))
        return found

    def layer_types(self) -> list[str]:
        """Return each layer's attention type: full, or a sliding window."""
        types, count = self("layer_types"), min(self.num_layers, LAYERS_MAX)
        if isinstance(types, list):
            return [str(kind) for kind in types[:count]]
        window = self("sliding_window") if self("use_sliding_window") in (None, True) else None
        first = 0
        match self.kind:
            case "qwen2" | "qwen3":
                first = int(self("max_window_layers") or 0)
                window = window if self("use_sliding_window") else None
            case "qwen3_moe":
                window = window if self("use_sliding_window") else None
            case "gemma2":
                return [_FULL if layer % 2 else _SLIDING for layer in range(count)]
            case "gemma3_text":
                every = int(self("sliding_window_pattern"))
                return [_SLIDING if (layer + 1) % every else _FULL for layer in range(count)]
        return [_SLIDING if window and layer >= first else _FULL for layer in range(count)]


def _fields(said: _Said, context: int) -> dict[str, Any]:
    heads, dim = int(said("num_attention_heads")), int(said("hidden_size"))
    head_dim = int(said("head_dim") or 0)
    fields: dict[str, Any] = {
        "vocab_size": int(said("vocab_size")),
        "dim": dim,
        "num_layers": said.num_layers,
        "num_heads": heads,
        "num_kv_heads": int(said("num_key_value_heads") or heads),
        "head_size": None if not head_dim or head_dim * heads == dim else head_dim,
        "ffn_dim": int(said("moe_intermediate_size" if said.kind == "qwen3_moe" else "intermediate_size")),
        "context": context,
        "rope_theta": said.rope()["rope_theta"],
        "norm_eps": float(said("rms_norm_eps") or 1e-6),
        "decoder": _decoder(said),
    }
    if said.kind in EXPERT_FAMILIES:
        fields["num_experts"] = int(said("num_local_experts") or said("num_experts"))
        fields["experts_per_token"] = int(said("num_experts_per_tok") or (2 if said.kind == "mixtral" else 8))
        fields["router_aux_loss"] = float(said("router_aux_loss_coef") or 0.0)
    return fields


def _decoder(said: _Said) -> DecoderSpec:
    fields: dict[str, Any] = {}
    for name, values in said.switches.items():
        if name == "head_size":
            continue
        only = values[0] if isinstance(values, tuple) and len(values) == 1 else None
        fields[name] = only if only is not None else _READ[name](said)
    if not fields.get("window"):
        fields = {name: value for name, value in fields.items() if name not in ("full_layers", "window_rope_theta")}
    return DecoderSpec(**fields)


def _read_rope(said: _Said) -> RopeScaling | None:
    found = said.rope()
    if found["rope_type"] == "default":
        return None
    kind, longest = found["rope_type"], int(said("max_position_embeddings") or 0)
    original = int(found.get("original_max_position_embeddings") or said("original_max_position_embeddings") or longest)
    factor = longest / original if kind == "yarn" and found.get("factor") is None else float(found["factor"])
    fields: dict[str, Any] = {"kind": kind, "factor": factor}
    if kind != "linear":
        fields["original_context"] = original
    if kind == "llama3":
        fields |= {name: float(found[name]) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields |= {name: float(found[name]) for name in ("beta_fast", "beta_slow") if found.get(name)}
        fields["truncate"] = bool(found.get("truncate", True))
        fields["attention_factor"] = _attention_factor(found, factor)
    return RopeScaling(**fields)


def _attention_factor(found: Mapping[str, Any], factor: float) -> float | None:
    """Return the factor by which Yarn scales cosines and sines; None: the default, `yarn_factor(factor)`.

    Some configs (DeepSeek's) give `mscale` and `mscale_all_dim` instead: the factor is then the Yarn factor of the
    first, divided by that of the second.
    """
    given = found.get("attention_factor")
    above, below = (float(found.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if given is None and above and below:
        given = yarn_factor(factor, above) / yarn_factor(factor, below)
    return None if given is None or float(given) == yarn_factor(factor) else float(given)


_READ: Final[Mapping[str, Callable[[_Said], Any]]] = {
    "rope": _read_rope,
    "attention_bias": lambda said: "all" if said("attention_bias") else "none",
    "mlp_bias": lambda said: bool(said("mlp_bias")),
    "window": lambda said: int(said("sliding_window") or 0) if _SLIDING in said.layer_types() else 0,
    "full_layers": lambda said: tuple(layer for layer, kind in enumerate(said.layer_types()) if kind == _FULL),
    "window_rope_theta": lambda said: said.rope(_SLIDING)["rope_theta"],
    "score_dim": lambda said: int(said("query_pre_attn_scalar")),
    "attention_softcap": lambda said: float(said("attn_logit_softcapping") or 0.0),
    "logit_softcap": lambda said: float(said("final_logit_softcapping") or 0.0),
}
"""Field of `DecoderSpec` that the family leaves open -> the function that reads its value from a config."""
_ACTIVATIONS: Final = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def _rope_written(model: ModelSpec) -> dict[str, Any]:
    """Return the RoPE fields of all versions of `transformers`: `rope_theta` and `rope_scaling` for versions before
    5, `rope_parameters` for later versions."""
    scaling, window_theta = model.decoder.rope, model.decoder.window_rope_theta
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_context
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_slow": scaling.beta_slow, "beta_fast": scaling.beta_fast, "truncate": scaling.truncate}
            rope["attention_factor"] = scaling.turned_factor
    written: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_parameters": rope}
    if scaling is not None:
        written["rope_scaling"] = rope
    if model.family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": window_theta or 10_000.0}
        written |= {"rope_parameters": {_FULL: rope, _SLIDING: local}, "rope_local_base_freq": local["rope_theta"]}
    return written


def _switches_written(model: ModelSpec) -> dict[str, Any]:
    decoder, switches = model.decoder, _SWITCHES[model.family]
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    written: dict[str, Any] = {}
    if "attention_bias" in switches and model.family != "qwen2":
        written["attention_bias"] = decoder.attention_bias == "all"
    elif model.family == "mixtral":
        written["attention_bias"] = False
    if "mlp_bias" in switches:
        written["mlp_bias"] = decoder.mlp_bias
    if "window" in switches:
        written["sliding_window"] = decoder.window or None
    if "full_layers" in switches:
        written["layer_types"] = [_SLIDING if window else _FULL for window in windows]
    if model.family in ("qwen2", "qwen3"):
        written["use_sliding_window"] = decoder.window > 0
        written["max_window_layers"] = next((at for at, window in enumerate(windows) if window), model.num_layers)
    if model.family == "qwen3_moe":
        written["use_sliding_window"] = decoder.window > 0
    if "score_dim" in switches:
        written |= {
            "hidden_activation": _ACTIVATIONS[decoder.activation],
            "query_pre_attn_scalar": decoder.score_dim or model.head_dim,
            "attn_logit_softcapping": decoder.attention_softcap or None,
            "final_logit_softcapping": decoder.logit_softcap or None,
        }
    return written


def _experts_written(model: ModelSpec) -> dict[str, Any]:
    if not model.num_experts:
        return {}
    written = {"num_experts_per_tok": model.experts_per_token, "router_aux_loss_coef": model.router_aux_loss}
    if model.family == "mixtral":
        return {"num_local_experts": model.num_experts, **written}
    return {
        "num_experts": model.num_experts,
        **written,
        "moe_intermediate_size": model.ffn_dim,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _said(value: object) -> str:
    """Format a config's value for an error message: printable, at most 80 characters."""
    return printable(value if isinstance(value, str) else repr(value))[:80]


def _troubles(said: _Said) -> list[str]:
    """Return the features of the config that our model lacks."""
    heads, dim, head_dim = (said(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    switches = said.switches
    ropes = [said.rope()] + ([said.rope(_SLIDING)] if "window_rope_theta" in switches else [])
    scales = [rope["rope_type"] for rope in ropes if rope["rope_type"] != "default"]
    strange = [kind for kind in scales if kind not in _ROPE_KINDS]
    partial = [part for rope in ropes if (part := rope.get("partial_rotary_factor", said("partial_rotary_factor")))]
    wanted = _ACTIVATIONS[switches["activation"][0] if "activation" in switches else "silu"]
    activation = said("hidden_activation" if "activation" in switches else "hidden_act") or wanted
    types = sorted(set(said.layer_types()) - {_FULL, _SLIDING}) if "full_layers" in switches else []
    experts = said.kind == "qwen3_moe"
    checks = [
        (strange, f"it scales its rotary positions ({_said(strange[0]) if strange else ''})"),
        (
            len(ropes) > 1 and ropes[1]["rope_type"] != "default",
            "it scales the rotary positions of its layers with a window",
        ),
        (any(part != 1 for part in partial), "only a part of each head has rotary positions"),
        (said("attention_bias") and "attention_bias" not in switches, "its attention has biases"),
        (said("mlp_bias") and "mlp_bias" not in switches, "its feed-forward has biases"),
        (activation != wanted, f"its activation is {_said(activation)}, not {wanted}"),
        (
            head_dim and heads and dim and head_dim * heads != dim and "head_size" not in switches,
            f"its {heads} heads of {head_dim} are not its width of {dim}",
        ),
        (types, f"it has layers of type {_said(types[0]) if types else ''}"),
        (said("attn_logit_softcapping") and "attention_softcap" not in switches, "its attention scores are capped"),
        (said("use_bidirectional_attention"), "its attention is bidirectional"),
        (experts and not said("norm_topk_prob"), "the weights of a token's experts need not add up to 1"),
        (
            experts and (said("mlp_only_layers") or said("decoder_sparse_step") not in (None, 1)),
            "only some of its layers have experts",
        ),
    ]
    return [sentence for is_so, sentence in checks if is_so]
