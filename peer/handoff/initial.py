"""Initial weights of a run that begins with given weights and not from its seed.

The run's spec has a digest of every layer. The host serves the weights like a snapshot; the holders of version 0 fetch
their layers and check them. Optimizer moments are not fetched: at version 0 they follow from the parameters.
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
    """A store from which a run's initial weights, or the base of adapters, are read."""

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the requested layers that the store has: float32 [numel] each, in the layer's layout (with adapters:
        in the form of `stored_base`). Raises: LocalError: the weights cannot be read any more."""
        ...


def weights_digest(param_N: Tensor) -> str:
    """Return the BLAKE3 digest, 32 hex digits, of the float32 values in little-endian order."""
    values = param_N.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return blake3(values.view(np.uint8).data).hexdigest(length=16)


def begins_with_weights(spec: RunSpec) -> bool:
    """True if version 0 of the trained state is made from given weights, not from the seed. Adapters are always made
    from the seed, even if their base has digests."""
    return bool(spec.initial.digests) and spec.adapter is None


def begun_numel(spec: RunSpec, key: str) -> int:
    """Return how many numbers are sent for a layer of the initial weights (with adapters: of the base)."""
    return layer_layout(spec.model, key).numel if spec.adapter is None else base_numel(spec, key)


def bare_layer(param_N: Tensor, vectors: Vectors = VECTORS) -> LayerState:
    """Return a layer with empty moments: the form in which weights are sent without moments."""
    return vectors.layer_state(param_N, vectors.empty(0), vectors.empty(0))


def initial_digests(spec: RunSpec) -> Mapping[str, str]:
    """Return layer -> digest of the weights that the run begins with (with adapters: of the base)."""
    return dict(zip(all_layer_keys(spec.model), spec.initial.digests, strict=True))


def layers_of(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the whole layers that contain `keys`, which are layers or parts of layers (such as an expert). Digests are
    of whole layers, so whole layers are fetched."""
    return tuple(dict.fromkeys(".".join(key.split(".")[:2]) for key in keys))


def first_state(
    spec: RunSpec, keys: Sequence[str], layers: Mapping[str, LayerState], device: torch.device
) -> StageState:
    """Return version 0 of `keys` (layers, or experts in them) from the parameters in `layers`, with new moments."""
    begun = {}
    for key in keys:
        (layer,) = layers_of([key])
        param_N = layers[layer].param_N[unit_slices(spec.model, layer)[key] if key != layer else slice(None)].to(device)
        moments = OPTIMIZERS[spec.optimizer.name].moments(param_N, layer_layout(spec.model, key).matrices)
        begun[key] = LayerState(param_N=param_N, moment1_N=moments[0], moment2_N=moments[1])
    return StageState(version=0, layers=begun)
