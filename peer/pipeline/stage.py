"""The arithmetic of one replica: forward and backward with the weights each step wants, and the optimizer step.

Every method runs on the device's one thread, as a job. What a microbatch was forwarded with it is backwarded with:
its context holds the very tensors. Unless memory is short (`keep = "recompute"`) or the run's compensation wants it
otherwise: then it holds the input only, and the backward runs the forward again with the weights for its step that the
version of that moment has.

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
from shoal.peer.model import llama
from shoal.peer.model.flop import backward_flop, forward_flop
from shoal.peer.model.layout import HEAD, stage_layer_keys
from shoal.peer.model.mixture import ExpertLoads, Experts, Mixture
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import Leaves, Shard
from shoal.peer.pipeline.weights import WeightSet
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
    ) -> None:
        super().__init__(spec, stage_layer_keys(spec.model, first_layer, last_layer), device=device)
        self.expert_loads = ExpertLoads(spec.model.num_experts)
        self._experts_of = experts_of
        self._corpus = corpus
        self._wire = ActivationWire(spec)
        self._rotary = llama.rotary_tables(spec.model, device)
        self._contexts: dict[Microbatch, _Context] = {}
        tokens = spec.training.microbatch_size * spec.model.context
        self.forward_flop = sum(forward_flop(spec.model, key, tokens) for key in self.keys)
        self.backward_flop = sum(backward_flop(spec.model, key, tokens) for key in self.keys)
        if spec.training.recomputes:
            self.backward_flop += self.forward_flop

    # --- jobs ---

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> bytearray:
        """Not the last stage: input (None at stage 0, which reads the data) -> activation for the next stage.

        `contributes`: its gradient is wanted; a mate's sum has it otherwise.
        """
        x, targets_BT = self._input(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        recomputes = self.spec.training.recomputes
        with torch.set_grad_enabled(not recomputes):
            y_BTD = self._run(microbatch, leaves, x, counts=True)
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
        loss = self._loss(self._run(microbatch, leaves, x, counts=True), targets_BT)
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
            y_BTD = kept.y_BTD if kept else self._run(microbatch, leaves, context.x)
            y_BTD.backward(grad_BTD)  # type: ignore[no-untyped-call]
        else:
            logger.warning("microbatch %s came back with a gradient that is not finite: it counts as zero", microbatch)
        return self._input_gradient(context.x)

    @torch.no_grad()
    def validate(self, microbatch: Microbatch, payload: Payload | None) -> bytearray | float:
        """Forward at the committed version. Returns: the activation, or the loss at the last stage."""
        x, targets_BT = self._input(microbatch, payload)
        _, leaves = self._weights_of(microbatch)
        y = self._run(microbatch, leaves, x)
        if self.keys[-1] == HEAD:
            return float(self._loss(y, targets_BT))
        return self._wire.encode_activation(y, targets_BT)

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

    def _run(self, microbatch: Microbatch, leaves: Leaves, x: Tensor, *, counts: bool = False) -> Tensor:
        """`counts`: it is no validation, and no repetition of what was run before."""
        mixture = Mixture(
            experts=self._experts_of(microbatch, leaves) if self._experts_of else None,
            loads=self.expert_loads if counts else None,
        )
        return llama.run_layers(self.spec.model, self.keys, leaves, x, self._rotary, mixture=mixture)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """NaN if a target is no token: a neighbour sent nonsense, and torch would raise, or lose its GPU's context."""
        if int(targets_BT.min()) < 0 or int(targets_BT.max()) >= self.spec.model.vocab_size:
            return logits_BTV.new_tensor(math.nan)
        return llama.loss(logits_BTV, targets_BT)

    def _input_gradient(self, x: Tensor) -> bytearray | None:
        if not x.is_floating_point():
            return None  # tokens
        return self._wire.encode_gradient(torch.zeros_like(x) if x.grad is None else x.grad)
