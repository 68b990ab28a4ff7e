"""The options in which a model's decoder may differ from Llama's, and the model families. Pure.

With all options at their defaults the decoder is Llama's. A family is a row of `FAMILIES`, not a class: it lists the
values that each option may have. A combination that fits no family is refused, since other software could not load it.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from shoal.protocol.limits import CONTEXT_MAX, LAYERS_MAX


def require(condition: bool, sentence: str) -> None:
    """Check a field. Raises: ValueError(`sentence`): `condition` is false; msgspec adds the field's path."""
    if not condition:
        raise ValueError(sentence)


def require_positive(section: msgspec.Struct, **most: float) -> None:
    """Check that each field named in `most` is > 0, finite, and at most the value given for it. Raises: ValueError."""
    for name, largest in most.items():
        value = getattr(section, name)
        require(0 < value < math.inf, f"{name} must be positive, is {value}")
        require(value <= largest, f"{name} is at most {largest:,}, and is {value}")


def require_not_negative(section: msgspec.Struct, *names: str) -> None:
    """Check that none of the fields `names` is negative; None counts as not set. Raises: ValueError."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= 0, f"{name} must not be negative, is {value}")


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Changes the rotary frequencies, for contexts longer than those with which the model was first trained.

    Sources: linear, Chen et al., 2023, arXiv 2306.15595; yarn, Peng et al., 2023, arXiv 2309.00071; llama3, the
    reference code of Llama 3.1. Field names and values mean the same as in `transformers`.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    """Divisor of the low rotary frequencies; of all frequencies if `kind` is linear."""
    original_context: int = 0
    """Context length in tokens with which the model was first trained; not used by linear."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with fewer turns than this within the original context are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with more turns than this are unchanged; from `low_freq_factor` on the change is gradual."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer turns than this within the original context are divided by `factor`."""
    beta_fast: float = 32.0
    """yarn: frequencies with more turns than this are unchanged; from `beta_slow` to this the change is gradual."""
    attention_factor: float | None = None
    """yarn: cosines and sines are multiplied by this. None: by 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: if True, the indices of the first and last frequency with a gradual change are rounded to whole numbers."""

    def __post_init__(self) -> None:
        require(1 <= self.factor < math.inf, f"factor must be 1 at least, is {self.factor}")
        if self.kind != "linear":
            require(
                0 < self.original_context <= CONTEXT_MAX,
                f"original_context must be in [1, {CONTEXT_MAX:,}], is {self.original_context}",
            )
        require(
            0 < self.low_freq_factor < self.high_freq_factor < math.inf,
            f"low_freq_factor {self.low_freq_factor} must be less than high_freq_factor {self.high_freq_factor}",
        )
        require(
            0 < self.beta_slow < self.beta_fast < math.inf,
            f"beta_slow {self.beta_slow} must be less than beta_fast {self.beta_fast}",
        )
        if self.attention_factor is not None:
            require(0 < self.attention_factor < math.inf, f"attention_factor is {self.attention_factor}")

    @property
    def turned_factor(self) -> float:
        """The factor by which the rotary cosines and sines are multiplied; without `attention_factor` 1 if not yarn."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_factor(self.factor) if self.kind == "yarn" else 1.0


