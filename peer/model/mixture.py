"""A decoder layer's mixture of experts as in Mixtral and Qwen3-MoE: a router sends each token to K of E SwiGLUs.

The load-balancing loss of a layer (the *balance*) depends only on the layer's router, so the layer's own backward adds
the balance's gradient. However the model is cut into stages, it thus trains on loss + `router_aux_loss` * the sum of
all balances. In a run with adapters, routers and experts are frozen, and there is no balance.

Sources: Mixtral (2024, arXiv 2401.04088, section 2.1) for the layer, its weights and their names; Switch Transformers
(2021, arXiv 2101.03961, equations 4 to 6) for the balance. Here the balance counts all K choices of a token and is
divided by K, so it is 1 for an even load.

N tokens   K experts a token   P = N K rows, sorted by expert   E experts   D width   F hidden width
W numbers that a layer adds to a token: D, or those of a subspace, in which w2 is [W, F]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.kernels.dispatch import combine, counts, group, grouped_matmul, permute
from shoal.peer.model.frozen import AdaptedLayer, linear
from shoal.protocol.spec import ModelSpec
from shoal.protocol.tensors import expert_name, router_name


class ExpertLoads:
    """The number of tokens sent to each expert, by layer. The device's thread adds to it; any thread may read it."""

    def __init__(self) -> None:
        self._totals: dict[int, Tensor] = {}

    def add(self, layer_index: int, counts_E: Tensor) -> None:
        """Add one forward's counts at a layer, int64 [E] on any device, without waiting for that device."""
        before = self._totals.get(layer_index)
        # Make a new tensor each time: a concurrent reader then never sees a half-updated one.
        self._totals[layer_index] = counts_E if before is None else before + counts_E

    def totals(self) -> dict[str, tuple[int, ...]]:
        """Return layer key -> for each expert the number of tokens sent to it since this object was made."""
        return {f"layers.{index}": tuple(totals_E.tolist()) for index, totals_E in sorted(self._totals.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Settings of one forward through layers with experts. Dense layers ignore them."""

    loads: ExpertLoads | None = None
    """Counts the tokens that this forward sends to each expert; None: they are not counted."""
    balances: list[Tensor] | None = None
    """Collects the layers' balances for the caller's loss. None: each layer adds the gradient of its balance, weighted
    by `router_aux_loss`, in its own backward."""


PLAIN: Final = Mixture()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A router's decisions."""

    chosen_NK: Tensor
    """int64: each token's experts, the one with the largest weight first."""
    weight_NK: Tensor
    """float32; each row adds up to 1."""
    counts_E: Tensor
    """int64: the number of tokens sent to each expert."""
    balance: Tensor
    """float32 [], the load-balancing loss: 1 for an even load, E / K if all tokens choose the same K with certainty."""


def mixture_layer(model: ModelSpec, index: int, params: Mapping[str, Tensor], x_ND: Tensor, mixture: Mixture) -> Tensor:
    """Run the mixture that replaces a dense layer's SwiGLU: [N, D] -> [N, W]."""
    router = router_name(model, index).removesuffix(".weight")
    routing = route(linear(params, router, x_ND), model.experts_per_token)
    if mixture.loads is not None:
        mixture.loads.add(index, routing.counts_E)
    y_NW = local_experts(model, index, params, x_ND, routing)
    if isinstance(params, AdaptedLayer):
        return y_NW
    if mixture.balances is not None:
        mixture.balances.append(routing.balance)
        return y_NW
    entered: Tensor = _Enter.apply(y_NW, model.router_aux_loss * routing.balance)  # type: ignore[no-untyped-call]
    return entered


def route(logit_NE: Tensor, experts_per_token: int) -> Routing:
    """Choose for each token the `experts_per_token` experts with the largest logits, weighted by the softmax of these
    logits."""
    logit_NE = logit_NE.float()
    (num_tokens, E), K = logit_NE.shape, experts_per_token
    top_NK, chosen_NK = logit_NE.topk(K, dim=-1)
    counts_E = counts(chosen_NK, E)
    # The choice of experts has no gradient; their probability has one.
    share_E = counts_E.to(torch.float32) / max(1, num_tokens * K)
    balance = E * (share_E * logit_NE.softmax(-1).sum(0)).sum() / max(1, num_tokens)
    return Routing(chosen_NK=chosen_NK, weight_NK=top_NK.softmax(-1), counts_E=counts_E, balance=balance)


def local_experts(
    model: ModelSpec, layer_index: int, params: Mapping[str, Tensor], x_ND: Tensor, routing: Routing
) -> Tensor:
    """Return the weighted sum of each token's experts: [N, D] -> [N, W]."""
    groups = group(routing.chosen_NK, model.num_experts)

    def times(matrix: str, rows: Tensor) -> Tensor:
        """Multiply each expert's rows by its matrix w1 [F, D], w2 [W, F] or w3 [F, D]."""
        names = [expert_name(model, layer_index, expert, matrix) for expert in range(model.num_experts)]
        if isinstance(params, AdaptedLayer):
            return params.grouped(names, rows, groups.offset_E)
        return grouped_matmul(rows, [params[name] for name in names], groups.offset_E)

    x_PD = permute(x_ND, groups)
    y_PW = times("w2", functional.silu(times("w1", x_PD)) * times("w3", x_PD))
    return combine(y_PW, routing.weight_NK, groups)


class _Enter(torch.autograd.Function):
    """Returns `y` unchanged; its backward gives `value` a gradient of 1, as if the loss had `value` as a term."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        ctx.like = value.detach()
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)
