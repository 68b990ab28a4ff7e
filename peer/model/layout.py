"""The place of each tensor in a layer's one flat buffer.

All tensors of a layer (`protocol.tensors` defines them) share one flat fp32 buffer, so that reducing, stepping,
hashing, sending and predicting a layer is one operation on one tensor. Matrices come first and get weight decay; the
norms and biases after them do not.

A layer with experts consists of units, each of which is placed, clipped and stepped on its own: its experts,
"layers.3.experts.0" …, from element 0 on, and after them the rest of the layer, "layers.3.trunk". A function that takes
a layer's key takes a unit's key, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
from blake3 import blake3
from torch import Tensor

from shoal.protocol.layers import EMBED as EMBED
from shoal.protocol.layers import HEAD as HEAD
from shoal.protocol.layers import TRUNK
from shoal.protocol.layers import all_layer_keys as all_layer_keys
from shoal.protocol.layers import expert_key as expert_key
from shoal.protocol.layers import expert_keys as expert_keys
from shoal.protocol.layers import layer_index as layer_index
from shoal.protocol.layers import stage_layer_keys as stage_layer_keys
from shoal.protocol.layers import trunk_keys as trunk_keys
from shoal.protocol.spec import AdapterSpec, ModelSpec, RunSpec
from shoal.protocol.tensors import HEAD_MATRIX, Shapes, adapter_tensors, layer_tensors, router_name


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The tensors of one layer or unit (an expert, or the rest of a layer with experts), in the order of the buffer."""

    key: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_decayed: int
    """Elements [0, num_decayed) belong to matrices, which get weight decay."""

    @cached_property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Return (first element, rows, columns) of each hidden matrix. Embedding and head have no hidden matrix: each
        of their rows is a vector of its own."""
        if self.key in (EMBED, HEAD):
            return ()
        return tuple((start, shape[0], shape[1]) for _, shape, start, _ in self._ranges if len(shape) == 2)

    @cached_property
    def _ranges(self) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
        """Return (name, shape, first element, end) of each tensor."""
        ends = list(accumulate((math.prod(shape) for shape in self.shapes), initial=0))
        return tuple(zip(self.names, self.shapes, ends, ends[1:], strict=False))

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Return name -> view of `flat_N` [numel]: no copy, so writing to a view changes `flat_N`."""
        if flat_N.shape != (self.numel,):
            raise ValueError(f"layer {self.key} has {self.numel} elements, not shape {tuple(flat_N.shape)}")
        return {name: flat_N[start:end].view(shape) for name, shape, start, end in self._ranges}

    def leaves(self, flat_N: Tensor, gradient_N: Tensor | None = None) -> dict[str, Tensor]:
        """Return name -> autograd leaf that shares memory with `flat_N` [numel]. `backward` adds the gradients into
        `gradient_N`, if given. (With one flat leaf, `backward` would fill a buffer of the layer's size for each tensor
        of the layer.)"""
        leaves = {name: view.detach().requires_grad_() for name, view in self.views(flat_N).items()}
        if gradient_N is not None:
            self.collect(leaves, gradient_N)
        return leaves

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors into a flat buffer, the inverse of `views`. Raises: ValueError: a name or a shape is wrong."""
        if set(tensors) != set(self.names):
            raise ValueError(f"layer {self.key} wants {sorted(self.names)}, not {sorted(tensors)}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, has {tuple(tensors[name].shape)}")
        return torch.cat([torch.empty(0), *(tensors[name].reshape(-1).to(torch.float32) for name in self.names)])

    def collect(self, leaves: Mapping[str, Tensor], gradient_N: Tensor) -> None:
        """Make the next `backward` add the gradients of `leaves` into `gradient_N` [numel], in place."""
        for name, gradient in self.views(gradient_N).items():
            leaves[name].grad = gradient


def unit_keys(model: ModelSpec, key: str) -> tuple[str, ...]:
    """Return a layer's units (its experts, then the rest) in buffer order; just `key` for a unit or a dense layer."""
    if not model.num_experts or key.count(".") != 1:
        return (key,)
    return (*(expert_key(key, expert) for expert in range(model.num_experts)), f"{key}.{TRUNK}")


@lru_cache(maxsize=1024)
def unit_slices(model: ModelSpec, key: str) -> Mapping[str, slice]:
    """Return unit (an expert, or the rest) -> its slice of the layer's flat buffer. No element is left over."""
    units = unit_keys(model, key)
    ends = list(accumulate((layer_layout(model, unit).numel for unit in units), initial=0))
    return {unit: slice(first, last) for unit, (first, last) in zip(units, pairwise(ends), strict=True)}


@lru_cache(maxsize=16384)
def layer_layout(model: ModelSpec, key: str) -> LayerLayout:
    """Return the layout of a layer or unit (expert, or the rest). Raises: ValueError: the model has no such layer."""
    return _layout_of(key, *layer_tensors(model, key))


def state_layout(spec: RunSpec, key: str) -> LayerLayout:
    """Return the layout of a layer's or unit's trained parameters: its adapters if the run has any, else all."""
    return layer_layout(spec.model, key) if spec.adapter is None else _adapter_layout(spec.model, spec.adapter, key)


def state_slices(spec: RunSpec, key: str) -> Mapping[str, slice]:
    """Return unit -> its slice of a layer's trained parameters. A layer's units are its experts and the rest; those of
    a tied head are the tied matrix and the rest. With adapters, the layer is one unit."""
    if key == HEAD and spec.trains_tied:
        layout, num = state_layout(spec, key), state_layout(spec, EMBED).numel
        return {HEAD_MATRIX: slice(0, num), HEAD: slice(num, layout.numel)}
    return unit_slices(spec.model, key) if spec.adapter is None else {key: slice(0, state_layout(spec, key).numel)}


