"""What a replica holds of its stage at one version: parameters and moments, by layer.

Immutable by convention: an optimizer step makes new tensors. So a version that in-flight microbatches, a newcomer or
a snapshot still uses lives as long as they hold it, and not a moment longer, and nobody counts references but Python.
Nor does a step hold it: each layer's old tensors go as its new ones come (`shard.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor
from xxhash import xxh3_128

from shoal.kernels.optimizer import OPTIMIZERS, clip
from shoal.peer.model.layout import initial_parameters, state_layout, state_slices
from shoal.peer.model.schedule import rate_of
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import HEAD_MATRIX

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """float32 [numel] each, in the layer's layout; `moment2_N` may be shorter or empty, see `moment2_numel`. Of weights
    alone that are on their way to a light member `param_N` is bfloat16, and both moments are empty."""

    param_N: Tensor
    moment1_N: Tensor
    moment2_N: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return (self.param_N, self.moment1_N, self.moment2_N)

    def to(self, device: torch.device) -> "LayerState":
        """On that device, all of it; itself if it is there."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        param_N, moment1_N, moment2_N = (tensor.to(device) for tensor in self.tensors)
        return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)

    def digest(self) -> str:
        """xxh3-128 of the three tensors' bytes: equal on two replicas exactly if their state is, bit for bit.

        Not a defence against a liar with a collision; BLAKE3 is (`proof`), and five times slower. It guards what leaves
        a peer: what newcomers fetch, and snapshots.
        """
        hasher = xxh3_128()
        for tensor in self.tensors:
            if tensor.numel():
                hasher.update(tensor.detach().cpu().numpy().data)
        return hasher.hexdigest()

    def proof(self) -> str:
        """BLAKE3 of the three tensors' bytes, 128 bits: nobody can make another state that has it."""
        hasher = blake3()
        for tensor in self.tensors:
            if tensor.numel():
                hasher.update(tensor.detach().cpu().view(torch.uint8).numpy().data)
        return hasher.hexdigest(length=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """All layers of a stage, at one version."""

    version: int
    layers: Mapping[str, LayerState]
    gradient_norm: float | None = None
    """The 2-norm, before clipping, of the reduced gradient whose step made this version; None: no step here made it."""

    def proofs(self) -> tuple[tuple[str, str], ...]:
        """(layer, its proof) of each, in the order of the layers."""
        return tuple((key, layer.proof()) for key, layer in self.layers.items())

    def digest(self) -> str:
        hasher = xxh3_128()
        for key, layer in self.layers.items():
            hasher.update(f"{key}:{layer.digest()};".encode())
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeights:
    """What a light member computes with: the weights of a stage at one version, without moments."""

    version: int
    params: Mapping[str, Tensor]
    """Layer key -> bfloat16 [numel]."""


def initial_state(spec: RunSpec, keys: tuple[str, ...], device: torch.device) -> StageState:
    """Version 0, a pure function of the run's seed: any peer makes the same bits without asking anyone."""
    layers = {}
    for key in keys:
        param_N = initial_parameters(spec, key).to(device)
        matrices = state_layout(spec, key).matrices
        moment1_N, moment2_N = OPTIMIZERS[spec.optimizer.name].moments(param_N, matrices)
        layers[key] = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
    return StageState(version=0, layers=layers)


def step_layer(spec: RunSpec, key: str, layer: LayerState, grad_N: Tensor, version: int) -> LayerState | None:
    """One optimizer step from `version` with the reduced gradient, clipped by the norm of each unit of this layer.

    A unit whose gradient is not finite, which no optimizer may see, stays as it is. So a step of a layer is a step of
    each of its units, whoever holds it: the same bits. `key` may be a unit's.
    Returns: the layer at `version + 1`; None if no unit's gradient is finite.
    """
    return step_layer_clipped(spec, key, layer, clipped(spec, key, grad_N), version)


def step_layer_clipped(
    spec: RunSpec, key: str, layer: LayerState, gradient: "Clipped", version: int
) -> LayerState | None:
    """As `step_layer`, with a gradient that has been clipped already."""
    if gradient.gradient_N is None:
        return None
    param_N, moment1_N, moment2_N = OPTIMIZERS[spec.optimizer.name].step(
        layer.param_N, gradient.gradient_N, layer.moment1_N, layer.moment2_N, **hyperparameters(spec, key, version)
    )
    after = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
    for unit in gradient.spoilt:
        logger.warning("at version %d the gradient of %s was not finite: it stays as it is", version, unit)
        for old_N, new_N, span in zip(layer.tensors, after.tensors, unit_spans(spec, key, unit), strict=True):
            new_N[span] = old_N[span]
    return after


class Clipped(NamedTuple):
    """What clipping makes of the gradient of one layer."""

    gradient_N: Tensor | None
    """float32 [N], as the layer's step wants it; None: no unit's gradient is finite, and the layer stays as it is."""
    spoilt: tuple[str, ...]
    """The units whose gradient is not finite. It is zero in `gradient_N`."""
    square: float
    """The square of the gradient's 2-norm before clipping, without the spoilt units, and without the matrix of a tied
    head, which counts as the embedding."""


def clipped(spec: RunSpec, key: str, grad_N: Tensor) -> Clipped:
    """Clip each unit by its own norm: an expert's step then needs nothing from whoever holds the rest of its layer."""
    slices = state_slices(spec, key)
    parts, spoilt, square = [], [], 0.0
    for unit, span in slices.items():
        part_N, norm = clip(grad_N[span], clip_norm=spec.optimizer.clip_norm)
        if not norm < float("inf"):  # also catches NaN
            spoilt.append(unit)
            part_N = torch.zeros_like(part_N)
        elif unit != HEAD_MATRIX:
            square += norm * norm
        parts.append(part_N)
    if len(spoilt) == len(slices):
        return Clipped(None, tuple(spoilt), square)
    return Clipped(parts[0] if len(parts) == 1 else torch.cat(parts), tuple(spoilt), square)


def unit_spans(spec: RunSpec, key: str, unit: str) -> tuple[slice, slice, slice]:
    """Where a unit lies in each of the tensors of its layer's `LayerState`. An expert's part of the second moment is
    empty with Muon, which has none for matrices."""
    span = state_slices(spec, key)[unit]
    missing = state_layout(spec, key).numel - moment2_numel(spec, key)  # the first so many elements have none
    return span, span, slice(max(0, span.start - missing), max(0, span.stop - missing))


def joined(spec: RunSpec, key: str, units: Mapping[str, LayerState]) -> LayerState:
    """A whole layer of its units."""
    tensors = zip(*(units[unit].tensors for unit in state_slices(spec, key)), strict=True)
    param_N, moment1_N, moment2_N = (torch.cat(parts) for parts in tensors)
    return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


def hyperparameters(spec: RunSpec, key: str, version: int) -> dict[str, Any]:
    """The keyword arguments that every optimizer of `shoal.kernels.optimizer` takes at `version`."""
    return {
        "learning_rate": rate_of(spec, version),
        "beta1": spec.optimizer.beta1,
        "beta2": spec.optimizer.beta2,
        "epsilon": spec.optimizer.epsilon,
        "weight_decay": spec.optimizer.weight_decay,
        "num_decayed": state_layout(spec, key).num_decayed,
        "step": version,
        "matrices": state_layout(spec, key).matrices,
    }


def moment2_numel(spec: RunSpec, key: str) -> int:
    """Elements of a layer's `moment2_N`: as many as it has parameters, fewer with Muon, none with SGD."""
    layout = state_layout(spec, key)
    return OPTIMIZERS[spec.optimizer.name].moment2_numel(layout.numel, layout.matrices)
