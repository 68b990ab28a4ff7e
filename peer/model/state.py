"""The state of a replica's stage at one version: parameters and moments, by layer.

A state is immutable by convention: an optimizer step makes new tensors. A layer's old tensors are freed unless a
microbatch in flight, a joining peer or a snapshot holds them (`shard.py`).
"""

import logging
from collections.abc import Iterable, Mapping
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
    """The parameters and moments of one layer, float32 [numel] each, in the layer's layout.

    `moment2_N` may be shorter or empty, see `moment2_numel`. A state that is sent to a learner (a member that computes
    with weights only) has its `param_N` in bfloat16 and both moments empty.
    """

    param_N: Tensor
    moment1_N: Tensor
    moment2_N: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return (self.param_N, self.moment1_N, self.moment2_N)

    @property
    def num_bytes(self) -> int:
        """Size of the parameters and moments in bytes, as float32."""
        return sum(4 * tensor.numel() for tensor in self.tensors)

    def to(self, device: torch.device) -> "LayerState":
        """Return the layer with all tensors on `device`; the layer itself if no tensor must be moved."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        param_N, moment1_N, moment2_N = (tensor.to(device) for tensor in self.tensors)
        return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)

    def digest(self) -> str:
        """Return the xxh3-128 of the three tensors' bytes, which is equal on two replicas if and only if their bits are
        equal. This hash detects accidental differences; `secure_digest` also resists attackers, but is five times
        slower."""
        hasher = xxh3_128()
        for tensor in self.tensors:
            if tensor.numel():
                hasher.update(tensor.detach().cpu().numpy().data)
        return hasher.hexdigest()

    def secure_digest(self) -> str:
        """Return BLAKE3 of the three tensors' bytes, 128 bits: nobody can construct another state with this hash."""
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
    """The 2-norm, before clipping, of the reduced gradient that made this version; None: this peer did not make it."""

    def proofs(self) -> tuple[tuple[str, str], ...]:
        """Return (layer key, the layer's `secure_digest`) for each layer."""
        return tuple((key, layer.secure_digest()) for key, layer in self.layers.items())

    def digest(self) -> str:
        hasher = xxh3_128()
        for key, layer in self.layers.items():
            hasher.update(f"{key}:{layer.digest()};".encode())
        return hasher.hexdigest()


class LayerAt(NamedTuple):
    """One layer's state and its version."""

    version: int
    layer: LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeights:
    """The weights of a stage at one version, without moments, as a learner holds them."""

    version: int
    params: Mapping[str, Tensor]
    """Layer key -> bfloat16 [numel]."""


def initial_state(spec: RunSpec, keys: tuple[str, ...], device: torch.device) -> StageState:
    """Return version 0, a pure function of the run's seed: every peer makes the same bits without communication."""
    layers = {}
    for key in keys:
        param_N = initial_parameters(spec, key).to(device)
        matrices = state_layout(spec, key).matrices
        moment1_N, moment2_N = OPTIMIZERS[spec.optimizer.name].moments(param_N, matrices)
        layers[key] = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
    return StageState(version=0, layers=layers)


def step_layer(spec: RunSpec, key: str, layer: LayerState, grad_N: Tensor, version: int) -> LayerState | None:
    """Make one optimizer step from `version` with the reduced gradient.

    Each unit of the layer (an expert, or all the rest) is clipped on its own, and stays unchanged if its gradient is
    not finite. So the step of a layer equals the steps of its units bit for bit, even if the units are on different
    peers. `key` may name a unit.
    Returns: the layer at `version + 1`; None if no unit's gradient is finite.
    """
    return step_layer_clipped(spec, key, layer, clipped(spec, key, grad_N), version)


def step_layer_clipped(
    spec: RunSpec, key: str, layer: LayerState, gradient: "Clipped", version: int
) -> LayerState | None:
    """Make one optimizer step from `version` with a clipped gradient. Returns: the layer at `version + 1`; None if
    `gradient_N` is None: the layer then stays unchanged."""
    if gradient.gradient_N is None:
        return None
    param_N, moment1_N, moment2_N = OPTIMIZERS[spec.optimizer.name].step(
        layer.param_N, gradient.gradient_N, layer.moment1_N, layer.moment2_N, **hyperparameters(spec, key, version)
    )
    after = LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)
    for unit in gradient.spoilt:
        logger.warning("at version %d the gradient of %s is not finite: the unit stays unchanged", version, unit)
        for old_N, new_N, span in zip(layer.tensors, after.tensors, unit_spans(spec, key, unit), strict=True):
            new_N[span] = old_N[span]
    return after


class Clipped(NamedTuple):
    """The gradient of one layer after clipping."""

    gradient_N: Tensor | None
    """float32 [N], the clipped gradient; None: no unit's gradient is finite, so the layer must stay unchanged."""
    spoilt: tuple[str, ...]
    """The units (experts, or the rest) with a gradient that is not finite; it is zero in `gradient_N`."""
    square: float
    """The gradient's squared 2-norm before clipping, without the units in `spoilt` and without a tied head's matrix."""


def clipped(spec: RunSpec, key: str, grad_N: Tensor) -> Clipped:
    """Clip a layer's gradient. Each unit of the layer (an expert, or all the rest) is clipped by its own norm, so that
    a peer can step an expert without the rest of the layer, which may be on other peers."""
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
    """Return the slices that a unit (an expert, or the rest) has in its layer's parameters, first moments and second
    moments. With Muon an expert has no second moment, so its third slice is empty."""
    span = state_slices(spec, key)[unit]
    missing = state_layout(spec, key).numel - moment2_numel(spec, key)  # the layer's first elements have none
    return span, span, slice(max(0, span.start - missing), max(0, span.stop - missing))


def joined(spec: RunSpec, key: str, units: Mapping[str, LayerState]) -> LayerState:
    """Join the states of a layer's units (its experts and the rest) to the state of the layer."""
    tensors = zip(*(units[unit].tensors for unit in state_slices(spec, key)), strict=True)
    param_N, moment1_N, moment2_N = (torch.cat(parts) for parts in tensors)
    return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


def hyperparameters(spec: RunSpec, key: str, version: int) -> dict[str, Any]:
    """Return the settings of the optimizer step from `version`: keyword arguments for `shoal.kernels.optimizer`."""
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
    """Return the number of elements of a layer's `moment2_N`: one per parameter, fewer with Muon, none with SGD."""
    layout = state_layout(spec, key)
    return OPTIMIZERS[spec.optimizer.name].moment2_numel(layout.numel, layout.matrices)


def state_numels(spec: RunSpec, key: str) -> tuple[int, int, int]:
    """Return the number of elements of a layer's parameters, first moments and second moments."""
    numel = state_layout(spec, key).numel
    return numel, numel, moment2_numel(spec, key)


def state_bytes(spec: RunSpec, keys: Iterable[str]) -> int:
    """Return the size in bytes of these layers' state, which is the same at every version."""
    return sum(4 * numel for key in keys for numel in state_numels(spec, key))
