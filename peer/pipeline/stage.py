"""The arithmetic of one replica: forward and backward with the weights each step wants, and the optimizer step.

Every method runs on the device's one thread, as a job. What a microbatch was forwarded with it is backwarded with:
its context holds the very tensors. Unless memory is short (`keep = "recompute"`) or the run's compensation wants it
otherwise: then it holds the input only, and the backward runs the forward again with the weights for its step that the
version of that moment has.

B samples   T tokens   D width   N parameters of the stage, its layers' flat buffers one behind the other
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.microbatch import microbatch as training_microbatch
from shoal.peer.data.microbatch import validation_microbatch
from shoal.peer.model import llama
from shoal.peer.model.flop import backward_flop, forward_flop
from shoal.peer.model.layout import HEAD, layer_layout, stage_layer_keys
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.pipeline.state import LayerState, StageState, initial_state, step_layer
from shoal.peer.pipeline.weights import Weights, WeightSet
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.vectors import Vectors
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

Leaves = dict[str, dict[str, Tensor]]
"""Layer key -> tensor name -> autograd leaf."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """One that was run, for its backward."""

    weights: WeightSet
    leaves: Leaves
    y_BTD: Tensor


@dataclass(frozen=True, slots=True)
class _Context:
    """A microbatch between its forward and its backward."""

    x: Tensor
    kept: _Forward | None
    """None: run again at the backward."""
    contributes: bool


class StageRuntime:
    """One stage's layers at the current version, and what in-flight microbatches need of older ones.

    Args:
        corpus: stage 0 only.
    """

    def __init__(
        self, spec: RunSpec, first_layer: int, last_layer: int, *, corpus: Corpus | None, device: torch.device
    ) -> None:
        self.spec = spec
        self.keys = stage_layer_keys(spec.model, first_layer, last_layer)
        self.device = device
        self.vectors = Vectors(torch.device("cpu"), gradients=spec.wire.gradients)
        self.state: StageState | None = None
        self._corpus = corpus
        self._wire = ActivationWire(spec)
        self._rotary = llama.rotary_tables(spec.model, device)
        sizes = [layer_layout(spec.model, key).numel for key in self.keys]
        self._spans = {key: slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i, key in enumerate(self.keys)}
        self.num_parameters = sum(sizes)
        self._contributions = Contributions(self.num_parameters, self.vectors)
        self._weights = Weights(spec, self._spans, self._contributions)
        self._contexts: dict[Microbatch, _Context] = {}
        tokens = spec.training.microbatch_size * spec.model.context
        self.forward_flop = sum(forward_flop(spec.model, key, tokens) for key in self.keys)
        self.backward_flop = sum(backward_flop(spec.model, key, tokens) for key in self.keys)
        if spec.training.recomputes:
            self.backward_flop += self.forward_flop
        self.step_flop = 20.0 * self.num_parameters

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

    def weight_copies(self) -> int:
        """Copies of the stage's parameters alive: the current one, predictions, stashes. At most `s_max + 2`."""
        return self._weights.copies(self.state)

    # --- jobs ---

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> bytearray:
        """Not the last stage: input (None at stage 0, which reads the data) -> activation for the next stage.

        `contributes`: its gradient is wanted; a mate's sum has it otherwise.
        """
        x, targets_BT = self._input(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        recomputes = self.spec.training.recomputes
        with torch.set_grad_enabled(not recomputes):
            y_BTD = self._run(leaves, x)
        kept = None if recomputes else _Forward(weights, leaves, y_BTD)
        self._contexts[microbatch] = _Context(x, kept, contributes)
        return self._wire.encode_activation(y_BTD.detach(), targets_BT)

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, bytearray | None]:
        """The last stage: forward, loss and backward in one.

        Returns: (loss in nats a token, gradient for the stage before; None if there is none). If the loss is not
        finite, the gradient is zero and nothing is added: no non-finite number may reach an optimizer.
        """
        x, targets_BT = self._input(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        loss = self._loss(self._run(leaves, x), targets_BT)
        self._collect(microbatch, weights, leaves, contributes)
        value = float(loss.detach())
        if math.isfinite(value):
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            logger.warning("microbatch %s has a loss of %s: nothing is learnt from it", microbatch, value)
        return value, self._input_gradient(x)

    def backward(self, microbatch: Microbatch, payload: Payload) -> bytearray | None:
        """Gradient of our output -> gradient of our input (None at stage 0); `contribute` takes that of the weights."""
        context = self._contexts.pop(microbatch)
        kept = context.kept
        grad_BTD = self._wire.decode_gradient(payload, self.device)
        weights, leaves = (kept.weights, kept.leaves) if kept else self._weights_of(microbatch)
        self._collect(microbatch, weights, leaves, context.contributes)
        if bool(grad_BTD.isfinite().all()):
            y_BTD = kept.y_BTD if kept else self._run(leaves, context.x)
            y_BTD.backward(grad_BTD)  # type: ignore[no-untyped-call]
        else:
            logger.warning("microbatch %s came back with a gradient that is not finite: it counts as zero", microbatch)
        return self._input_gradient(context.x)

    @torch.no_grad()
    def validate(self, microbatch: Microbatch, payload: Payload | None) -> bytearray | float:
        """Forward at the committed version. Returns: the activation, or the loss at the last stage."""
        x, targets_BT = self._input(microbatch, payload)
        _, leaves = self._weights_of(microbatch)
        y = self._run(leaves, x)
        if self.keys[-1] == HEAD:
            return float(self._loss(y, targets_BT))
        return self._wire.encode_activation(y, targets_BT)

    @torch.no_grad()
    def step(self, mean_gradient_N: Tensor) -> tuple[StageState, str, int]:
        """Commit: the optimizer's step with the reduced gradient, float32 [N].

        Returns: (the new state, its digest, layers left alone because their gradient was not finite).
        """
        before = self.state
        assert before is not None
        layers: dict[str, LayerState] = {}
        skipped = 0
        for key, layer in before.layers.items():
            grad_N = mean_gradient_N[self._spans[key]].to(self.device)
            stepped = step_layer(self.spec, key, layer, grad_N, before.version)
            skipped += stepped is None
            layers[key] = stepped or layer
        after = StageState(version=before.version + 1, layers=layers)
        if self.state is before:  # else another one was loaded meanwhile, because this one was not the group's
            self.state = after
            self._weights.stepped(before, after)
            self._contributions.forget_before(after.version)
        return after, after.digest(), skipped

    # --- between jobs ---

    def contribute(self, microbatch: Microbatch, *, apart: bool = False) -> bool:
        """Its backward is done and the others are about to be told: add its gradient to the step's sum, or keep it
        `apart` from that if there is room, so that it can be left out.

        On the loop's thread, as `gradient_sum` is: what the sum holds is exactly what has been told.
        Returns: whether it is kept apart.
        """
        return self._contributions.contribute(microbatch, version=self.version, apart=apart)

    def gradient_sum(self, step: int, indices: IndexSet | None = None) -> Tensor:
        """The sum over our contributions to `step`, float32 [N] on the CPU; of those kept apart `indices`, if given.

        Corrected for the weights that they were taken at, if the run's compensation does so and `step` is the current
        one. (A round may be called before our own step to it has ended; then what they should have been taken at is
        not known, and the sum stays as it is.)
        """
        sum_N = self._contributions.total(step, indices)
        state = self.state
        if self._weights.corrects and state is not None and state.version == step:
            self._weights.correct(state, sum_N, self._contributions.taken_at(step, indices))
        return sum_N

    def forget(self, microbatch: Microbatch) -> None:
        self._contexts.pop(microbatch, None)
        self._contributions.forget(microbatch)

    # --- inside ---

    def _input(self, microbatch: Microbatch, payload: Payload | None) -> tuple[Tensor, Tensor]:
        if payload is not None:
            x_BTD, targets_BT = self._wire.decode_activation(payload, self.device)
            return x_BTD.requires_grad_(not microbatch.validates), targets_BT
        assert self._corpus is not None, "only stage 0 reads the data"
        if microbatch.validates:
            tokens_BT, targets_BT = validation_microbatch(self._corpus, self.spec, -1 - microbatch.index)
        else:
            tokens_BT, targets_BT = training_microbatch(self._corpus, self.spec, microbatch.step, microbatch.index)
        return tokens_BT.to(self.device), targets_BT.to(self.device)

    def _run(self, leaves: Leaves, x: Tensor) -> Tensor:
        return llama.run_layers(self.spec.model, self.keys, leaves, x, self._rotary)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """NaN if a target is no token: a neighbour sent nonsense, and torch would raise, or lose its GPU's context."""
        if int(targets_BT.min()) < 0 or int(targets_BT.max()) >= self.spec.model.vocab_size:
            return logits_BTV.new_tensor(math.nan)
        return llama.loss(logits_BTV, targets_BT)

    def _weights_of(self, microbatch: Microbatch) -> tuple[WeightSet, Leaves]:
        """What it wants of the current version, and that as leaves of its own: its gradient is nobody else's."""
        state = self.state
        assert state is not None
        weights = self._weights.of(state, state.version if microbatch.validates else microbatch.step)
        leaves = {key: layer_layout(self.spec.model, key).leaves(x_N) for key, x_N in weights.params.items()}
        return weights, leaves

    def _collect(self, microbatch: Microbatch, weights: WeightSet, leaves: Leaves, contributes: bool) -> None:
        """The backward that follows leaves its gradient in one flat tensor, if anybody wants it."""
        if not contributes or self._contributions.has(microbatch):
            return
        gradient_N = torch.zeros(self.num_parameters, device=self.device)
        for key, named in leaves.items():
            layer_layout(self.spec.model, key).collect(named, gradient_N[self._spans[key]])
        self._contributions.finish(microbatch, gradient_N, weights if self._weights.corrects else None)

    def _input_gradient(self, x: Tensor) -> bytearray | None:
        if not x.is_floating_point():
            return None  # tokens
        return self._wire.encode_gradient(torch.zeros_like(x) if x.grad is None else x.grad)
