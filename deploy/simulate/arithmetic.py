"""Defines the computations of a modelled peer. Their results have the right size and version, but no contents.

Vectors are `Extent` objects. Payloads, activations and tokens are phantoms (`extents.py`): they have only a length,
which determines how long a link is busy with them. A job's FLOP determine how long the simulated device is busy.
`routing.py` draws the number of tokens that each placed expert gets.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.deploy.simulate.extents import NOWHERE, ModelledVectors, phantom
from shoal.deploy.simulate.modelled_expert import ModelledExpert, ModelledTokenWire
from shoal.deploy.simulate.modelled_shard import ModelledShard
from shoal.deploy.simulate.routing import SimulatedRouting
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.flop import stage_flop, trunk_stage_flop
from shoal.peer.model.frozen import base_numel
from shoal.peer.model.layout import EMBED, HEAD, layer_index, stage_layer_keys, trunk_keys
from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.expert_call import Calling, ExpertCall
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import How, StageShard
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import WireFormat


class _ModelledStage(ModelledShard, StageShard):
    """A modelled stage: its jobs return activations without numbers, and losses of 0, since it learns nothing."""

    def __init__(self, spec: RunSpec, keys: tuple[str, ...], *, first_layer: int, vectors: Vectors) -> None:
        super().__init__(spec, keys, first_layer=first_layer, corpus=None, device=NOWHERE, vectors=vectors)
        self._contributes: dict[Microbatch, bool] = {}
        self._has_input = first_layer > 0
        self._size_payloads()

    def travel_as(self, leaving: WireFormat, coming: WireFormat) -> None:
        super().travel_as(leaving, coming)
        self._size_payloads()

    def _size_payloads(self) -> None:
        wire = self._boundary.wire
        self._activation = phantom(wire.activation_bytes + wire.targets_bytes)
        self._output = phantom(wire.gradient_bytes) if self._has_input else None

    def forget(self, microbatch: Microbatch) -> None:
        self._contributes.pop(microbatch, None)
        super().forget(microbatch)


class ModelledRuntime(_ModelledStage):
    """Replaces `StageRuntime` in a simulation."""

    def __init__(self, spec: RunSpec, first_layer: int, last_layer: int, *, vectors: Vectors) -> None:
        layers = stage_layer_keys(spec.model, first_layer, last_layer)
        super().__init__(spec, layers, first_layer=first_layer, vectors=vectors)
        self.flop = stage_flop(spec, layers)

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> Payload:
        self._contributes[microbatch] = contributes
        return self._activation

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, Payload | None]:
        self._finish(microbatch, contributes)
        return 0.0, self._output

    def backward(self, microbatch: Microbatch, payload: Payload) -> Payload | None:
        self._finish(microbatch, self._contributes.pop(microbatch))
        return self._output

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Payload | float:
        return 0.0 if self.keys[-1] == HEAD else self._activation


class ModelledTrunk(_ModelledStage):
    """Replaces `StageTrunk` in a simulation; `routing` draws the number of tokens for each expert."""

    def __init__(
        self, spec: RunSpec, first_layer: int, last_layer: int, *, vectors: Vectors, routing: SimulatedRouting
    ) -> None:
        keys = trunk_keys(spec.model, first_layer, last_layer)
        super().__init__(spec, keys, first_layer=first_layer, vectors=vectors)
        layers = stage_layer_keys(spec.model, first_layer, last_layer)
        self.flop = trunk_stage_flop(spec, layers)
        self._routing = routing
        self._layers = [layer_index(key) for key in layers if key not in (EMBED, HEAD)]

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> Calling[Payload]:
        self._count_loads(microbatch)
        yield from self._calls(microbatch, backward=False)
        self._contributes[microbatch] = contributes
        return self._activation

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> Calling[tuple[float, Payload | None]]:
        self._count_loads(microbatch)
        yield from self._calls(microbatch, backward=False)
        yield from self._calls(microbatch, backward=True)
        self._finish(microbatch, contributes)
        return 0.0, self._output

    def backward(self, microbatch: Microbatch, payload: Payload) -> Calling[Payload | None]:
        contributes = self._contributes.pop(microbatch)
        if self.spec.training.recomputes:
            yield from self._calls(microbatch, backward=False)
        yield from self._calls(microbatch, backward=True)
        self._finish(microbatch, contributes)
        return self._output

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Calling[Payload | float]:
        yield from self._calls(microbatch, backward=False)
        return 0.0 if self.keys[-1] == HEAD else self._activation

    # --- inside ---

    def _count_loads(self, microbatch: Microbatch) -> None:
        for layer in self._layers:
            self.expert_loads.add(layer, torch.tensor(self._routing.counts_of(microbatch, layer)))

    def _calls(self, microbatch: Microbatch, *, backward: bool) -> Calling[None]:
        """Yield the calls to the experts of each layer, from the first layer on, or backward from the last layer on."""
        tokens = self._routing.tokens
        for layer in reversed(self._layers) if backward else self._layers:
            counts = self._routing.counts_of(microbatch, layer)
            yield ExpertCall(layer=layer, counts=counts, tokens=tokens, gradients=tokens if backward else None)


class ModelledArithmetic(Arithmetic):
    """The computations of one modelled peer. Args: routing: draws the number of tokens for each expert; needed if the
    run places experts."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        has_text: bool,
        memory_bytes: float,
        chunk_bytes: int,
        routing: SimulatedRouting | None = None,
    ) -> None:
        self.vectors = ModelledVectors(chunk_bytes=chunk_bytes, sums=spec.wire.sums)
        self.tokens = ModelledTokenWire(spec)
        self.device_name = "modelled"
        self.has_text = has_text
        self._memory_bytes = int(memory_bytes)
        self._spec = spec
        self._routing = routing

    def free_bytes(self) -> int:
        return self._memory_bytes

    def free_host_bytes(self) -> int:
        return self._memory_bytes

    def step_layer(self, key: str, layer: LayerState, gradient_N: Tensor, version: int) -> LayerState:
        return layer

    def seed_base(self, key: str) -> Tensor:
        return self.vectors.empty(base_numel(self._spec, key))

    def probe_job(self) -> Callable[[], None]:
        return lambda: None

    def runtime(self, first_layer: int, last_layer: int) -> ModelledRuntime:
        return ModelledRuntime(self._spec, first_layer, last_layer, vectors=self.vectors)

    def trunk(self, first_layer: int, last_layer: int) -> ModelledTrunk:
        assert self._routing is not None, "a plan places experts, the run spec has none"
        return ModelledTrunk(self._spec, first_layer, last_layer, vectors=self.vectors, routing=self._routing)

    def expert(self, first_layer: int, last_layer: int, expert: int) -> ModelledExpert:
        how: How = {"device": NOWHERE, "vectors": self.vectors}
        return ModelledExpert(self._spec, first_layer, last_layer, expert, **how)
