"""What a peer computes with that only pretends to: things of the right size and version, and nothing in them.

Vectors are extents; their payloads, and activations, are phantoms, which links charge for. Jobs take their time in the
simulated device, which is told their FLOP as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from shoal.peer.experts.shard import ExpertShard
from shoal.peer.model.flop import backward_flop, forward_flop
from shoal.peer.model.layout import HEAD, layer_layout, stage_layer_keys
from shoal.peer.model.mixture import ExpertLoads
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.pipeline.state import LayerState, StageState, moment2_numel
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.vectors import Vectors
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Payload
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.spec import RunSpec

_NOWHERE = torch.device("meta")


class Extent:
    """Stands for a flat tensor where only its size matters: what is done to its numbers is done to none.

    A tensor on torch's `meta` device is the same thing, at 100 us an addition.
    """

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def numel(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> "Extent":
        return Extent(len(range(*part.indices(self._size))))

    def __setitem__(self, part: slice, values: object) -> None:
        pass

    def __iadd__(self, other: object) -> "Extent":
        return self

    def __imul__(self, other: object) -> "Extent":
        return self

    def zero_(self) -> "Extent":
        return self

    def to(self, *where: object, **how: object) -> "Extent":
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledLayerState(LayerState):
    def digest(self) -> str:
        """Equal at all replicas and versions: nobody here computes anything that could differ."""
        return f"modelled-{self.param_N.numel()}"


class ModelledVectors(Vectors):
    """Flat vectors that have only a size."""

    def __init__(self, *, chunk_bytes: int, gradients: Literal["fp32", "bf16"] = "fp32") -> None:
        super().__init__(_NOWHERE, chunk_bytes=chunk_bytes, gradients=gradients)

    def empty(self, size: int) -> Tensor:
        return cast(Tensor, cast(Any, Extent(size)))

    def zeros(self, size: int) -> Tensor:
        return self.empty(size)

    def payload_of(self, values_C: Tensor) -> Payload:
        return _phantom(4 * values_C.numel())

    def values_of(self, payload: Payload) -> Tensor:
        return self.empty(len(payload) // 4)

    def gradient_payload(self, values_C: Tensor) -> Payload:
        return _phantom(self.gradient_bytes * values_C.numel())

    def gradient_of(self, payload: Payload) -> Tensor:
        return self.empty(len(payload) // self.gradient_bytes)

    def round_gradient(self, values_C: Tensor) -> None:
        """Nothing is there to be rounded."""

    def layer_state(self, param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor) -> LayerState:
        return ModelledLayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


class ModelledRuntime:
    """Implements `Runtime`. Every loss is 0: nothing is learnt."""

    def __init__(self, spec: RunSpec, first_layer: int, last_layer: int, *, vectors: Vectors) -> None:
        self.spec = spec
        self.vectors = vectors
        self.device = _NOWHERE
        self.keys = stage_layer_keys(spec.model, first_layer, last_layer)
        self.state: StageState | None = None
        self.num_parameters = sum(layer_layout(spec.model, key).numel for key in self.keys)
        tokens = spec.training.microbatch_size * spec.model.context
        self.forward_flop = sum(forward_flop(spec.model, key, tokens) for key in self.keys)
        self.backward_flop = sum(backward_flop(spec.model, key, tokens) for key in self.keys)
        if spec.training.recomputes:
            self.backward_flop += self.forward_flop
        self.step_flop = 20.0 * self.num_parameters
        self.expert_loads = ExpertLoads(spec.model.num_experts)
        self._contributions = Contributions(self.num_parameters, vectors)
        self._gradient_N = vectors.empty(self.num_parameters)
        self._contributes: dict[Microbatch, bool] = {}
        self._has_stepped = False
        wire = ActivationWire(spec)
        self._activation = _phantom(wire.tensor_bytes + wire.targets_bytes)
        self._output = _phantom(wire.tensor_bytes)
        self._is_first = first_layer == 0

    @property
    def version(self) -> int:
        assert self.state is not None, "the stage has no state yet"
        return self.state.version

    @property
    def remembers(self) -> bool:
        return self._has_stepped or self.spec.training.s_max > 0

    def initial_state(self) -> StageState:
        layers = {}
        for key in self.keys:
            size = layer_layout(self.spec.model, key).numel
            param_N, moment1_N = self.vectors.empty(size), self.vectors.empty(size)
            moment2_N = self.vectors.empty(moment2_numel(self.spec, key))
            layers[key] = self.vectors.layer_state(param_N, moment1_N, moment2_N)
        return StageState(version=0, layers=layers)

    def load(self, state: StageState) -> None:
        assert tuple(state.layers) == self.keys, "the state is another stage's"
        self.state = state
        self._has_stepped = False
        self._contributions.forget_before(self.version)

    # --- jobs ---

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> Payload:
        self._contributes[microbatch] = contributes
        return self._activation

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, Payload | None]:
        self._finish(microbatch, contributes)
        return 0.0, None if self._is_first else self._output

    def backward(self, microbatch: Microbatch, payload: Payload) -> Payload | None:
        self._finish(microbatch, self._contributes.pop(microbatch))
        return None if self._is_first else self._output

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Payload | float:
        return 0.0 if self.keys[-1] == HEAD else self._activation

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        assert self.state is not None
        before = self.state
        after = StageState(version=before.version + 1, layers=before.layers)
        if self.state is before:
            self.state = after
            self._has_stepped = True
            self._contributions.forget_before(self.version)
        return after, after.digest(), 0

    # --- between jobs ---

    def contribute(self, microbatch: Microbatch, *, apart: bool = False) -> bool:
        return self._contributions.contribute(microbatch, version=self.version, apart=apart)

    def gradient_sum(self, step: int, indices: IndexSet | None = None) -> Tensor:
        return self._contributions.total(step, indices)

    def forget(self, microbatch: Microbatch) -> None:
        self._contributes.pop(microbatch, None)
        self._contributions.forget(microbatch)

    def _finish(self, microbatch: Microbatch, contributes: bool) -> None:
        if contributes and not self._contributions.has(microbatch):
            self._contributions.finish(microbatch, self._gradient_N)


class ModelledArithmetic:
    """Implements `Arithmetic`."""

    def __init__(self, spec: RunSpec, *, has_text: bool, memory_bytes: float, chunk_bytes: int) -> None:
        self.vectors: Vectors = ModelledVectors(chunk_bytes=chunk_bytes, gradients=spec.wire.gradients)
        self.device_name = "modelled"
        self.has_text = has_text
        self._memory_bytes = int(memory_bytes)
        self._spec = spec

    def free_bytes(self) -> int:
        return self._memory_bytes

    def probe_job(self) -> Callable[[], None]:
        return lambda: None

    def runtime(self, first_layer: int, last_layer: int, *, placed: bool = False) -> ModelledRuntime:
        """Raises: LocalError: experts are placed."""
        if placed:
            raise LocalError("modelled devices hold whole layers, with their experts")
        return ModelledRuntime(self._spec, first_layer, last_layer, vectors=self.vectors)

    def expert(self, first_layer: int, last_layer: int, expert: int) -> ExpertShard:
        """Raises: LocalError."""
        raise LocalError("modelled devices hold whole layers, with their experts")


def _phantom(nbytes: int) -> Payload:
    """Handlers of modelled peers only ever ask for its length."""
    return cast(Payload, cast(Any, Phantom(nbytes)))
