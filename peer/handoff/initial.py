"""Initial weights of a run that are not made from its seed.

The run's spec has a digest of every layer. The host serves the weights like a snapshot, and the holders of the run's
first version fetch their own layers and check them. Moments are made, not fetched: at version 0 they follow from the
parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.encoding.vectors import VECTORS, Vectors
from shoal.peer.model.frozen import base_numel
from shoal.peer.model.layout import layer_layout, unit_slices
from shoal.peer.model.state import LayerState, StageState
from shoal.protocol.layers import all_layer_keys
from shoal.protocol.spec import RunSpec


class InitialWeights(Protocol):
    """A source of initial weights."""

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return those of the layers that it has: float32 [numel] each in the layer's layout; with adapters in the form
        of `stored_base`. Raises: LocalError: they cannot be read any more."""
        ...


def weights_digest(param_N: Tensor) -> str:
    """BLAKE3 of the float32 values, little-endian, as `InitialWeights` gives them: 32 hex digits."""
    values = param_N.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return blake3(values.view(np.uint8).data).hexdigest(length=16)


def begins_with_weights(spec: RunSpec) -> bool:
    """True if version 0 is not made from the seed. Adapters always are, even beside a base with digests."""
    return bool(spec.initial.digests) and spec.adapter is None


def begun_numel(spec: RunSpec, key: str) -> int:
    """Numbers that a layer of the initial weights (of the base, with adapters) has on its way to a peer."""
    return layer_layout(spec.model, key).numel if spec.adapter is None else base_numel(spec, key)


def bare_layer(param_N: Tensor, vectors: Vectors = VECTORS) -> LayerState:
    """Return a layer without moments, as initial weights travel."""
    return vectors.layer_state(param_N, vectors.empty(0), vectors.empty(0))


def initial_digests(spec: RunSpec) -> Mapping[str, str]:
    """Return the digest of each layer that the run begins with; of its base, with adapters."""
    return dict(zip(all_layer_keys(spec.model), spec.initial.digests, strict=True))


def layers_of(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the layers of these units or layers. Digests are of whole layers, so whole layers are fetched."""
    return tuple(dict.fromkeys(".".join(key.split(".")[:2]) for key in keys))


def first_state(
    spec: RunSpec, keys: Sequence[str], layers: Mapping[str, LayerState], device: torch.device
) -> StageState:
    """Return version 0 of `keys`, layers or units of layers, from the parameters in `layers`."""
    begun = {}
    for key in keys:
        (layer,) = layers_of([key])
        param_N = layers[layer].param_N[unit_slices(spec.model, layer)[key] if key != layer else slice(None)].to(device)
        moments = OPTIMIZERS[spec.optimizer.name].moments(param_N, layer_layout(spec.model, key).matrices)
        begun[key] = LayerState(param_N=param_N, moment1_N=moments[0], moment2_N=moments[1])
    return StageState(version=0, layers=begun)
