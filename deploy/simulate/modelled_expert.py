"""Defines modelled experts, and a token wire with payloads that have only a size."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from shoal.deploy.simulate.extents import Extent, phantom
from shoal.deploy.simulate.modelled_shard import ModelledShard
from shoal.peer.pipeline.expert_runs import Run
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.ports import Payload


class ModelledTokenWire(TokenWire):
    """Encodes the rows (tokens) for experts; each row is one element of an `Extent`."""

    def encode(self, x_PD: Tensor) -> bytearray:
        return cast(bytearray, phantom(self.row_bytes * x_PD.numel()))

    def decode(self, payload: Payload, device: torch.device) -> Tensor:
        return cast(Tensor, cast(Any, Extent(len(payload) // self.row_bytes)))

    def room(self, nbytes: int) -> Payload:
        return phantom(nbytes)

    def part(self, payload: Payload, span: slice) -> Payload:
        return phantom(len(range(*span.indices(len(payload)))))

    def write(self, into: Payload, span: slice, part: Payload) -> None:
        """Do nothing, since there is nothing to write."""

    def joined(self, parts: Iterable[Payload]) -> Payload:
        return phantom(sum(len(part) for part in parts))


class ModelledExpert(ExpertShard, ModelledShard):
    """An expert at a peer that holds it. Its output is its input."""

    def forward(self, microbatch: Microbatch, layer: int, x_ND: Tensor) -> Tensor:
        return x_ND

    def backward(self, run: Run, layer: int, x_ND: Tensor, grad_ND: Tensor, *, wanted: bool) -> Tensor:
        opened = self.open_runs.get(run)
        if opened is None:
            gradient_N = self._zero_gradient() if wanted else None
            staleness_steps = max(0, run.microbatch.step - self.version)
            opened = self.open_runs.begin(run, gradient_N=gradient_N, weights=None, staleness_steps=staleness_steps)
        opened.layers.add(layer)
        return grad_ND
