"""The tensors of each layer: their Hugging Face names and shapes, and how frozen tensors are stored. Pure.

Both the code that stores layers and the code that plans their sizes use this module.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from shoal.protocol.layers import EMBED, EXPERTS, HEAD, TRUNK, all_layer_keys, expert_key, layer_index, trunk_key
from shoal.protocol.spec import AdapterSpec, BaseFormat, ModelSpec, RunSpec
from shoal.protocol.wire_format import tensor_bytes

Shapes = dict[str, tuple[int, ...]]

BACKWARD_PER_FORWARD: Final = 2.0
"""FLOP of a backward / FLOP of its forward: for each matmul two, for the gradients of its input and of its weight."""
ADAPTED_BACKWARD_PER_FORWARD: Final = 1.0
"""Backward work / forward work if only adapters train; the adapters' own products (a few hundredths) do not count."""
EMBEDDING_MATRIX: Final = "model.embed_tokens.weight"
HEAD_MATRIX: Final = "lm_head.weight"
EXPERT_MATRICES: Final = ("w1", "w2", "w3")
"""The matrices of one expert: gate, down and up."""
_OF_EXPERTS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "mixtral": ("block_sparse_moe", {"w1": "w1", "w2": "w2", "w3": "w3"}),
    "qwen3_moe": ("mlp", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}),
}
"""Family -> (the family's name of the expert layer, our name -> the family's name of each matrix of an expert)."""
ROUTER: Final = ".gate.weight"
ALIGNMENT: Final = 16
_NORMS: Final = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""`decoder.norms` -> a layer's norms. In "pre" `post_attention_layernorm` is after the residual sum, else before."""


def layer_tensors(model: ModelSpec, key: str) -> tuple[Shapes, Shapes]:
    """Return the tensors of a layer, or of a unit (trunk or one expert) of a layer: (matrices, norms and biases).

    Raises: ValueError: the model has no such layer.
    """
    D, W = model.dim, model.written_width
    if key == EMBED:
        return {EMBEDDING_MATRIX: (model.vocab_size, W)}, {}
    if key == HEAD:
        return {HEAD_MATRIX: (model.vocab_size, D)}, {"model.norm.weight": (D,)}
    index, unit = _unit(model, key)
    if unit is not None and unit != TRUNK:
        F = model.ffn_dim
        shape_of = {"w1": (F, D), "w2": (W, F), "w3": (F, D)}
        return {expert_name(model, index, int(unit), w): shape_of[w] for w in EXPERT_MATRICES}, {}
    matrices, vectors = _attention(model, index)
    if not model.num_experts:
        more, biases = _feed_forward(model, index)
        return matrices | more, vectors | biases
    matrices |= {router_name(model, index): (model.num_experts, D)}
    if unit == TRUNK:
        return matrices, vectors
    experts: Shapes = {}
    for expert in range(model.num_experts):
        experts |= layer_tensors(model, expert_key(key, expert))[0]
    return experts | matrices, vectors


def adapter_tensors(model: ModelSpec, adapter: AdapterSpec, key: str) -> tuple[Shapes, Shapes]:
    """Return the adapter tensors of a layer; none for embedding and head.

    Returns: two dicts by name: A [rank, columns] and B [rows, rank] of each target matrix; with "dora", magnitude
        vectors [rows].
    Raises: ValueError: the model has no such layer.
    """
    matrices, _ = layer_tensors(model, key)
    targets = adapter.targets_in(model)
    found: Shapes = {}
    magnitudes: Shapes = {}
    for name, (rows, columns) in matrices.items():
        if name.removesuffix(".weight").rpartition(".")[2] in targets:
            a, b = adapter_names(name)
            found |= {a: (adapter.rank, columns), b: (rows, adapter.rank)}
            if adapter.kind == "dora":
                magnitudes[magnitude_name(name)] = (rows,)
    return found, magnitudes


def adapter_names(matrix: str) -> tuple[str, str]:
    """Return PEFT's names of A and B for a matrix."""
    of = matrix.removesuffix(".weight")
    return f"{of}.lora_A.weight", f"{of}.lora_B.weight"


def magnitude_name(matrix: str) -> str:
    """Return PEFT's name of a matrix's DoRA magnitude vector."""
    return f"{matrix.removesuffix('.weight')}.lora_magnitude_vector"


def state_elements(spec: RunSpec, key: str) -> int:
    """Count the trained parameters of a layer, or of a unit (trunk or one expert) of a layer."""
    if spec.adapter is None:
        return sum(num_elements(spec.model, key))
    return sum(math.prod(shape) for of in adapter_tensors(spec.model, spec.adapter, key) for shape in of.values())


def expert_name(model: ModelSpec, index: int, expert: int, matrix: str) -> str:
    """Return the name of an expert's matrix in the decoder layer `index`; `matrix` is one of `EXPERT_MATRICES`."""
    mixture, name_of = _OF_EXPERTS[model.family]
    return f"model.layers.{index}.{mixture}.experts.{expert}.{name_of[matrix]}.weight"


def router_name(model: ModelSpec, index: int) -> str:
    """Return the Hugging Face name of the router in the decoder layer `index`, which has experts."""
    return f"model.layers.{index}.{_OF_EXPERTS[model.family][0]}{ROUTER}"


@lru_cache(maxsize=16384)
def num_elements(model: ModelSpec, key: str) -> tuple[int, int]:
    """Return (number of elements in matrices, in norms and biases) of a layer, or of a unit (trunk or one expert)."""
    matrices, vectors = (sum(math.prod(shape) for shape in shapes.values()) for shapes in layer_tensors(model, key))
    return matrices, vectors


