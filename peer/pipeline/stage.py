"""The arithmetic of one replica: forward and backward with the weights each step wants, and the optimizer step.

Every method runs on the device's one thread, as a job. What a microbatch was forwarded with it is backwarded with:
its context holds the very tensors. Unless memory is short (`keep = "recompute"`) or the run's compensation wants it
otherwise: then it holds the input only, and the backward runs the forward again with the weights for its step that the
version of that moment has.

Where the experts are elsewhere (`placed`), a job returns `Suspended` at each layer, and goes on when it is resumed.

B samples   T tokens   D width   N parameters of the stage, its layers' flat buffers one behind the other
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.microbatch import microbatch as training_microbatch
from shoal.peer.data.microbatch import validation_microbatch
from shoal.peer.experts.wire import TokenWire
from shoal.peer.model import llama
from shoal.peer.model.flop import forward_flop as whole_flop
from shoal.peer.model.flop import job_flop, trunk_flop
from shoal.peer.model.layout import HEAD, stage_layer_keys, trunk_keys
from shoal.peer.model.mixture import ExpertLoads, Experts, Mixture
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.passing import InParts, Passing, Whole, part_flop
from shoal.peer.pipeline.shard import Leaves, Shard
from shoal.peer.pipeline.suspended import Suspended
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

ExpertsOf = Callable[[Microbatch, Leaves], Experts]
"""Who computes the experts when a microbatch passes the stage with those weights; asked again for each pass."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """One that was run, for its backward."""

    weights: WeightSet
    leaves: Leaves
    passing: Passing
    y_BTD: Tensor


@dataclass(frozen=True, slots=True)
class _Context:
    """A microbatch between its forward and its backward."""

    x: Tensor
    kept: _Forward | None
    """None: run again at the backward."""
    contributes: bool


class StageRuntime(Shard):
    """One stage's layers at the current version, and what in-flight microbatches need of older ones.

    Args:
        corpus: stage 0 only.
        experts_of: None: the stage's own, here.
        placed: the experts are elsewhere, and not of this shard; jobs may return `Suspended`. What is said of a job's
            arithmetic is then said of its first part.
    """

    def __init__(
        self,
        spec: RunSpec,
        first_layer: int,
        last_layer: int,
        *,
        corpus: Corpus | None,
        device: torch.device,
        experts_of: ExpertsOf | None = None,
        placed: bool = False,
    ) -> None:
        keys = (trunk_keys if placed else stage_layer_keys)(spec.model, first_layer, last_layer)
        super().__init__(spec, keys, device=device)
        self._placed = placed
        self.expert_loads = ExpertLoads(spec.model.num_experts)
        self._experts_of = experts_of
        self._corpus = corpus
        self._wire = ActivationWire(spec)
        self._rotary = llama.rotary_tables(spec.model, device)
        self._contexts: dict[Microbatch, _Context] = {}
        self._token_wire = TokenWire(spec)
        tokens = spec.training.microbatch_size * spec.model.context
        layers = stage_layer_keys(spec.model, first_layer, last_layer)
        self._flop = sum((trunk_flop if placed else whole_flop)(spec.model, key, tokens) for key in layers)
        forward_flop = part_flop(layers, self._flop) if placed else self._flop
        self.flop = job_flop(forward_flop, recomputes=spec.training.recomputes)

    # --- jobs ---

    def forward(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> bytearray | Suspended:
        """Not the last stage: input (None at stage 0, which reads the data) -> activation for the next stage.

        `contributes`: its gradient is wanted; a mate's sum has it otherwise.
        """
        x, targets_BT = self._input(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        recomputes = self.spec.training.recomputes
        passing = self._passing(microbatch, leaves, counts=True)

        def end(y_BTD: Tensor) -> bytearray:
            kept = None if recomputes else _Forward(weights, leaves, passing, y_BTD)
            self._contexts[microbatch] = _Context(x, kept, contributes)
            return self._wire.encode_activation(y_BTD.detach(), targets_BT)

        value: bytearray | Suspended = passing.forward(x, end, grad=not recomputes)
        return value

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, bytearray | None] | Suspended:
        """The last stage: forward, loss and backward in one.

        Returns: (loss in nats a token, gradient for the stage before; None if there is none). If the loss is not
        finite, the gradient is zero and nothing is added: no non-finite number may reach an optimizer.
        """
        x, targets_BT = self._input(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        passing = self._passing(microbatch, leaves, counts=True)

        def turn(logits_BTV: Tensor) -> tuple[float, bytearray | None] | Suspended:
            loss = self._loss(logits_BTV, targets_BT)
            self._collect(microbatch, weights, leaves, contributes)
            value = float(loss.detach())
            if not math.isfinite(value):
                logger.warning("microbatch %s has a loss of %s: nothing is learnt from it", microbatch, value)
                return value, self._input_gradient(x)
            back: tuple[float, bytearray | None] | Suspended = passing.backward(
                loss, None, lambda: (value, self._end_backward(microbatch, x))
            )
            return back

        ended: tuple[float, bytearray | None] | Suspended = passing.forward(x, turn, grad=True)
        return ended

    def backward(self, microbatch: Microbatch, payload: Payload) -> bytearray | Suspended | None:
        """Gradient of our output -> gradient of our input (None at stage 0); `contribute` takes that of the weights."""
        context = self._contexts.pop(microbatch)
        kept = context.kept
        grad_BTD = self._wire.decode_gradient(payload, self.device)
        weights, leaves = (kept.weights, kept.leaves) if kept else self._weights_of(microbatch)
        self._collect(microbatch, weights, leaves, context.contributes)
        if not bool(grad_BTD.isfinite().all()):
            logger.warning("microbatch %s came back with a gradient that is not finite: it counts as zero", microbatch)
            return self._input_gradient(context.x)
        passing = kept.passing if kept else self._passing(microbatch, leaves, counts=False)

        def back(y_BTD: Tensor) -> bytearray | Suspended | None:
            value: bytearray | Suspended | None = passing.backward(
                y_BTD, grad_BTD, lambda: self._end_backward(microbatch, context.x)
            )
            return value

        ended: bytearray | Suspended | None = back(kept.y_BTD) if kept else passing.forward(context.x, back, grad=True)
        return ended

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> bytearray | float | Suspended:
        """Forward at the committed version. Returns: the activation, or the loss at the last stage."""
        x, targets_BT = self._input(microbatch, payload)
        _, leaves = self._weights_of(microbatch)

        def end(y: Tensor) -> bytearray | float:
            if self.keys[-1] == HEAD:
                return float(self._loss(y, targets_BT))
            return self._wire.encode_activation(y, targets_BT)

        value: bytearray | float | Suspended = self._passing(microbatch, leaves, counts=False).forward(
            x, end, grad=False
        )
        return value

    def forget(self, microbatch: Microbatch) -> None:
        self._contexts.pop(microbatch, None)
        super().forget(microbatch)

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

    def _passing(self, microbatch: Microbatch, leaves: Leaves, *, counts: bool) -> Passing:
        """`counts`: it is no validation, and no repetition of what was run before."""
        loads = self.expert_loads if counts else None
        if self._placed:
            return InParts(self.spec, leaves, self._rotary, self._token_wire, loads, self._flop)
        experts = self._experts_of(microbatch, leaves) if self._experts_of else None
        return Whole(self.spec, leaves, self._rotary, Mixture(experts=experts, loads=loads))

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """NaN if a target is no token: a neighbour sent nonsense, and torch would raise, or lose its GPU's context."""
        if int(targets_BT.min()) < 0 or int(targets_BT.max()) >= self.spec.model.vocab_size:
            return logits_BTV.new_tensor(math.nan)
        return llama.loss(logits_BTV, targets_BT)

    def _end_backward(self, microbatch: Microbatch, x: Tensor) -> bytearray | None:
        """Returns: the gradient of the input, as the stage before gets it."""
        # Zero came back for an activation that was not finite, and 0 x NaN is NaN in all weights that it has met.
        self._contributions.zero_if_not_finite(microbatch)
        return self._input_gradient(x)

    def _input_gradient(self, x: Tensor) -> bytearray | None:
        if not x.is_floating_point():
            return None  # tokens
        return self._wire.encode_gradient(torch.zeros_like(x) if x.grad is None else x.grad)
