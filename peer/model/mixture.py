"""A decoder layer's mixture of experts as in Mixtral and Qwen3-MoE: a router sends each token to K of E SwiGLUs.

The load-balancing loss of a layer depends only on that layer's router. So its gradient enters in the layer's own
backward, without messages between stages: the model trains on loss + `router_aux_loss` * the sum of all layers'
balance, wherever it is cut. With adapters, routers and experts are frozen, and there is no balance.

Sources: Mixtral (2024, arXiv 2401.04088, section 2.1), its weights and names; Switch Transformers (2021, arXiv
2101.03961, equations 4 to 6), the balance, here over all K choices of a token and divided by K, so that it is 1 for an
even load at any K.

N tokens   K experts a token   P = N K rows, sorted by expert   E experts   D width   F hidden width
W numbers that a layer adds to a token: D, or those of a subspace, in which w2 is [W, F]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.kernels.dispatch import combine, counts, group, grouped_matmul, permute
from shoal.peer.model.frozen import AdaptedLayer
from shoal.protocol.spec import ModelSpec
from shoal.protocol.tensors import expert_name, router_name


class Experts(Protocol):
    """Computes the experts of a layer, here or on other peers."""

    def __call__(self, layer_index: int, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x_ND: the tokens, of any floating dtype.
            chosen_NK: int64, different experts for each token.
            weight_NK: float32, their weights; a token's add up to 1.
        Returns: [N, D] in the dtype of `x_ND`, differentiable in `x_ND` and `weight_NK`. A token without available
        experts has a row of zeros: the residual carries it on.
        """
        ...


class ExpertLoads:
    """The number of tokens sent to each expert, by layer. Counted on the device's thread, read on any."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._totals: dict[int, Tensor] = {}

    def add(self, layer_index: int, counts_E: Tensor) -> None:
        """Add int64 [E] on any device, without waiting for it."""
        before = self._totals.get(layer_index)
        # A new tensor each time, so that a concurrent reader sees a consistent one.
        self._totals[layer_index] = counts_E if before is None else before + counts_E

    def totals(self) -> dict[str, tuple[int, ...]]:
        """Return layer key -> tokens of each expert since the start; readers take differences."""
        return {f"layers.{index}": tuple(totals_E.tolist()) for index, totals_E in sorted(self._totals.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Settings of one run through layers with experts. Dense layers ignore it."""

    experts: Experts | None = None
    """None: compute the experts here, from the layer's parameters."""
    loads: ExpertLoads | None = None
    """Counts the run, if given."""
    balances: list[Tensor] | None = None
    """Collects the layers' balances for the caller's loss. None: each enters its own layer's backward with the weight
    `router_aux_loss`."""


LOCAL: Final = Mixture()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A router's decisions."""

    chosen_NK: Tensor
    """int64, heaviest first."""
    weight_NK: Tensor
    """float32, a row adds up to 1."""
    counts_E: Tensor
    """int64, tokens of each expert."""
    balance: Tensor
    """float32 []: 1 for an even load, E / K if all tokens choose the same K with certainty."""


def mixture_layer(model: ModelSpec, index: int, params: Mapping[str, Tensor], x_ND: Tensor, mixture: Mixture) -> Tensor:
    """Run the mixture that replaces a dense layer's SwiGLU: [N, D] -> [N, W].

    `params` of decoder layer `index` need not have the experts' matrices if `mixture.experts` computes them.
    """
    routing = route(_linear(params, router_name(model, index), x_ND), model.experts_per_token)
    if mixture.loads is not None:
        mixture.loads.add(index, routing.counts_E)
    experts = mixture.experts or local_experts(model, params)
    y_ND = experts(index, x_ND, routing.chosen_NK, routing.weight_NK)
    if isinstance(params, AdaptedLayer):
        return y_ND
    if mixture.balances is not None:
        mixture.balances.append(routing.balance)
        return y_ND
    entered: Tensor = _Enter.apply(y_ND, model.router_aux_loss * routing.balance)  # type: ignore[no-untyped-call]
    return entered


def _linear(params: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if isinstance(params, AdaptedLayer):
        return params.linear(name.removesuffix(".weight"), x)
    return functional.linear(x, params[name])


def route(logit_NE: Tensor, experts_per_token: int) -> Routing:
    """Choose the `experts_per_token` largest logits of each token, weighted by their softmax."""
    logit_NE = logit_NE.float()
    (num_tokens, E), K = logit_NE.shape, experts_per_token
    top_NK, chosen_NK = logit_NE.topk(K, dim=-1)
    counts_E = counts(chosen_NK, E)
    # The choice of experts has no gradient; their probability has one.
    share_E = counts_E.to(torch.float32) / max(1, num_tokens * K)
    balance = E * (share_E * logit_NE.softmax(-1).sum(0)).sum() / max(1, num_tokens)
    return Routing(chosen_NK=chosen_NK, weight_NK=top_NK.softmax(-1), counts_E=counts_E, balance=balance)


def local_experts(model: ModelSpec, params: Mapping[str, Tensor]) -> Experts:
    """Return an `Experts` that uses the parameters of its one decoder layer directly."""

    def experts(layer_index: int, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        groups = group(chosen_NK, model.num_experts)

        def times(matrix: str, rows: Tensor) -> Tensor:
            """Multiply each expert's rows by its matrix w1 [F, D], w2 [W, F] or w3 [F, D]."""
            names = [expert_name(model, layer_index, expert, matrix) for expert in range(model.num_experts)]
            if isinstance(params, AdaptedLayer):
                return params.grouped(names, rows, groups.offset_E)
            return grouped_matmul(rows, [params[name] for name in names], groups.offset_E)

        x_PD = permute(x_ND, groups)
        y_PW = times("w2", functional.silu(times("w1", x_PD)) * times("w3", x_PD))
        return combine(y_PW, weight_NK, groups)

    return experts


class _Enter(torch.autograd.Function):
    """Returns `y` unchanged; its backward gives `value` a gradient of 1, as if it were a term of the loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        ctx.like = value.detach()
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)
