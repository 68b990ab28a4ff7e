"""A modelled expert at its holder, and token payloads that have only a size."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from shoal.deploy.simulate.extents import Extent, phantom
from shoal.deploy.simulate.modelled_shard import ModelledShard
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.layout import expert_keys
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.expert_runs import OpenRuns, Run
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec


class ModelledTokenWire(TokenWire):
    """A wire with extents as rows, of one element each."""

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


class ModelledExpert(ModelledShard):
    """Implements `HeldExpert`."""

    def __init__(self, spec: RunSpec, first_layer: int, last_layer: int, expert: int, *, vectors: Vectors) -> None:
        super().__init__(spec, expert_keys(first_layer, last_layer, expert), vectors=vectors)
        self.expert = expert
        self.layers = range(first_layer, last_layer)
        self.open_runs = OpenRuns(self._contributions)

    # --- jobs ---

    def forward(self, microbatch: Microbatch, layer: int, x_ND: Tensor) -> Tensor:
        return x_ND

    def backward(self, run: Run, layer: int, x_ND: Tensor, grad_ND: Tensor, *, wanted: bool) -> Tensor:
        opened = self.open_runs.get(run)
        if opened is None:
            opened = self.open_runs.begin(
                run,
                gradient_N=self._gradient_N if wanted else None,
                weights=None,
                staleness_steps=max(0, run.microbatch.step - self.version),
            )
        opened.layers.add(layer)
        return grad_ND

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        stepped = super().step(mean_gradient_N)
        self.open_runs.forget_before(stepped[0].version)
        return stepped

    # --- between jobs ---

    def close(self, run: Run, *, wanted: bool) -> int | None:
        zero_N = self._gradient_N if wanted else None
        return self.open_runs.close(run, version=self.version, zero_N=zero_N, keeps_weights=False)
