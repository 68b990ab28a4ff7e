"""Computes one replica's jobs: forward and backward with the weights for each step.

Every method runs on the device's one thread, as a job. Between forward and backward a microbatch's context keeps

- the graph and the weights of the forward; or
- with `keep = "recompute"`, or if the compensation asks for it, only the input: the backward repeats the forward with
  the weights that the current version gives for the microbatch's step; or
- with `keep = "layers"`, the weights and each layer's input: the backward repeats the forward of one layer at a time,
  so that only one layer's graph is in memory. After a job has run out of memory, every job goes layer by layer.

No job reads a number from its device before its end (`../model/finite.py`). `trunk.py` replaces this module where the
experts are on other peers.

B samples   T tokens   D width   N parameters of the stage; the layers' flat buffers follow one another
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.labels import Labels
from shoal.peer.model import llama
from shoal.peer.model.backward import backward
from shoal.peer.model.compiled import compiled_layers
from shoal.peer.model.documents import Documents
from shoal.peer.model.finite import finite
from shoal.peer.model.flop import stage_flop
from shoal.peer.model.layout import EMBED, HEAD, stage_layer_keys
from shoal.peer.model.mixture import Mixture
from shoal.peer.pipeline.fixed_stage import FixedStage
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import How, Leaves, StageShard
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Context:
    x: Tensor
    labels: Labels
    contributes: bool
    kept: tuple[WeightSet, Leaves, Tensor] | None
    """(the forward's weights, their autograd leaves, the output [B, T, D] with its graph); None: the backward repeats
    the forward."""
    read: tuple[WeightSet, Leaves, list[Tensor]] | None = None
    """If the backward runs layer by layer: (the forward's weights, their leaves, each layer's input); else None."""


class StageRuntime(StageShard):
    """All layers of one stage on this peer, and each microbatch's context between its forward and backward."""

    def __init__(
        self, spec: RunSpec, first_layer: int, last_layer: int, *, corpus: Corpus | None, **how: Unpack[How]
    ) -> None:
        keys = stage_layer_keys(spec.model, first_layer, last_layer)
        super().__init__(spec, keys, first_layer=first_layer, corpus=corpus, **how)
        self._rotary = llama.rotary_tables(spec.model, self.device)
        self.compiled = compiled_layers(spec, self.device, self.dtype)
        """The compiled layers; None: this stage's layers run uncompiled."""
        self._contexts: dict[Microbatch, _Context] = {}
        self._by_layer = spec.recomputes_by_layer
        self.flop = stage_flop(spec, self.keys)

    def forward(self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True) -> bytearray:
        x, labels = self._boundary.receive(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        mixture = Mixture(loads=self.expert_loads)
        if self.spec.recomputes_by_layer:
            y_BTD, read = self._read_by_layers(leaves, x, labels, mixture)
            self._contexts[microbatch] = _Context(x, labels, contributes, None, (weights, leaves, read))
            return self._boundary.send(y_BTD, labels)
        recomputes = self.spec.training.recomputes
        with torch.set_grad_enabled(not recomputes):
            y_BTD = self._run_layers(leaves, x, labels, mixture)
        self._contexts[microbatch] = _Context(x, labels, contributes, None if recomputes else (weights, leaves, y_BTD))
        return self._boundary.send(y_BTD, labels)

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> tuple[float, bytearray | None]:
        x, labels = self._boundary.receive(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        mixture, read = Mixture(loads=self.expert_loads), None
        if self._by_layer:
            y_BTD, read = self._read_by_layers(leaves, x, labels, mixture)
            y_BTD.requires_grad_()
        else:
            y_BTD = self._run_layers(leaves, x, labels, mixture)
        loss = self._boundary.loss(leaves[HEAD], y_BTD, labels)
        self._collect(microbatch, weights, leaves, contributes)
        torch.autograd.backward(loss)
        if read is not None:
            self._backward_by_layers(leaves, read, y_BTD.grad, x, labels)
        fine = finite(loss.detach())
        counts = self._contributions.zero_unless_finite(microbatch, fine)
        gradient = self._boundary.send_gradient(x, microbatch, fine)
        value = float(loss.detach())
        if not math.isfinite(value):
            logger.warning("microbatch %s has a loss of %s: nothing is learnt from it", microbatch, value)
        elif not bool(counts):
            logger.warning("microbatch %s has a gradient that is not finite: it counts as zero", microbatch)
        return value, gradient

    def backward(self, microbatch: Microbatch, payload: Payload) -> bytearray | None:
        context = self._contexts[microbatch]  # removed only at the end: a job that runs out of memory is retried
        grad_BTD = self._boundary.receive_gradient(payload)
        fine = finite(grad_BTD)
        if context.kept is not None:
            weights, leaves, y_BTD = context.kept
            self._collect(microbatch, weights, leaves, context.contributes)
            backward([y_BTD], [grad_BTD.to(y_BTD.dtype)])
        elif context.read is not None or self._by_layer:
            weights, leaves, read = context.read or self._read_again(microbatch, context)
            self._collect(microbatch, weights, leaves, context.contributes)
            self._backward_by_layers(leaves, read, grad_BTD, context.x, context.labels)
        else:
            weights, leaves = self._weights_of(microbatch)
            self._collect(microbatch, weights, leaves, context.contributes)
            y_BTD = self._run_layers(leaves, context.x, context.labels, Mixture())
            backward([y_BTD], [grad_BTD.to(y_BTD.dtype)])
        # If an activation was not finite, the next stage sends a zero gradient, but 0 x NaN makes NaN in our weights.
        counts = self._contributions.zero_unless_finite(microbatch, fine)
        gradient = self._boundary.send_gradient(context.x, microbatch, fine)
        self._contexts.pop(microbatch, None)
        if not bool(fine):
            logger.warning("microbatch %s came back with a gradient that is not finite: it counts as zero", microbatch)
        elif not bool(counts):
            logger.warning("microbatch %s has a gradient that is not finite: it counts as zero", microbatch)
        return gradient

    @torch.no_grad()
    def validate(self, microbatch: Microbatch, payload: Payload | None) -> bytearray | float:
        x, labels = self._boundary.receive(microbatch, payload)
        _, leaves = self._weights_of(microbatch)
        y = self._run_layers(leaves, x, labels, Mixture())
        if self.keys[-1] == HEAD:
            return float(self._boundary.loss(leaves[HEAD], y, labels))
        return self._boundary.send(y, labels)

    @torch.no_grad()
    def fixed(self) -> FixedStage:
        """Return a copy of the stage at its committed version, for inference; later steps do not change the copy. Call
        this within a job. Raises: MemoryError: a step that ran out of memory must finish first."""
        _, leaves = self._weights_of(Microbatch(self.version, -1))
        return FixedStage(self.spec.model, leaves, rotary=self._rotary, device=self.device, dtype=self.dtype)

    def make_room(self) -> None:
        """Free the graphs of all microbatches: their backwards repeat the forward. From now on go layer by layer."""
        self._by_layer = True
        for microbatch, context in list(self._contexts.items()):
            context.x.grad = None
            read = context.read if self.spec.recomputes_by_layer else None
            self._contexts[microbatch] = _Context(context.x, context.labels, context.contributes, None, read)
        super().make_room()

    def forget(self, microbatch: Microbatch) -> None:
        self._contexts.pop(microbatch, None)
        super().forget(microbatch)

    def _run_layers(self, leaves: Leaves, x: Tensor, labels: Labels, mixture: Mixture) -> Tensor:
        """Run all layers but the head (the loss includes the head)."""
        if x.is_floating_point():
            x = x.to(self.dtype)
        for layer in self._layers(leaves, labels, mixture):
            x = layer(x)
        return x

    def _layers(self, leaves: Leaves, labels: Labels, mixture: Mixture) -> list[Callable[[Tensor], Tensor]]:
        documents, rotary = Documents.of(labels.begins_BT, self._rotary)

        def run(key: str, x: Tensor) -> Tensor:
            return llama.run_layers(self.spec.model, (key,), leaves, x, rotary, mixture=mixture, documents=documents)

        layers: list[Callable[[Tensor], Tensor]] = []
        for key in self.keys:
            if key == HEAD:
                continue
            compiled = None
            if self.compiled is not None and documents is None and key != EMBED:
                compiled = self.compiled.layer(key, leaves[key], rotary)
            layers.append(compiled or partial(run, key))
        return layers

    # --- layer by layer ---

    @torch.no_grad()
    def _read_by_layers(
        self, leaves: Leaves, x: Tensor, labels: Labels, mixture: Mixture
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers but the head without a graph. Returns: (the output, the input of each layer)."""
        x = x.detach()
        if x.is_floating_point():
            x = x.to(self.dtype)
        read: list[Tensor] = []
        for layer in self._layers(leaves, labels, mixture):
            read.append(x)
            x = layer(x)
        return x, read

    def _read_again(self, microbatch: Microbatch, context: _Context) -> tuple[WeightSet, Leaves, list[Tensor]]:
        """Repeat the forward with the weights that the current version gives for the microbatch's step. Returns: (these
        weights, their autograd leaves, the input of each layer)."""
        weights, leaves = self._weights_of(microbatch)
        _, read = self._read_by_layers(leaves, context.x, context.labels, Mixture())
        return weights, leaves, read

    def _backward_by_layers(
        self, leaves: Leaves, read: list[Tensor], grad_BTD: Tensor | None, x: Tensor, labels: Labels
    ) -> None:
        """Repeat each layer's forward and run its backward, which adds to `.grad` of the leaves. Set `x.grad`, unless
        the stage's input `x` is tokens.

        Args: read: the input of each layer; grad_BTD: the gradient of the stage's output; None: the loss gave none.
        """
        layers = self._layers(leaves, labels, Mixture())
        for key, layer, x_read in reversed(list(zip(self.keys, layers, read, strict=False))):
            if grad_BTD is None or (key == EMBED and self.spec.adapter is not None):
                return  # no trained parameters before this layer
            x_leaf = x_read.detach().requires_grad_(x_read.is_floating_point())
            y_BTD = layer(x_leaf)
            backward([y_BTD], [grad_BTD.to(y_BTD.dtype)])
            grad_BTD = x_leaf.grad
        if x.is_floating_point() and grad_BTD is not None:
            x.grad = grad_BTD.to(x.dtype)
