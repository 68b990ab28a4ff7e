"""The arithmetic of a peer: the only part in which a training peer and a simulated one differ.

Drivers run jobs by this interface. `TorchArithmetic` computes; the modelled twin in `deploy/simulate` returns values of
the same size, so that the same drivers run a thousand peers in one process.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shoal.peer.compute.cgroup import free_memory_bytes
from shoal.peer.compute.compute_device import ComputeDevice, free_bytes, name_of
from shoal.peer.compute.precision import layer_job
from shoal.peer.data.corpus import Corpus
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.flop import JobFlop
from shoal.peer.model.frozen import seed_base
from shoal.peer.model.mixture import ExpertLoads
from shoal.peer.model.state import LayerState, RoundedWeights, StageState, step_layer
from shoal.peer.pipeline.expert_call import Calling
from shoal.peer.pipeline.expert_runs import OpenRuns, Run
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.pipeline.offload import Offload
from shoal.peer.pipeline.shard import How
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.pipeline.trunk import StageTrunk
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import WireFormat


class LayerRuntime(Protocol):
    """Some layers, as one replica has them; `shoal.peer.pipeline.shard.Shard` documents it."""

    spec: RunSpec
    vectors: Vectors
    device: torch.device
    keys: tuple[str, ...]
    state: StageState | None
    num_parameters: int
    step_flop: float

    @property
    def version(self) -> int: ...

    @property
    def is_stepping(self) -> bool: ...

    @property
    def is_learner(self) -> bool: ...

    @property
    def remembers(self) -> bool: ...

    def initial_state(self) -> StageState: ...

    def load(self, state: StageState) -> None: ...

    def load_weights(self, weights: RoundedWeights) -> None: ...

    def load_base(self, stored: Mapping[str, Tensor]) -> None: ...

    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]: ...

    def contribute(self, microbatch: Microbatch, *, held_out: bool = False) -> bool | None: ...

    def gradient_sum(self, step: int, indices: Indices | None = None) -> Callable[[], Tensor | None]: ...

    def forget(self, microbatch: Microbatch) -> None: ...

    def make_room(self) -> None: ...


class Runtime(LayerRuntime, Protocol):
    """One replica's part of the model, with or without its experts."""

    flop: JobFlop
    expert_loads: ExpertLoads

    def travel_as(self, leaving: WireFormat, coming: WireFormat) -> None:
        """Send activations in the format `leaving`, and gradients in the one that goes with `coming`, the previous
        stage's."""
        ...


class DenseRuntime(Runtime, Protocol):
    """All of a stage's layers; `shoal.peer.pipeline.stage.StageRuntime` documents it."""

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> Payload: ...

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, Payload | None]: ...

    def backward(self, microbatch: Microbatch, payload: Payload) -> Payload | None: ...

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Payload | float: ...


class TrunkRuntime(Runtime, Protocol):
    """A stage's layers without placed experts (`shoal.peer.pipeline.trunk.StageTrunk`). `flop`: of a first part."""

    def forward(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> Calling[Payload]: ...

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> Calling[tuple[float, Payload | None]]: ...

    def backward(self, microbatch: Microbatch, payload: Payload) -> Calling[Payload | None]: ...

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Calling[Payload | float]: ...


class HeldExpert(LayerRuntime, Protocol):
    """One holder's expert; `ExpertShard` documents it."""

    expert: int
    layers: range
    open_runs: OpenRuns

    def forward(self, microbatch: Microbatch, layer: int, x_ND: Tensor) -> Tensor: ...

    def backward(self, run: Run, layer: int, x_ND: Tensor, grad_ND: Tensor, *, wanted: bool) -> Tensor: ...

    def close(self, run: Run, *, wanted: bool) -> int | None: ...


class Arithmetic(Protocol):
    """The computations of one peer, and what its device can hold."""

    vectors: Vectors
    tokens: TokenWire
    device_name: str
    has_text: bool
    """True if it can read the run's data, and so hold stage 0."""

    def free_bytes(self) -> int:
        """Free memory of the device."""
        ...

    def free_host_bytes(self) -> int:
        """Free memory of the host, beside the device's or shared with it."""
        ...

    def step_layer(self, key: str, layer: LayerState, gradient_N: Tensor, version: int) -> LayerState:
        """Make a layer's step from `version` on the device, with a replica's bits; all tensors are on the host."""
        ...

    def seed_base(self, key: str) -> Tensor:
        """Return a layer of the base that the run's seed makes, in the form of `stored_base`."""
        ...

    def probe_job(self) -> Callable[[], None]:
        """Return the forward of one decoder layer, to be timed."""
        ...

    def runtime(self, first_layer: int, last_layer: int) -> DenseRuntime:
        """Make the runtime of a replica of decoder layers [first_layer, last_layer)."""
        ...

    def trunk(self, first_layer: int, last_layer: int) -> TrunkRuntime:
        """Make the runtime of a replica of these layers without their experts, which are placed."""
        ...

    def expert(self, first_layer: int, last_layer: int, expert: int) -> HeldExpert:
        """Make the runtime of a holder of one expert of those layers."""
        ...


class TorchArithmetic:
    """Implements `Arithmetic` on a device of torch.

    Args:
        corpus: the run's text, if this peer has it.
        steps_on: the device that makes the optimizer's steps (`known_answers.py`); None: `device`.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus | None,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        steps_on: torch.device | None = None,
    ) -> None:
        self.vectors = Vectors(torch.device("cpu"), sums=spec.wire.sums)
        self.tokens = TokenWire(spec)
        self.device_name = name_of(device)
        self.has_text = corpus is not None
        self._spec = spec
        self._corpus = corpus
        self._device, self._dtype, self._steps_on = device, dtype, steps_on or device
        self._how: How = {"device": device, "dtype": dtype, "steps_on": steps_on, "offload": Offload(device)}

    @classmethod
    def on(cls, use: ComputeDevice, spec: RunSpec, corpus: Corpus | None) -> "TorchArithmetic":
        return cls(spec, corpus, use.device, dtype=use.dtype, steps_on=use.steps_on)

    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def free_host_bytes(self) -> int:
        return free_memory_bytes()

    @torch.no_grad()
    def step_layer(self, key: str, layer: LayerState, gradient_N: Tensor, version: int) -> LayerState:
        there = layer.to(self._steps_on)
        stepped = step_layer(self._spec, key, there, gradient_N.to(self._steps_on), version) or there
        return stepped.to(self.vectors.host)

    def seed_base(self, key: str) -> Tensor:
        return seed_base(self._spec, key)

    def probe_job(self) -> Callable[[], None]:
        shape_BT = self._spec.training.microbatch_size, self._spec.model.context
        return layer_job(self._spec, self._device, self._dtype, shape_BT)

    def runtime(self, first_layer: int, last_layer: int) -> StageRuntime:
        return StageRuntime(self._spec, first_layer, last_layer, corpus=self._text_of(first_layer), **self._how)

    def trunk(self, first_layer: int, last_layer: int) -> StageTrunk:
        return StageTrunk(self._spec, first_layer, last_layer, corpus=self._text_of(first_layer), **self._how)

    def expert(self, first_layer: int, last_layer: int, expert: int) -> ExpertShard:
        return ExpertShard(self._spec, first_layer, last_layer, expert, **self._how)

    def _text_of(self, first_layer: int) -> Corpus | None:
        return self._corpus if first_layer == 0 else None
