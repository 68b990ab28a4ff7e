"""The layers of one replica: state, weights for each step, gradients, and in a run with adapters the frozen base model.

N trained parameters of all layers; the layers' flat buffers follow one another
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.flop import JobFlop
from shoal.peer.model.frozen import AdaptedLayer, FrozenLayer
from shoal.peer.model.layout import state_layout
from shoal.peer.model.mixture import ExpertLoads
from shoal.peer.model.state import (
    LayerState,
    RoundedWeights,
    StageState,
    clipped,
    initial_state,
    step_layer_clipped,
)
from shoal.peer.model.subspace import constants_of
from shoal.peer.pipeline.boundary import Boundary
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.pipeline.offload import Offload
from shoal.peer.pipeline.prediction import COMPENSATIONS
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.peer.pipeline.weights import Weights
from shoal.protocol.layers import EMBED, HEAD
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import WireFormat

Leaves = dict[str, dict[str, Tensor]]
"""Layer key -> tensor name -> autograd leaf, or a constant of a subspace model (`subspace.constants_of`)."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """An optimizer step in progress. The old state of a layer is freed as soon as its new state exists."""

    version: int
    old: dict[str, LayerState]
    kept: WeightSet | None
    new: dict[str, LayerState] = field(default_factory=dict)
    skipped: int = 0
    square: float = 0.0
    """The sum of squares of the gradients, before clipping, of all layers in `new`."""


class How(TypedDict, total=False):
    """Keyword arguments of `Shard` that say how a peer uses its device; the defaults are those of `Shard`."""

    device: Required[torch.device]
    dtype: torch.dtype
    steps_on: torch.device | None
    offload: Offload | None
    vectors: Vectors | None


class Shard:
    """The layers `keys` of one replica: state, weights and gradients. Subclasses compute forward and backward.

    Jobs run on the device's one thread; `contribute` and `gradient_sum` run on the event loop and touch no tensor.

    **A step takes the state apart.** Old and new state together would be a peer's largest use of memory, so each
    layer's old state is freed as soon as its new state exists. During a step `state` is None. A step that runs out of
    memory keeps the layers that have stepped, and later continues with the other layers; until then jobs that need the
    weights raise MemoryError, too.

    Args:
        dtype: the dtype of forward and backward, float32 or bfloat16. State, steps and sums of gradients are float32.
        steps_on: the device that runs the optimizer; None: `device`.
        vectors: the arithmetic on gradients in host memory; None: the usual one. A simulated peer passes its own.
    """

    def __init__(
        self,
        spec: RunSpec,
        keys: tuple[str, ...],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        steps_on: torch.device | None = None,
        offload: Offload | None = None,
        vectors: Vectors | None = None,
    ) -> None:
        self.spec = spec
        self.keys = keys
        self.device = device
        self.dtype = dtype
        self._steps_on = steps_on or device
        self._offload = offload or Offload(device)
        self.vectors = vectors or Vectors(torch.device("cpu"), sums=spec.wire.sums)
        self.state: StageState | None = None
        """The committed state; None before the first state has arrived, and during a step."""
        self._version = -1
        self._light: WeightSet | None = None
        self._step: _Step | None = None
        sizes = [state_layout(spec, key).numel for key in keys]
        self._spans = {key: slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i, key in enumerate(keys)}
        self.num_parameters = sum(sizes)
        self.step_flop = 20.0 * self.num_parameters
        corrects = COMPENSATIONS[spec.training.compensation].corrects
        self._contributions = Contributions(self.num_parameters, self.vectors, corrects=corrects, offload=self._offload)
        self._weights = Weights(spec, self._spans, self._contributions)
        self._base: dict[str, FrozenLayer] = {}
        """Layer key -> frozen base layer. Filled before the first job in a run with adapters; empty in other runs."""

    @property
    def version(self) -> int:
        """The version of the state; during a step, the version before that step."""
        assert self._version >= 0, "the stage has no state yet"
        return self._version

    @property
    def is_stepping(self) -> bool:
        return self._step is not None

    @property
    def is_learner(self) -> bool:
        """True if this replica is a learner: it has weights but no optimizer moments."""
        return self._light is not None

    @property
    def remembers(self) -> bool:
        """True if microbatches of the previous step may be repeated, with its weights or (s_max > 0) others."""
        return self._weights.remembers or self.spec.training.s_max > 0

    def initial_state(self) -> StageState:
        return initial_state(self.spec, self.keys, self.device)

    def load(self, state: StageState) -> None:
        """Use `state`, from the run's seed, a group member or a snapshot. Keep gradient sums of uncommitted steps."""
        assert tuple(state.layers) == self.keys, "the state is another stage's"
        self._version, self._step, self._light = state.version, None, None
        self.state = self._offload.state(state)
        self._weights.loaded()
        self._contributions.forget_before(self.version)

    def load_weights(self, weights: RoundedWeights) -> None:
        """Use `weights`, without moments (as a learner), until a state is loaded. Keep uncommitted gradients."""
        assert tuple(weights.params) == self.keys, "the weights are another stage's"
        assert self.state is None, "weights alone in place of a state"
        params = {key: param_N.to(self.device) for key, param_N in weights.params.items()}
        self._version, self._light = weights.version, WeightSet(params, weights.version)
        self._contributions.forget_before(self.version)

    def load_base(self, stored: Mapping[str, Tensor]) -> None:
        """Use `stored`, the frozen base of our layers as returned by `stored_base`. It never changes during the run."""
        assert tuple(stored) == self.keys, "the base is another stage's"
        if self.spec.model.tied and EMBED in stored and HEAD in stored:
            begin = stored[HEAD][: stored[EMBED].numel()]
            if torch.equal(begin.view(torch.uint8), stored[EMBED].view(torch.uint8)):
                head = stored[HEAD].to(self.device)
                stored = {**stored, HEAD: head, EMBED: head[: begin.numel()]}
        self._base = {
            key: FrozenLayer.of(self.spec, key, values, device=self.device, dtype=self.dtype)
            for key, values in stored.items()
        }

    @torch.no_grad()
    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        """Commit a step: run the optimizer with the reduced gradient, float32 [N].

        Returns: (the new state, its digest, the number of layers left unchanged because their gradient is not finite).
        Raises: MemoryError, or the device's error of that kind: call again with the same gradient to continue.
        """
        self._contributions.settle()  # a gradient that waits to be added is as large as what a step allocates
        step = self._step or self._begun()
        for key in list(step.old):
            self._step_layer(step, key, mean_gradient_N[self._spans[key]])
        after = StageState(version=step.version + 1, layers=step.new, gradient_norm=math.sqrt(step.square))
        if self._step is step:  # else another state was loaded meanwhile, because ours was wrong
            self._version = after.version
            self.state = after
            self._step = None
            self._weights.stepped(step.kept)
        return after, after.digest(), step.skipped

    def _begun(self) -> _Step:
        """Begin a step: take the state apart, and free all tensors as large as the stage that are no longer needed."""
        before = self.state
        assert before is not None, "a step before there is a state"
        self._contributions.forget_before(before.version + 1)
        step = _Step(version=before.version, old=dict(before.layers), kept=self._weights.kept_of(before))
        self._step, self.state = step, None
        self._weights.loaded()
        return step

    def _step_layer(self, step: _Step, key: str, grad_N: Tensor) -> None:
        layer = step.old[key].to(self.device)
        gradient = clipped(self.spec, key, grad_N.to(self._steps_on))
        stepped = step_layer_clipped(self.spec, key, layer.to(self._steps_on), gradient, step.version)
        after = step.old[key] if stepped is None else stepped.to(self.device)
        if stepped is not None and self._step is step:
            self._weights.layer_stepped(key, layer, after, step.version)
        step.new[key] = self._offload.layer(after)
        step.skipped += stepped is None
        step.square += gradient.square
        del step.old[key]

    # --- between jobs ---

    def contribute(self, microbatch: Microbatch, *, held_out: bool = False) -> bool | None:
        """Add the microbatch's gradient to its step's sum or, if `held_out` and there is room, keep it apart, so that a
        round can omit it. Call this just before the gradient is announced.

        Returns: True: it is kept apart; False: it is in the sum, or there is none; None: its step is committed."""
        return self._contributions.contribute(microbatch, version=self.version, held_out=held_out)

    def gradient_sum(self, step: int, indices: Indices | None = None) -> Callable[[], Tensor | None]:
        """Request the sum of our gradients of `step`, with the held-out ones that `indices` names (None: all). If the
        compensation corrects gradients for the weights at which they were taken, and `step` is the current version,
        the sum is corrected. (A sum requested before our own step to version `step` has ended is not corrected.)

        Returns: a function for any thread but the event loop's: float32 [N] on the CPU; None: our step has begun.
        """
        total = self._contributions.total(step, indices)
        state = self.state if self._weights.corrects else None  # a reference to the state keeps its memory alive

        def make() -> Tensor | None:
            summed = total()
            if summed is None:
                return None
            if state is not None and state.version == step:
                self._weights.correct(state, summed.sum_N, summed.places, summed.num)
            return summed.sum_N

        return make

    def make_room(self) -> None:
        """Free all tensors that can be made again, and begin to offload to host memory. Call this within a job."""
        self._contributions.settle()
        self._weights.forget_made()
        self.vectors.free()
        if self._offload.begin():
            self._move_out()
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _move_out(self) -> None:
        if self.state is not None:
            self.state = self._offload.state(self.state)
        if self._step is not None:
            self._step.old, self._step.new = map(self._offload.layers, (self._step.old, self._step.new))
        self._contributions.move_out()

    def forget(self, microbatch: Microbatch) -> None:
        self._contributions.forget(microbatch)

    # --- for subclasses, within a job ---

    def _weights_of(self, microbatch: Microbatch) -> tuple[WeightSet, Leaves]:
        """Return (the weights for the microbatch's step, autograd leaves that share their memory and collect the
        gradient of this microbatch alone)."""
        self._contributions.settle()  # adds announced gradients, which frees memory
        weights = self._wanted_by(microbatch)
        leaves = {key: self._leaves_of(key, weights.computed_in(self.dtype, key)) for key in self.keys}
        return weights, leaves

    def _wanted_by(self, microbatch: Microbatch) -> WeightSet:
        """Return the weights for the microbatch's step. Raises: MemoryError: a step that ran out of memory is
        unfinished."""
        if (light := self._light) is not None:
            return light  # without moments nothing can be predicted
        state = self.state
        if state is None and self.is_stepping:
            raise MemoryError("an optimizer step waits for memory")
        assert state is not None, "a job before there are weights"
        return self._weights.of(state, state.version if microbatch.validates else microbatch.step)

    def _leaves_of(self, key: str, flat_N: Tensor) -> dict[str, Tensor]:
        leaves = state_layout(self.spec, key).leaves(flat_N)
        if self.spec.adapter is None:
            return leaves | constants_of(self.spec, key, device=self.device, dtype=self.dtype)
        return AdaptedLayer(self._base[key], leaves, scale=self.spec.adapter.scale)

    def _collect(self, microbatch: Microbatch, weights: WeightSet, leaves: Leaves, contributes: bool) -> None:
        """Make the coming backward write its gradient into one flat tensor, unless the group or we have it."""
        self._contributions.settle()
        if not contributes or self._contributions.has(microbatch):
            return
        gradient_N = self._zero_gradient()
        for key, named in leaves.items():
            state_layout(self.spec, key).collect(named, gradient_N[self._spans[key]])
        keeps_place = self._weights.keeps_places and not self.is_learner
        self._contributions.finish(microbatch, gradient_N, weights if keeps_place else None)

    def _zero_gradient(self) -> Tensor:
        """Return a gradient of zeros, [N], in the dtype in which forward and backward run (`dtype`)."""
        if self.device == self.vectors.host and self.dtype == torch.float32:
            return self.vectors.zeros(self.num_parameters)
        return torch.zeros(self.num_parameters, device=self.device, dtype=self.dtype)


