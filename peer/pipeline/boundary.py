"""A stage's input and output: decodes the activations and gradients that it receives, and encodes those that it sends.

B samples   T tokens   D width   V vocabulary
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.labels import IGNORED, Labels
from shoal.peer.data.microbatch import microbatch as training_microbatch
from shoal.peer.data.microbatch import validation_microbatch
from shoal.peer.model import llama
from shoal.peer.model.finite import zero_unless
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec


class Boundary:
    """Input and output of the stage that begins at `first_layer`. Args: corpus: the run's text, at stage 0 only."""

    def __init__(self, spec: RunSpec, *, first_layer: int, corpus: Corpus | None, device: torch.device) -> None:
        self._spec = spec
        self._first_layer = first_layer
        self._corpus = corpus
        self._device = device
        self.wire = ActivationWire(spec)

    def receive(self, microbatch: Microbatch, payload: Payload | None) -> tuple[Tensor, Labels]:
        """Return (the stage's input, the labels). Args: payload: an activation, decoded to the input [B, T, D]; None at
        stage 0: the input is tokens [B, T] from the corpus."""
        if payload is not None:
            x_BTD, labels = self.wire.decode_activation(payload, self._device)
            return x_BTD.requires_grad_(not microbatch.validates), labels
        assert self._corpus is not None, "only stage 0 reads the data"
        if microbatch.validates:
            tokens_BT, labels = validation_microbatch(self._corpus, self._spec, -1 - microbatch.index)
        else:
            tokens_BT, labels = training_microbatch(self._corpus, self._spec, microbatch.step, microbatch.index)
        if self._spec.model.subspace:
            labels = replace(labels, tokens_BT=tokens_BT)
        return tokens_BT.to(self._device), labels.to(self._device)

    def send(self, y_BTD: Tensor, labels: Labels) -> bytearray:
        return self.wire.encode_activation(y_BTD.detach(), labels)

    def loss(self, params: llama.Params, x_BTD: Tensor, labels: Labels) -> Tensor:
        """Return the loss of the head `params`, in nats a token, times the microbatch's weight. The loss is NaN if the
        previous stage sent a weight or target out of range: such a value would make torch raise an error, or
        destroy its GPU context."""
        last, targets_BT, training = self._spec.model.vocab_size - 1, labels.targets_BT, self._spec.training
        tokens_BT = targets_BT.clamp(0, last)
        if labels.counted is None:
            loss = llama.loss_of_head(self._spec.model, params, x_BTD, tokens_BT)
            return torch.where((tokens_BT == targets_BT).all(), loss, math.nan)
        tokens_BT = torch.where(targets_BT == IGNORED, IGNORED, tokens_BT)
        loss = llama.loss_of_head(self._spec.model, params, x_BTD, tokens_BT, labels.counted)
        weight_max = max(training.microbatches_per_step, training.validation_microbatches)
        weight = labels.weight if 0 <= labels.weight <= weight_max else math.nan
        return weight * torch.where((tokens_BT == targets_BT).all(), loss, math.nan)

    def receive_gradient(self, payload: Payload) -> Tensor:
        """Decode the gradient of our output, float32 [B, T, D]."""
        return self.wire.decode_gradient(payload, self._device)

    def send_gradient(self, x: Tensor, microbatch: Microbatch, fine: Tensor) -> bytearray | None:
        """Encode the gradient of our input `x`; return None if `x` is tokens. The gradient is zero if the backward gave
        none, or if `fine` is False. Args: fine: bool [], True if the backward's input was finite."""
        if not x.is_floating_point():
            return None
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        return self.wire.encode_gradient(zero_unless(fine, gradient), microbatch, self._first_layer)
