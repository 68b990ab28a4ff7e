"""What a replica holds of some layers: their state at the current version, what steps want of it, and gradients; where
adapters are trained, the base that these stand beside, too.

N parameters that it trains in all its layers, their flat buffers one behind the other
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.peer.model.frozen import AdaptedLayer, FrozenLayer
from shoal.peer.model.layout import state_layout
from shoal.peer.model.subspace import constants_of
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.pipeline.offload import Offload
from shoal.peer.pipeline.prediction import COMPENSATIONS
from shoal.peer.pipeline.state import (
    LayerState,
    RoundedWeights,
    StageState,
    clipped,
    initial_state,
    step_layer_clipped,
)
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.peer.pipeline.weights import Weights
from shoal.peer.vectors import Vectors
from shoal.protocol.layers import EMBED, HEAD
from shoal.protocol.spec import RunSpec

Leaves = dict[str, dict[str, Tensor]]
"""Layer key -> tensor name -> autograd leaf; in a subspace model also what of the layer is not trained
(`subspace.constants_of`)."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """One that is being made: the old state of a layer goes when the new one is there."""

    version: int
    """That it is made from."""
    old: dict[str, LayerState]
    """The layers that have yet to step."""
    kept: WeightSet | None
    new: dict[str, LayerState] = field(default_factory=dict)
    skipped: int = 0
    square: float = 0.0
    """Of the 2-norm of the gradient of the layers in `new`."""


class Shard:
    """The layers `keys` of one replica; what is computed with them is its subclasses' business.

    Jobs run on the device's one thread; `contribute` and `gradient_sum` on the loop's, which touches no tensor.

    **A step takes the state apart.** Beside each other the old and the new state are what a peer takes most for. So
    each layer's old state goes as soon as its new one is there, unless somebody else holds it: a newcomer's pin, a
    snapshot that is being written, a signed version. While a step is made there is no `state`, and who wants one waits
    for the new one. A step that finds no memory keeps the layers that have stepped, and goes on from there; jobs that
    need the weights meanwhile find no memory either.

    Args:
        dtype: what jobs multiply in, float32 or bfloat16. State, steps and sums of gradients are float32.
        steps_on: the device that makes the optimizer's steps; None: `device`.
        offload: what is kept in the machine's memory; None: nothing is yet.
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
    ) -> None:
        self.spec = spec
        self.keys = keys
        self.device = device
        self.dtype = dtype
        self._steps_on = steps_on or device
        self._offload = offload or Offload(device)
        self.vectors = Vectors(torch.device("cpu"), sums=spec.wire.sums)
        self.state: StageState | None = None
        """None: none has come yet, or a step is being made."""
        self._version = -1
        self._light: WeightSet | None = None
        """All that is here, of a light member."""
        self._step: _Step | None = None
        sizes = [state_layout(spec, key).numel for key in keys]
        self._spans = {key: slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i, key in enumerate(keys)}
        self.num_parameters = sum(sizes)
        self.step_flop = 20.0 * self.num_parameters
        corrects = COMPENSATIONS[spec.training.compensation].corrects
        self._contributions = Contributions(self.num_parameters, self.vectors, corrects=corrects, offload=self._offload)
        self._weights = Weights(spec, self._spans, self._contributions)
        self._base: dict[str, FrozenLayer] = {}
        """Of a run with adapters, before the first job."""

    @property
    def version(self) -> int:
        """While a step is made, that which it is made from."""
        assert self._version >= 0, "the stage has no state yet"
        return self._version

    @property
    def is_stepping(self) -> bool:
        """There is no state because one is being made."""
        return self._step is not None

    @property
    def is_light(self) -> bool:
        """There is no state, only weights to compute with."""
        return self._light is not None

    @property
    def remembers(self) -> bool:
        """Whether what others run again of the step before can be repaired here exactly (s_max = 0)."""
        return self._weights.remembers or self.spec.training.s_max > 0

    def initial_state(self) -> StageState:
        """Version 0, from the run's seed."""
        return initial_state(self.spec, self.keys, self.device)

    def load(self, state: StageState) -> None:
        """Take over `state`, from the seed, a mate or a snapshot. Contributions already summed stay."""
        assert tuple(state.layers) == self.keys, "the state is another stage's"
        self._version, self._step, self._light = state.version, None, None
        self.state = self._offload.state(state)
        self._weights.loaded()
        self._contributions.forget_before(self.version)

    def load_weights(self, weights: RoundedWeights) -> None:
        """Compute with weights alone, until a state is loaded. Contributions already summed stay."""
        assert tuple(weights.params) == self.keys, "the weights are another stage's"
        assert self.state is None, "weights alone in place of a state"
        params = {key: param_N.to(self.device) for key, param_N in weights.params.items()}
        self._version, self._light = weights.version, WeightSet(params, weights.version)
        self._contributions.forget_before(self.version)

    def load_base(self, stored: Mapping[str, Tensor]) -> None:
        """Take over the base of our layers, as `stored_base` has it. It is the same for as long as the run lasts."""
        assert tuple(stored) == self.keys, "the base is another stage's"
        if self.spec.model.tied and EMBED in stored and HEAD in stored:
            begin = stored[HEAD][: stored[EMBED].numel()]
            if torch.equal(begin.view(torch.uint8), stored[EMBED].view(torch.uint8)):
                # One matrix, which is in memory once.
                head = stored[HEAD].to(self.device)
                stored = {**stored, HEAD: head, EMBED: head[: begin.numel()]}
        self._base = {
            key: FrozenLayer.of(self.spec, key, values, device=self.device, dtype=self.dtype)
            for key, values in stored.items()
        }

    def weight_copies(self) -> int:
        """Copies of the stage's parameters alive: the current one, predictions, stashes. At most `s_max + 2`."""
        return self._weights.copies(self.state)

    @torch.no_grad()
    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        """Commit: the optimizer's step with the reduced gradient, float32 [N].

        Raises: MemoryError and its like: some layers may have stepped. The next call goes on behind them, with the same
            gradient.
        Returns: (the new state, its digest, layers left alone because their gradient was not finite).
        """
        self._contributions.settle()  # a gradient that waits to be added is as large as what a step makes
        step = self._step or self._begun()
        for key in list(step.old):
            self._step_layer(step, key, mean_gradient_N[self._spans[key]])
        after = StageState(version=step.version + 1, layers=step.new, gradient_norm=math.sqrt(step.square))
        if self._step is step:  # else another state was loaded meanwhile, because this one was not the group's
            self._version = after.version
            self.state = after
            self._step = None
            self._weights.stepped(step.kept)
        return after, after.digest(), step.skipped

    def _begun(self) -> _Step:
        """Begin a step: take the state apart, and let everything go that is as large and is of no use any more."""
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

    def contribute(self, microbatch: Microbatch, *, apart: bool = False) -> bool | None:
        """Its backward is done and the others are about to be told: add its gradient to the step's sum, or keep it
        `apart` from that if there is room, so that it can be left out.

        The tensor itself is added by the next job here, or before that by whoever makes a sum.
        Returns: whether it is kept apart; None: we have stepped without it.
        """
        return self._contributions.contribute(microbatch, version=self.version, apart=apart)

    def gradient_sum(self, step: int, indices: Indices | None = None) -> Callable[[], Tensor | None]:
        """Ask for the sum over our contributions to `step` that have been told of by now; of those kept apart
        `indices`, if given. Returns: what makes it, float32 [N] on the CPU, on a thread that is not the loop's; None if
        our optimizer's step has begun by then.

        Corrected for the weights that they were taken at, if the run's compensation does so and `step` is the current
        one. (A round may be called before our own step to it has ended; then what they should have been taken at is
        not known, and the sum stays as it is.)
        """
        total = self._contributions.total(step, indices)
        state = self.state if self._weights.corrects else None  # who holds a state keeps its memory

        def make() -> Tensor | None:
            summed = total()
            if summed is None:
                return None
            if state is not None and state.version == step:
                self._weights.correct(state, summed.sum_N, summed.places, summed.num)
            return summed.sum_N

        return make

    def make_room(self) -> None:
        """Free what can be made again. Within a job."""
        self._contributions.settle()
        self._weights.forget_made()
        self.vectors.free()
        if self._offload.begin():
            self._move_out()
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _move_out(self) -> None:
        """What is kept in the machine's memory from now on goes there."""
        if self.state is not None:
            self.state = self._offload.state(self.state)
        if self._step is not None:
            self._step.old, self._step.new = map(self._offload.layers, (self._step.old, self._step.new))
        self._contributions.move_out()

    def forget(self, microbatch: Microbatch) -> None:
        """Nobody will ask for it any more."""
        self._contributions.forget(microbatch)

    # --- for subclasses, within a job ---

    def _weights_of(self, microbatch: Microbatch) -> tuple[WeightSet, Leaves]:
        """What it wants of the current version, and that as leaves of its own: its gradient is nobody else's."""
        self._contributions.settle()  # what has been told of is seen by strategies that see, and frees its memory
        weights = self._wanted_by(microbatch)
        leaves = {key: self._leaves_of(key, weights.computed_in(self.dtype, key)) for key in self.keys}
        return weights, leaves

    def _wanted_by(self, microbatch: Microbatch) -> WeightSet:
        """Raises: MemoryError: a step that has found no memory has to come first."""
        if (light := self._light) is not None:
            return light  # no moments are here that could say where the steps between lead
        state = self.state
        if state is None and self.is_stepping:
            raise MemoryError("a step of the optimizer waits for memory")
        assert state is not None, "a job before there are weights"
        return self._weights.of(state, state.version if microbatch.validates else microbatch.step)

    def _leaves_of(self, key: str, flat_N: Tensor) -> dict[str, Tensor]:
        leaves = state_layout(self.spec, key).leaves(flat_N)
        if self.spec.adapter is None:
            return leaves | constants_of(self.spec, key, device=self.device, dtype=self.dtype)
        return AdaptedLayer(self._base[key], leaves, scale=self.spec.adapter.scale)

    def _collect(self, microbatch: Microbatch, weights: WeightSet, leaves: Leaves, contributes: bool) -> None:
        """The backward that follows leaves its gradient in one flat tensor, if anybody wants it."""
        self._contributions.settle()
        if not contributes or self._contributions.has(microbatch):
            return
        if self.device == self.vectors.host and self.dtype == torch.float32:
            gradient_N = self.vectors.zeros(self.num_parameters)
        else:
            gradient_N = torch.zeros(self.num_parameters, device=self.device, dtype=self.dtype)
        for key, named in leaves.items():
            state_layout(self.spec, key).collect(named, gradient_N[self._spans[key]])
        keeps_place = self._weights.keeps_places and not self.is_light
        self._contributions.finish(microbatch, gradient_N, weights if keeps_place else None)