def trunk_elements(model: ModelSpec, index: int) -> tuple[int, int]:
    """Return (elements in matrices, in norms and biases) of a decoder layer, less its experts or feed-forward."""
    if model.num_experts:
        return num_elements(model, trunk_key(f"layers.{index}"))
    matrices, vectors = num_elements(model, f"layers.{index}")
    return matrices - expert_elements(model), vectors


def expert_elements(model: ModelSpec) -> int:
    """Count the elements of one expert, or of a dense layer's feed-forward."""
    return (2 * model.dim + model.written_width) * model.ffn_dim


def basis_elements(model: ModelSpec) -> int:
    """Count the elements of the two fixed matrices that write into the residual stream; 0: no subspace."""
    return 2 * model.dim * model.subspace


def tokens_seen(model: ModelSpec, index: int) -> float:
    """Return to how many tokens a token attends on average, itself included, in the decoder layer `index`."""
    T, window = model.context, model.window_of(index)
    # The first tokens attend to 1, 2, ..., window tokens, all later ones to window.
    return (T + 1) / 2 if not window or window >= T else window - window * (window - 1) / (2 * T)


def _attention(model: ModelSpec, index: int) -> tuple[Shapes, Shapes]:
    D, K, decoder = model.dim, model.head_dim, model.decoder
    rows = {"q": model.num_heads * K, "k": model.num_kv_heads * K, "v": model.num_kv_heads * K}
    at = f"model.layers.{index}."
    matrices: Shapes = {f"{at}self_attn.{name}_proj.weight": (number, D) for name, number in rows.items()}
    matrices[at + "self_attn.o_proj.weight"] = (model.written_width, rows["q"])
    vectors: Shapes = {f"{at}{name}.weight": (D,) for name in _NORMS[decoder.norms]}
    if decoder.qk_norm != "none":
        for name in ("q", "k"):
            vectors[f"{at}self_attn.{name}_norm.weight"] = (K if decoder.qk_norm == "head" else rows[name],)
    biased = {"none": {}, "qkv": rows, "all": rows | {"o": D}}[decoder.attention_bias]
    return matrices, vectors | {f"{at}self_attn.{name}_proj.bias": (number,) for name, number in biased.items()}


def _feed_forward(model: ModelSpec, index: int) -> tuple[Shapes, Shapes]:
    D, W, F = model.dim, model.written_width, model.ffn_dim
    at = f"model.layers.{index}.mlp."
    matrices: Shapes = {at + "gate_proj.weight": (F, D), at + "up_proj.weight": (F, D), at + "down_proj.weight": (W, F)}
    biases: Shapes = {name.removesuffix("weight") + "bias": shape[:1] for name, shape in matrices.items()}
    return matrices, biases if model.decoder.mlp_bias else {}


def _unit(model: ModelSpec, key: str) -> tuple[int, str | None]:
    """Split the key of a decoder layer or unit into (the layer's index, unit): "trunk", an expert's number; None: the
    layer."""
    layer, dot, unit = key.removeprefix("layers.").partition(".")
    index = layer_index("layers." + layer if key.startswith("layers.") else key)
    if index >= model.num_layers:
        raise ValueError(f"the model has {model.num_layers} decoder layers, there is no {key!r}")
    if not dot:
        return index, None
    kind, _, number = unit.partition(".")
    if model.num_experts and unit == TRUNK:
        return index, unit
    if kind == EXPERTS and number in map(str, range(model.num_experts)):
        return index, number
    raise ValueError(f"a decoder layer with {model.num_experts} experts has no unit {key!r}")


# --- the frozen weights of a base model ---


def stored_tensors(
    model: ModelSpec, base: BaseFormat, key: str
) -> Iterator[tuple[str, tuple[int, ...], BaseFormat, int, int]]:
    """Yield each tensor of a frozen layer as it is stored: (name, shape, its format, first byte, byte after the last).

    The tensors of a layer follow each other in the order of `layer_tensors`, each padded to `ALIGNMENT` bytes.
    `kernels/codec` defines the format "int8", `kernels/nf4` the format "nf4".
    """
    matrices, vectors = layer_tensors(model, key)
    first = 0
    for name, shape in (matrices | vectors).items():
        form = _form_of(base, key, shape, is_router=name.endswith(ROUTER))
        end = first + tensor_bytes(form, math.prod(shape))
        yield name, shape, form, first, end
        first = end + -end % ALIGNMENT


@lru_cache(maxsize=4096)
def base_bytes(model: ModelSpec, base: BaseFormat, key: str) -> int:
    """Return the size in bytes of a layer's frozen weights as stored, a multiple of `ALIGNMENT`."""
    *_, (_, _, _, _, end) = stored_tensors(model, base, key)
    return end + -end % ALIGNMENT


def model_bytes(model: ModelSpec, base: BaseFormat) -> int:
    """Return the size in bytes of the whole model's frozen weights as stored."""
    return sum(base_bytes(model, base, key) for key in all_layer_keys(model))


def _form_of(base: BaseFormat, key: str, shape: tuple[int, ...], *, is_router: bool) -> BaseFormat:
    # A router is small, and rounding it would send tokens to other experts.
    if len(shape) == 1 or is_router:
        return "fp32" if base == "fp32" else "bf16"
    # Every token passes through embedding and head, and each of their rows belongs to one token: 4 bits cost much
    # there.
    return "int8" if base == "nf4" and key in (EMBED, HEAD) else base