class StageShard(Shard, ABC):
    """The layers of one stage, with its input and output. There are two subclasses. `StageRuntime` holds the experts,
    too, and its jobs return results. `StageTrunk` calls experts on other peers, and its jobs are generators
    (`expert_call.py`) that give the same results.

    Args: corpus: the run's text, at stage 0 only.
    """

    flop: JobFlop
    """FLOP of each kind of job; of one part of a job if calls to experts on other peers cut the job."""

    def __init__(
        self, spec: RunSpec, keys: tuple[str, ...], *, first_layer: int, corpus: Corpus | None, **how: Unpack[How]
    ) -> None:
        super().__init__(spec, keys, **how)
        self.expert_loads = ExpertLoads()
        self._boundary = Boundary(spec, first_layer=first_layer, corpus=corpus, device=self.device)

    def travel_as(self, leaving: WireFormat, coming: WireFormat) -> None:
        """Send activations in the format `leaving`, and gradients in the format that the run pairs with `coming`, in
        which activations arrive."""
        self._boundary.wire.travel_as(leaving, coming)

    @abstractmethod
    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> Any:
        """Run the forward of a stage that is not the last. Return the activation for the next stage.

        Args:
            payload: the activation; None at stage 0, which reads the data.
            contributes: False: do not collect this microbatch's gradient, because another member's sum already has it.
        """

    @abstractmethod
    def loss(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> Any:
        """Run forward, loss and backward of the last stage. If the loss is not finite, all gradients are zero.

        Returns: (loss in nats a token, gradient for the previous stage or None at stage 0).
        """

    @abstractmethod
    def backward(self, microbatch: Microbatch, payload: Payload) -> Any:
        """Return the gradient of our input (None at stage 0); `payload` is the gradient of our output. The weights'
        gradient is added to the step's sum later, by `contribute`."""

    @abstractmethod
    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Any:
        """Run the forward at the committed version. Return the activation, or the loss at the last stage."""
