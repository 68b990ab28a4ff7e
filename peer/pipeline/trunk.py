"""Computes a stage with its experts on other peers: attention, routers, norms, embedding and head.

Each job is a generator: it yields one call to the experts of each layer and continues with their answer. The part
before a call is kept with its graph. The part after the call begins with new autograd leaves: the residual stream, the
weights of the chosen experts, and the experts' output. So a stage that keeps the graphs computes no part twice: the
backward takes the gradients of these leaves, sends the gradient of the experts' output to the experts, and continues
with their answer through the part before the call.

Rows are rounded to the wire's dtype on the way to the experts; the gradient of this rounding is taken as 1.

B samples   T tokens   D width   K experts a token   P rows, sorted by expert
"""

import logging
import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from shoal.kernels.dispatch import Groups, combine, group, permute
from shoal.peer.data.corpus import Corpus
from shoal.peer.data.labels import Labels
from shoal.peer.model import llama
from shoal.peer.model.backward import backward
from shoal.peer.model.documents import Documents
from shoal.peer.model.finite import finite
from shoal.peer.model.flop import trunk_stage_flop
from shoal.peer.model.layout import EMBED, HEAD, layer_index, stage_layer_keys, trunk_keys
from shoal.peer.model.mixture import ExpertLoads, Routing, route
from shoal.peer.model.rotary import Rotary
from shoal.peer.pipeline.expert_call import Calling, ExpertCall
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import How, Leaves, StageShard
from shoal.peer.pipeline.weight_set import WeightSet
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import router_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Front:
    """The part of one layer before its experts, with its autograd graph."""

    layer: int
    routing: Routing
    groups: Groups
    h_BTD: Tensor
    x_PD: Tensor
    call: ExpertCall


@dataclass(frozen=True, slots=True)
class _Cut:
    """One layer's call to its experts, kept for the backward: the graph before the call, the autograd leaves after
    it."""

    front: _Front
    behind: tuple[Tensor, Tensor, Tensor]
    """The leaves after the call: the residual stream [B, T, D], the weights [N, K] and the experts' output [P, D]."""


_Graph = tuple[Tensor, list[_Cut]]
"""(a forward's output, with the graph after its last call to experts; all its calls, first layer first)."""


@dataclass(frozen=True, slots=True)
class _Context:
    x: Tensor
    labels: Labels
    contributes: bool
    kept: tuple[WeightSet, Leaves, _Graph] | None
    """(the forward's weights, their autograd leaves, its graph); None: the backward repeats the forward."""


