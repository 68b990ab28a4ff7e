"""Tensors that a replica keeps in host memory because its device is full.

Only two kinds of work read the optimizer's moments and the `Places` (sums of the weights at which gradients were
taken): the optimizer step and predictions for a step ahead. A sum that is being reduced passes through host memory
anyway. Once a job has run out of memory, these tensors stay on the host and return layer by layer for each use. The
bits are the same; a step takes longer.

Source: ZeRO-Offload (Ren et al., 2021, arXiv 2101.06840), section 4. The paper's CPU runs the optimizer; here the
device does, because its bits equal those of all members (`../compute/known_answers.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from shoal.peer.model.state import LayerState, StageState

logger = logging.getLogger(__name__)

_APART: Final = ("cuda", "xpu")
"""Device types that have memory separate from the host's."""


class Offload:
    """Moves tensors from a peer's `device` to host memory; once begun, also for all later replicas of the peer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_on = False

    @property
    def is_possible(self) -> bool:
        """True if the device has memory of its own, so that moving tensors to the host frees some of it."""
        return self._device.type in _APART

    def begin(self) -> bool:
        """Keep moments and `Places` in host memory from now on. Return False if that is impossible or nothing new."""
        if self.is_on or not self.is_possible:
            return False
        logger.warning(
            "%s is full: optimizer moments and staleness corrections move to host memory, which makes steps slower",
            self._device,
        )
        self.is_on = True
        return True

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, pinned for CUDA; `tensor` itself if it is on the CPU or offloading is off."""
        if not self.is_on or tensor.device.type == "cpu":
            return tensor
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return there.copy_(tensor)

    def layer(self, layer: LayerState) -> LayerState:
        """Return the layer with its moments moved to host memory; `layer` itself if nothing moves."""
        moment1_N, moment2_N = self.put(layer.moment1_N), self.put(layer.moment2_N)
        if moment1_N is layer.moment1_N and moment2_N is layer.moment2_N:
            return layer
        return replace(layer, moment1_N=moment1_N, moment2_N=moment2_N)

    def layers(self, layers: Mapping[str, LayerState]) -> dict[str, LayerState]:
        return {key: self.layer(layer) for key, layer in layers.items()}

    def state(self, state: StageState) -> StageState:
        """Return a state with the moments of all layers in host memory; `state` itself before `begin` is called."""
        if not self.is_on:
            return state
        return replace(state, layers=self.layers(state.layers))
