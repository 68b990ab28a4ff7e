"""A decoder layer's mixture of experts, as Mixtral's and Qwen3-MoE's: a router sends each token to K of E SwiGLUs.

The load-balancing loss of a layer is a function of that layer's router alone. So its gradient enters where the layer
is, in its backward, and no message has to carry it to the last stage and back: the model trains on
loss + `router_aux_loss` * the sum of all layers' balance, wherever it is cut. Where adapters are trained routers and
experts stay as they are: there is nothing to balance, and the loss is the loss.

Who computes the experts is open (`Experts`). Whoever else does it must be differentiable in tokens and weights.

Sources: Mixtral (2024, arXiv 2401.04088, section 2.1), its weights and names; Switch Transformers (2021, arXiv
2101.03961, equations 4 to 6), the balance, here over all K choices of a token and divided by K, so that it is 1 where
the load is even, whatever K is.

N tokens   K experts a token   P = N K rows, sorted by expert   E experts   D width   F hidden width
W numbers that a layer adds to a token: D, or those of a subspace, in which w2 is [W, F]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.kernels.dispatch import combine, counts, group, grouped_matmul, permute
from shoal.peer.model.frozen import AdaptedLayer
from shoal.protocol.spec import ModelSpec
from shoal.protocol.tensors import EXPERT_MATRICES, expert_name, router_name


class Experts(Protocol):
    """Who computes the experts of a layer."""

    def __call__(self, layer_index: int, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """The weighted sum of what each token's experts make of it: [N, D].

        Args:
            x_ND: the tokens, of any floating dtype.
            chosen_NK: int64, different experts for each token.
            weight_NK: float32, their weights; a token's add up to 1.
        Returns: [N, D] of the dtype of `x_ND`, with a gradient to `x_ND` and to `weight_NK`. The row of a token that no
            expert was there for is zero: the residual carries it on.
        """
        ...


class ExpertLoads:
    """How many tokens each expert was sent, by layer. Counted on the device's thread, read on any."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._totals: dict[int, Tensor] = {}

    def add(self, layer_index: int, counts_E: Tensor) -> None:
        """int64 [E], on any device; it is not waited for."""
        before = self._totals.get(layer_index)
        # A new tensor each time: who reads meanwhile has a whole one.
        self._totals[layer_index] = counts_E if before is None else before + counts_E

    def totals(self) -> dict[str, tuple[int, ...]]:
        """Layer key -> tokens of each expert, since this began; readers take differences, so none need arrive."""
        return {f"layers.{index}": tuple(totals_E.tolist()) for index, totals_E in sorted(self._totals.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How the mixtures of one run through some layers are computed. Dense layers do not look at it."""

    experts: Experts | None = None
    """None: by the layer's own parameters, here."""
    loads: ExpertLoads | None = None
    """Counts the run, if given."""
    balances: list[Tensor] | None = None
    """Takes the layers' balances, one behind the other, for the caller to add to its loss. None: each enters its own
    layer's backward, with `router_aux_loss`, as part of a loss whose own gradient is 1."""


LOCAL: Final = Mixture()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What a router decided."""

    chosen_NK: Tensor
    """int64, in the order of their weights."""
    weight_NK: Tensor
    """float32, a row adds up to 1."""
    counts_E: Tensor
    """int64, tokens of each expert."""
    balance: Tensor
    """float32 []: 1 where the load is even, E / K where all tokens want the same K with certainty."""


def mixture_layer(model: ModelSpec, index: int, params: Mapping[str, Tensor], x_ND: Tensor, mixture: Mixture) -> Tensor:
    """What stands in a dense layer's SwiGLU's place: [N, D] -> [N, W].

    `params` of decoder layer `index` need not have the experts' matrices if `mixture` has others compute them.
    """
    routing = route(_linear(params, router_name(model, index), x_ND), model.experts_per_token)
    if mixture.loads is not None:
        mixture.loads.add(index, routing.counts_E)
    experts = mixture.experts or local_experts(model, {f"layers.{index}": params})
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
    """The `experts_per_token` largest logits of each token, and the softmax over those."""
    logit_NE = logit_NE.float()
    (num_tokens, E), K = logit_NE.shape, experts_per_token
    top_NK, chosen_NK = logit_NE.topk(K, dim=-1)
    counts_E = counts(chosen_NK, E)
    # Which experts were chosen has no gradient; that they are likely to be has one.
    share_E = counts_E.to(torch.float32) / max(1, num_tokens * K)
    balance = E * (share_E * logit_NE.softmax(-1).sum(0)).sum() / max(1, num_tokens)
    return Routing(chosen_NK=chosen_NK, weight_NK=top_NK.softmax(-1), counts_E=counts_E, balance=balance)


def local_experts(model: ModelSpec, params_by_key: Mapping[str, Mapping[str, Tensor]]) -> Experts:
    """Those of the decoder layers `params_by_key`, here and now."""

    def experts(layer_index: int, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        params = params_by_key[f"layers.{layer_index}"]
        groups = group(chosen_NK, model.num_experts)
        x_PD, offset_E, all_experts = permute(x_ND, groups), groups.offset_E, range(model.num_experts)
        if isinstance(params, AdaptedLayer):
            names = {w: [expert_name(model, layer_index, e, w) for e in all_experts] for w in EXPERT_MATRICES}
            y_PD = _swiglu(x_PD, lambda w, rows: params.grouped(names[w], rows, offset_E))
        else:
            y_PD = swiglu_experts(x_PD, offset_E, *expert_matrices(model, params, layer_index, all_experts))
        return combine(y_PD, weight_NK, groups)

    return experts


def expert_matrices(
    model: ModelSpec, params: Mapping[str, Tensor], layer_index: int, experts: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(w1 [F, D], w2 [W, F], w3 [F, D]) of each of `experts`, in their order."""
    w1, w2, w3 = ([params[expert_name(model, layer_index, expert, w)] for expert in experts] for w in EXPERT_MATRICES)
    return w1, w2, w3


def swiglu_experts(
    x_PD: Tensor, offset_E: Tensor, w1: Sequence[Tensor], w2: Sequence[Tensor], w3: Sequence[Tensor]
) -> Tensor:
    """Each expert's rows through its SwiGLU, [P, D] -> [P, W]: rows [offset_E[e], offset_E[e + 1]) are the e-th's."""
    matrices = {"w1": w1, "w2": w2, "w3": w3}
    return _swiglu(x_PD, lambda w, rows: grouped_matmul(rows, matrices[w], offset_E))


def _swiglu(x_PD: Tensor, times: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Args: times: (matrix, rows) -> each expert's rows times its matrix of that name."""
    return times("w2", functional.silu(times("w1", x_PD)) * times("w3", x_PD))


class _Enter(torch.autograd.Function):
    """`y` as it is; in the backward `value` has a gradient of 1, as if it had been added to the loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        ctx.like = value.detach()
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)
