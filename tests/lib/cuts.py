"""What crosses a cut between two stages, in one process: `between` of `peer/single_process.py`."""

from typing import Any

import torch
from torch import Tensor

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.single_process import Between
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, wire: ActivationWire, microbatch: Microbatch, layer: int) -> Tensor:
        ctx.at = wire, microbatch, layer
        targets_BT = torch.zeros(x_BTD.shape[:2], dtype=torch.int32)
        return wire.decode_activation(wire.encode_activation(x_BTD, targets_BT), CPU)[0]

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None, None, None]:
        wire, microbatch, layer = ctx.at
        return wire.decode_gradient(wire.encode_gradient(grad_BTD, microbatch, layer), CPU), None, None, None


def cuts(spec: RunSpec) -> Between:
    """Every layer gets, and gives back, what the run's wire makes of it."""
    wire = ActivationWire(spec)
    return lambda x_BTD, microbatch, layer: _Cut.apply(x_BTD, wire, microbatch, layer)
