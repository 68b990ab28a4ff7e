"""What a replica keeps in the machine's memory because its device is full.

Of what a run by default takes on a device with memory of its own (`coordinator/cost/memory.py`), jobs need the weights,
the gradient of the one that runs and the sums of gradients. Moments are read when the optimizer steps and when weights
for a step ahead are made; where gradients were taken is read then, too; and a sum that is being reduced is on its way
through the machine's memory anyway. Once a job has found no room these lie there, and come back for the time of their
use, layer by layer. The bits are the same; a step is slower by the copies.

Source: ZeRO-Offload (Ren et al., 2021, arXiv 2101.06840), section 4. There the processor steps; here the device does,
whose bits are those of all members (`../known_answers.py`).
"""

import logging
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from shoal.peer.pipeline.state import LayerState, StageState

logger = logging.getLogger(__name__)

_APART: Final = ("cuda", "xpu")
"""Devices that have memory of their own."""


class Offload:
    """Of one peer: what has begun for one of its replicas goes on for the next.

    Args: device: what jobs run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_on = False

    @property
    def is_possible(self) -> bool:
        """Whether the device has memory of its own, so that moving tensors to the machine's memory frees some of it."""
        return self._device.type in _APART

    def begin(self) -> bool:
        """Keep moments and places in the machine's memory from now on. Returns: whether this has changed anything;
        False: they are kept there already, or the device has no memory of its own."""
        if self.is_on or not self.is_possible:
            return False
        logger.warning(
            "%s is full: moments and what corrects staleness go to the machine's memory, which makes steps slower",
            self._device,
        )
        self.is_on = True
        return True

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy in the machine's memory, pinned for CUDA, once `begin` was called; the tensor itself before."""
        if not self.is_on or tensor.device.type == "cpu":
            return tensor
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return there.copy_(tensor)

    def layer(self, layer: LayerState) -> LayerState:
        """Return the layer with its moments `put`; its parameters stay on the device. Itself if nothing moves."""
        moment1_N, moment2_N = self.put(layer.moment1_N), self.put(layer.moment2_N)
        if moment1_N is layer.moment1_N and moment2_N is layer.moment2_N:
            return layer
        return LayerState(param_N=layer.param_N, moment1_N=moment1_N, moment2_N=moment2_N)

    def layers(self, layers: Mapping[str, LayerState]) -> dict[str, LayerState]:
        return {key: self.layer(layer) for key, layer in layers.items()}

    def state(self, state: StageState) -> StageState:
        """Return the state with the moments of all layers `put`; itself before `begin`."""
        if not self.is_on:
            return state
        return StageState(version=state.version, layers=self.layers(state.layers), gradient_norm=state.gradient_norm)
