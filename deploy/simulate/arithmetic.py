"""Stands for the computing of a modelled peer: values of the right size and version, with nothing in them.

Vectors are extents; their payloads, activations and tokens are phantoms, which links charge for (`extents.py`). Jobs
take their time in the simulated device, which is told their FLOP as ever. Where experts are placed, how many tokens
each gets is drawn (`routing.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.deploy.simulate.extents import ModelledVectors, phantom
from shoal.deploy.simulate.modelled_expert import ModelledExpert, ModelledTokenWire
from shoal.deploy.simulate.modelled_shard import ModelledShard
from shoal.deploy.simulate.routing import Routing
from shoal.peer.experts.wire import TokenWire
from shoal.peer.model.flop import BACKWARD_PER_FORWARD, forward_flop, job_flop, trunk_flop
from shoal.peer.model.layout import EMBED, HEAD, layer_index, stage_layer_keys, trunk_keys
from shoal.peer.model.mixture import ExpertLoads
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.passing import part_flop
from shoal.peer.pipeline.suspended import ExpertCall, Suspended
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.vectors import Vectors
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec


class ModelledRuntime(ModelledShard):
    """Implements `Runtime`. Every loss is 0: nothing is learnt.

    Args: routing: None: the experts are the layers' own, if there are any.
    """

    def __init__(
        self, spec: RunSpec, first_layer: int, last_layer: int, *, vectors: Vectors, routing: Routing | None = None
    ) -> None:
        placed = routing is not None
        layers = stage_layer_keys(spec.model, first_layer, last_layer)
        super().__init__(spec, trunk_keys(spec.model, first_layer, last_layer) if placed else layers, vectors=vectors)
        tokens = spec.training.microbatch_size * spec.model.context
        flop = sum((trunk_flop if placed else forward_flop)(spec.model, key, tokens) for key in layers)
        self.flop = job_flop(part_flop(layers, flop) if placed else flop, recomputes=spec.training.recomputes)
        self.expert_loads = ExpertLoads(spec.model.num_experts)
        self._routing = routing
        self._cuts = [layer_index(key) for key in layers if key not in (EMBED, HEAD)] if placed else []
        self._contributes: dict[Microbatch, bool] = {}
        wire = ActivationWire(spec)
        self._activation = phantom(wire.tensor_bytes + wire.targets_bytes)
        self._output = phantom(wire.tensor_bytes)
        self._is_first = first_layer == 0

    # --- jobs ---

    def forward(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> Payload | Suspended:
        def end() -> Payload:
            self._contributes[microbatch] = contributes
            return self._activation

        ended: Payload | Suspended = self._forth(microbatch, end, counts=True)
        return ended

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, Payload | None] | Suspended:
        def end() -> tuple[float, Payload | None]:
            self._finish(microbatch, contributes)
            return 0.0, None if self._is_first else self._output

        ended: tuple[float, Payload | None] | Suspended = self._forth(
            microbatch, lambda: self._back(microbatch, end), counts=True
        )
        return ended

    def backward(self, microbatch: Microbatch, payload: Payload) -> Payload | Suspended | None:
        contributes = self._contributes.pop(microbatch)

        def end() -> Payload | None:
            self._finish(microbatch, contributes)
            return None if self._is_first else self._output

        ended: Payload | Suspended | None
        if self.spec.training.recomputes:
            ended = self._forth(microbatch, lambda: self._back(microbatch, end), counts=False)
        else:
            ended = self._back(microbatch, end)
        return ended

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Payload | float | Suspended:
        def end() -> Payload | float:
            return 0.0 if self.keys[-1] == HEAD else self._activation

        ended: Payload | float | Suspended = self._forth(microbatch, end, counts=False)
        return ended

    def forget(self, microbatch: Microbatch) -> None:
        self._contributes.pop(microbatch, None)
        super().forget(microbatch)

    # --- inside ---

    def _forth(self, microbatch: Microbatch, then: Callable[[], Any], *, counts: bool) -> Any:
        """Make a forward. `counts`: it is no validation, and no repetition of what was run before."""
        if self._routing is not None and counts:
            for layer in self._cuts:
                self.expert_loads.add(layer, torch.tensor(self._routing.counts_of(microbatch, layer)))
        return self._through(microbatch, self._cuts, then, backward=False)

    def _back(self, microbatch: Microbatch, then: Callable[[], Any]) -> Any:
        return self._through(microbatch, self._cuts[::-1], then, backward=True)

    def _through(
        self, microbatch: Microbatch, layers: Sequence[int], then: Callable[[], Any], *, backward: bool
    ) -> Any:
        """Make a job with a cut at each of `layers`."""
        if self._routing is None or not layers:
            return then()
        counts = self._routing.counts_of(microbatch, layers[0])
        tokens = self._routing.tokens
        return Suspended(
            call=ExpertCall(layer=layers[0], counts=counts, tokens=tokens, gradients=tokens if backward else None),
            resume=lambda output: self._through(microbatch, layers[1:], then, backward=backward),
            flop=(BACKWARD_PER_FORWARD if backward else 1.0) * self.flop.forward,
        )


class ModelledArithmetic:
    """Implements `Arithmetic`.

    Args: routing: where experts are placed.
    """

    def __init__(
        self, spec: RunSpec, *, has_text: bool, memory_bytes: float, chunk_bytes: int, routing: Routing | None = None
    ) -> None:
        self.vectors: Vectors = ModelledVectors(chunk_bytes=chunk_bytes, gradients=spec.wire.gradients)
        self.tokens: TokenWire = ModelledTokenWire(spec)
        self.device_name = "modelled"
        self.has_text = has_text
        self._memory_bytes = int(memory_bytes)
        self._spec = spec
        self._routing = routing

    def free_bytes(self) -> int:
        return self._memory_bytes

    def probe_job(self) -> Callable[[], None]:
        return lambda: None

    def runtime(self, first_layer: int, last_layer: int, *, placed: bool = False) -> ModelledRuntime:
        routing = self._routing if placed else None
        assert routing is not None or not placed, "a plan places experts, the run spec has none"
        return ModelledRuntime(self._spec, first_layer, last_layer, vectors=self.vectors, routing=routing)

    def expert(self, first_layer: int, last_layer: int, expert: int) -> ModelledExpert:
        return ModelledExpert(self._spec, first_layer, last_layer, expert, vectors=self.vectors)
