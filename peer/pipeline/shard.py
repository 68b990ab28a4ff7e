"""What a replica holds of some layers: their state at the current version, what steps want of it, and gradients; where
adapters are trained, the base that these stand beside, too.

N parameters that it trains in all its layers, their flat buffers one behind the other
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.peer.model.frozen import AdaptedLayer, FrozenLayer
from shoal.peer.model.layout import state_layout
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.pipeline.prediction import COMPENSATIONS
from shoal.peer.pipeline.state import LayerState, StageState, clipped, initial_state, step_layer_clipped
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.peer.pipeline.weights import Weights
from shoal.peer.vectors import Vectors
from shoal.protocol.layers import EMBED, HEAD
from shoal.protocol.spec import RunSpec

Leaves = dict[str, dict[str, Tensor]]
"""Layer key -> tensor name -> autograd leaf."""


class Shard:
    """The layers `keys` of one replica; what is computed with them is its subclasses' business.

    Jobs run on the device's one thread; `contribute` and `gradient_sum` on the loop's, which touches no tensor.

    Args:
        dtype: what jobs multiply in, float32 or bfloat16. State, steps and sums of gradients are float32.
        steps_on: the device that makes the optimizer's steps; None: `device`.
    """

    def __init__(
        self,
        spec: RunSpec,
        keys: tuple[str, ...],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        steps_on: torch.device | None = None,
    ) -> None:
        self.spec = spec
        self.keys = keys
        self.device = device
        self.dtype = dtype
        self._steps_on = steps_on or device
        self.vectors = Vectors(torch.device("cpu"), sums=spec.wire.sums)
        self.state: StageState | None = None
        sizes = [state_layout(spec, key).numel for key in keys]
        self._spans = {key: slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i, key in enumerate(keys)}
        self.num_parameters = sum(sizes)
        self.step_flop = 20.0 * self.num_parameters
        corrects = COMPENSATIONS[spec.training.compensation].corrects
        self._contributions = Contributions(self.num_parameters, self.vectors, corrects=corrects)
        self._weights = Weights(spec, self._spans, self._contributions)
        self._base: dict[str, FrozenLayer] = {}
        """Of a run with adapters, before the first job."""

    @property
    def version(self) -> int:
        assert self.state is not None, "the stage has no state yet"
        return self.state.version

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
        self.state = state
        self._weights.loaded()
        self._contributions.forget_before(self.version)

    def load_base(self, stored: Mapping[str, Tensor]) -> None:
        """Take over the base of our layers, as `stored_base` has it. It is the same for as long as the run lasts."""
        assert tuple(stored) == self.keys, "the base is another stage's"
        if self.spec.initial.tied and EMBED in stored and HEAD in stored:
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

        Returns: (the new state, its digest, layers left alone because their gradient was not finite).
        """
        self._contributions.settle()  # a gradient that waits to be added is as large as what a step makes
        before = self.state
        assert before is not None
        layers: dict[str, LayerState] = {}
        skipped, square = 0, 0.0
        for key, layer in before.layers.items():
            gradient = clipped(self.spec, key, mean_gradient_N[self._spans[key]].to(self._steps_on))
            square += gradient.square
            stepped = step_layer_clipped(self.spec, key, layer.to(self._steps_on), gradient, before.version)
            skipped += stepped is None
            layers[key] = layer if stepped is None else stepped.to(self.device)
        after = StageState(version=before.version + 1, layers=layers, gradient_norm=math.sqrt(square))
        if self.state is before:  # else another one was loaded meanwhile, because this one was not the group's
            self.state = after
            self._weights.stepped(before, after)
            self._contributions.forget_before(after.version)
        return after, after.digest(), skipped

    # --- between jobs ---

    def contribute(self, microbatch: Microbatch, *, apart: bool = False) -> bool | None:
        """Its backward is done and the others are about to be told: add its gradient to the step's sum, or keep it
        `apart` from that if there is room, so that it can be left out.

        The tensor itself is added by the next job here, or before that by whoever makes a sum.
        Returns: whether it is kept apart; None: we have stepped without it.
        """
        return self._contributions.contribute(microbatch, version=self.version, apart=apart)

    def gradient_sum(self, step: int, indices: Indices | None = None) -> Callable[[], Tensor]:
        """Ask for the sum over our contributions to `step` that have been told of by now; of those kept apart
        `indices`, if given. Returns: what makes it, float32 [N] on the CPU, on a thread that is not the loop's.

        Corrected for the weights that they were taken at, if the run's compensation does so and `step` is the current
        one. (A round may be called before our own step to it has ended; then what they should have been taken at is
        not known, and the sum stays as it is.)
        """
        total, state = self._contributions.total(step, indices), self.state
        corrects = self._weights.corrects and state is not None and state.version == step

        def make() -> Tensor:
            summed = total()
            if corrects and state is not None:
                self._weights.correct(state, summed.sum_N, summed.places, summed.num)
            return summed.sum_N

        return make

    def make_room(self) -> None:
        """Free what can be made again. Within a job."""
        self._contributions.settle()
        self._weights.forget_made()
        self.vectors.free()
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def forget(self, microbatch: Microbatch) -> None:
        """Nobody will ask for it any more."""
        self._contributions.forget(microbatch)

    # --- for subclasses, within a job ---

    def _weights_of(self, microbatch: Microbatch) -> tuple[WeightSet, Leaves]:
        """What it wants of the current version, and that as leaves of its own: its gradient is nobody else's."""
        self._contributions.settle()  # what has been told of is seen by strategies that see, and frees its memory
        state = self.state
        assert state is not None
        weights = self._weights.of(state, state.version if microbatch.validates else microbatch.step)
        leaves = {key: self._leaves_of(key, weights.computed_in(self.dtype, key)) for key in self.keys}
        return weights, leaves

    def _leaves_of(self, key: str, flat_N: Tensor) -> dict[str, Tensor]:
        leaves = state_layout(self.spec, key).leaves(flat_N)
        if self.spec.adapter is None:
            return leaves
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
        self._contributions.finish(microbatch, gradient_N, weights if self._weights.keeps_places else None)