def yarn_factor(factor: float, scale: float = 1.0) -> float:
    """Return 0.1 scale ln(factor) + 1, by which yarn multiplies queries and keys (arXiv 2309.00071, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1.0


class DecoderSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The options in which a decoder may differ from Llama's; the defaults are Llama's values."""

    rope: RopeScaling | None = None
    """Scaling of the rotary frequencies; None: they are not scaled."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Attention projections that have a bias. "qkv": queries, keys and values; "all": also the output projection."""
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMSNorm of queries and keys before the rotation: none, of each head by itself, or of the whole projection."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Place of the norms of attention and feed-forward: before, after (but before the residual sum), or both."""
    norm_plus_one: bool = False
    """A norm multiplies by 1 + w instead of w, so that its weights lie around 0."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the feed-forward's gate: "silu" makes it SwiGLU, "gelu_tanh" GeGLU."""
    window: int = 0
    """Sliding attention window in tokens, including the token itself; 0: full causal attention."""
    full_layers: tuple[int, ...] = ()
    """Indices of the decoder layers that use full attention although `window` is set."""
    window_rope_theta: float | None = None
    """Base of the (unscaled) rotary frequencies in layers with a window. None: as in the other layers."""
    score_dim: int | None = None
    """Attention scores are divided by the square root of this number; None: by the square root of the head size."""
    attention_softcap: float = 0.0
    """Soft cap c: attention scores become c tanh(score / c). 0: no cap."""
    logit_softcap: float = 0.0
    scale_embedding: bool = False
    """Embeddings are multiplied by the square root of the width."""

    def __post_init__(self) -> None:
        require(0 <= self.window <= CONTEXT_MAX, f"window must be in [0, {CONTEXT_MAX:,}], is {self.window}")
        full = self.full_layers
        require(len(full) <= LAYERS_MAX, f"full_layers has more than {LAYERS_MAX} entries")
        require(list(full) == sorted(set(full)), "full_layers must be in order, each layer once")
        require(not full or self.window > 0, "full_layers means nothing without a window")
        if self.window_rope_theta is not None:
            require(self.window > 0, "window_rope_theta means nothing without a window")
            require(1 < self.window_rope_theta < math.inf, f"window_rope_theta is {self.window_rope_theta}")
        require(self.score_dim is None or self.score_dim > 0, f"score_dim must be positive, is {self.score_dim}")
        for name in ("attention_softcap", "logit_softcap"):
            require(0 <= getattr(self, name) < math.inf, f"{name} must not be negative, is {getattr(self, name)}")


LLAMA: Final = DecoderSpec()


_ANY: Final = None
"""Stands in `FAMILIES` in place of an option's allowed values: the option may have any value."""
_BIASES: Final = {"attention_bias": ("none", "all")}
_ROTARY: Final = {"rope": _ANY}
_HEADS: Final = {"head_size": _ANY}
_WINDOWS: Final = {"window": _ANY, "full_layers": _ANY}
_GEMMA: Final = {
    **_BIASES,
    **_ROTARY,
    **_HEADS,
    **_WINDOWS,
    "norms": ("both",),
    "norm_plus_one": (True,),
    "activation": ("gelu_tanh",),
    "scale_embedding": (True,),
    "score_dim": _ANY,
    "logit_softcap": _ANY,
}
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {**_BIASES, **_ROTARY, **_HEADS, "mlp_bias": (False, True)},
    "mistral": {**_ROTARY, **_HEADS, "window": _ANY},
    "qwen2": {**_ROTARY, **_WINDOWS, "attention_bias": ("qkv",)},
    "qwen3": {**_BIASES, **_ROTARY, **_HEADS, **_WINDOWS, "qk_norm": ("head",)},
    "olmo2": {**_BIASES, **_ROTARY, "qk_norm": ("projection",), "norms": ("post",)},
    "gemma2": {**_GEMMA, "attention_softcap": _ANY},
    "gemma3_text": {**_GEMMA, "qk_norm": ("head",), "window_rope_theta": _ANY},
}
"""Family (`model_type` in `transformers`) -> allowed values of each option; an option that is not listed must have its
default. A model belongs to the first family that fits."""
EXPERT_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "mixtral": {**_ROTARY, **_HEADS, "window": _ANY},
    "qwen3_moe": {**_BIASES, **_ROTARY, **_HEADS, "window": _ANY, "qk_norm": ("head",)},
}
"""Families of models with experts, in the form of `FAMILIES`: `model_type` -> allowed values of each option."""


@lru_cache(maxsize=1024)
def family_of(decoder: DecoderSpec, *, head_size: int | None, experts: bool) -> str:
    """Return a decoder's family. Args: head_size: None: it is width / heads. Raises: ValueError: no family fits."""
    said = {name: getattr(decoder, name) for name in decoder.__struct_fields__} | {"head_size": head_size}
    usual = {name: getattr(LLAMA, name) for name in decoder.__struct_fields__} | {"head_size": None}
    families = EXPERT_FAMILIES if experts else FAMILIES
    for family, allowed in families.items():
        free = {name for name, values in allowed.items() if values is _ANY}
        if all(name in free or value in allowed.get(name, (usual[name],)) for name, value in said.items()):
            return family
    unusual = ", ".join(name for name, value in said.items() if value != usual[name])
    kind = "with experts " if experts else ""
    raise ValueError(f"no model family {kind}({', '.join(families)}) allows these values together: {unusual}")