class StageTrunk(StageShard):
    """The layers of one stage without their experts, which other peers hold."""

    def __init__(
        self, spec: RunSpec, first_layer: int, last_layer: int, *, corpus: Corpus | None, **how: Unpack[How]
    ) -> None:
        keys = trunk_keys(spec.model, first_layer, last_layer)
        super().__init__(spec, keys, first_layer=first_layer, corpus=corpus, **how)
        self._rotary = llama.rotary_tables(spec.model, self.device)
        self._wire = TokenWire(spec)
        self._contexts: dict[Microbatch, _Context] = {}
        self.flop = trunk_stage_flop(spec, stage_layer_keys(spec.model, first_layer, last_layer))

    def forward(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> Calling[bytearray]:
        x, labels = self._boundary.receive(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        recomputes = self.spec.training.recomputes
        y_BTD, cuts = yield from self._run_layers(leaves, x, labels, self.expert_loads, grad=not recomputes)
        kept = None if recomputes else (weights, leaves, (y_BTD, cuts))
        self._contexts[microbatch] = _Context(x, labels, contributes, kept)
        return self._boundary.send(y_BTD, labels)

    def loss(
        self, microbatch: Microbatch, payload: Payload | None, *, contributes: bool = True
    ) -> Calling[tuple[float, bytearray | None]]:
        x, labels = self._boundary.receive(microbatch, payload)
        weights, leaves = self._weights_of(microbatch)
        y_BTD, cuts = yield from self._run_layers(leaves, x, labels, self.expert_loads, grad=True)
        loss = self._boundary.loss(leaves[HEAD], y_BTD, labels)
        self._collect(microbatch, weights, leaves, contributes)
        value, fine = float(loss.detach()), finite(loss.detach())
        if math.isfinite(value):
            torch.autograd.backward(loss)
            yield from self._back_through(cuts)
            if not bool(self._contributions.zero_unless_finite(microbatch)):
                logger.warning("microbatch %s has a gradient that is not finite: it counts as zero", microbatch)
        else:
            logger.warning("microbatch %s has a loss of %s: nothing is learnt from it", microbatch, value)
        return value, self._boundary.send_gradient(x, microbatch, fine)

    def backward(self, microbatch: Microbatch, payload: Payload) -> Calling[bytearray | None]:
        context = self._contexts.pop(microbatch)
        grad_BTD = self._boundary.receive_gradient(payload)
        weights, leaves, graph = context.kept or (*self._weights_of(microbatch), None)
        self._collect(microbatch, weights, leaves, context.contributes)
        fine = finite(grad_BTD)
        if bool(fine):
            y_BTD, cuts = graph or (yield from self._run_layers(leaves, context.x, context.labels, None, grad=True))
            backward([y_BTD], [grad_BTD.to(y_BTD.dtype)])
            yield from self._back_through(cuts)
            # If an activation was not finite, its gradient comes back as zero, but 0 x NaN makes NaN in our weights.
            if not bool(self._contributions.zero_unless_finite(microbatch)):
                logger.warning("microbatch %s has a gradient that is not finite: it counts as zero", microbatch)
        else:
            logger.warning("microbatch %s came back with a gradient that is not finite: it counts as zero", microbatch)
        return self._boundary.send_gradient(context.x, microbatch, fine)

    def validate(self, microbatch: Microbatch, payload: Payload | None) -> Calling[bytearray | float]:
        x, labels = self._boundary.receive(microbatch, payload)
        _, leaves = self._weights_of(microbatch)
        y, _ = yield from self._run_layers(leaves, x, labels, None, grad=False)
        if self.keys[-1] == HEAD:
            with torch.no_grad():
                return float(self._boundary.loss(leaves[HEAD], y, labels))
        return self._boundary.send(y, labels)

    def forget(self, microbatch: Microbatch) -> None:
        self._contexts.pop(microbatch, None)
        super().forget(microbatch)

    # --- inside ---

    def _run_layers(
        self, leaves: Leaves, x: Tensor, labels: Labels, loads: ExpertLoads | None, *, grad: bool
    ) -> Calling[_Graph]:
        """Run all layers but the head, with experts. Args: loads: counts each expert's tokens; grad: keep the graph."""
        model, cuts = self.spec.model, list[_Cut]()
        documents, rotary = Documents.of(labels.begins_BT, self._rotary)
        if x.is_floating_point():
            with torch.set_grad_enabled(grad):
                x = x.to(self.dtype)
        for key, params in leaves.items():
            with torch.set_grad_enabled(grad):
                if key == EMBED:
                    x = llama.embed(model, params, x)
                    continue
                if key == HEAD:
                    break
                front = self._attend_and_route(key, params, x, rotary, documents, loads)
            output = yield front.call
            assert output is not None
            weight_NK = front.routing.weight_NK
            rows_PD = self._wire.decode(output, self.device).to(self.dtype)
            behind = (front.h_BTD.detach(), weight_NK.detach(), rows_PD)
            if grad:
                for leaf in behind:
                    leaf.requires_grad_()
                cuts.append(_Cut(front, behind))
            with torch.set_grad_enabled(grad):
                h_BTD, weight_NK, y_PD = behind
                x = h_BTD + combine(y_PD, weight_NK, front.groups).view_as(h_BTD)
        return x, cuts

    def _attend_and_route(
        self,
        key: str,
        params: dict[str, Tensor],
        x_BTD: Tensor,
        rotary: Rotary,
        documents: Documents | None,
        loads: ExpertLoads | None,
    ) -> _Front:
        model, layer = self.spec.model, layer_index(key.rpartition(".")[0])
        h_BTD, normed_BTD = llama.attend(model, layer, params, x_BTD, rotary, documents=documents)
        x_ND = normed_BTD.flatten(0, 1)
        gate_ED = params[router_name(model, layer)]
        routing = route(functional.linear(x_ND, gate_ED), model.experts_per_token)
        if loads is not None:
            loads.add(layer, routing.counts_E)
        groups = group(routing.chosen_NK, model.num_experts)
        x_PD = permute(x_ND, groups)
        call = ExpertCall(layer=layer, counts=tuple(routing.counts_E.tolist()), tokens=self._wire.encode(x_PD))
        return _Front(layer=layer, routing=routing, groups=groups, h_BTD=h_BTD, x_PD=x_PD, call=call)

    def _back_through(self, cuts: list[_Cut]) -> Calling[None]:
        """Run the backward through all layers' `cuts`, last layer first, and empty the list."""
        while cuts:
            cut = cuts.pop()
            front, routing = cut.front, cut.front.routing
            grad_BTD, grad_NK, grad_PD = (
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in cut.behind
            )
            call, gradients = front.call, self._wire.encode(grad_PD)
            output = yield ExpertCall(layer=call.layer, counts=call.counts, tokens=call.tokens, gradients=gradients)
            assert output is not None
            grad_PD = self._wire.decode(output, self.device).to(self.dtype)
            # The balance loss of the router is a term of the loss, so its gradient is its weight in the loss.
            ones = torch.full_like(routing.balance, self.spec.model.router_aux_loss)
            ends = [front.h_BTD, routing.weight_NK, front.x_PD, routing.balance]
            backward(ends, [grad_BTD, grad_NK, grad_PD, ones])