@lru_cache(maxsize=64)
def tied_spans(spec: RunSpec, keys: tuple[str, ...]) -> Mapping[str, slice]:
    """Return where tied matrices lie in one vector of all trained parameters of `keys`: "embed" or "head", if it is in
    `keys` -> slice. The result is empty if the run trains no tied matrix."""
    spans: dict[str, slice] = {}
    if spec.trains_tied:
        starts = accumulate((state_layout(spec, key).numel for key in keys), initial=0)
        num = state_layout(spec, EMBED).numel
        spans = {key: slice(at, at + num) for key, at in zip(keys, starts, strict=False) if key in (EMBED, HEAD)}
    return spans


@lru_cache(maxsize=4096)
def _adapter_layout(model: ModelSpec, adapter: AdapterSpec, key: str) -> LayerLayout:
    return _layout_of(key, *adapter_tensors(model, adapter, key))


def _layout_of(key: str, matrices: Shapes, vectors: Shapes) -> LayerLayout:
    shapes = matrices | vectors
    num_decayed = sum(math.prod(shape) for shape in matrices.values())
    return LayerLayout(key=key, names=tuple(shapes), shapes=tuple(shapes.values()), num_decayed=num_decayed)


def num_parameters(model: ModelSpec) -> int:
    """Return the number of parameters of the model. A tied matrix counts once, though two stages may hold it."""
    held = sum(layer_layout(model, key).numel for key in all_layer_keys(model))
    return held - (layer_layout(model, EMBED).numel if model.tied else 0)


def num_trained(spec: RunSpec) -> int:
    """Return the number of parameters that a run trains, each counted once."""
    held = sum(state_layout(spec, key).numel for key in all_layer_keys(spec.model))
    return held - (state_layout(spec, EMBED).numel if spec.trains_tied else 0)


def initial_parameters(spec: RunSpec, key: str) -> Tensor:
    """Return the trained parameters of a layer or unit (expert, or the rest) at version 0, from the run's seed."""
    if spec.adapter is None:
        return init_layer(spec.model, key, spec.seed)
    return _initial_adapters(spec, key)


def _initial_adapters(spec: RunSpec, key: str) -> Tensor:
    """Return a layer's initial adapters. A is drawn evenly from +-1 / sqrt(columns), as in PEFT, and all else is zero,
    so that the model equals its base at first."""
    layout = state_layout(spec, key)
    generator = _generator(f"{spec.seed} {key} adapter")
    flat_N = torch.zeros(layout.numel)
    for name, view_RC in layout.views(flat_N).items():
        if name.endswith("lora_A.weight"):
            even_RC = torch.rand(view_RC.shape, generator=generator)
            torch.mul(2 * even_RC - 1, 1 / math.sqrt(view_RC.shape[1]), out=view_RC)
    return flat_N


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(blake3(name.encode()).digest(length=7)))


def init_layer(model: ModelSpec, key: str, seed: int) -> Tensor:
    """Return the initial parameters of one layer or unit, float32 [numel]: a pure function of (model, key, seed).

    Norms multiply by 1, biases are 0. An element of a matrix is a sum of four uniform numbers: its distribution is
    almost normal, it is at most 3.5 standard deviations (`_deviation`) from zero, and its bits are the same on every
    CPU, which those of torch's normal numbers are not.
    """
    units = unit_keys(model, key)
    if len(units) > 1:
        return torch.cat([init_layer(model, unit, seed) for unit in units])
    layout = layer_layout(model, key)
    generator = _generator(f"{seed} {key}")
    flat_N = torch.ones(layout.numel)
    for name, view in layout.views(flat_N).items():
        if name == HEAD_MATRIX and model.tied:
            view.copy_(init_layer(model, EMBED, seed).view_as(view))
        elif view.ndim == 2:
            total = sum(torch.rand(view.shape, generator=generator) for _ in range(4))
            torch.mul(total - 2, _deviation(model, name, view) * math.sqrt(3), out=view)  # a uniform's variance is 1/12
        elif name.endswith(".bias") or model.decoder.norm_plus_one:
            view.zero_()
    return flat_N


def _deviation(model: ModelSpec, name: str, matrix_RC: Tensor) -> float:
    """Return the initial standard deviation of a matrix with C columns in a model of L layers.

    It is 1 for an embedding (after the embedding's scaling, if any); 1/sqrt(2 L C) for matrices that write into the
    residual stream; 0.02 for the router, so that experts get nearly equal shares; 1/sqrt(C) for all others and for a
    tied embedding. So a layer changes little of the stream that it reads, at any width: "small sub-layers, large
    shortcut" (Takase et al., 2023, arXiv 2312.16903). With the usual 0.02 narrow models learn much less
    (`MEASURED.md`), least of all from stale gradients (`tests/bench/staleness/MEASURED.md`).
    """
    if name.endswith("embed_tokens.weight"):
        return 1 / math.sqrt(model.dim) if model.decoder.scale_embedding or model.tied else 1.0
    if model.num_experts and name.endswith(router_name(model, 0).removeprefix("model.layers.0")):
        return 0.02
    residual = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
    return 1 / math.sqrt(matrix_RC.shape[1] * (2 * model.num_layers if residual else 1))
