"""A microbatch through the layers of a stage and back: in one go, or cut where the experts of a layer are elsewhere.

Each layer is one cut. In front of it are attention and router, whose results (the residual stream, the weights of the
chosen experts, the tokens sorted by expert) are kept with their graph, and what is behind it begins with leaves of its
own: the residual stream, the weights, and what the experts made of the tokens. So the backward can go back part by part
and nothing runs twice: the leaves' gradients, the experts' answer to theirs, and both through the part before.

Rows are rounded to the wire's dtype on the way to the experts, whose gradient is taken as 1: as everywhere on the wire.

B samples   T tokens   D width   K experts a token   P rows, sorted by expert
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shoal.kernels.dispatch import Groups, combine, group, permute
from shoal.peer.experts.wire import TokenWire
from shoal.peer.model import llama
from shoal.peer.model.backward import backward
from shoal.peer.model.layout import EMBED, HEAD, layer_index
from shoal.peer.model.mixture import ExpertLoads, Mixture, Routing, route
from shoal.peer.pipeline.shard import Leaves
from shoal.peer.pipeline.suspended import ExpertCall, Suspended
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec


class Passing(Protocol):
    """One microbatch, with the weights that it wants."""

    def forward(self, x: Tensor, then: Callable[[Tensor], Any], *, grad: bool) -> Any:
        """Through all layers. Returns: what `then` makes of the result, or a `Suspended` that ends so."""
        ...

    def backward(self, y: Tensor, gradient: Tensor | None, then: Callable[[], Any]) -> Any:
        """From `y`, which came of the result of the forward, into the leaves. Returns: as `forward` does."""
        ...


class Whole:
    """In one go."""

    def __init__(self, spec: RunSpec, leaves: Leaves, rotary: llama.Rotary, mixture: Mixture) -> None:
        self._spec = spec
        self._leaves = leaves
        self._rotary = rotary
        self._mixture = mixture

    def forward(self, x: Tensor, then: Callable[[Tensor], Any], *, grad: bool) -> Any:
        with torch.set_grad_enabled(grad):
            keys = tuple(self._leaves)
            y = llama.run_layers(self._spec.model, keys, self._leaves, x, self._rotary, mixture=self._mixture)
            return then(y)

    def backward(self, y: Tensor, gradient: Tensor | None, then: Callable[[], Any]) -> Any:
        _backward(y, gradient)
        return then()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One layer's."""

    layer: int
    routing: Routing
    groups: Groups
    before: tuple[Tensor, Tensor, Tensor]
    """The residual stream [B, T, D], the weights [N, K] and the rows [P, D], as the part before ends with them."""
    behind: tuple[Tensor, Tensor, Tensor]
    """The same as the part behind begins with them, the rows being those that came back."""
    counts: tuple[int, ...]
    tokens: Payload


class InParts:
    """Experts are elsewhere.

    Args:
        loads: counts the run, if given.
        flop: of the forward of all parts together.
    """

    def __init__(
        self,
        spec: RunSpec,
        leaves: Leaves,
        rotary: llama.Rotary,
        wire: TokenWire,
        loads: ExpertLoads | None,
        flop: float,
    ) -> None:
        self._model: Final = spec.model
        self._leaves = leaves
        self._keys = tuple(leaves)
        self._rotary = rotary
        self._wire = wire
        self._loads = loads
        self._flop = part_flop(self._keys, flop)
        self._cuts: list[_Cut] = []

    def forward(self, x: Tensor, then: Callable[[Tensor], Any], *, grad: bool) -> Any:
        return self._onwards(0, x, then, grad)

    def backward(self, y: Tensor, gradient: Tensor | None, then: Callable[[], Any]) -> Any:
        _backward(y, gradient)
        return self._back(then)

    def _onwards(self, at: int, x: Tensor, then: Callable[[Tensor], Any], grad: bool) -> Any:
        """From layer `at` on."""
        with torch.set_grad_enabled(grad):
            for position in range(at, len(self._keys)):
                key = self._keys[position]
                if key == EMBED:
                    x = llama.embed(self._model, self._leaves[key], x)
                elif key == HEAD:
                    x = llama.head(self._model, self._leaves[key], x)
                else:
                    return self._ask(position, x, then, grad)
            return then(x)

    def _ask(self, position: int, x_BTD: Tensor, then: Callable[[Tensor], Any], grad: bool) -> Suspended:
        params = self._leaves[self._keys[position]]
        layer = layer_index(self._keys[position].rpartition(".")[0])
        h_BTD, normed_BTD = llama.attend(self._model, layer, params, x_BTD, self._rotary)
        x_ND = normed_BTD.flatten(0, 1)
        gate_ED = params[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        routing = route(functional.linear(x_ND, gate_ED), self._model.experts_per_token)
        if self._loads is not None:
            self._loads.add(layer, routing.counts_E)
        groups = group(routing.chosen_NK, self._model.num_experts)
        x_PD = permute(x_ND, groups)
        counts = tuple(routing.counts_E.tolist())
        tokens = self._wire.encode(x_PD)

        def resume(output: Payload) -> Any:
            y_PD = self._wire.decode(output, x_PD.device)
            before = (h_BTD, routing.weight_NK, x_PD)
            behind = (h_BTD.detach(), routing.weight_NK.detach(), y_PD)
            if grad:
                for leaf in behind:
                    leaf.requires_grad_()
                cut = _Cut(
                    layer=layer,
                    routing=routing,
                    groups=groups,
                    before=before,
                    behind=behind,
                    counts=counts,
                    tokens=tokens,
                )
                self._cuts.append(cut)
            with torch.set_grad_enabled(grad):
                h, weight, y = behind
                return self._onwards(position + 1, h + combine(y, weight, groups).view_as(h), then, grad)

        call = ExpertCall(layer=layer, counts=counts, tokens=tokens)
        return Suspended(call=call, resume=resume, flop=self._flop)

    def _back(self, then: Callable[[], Any]) -> Any:
        """Through what is in front of the last cut."""
        if not self._cuts:
            return then()
        cut = self._cuts.pop()
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in cut.behind]

        def resume(output: Payload) -> Any:
            grad_PD = self._wire.decode(output, grads[2].device)
            # The balance is a part of the loss, whose own gradient is 1.
            ones = torch.full_like(cut.routing.balance, self._model.router_aux_loss)
            backward([*cut.before, cut.routing.balance], [grads[0], grads[1], grad_PD, ones])
            return self._back(then)

        gradients = self._wire.encode(grads[2])
        call = ExpertCall(layer=cut.layer, counts=cut.counts, tokens=cut.tokens, gradients=gradients)
        return Suspended(call=call, resume=resume, flop=2.0 * self._flop)


def _backward(y: Tensor, gradient: Tensor | None) -> None:
    """`gradient` is that of `y`; None: `y` is a scalar, the loss."""
    if gradient is None:
        torch.autograd.backward(y)
    else:
        backward([y], [gradient])


def part_flop(keys: tuple[str, ...], flop: float) -> float:
    """Of one of the parts into which a stage's `flop` are cut: one cut a decoder layer."""
    return flop / (1 + sum(key not in (EMBED, HEAD) for key in keys))
