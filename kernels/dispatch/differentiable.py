"""`permute`, `combine` and `grouped_matmul` with their backwards, for a model on any device.

The shape letters are those of `reference.py`.
"""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.dispatch import reference
from shoal.kernels.dispatch.groups import Groups
from shoal.kernels.triton_twins import triton_twins

_NARROW_ENOUGH = (torch.float32, torch.bfloat16)
"""The dtypes that the Triton twins support."""


def permute(x_ND: Tensor, groups: Groups) -> Tensor:
    """Copy each token once for each expert that it has chosen, into rows sorted by expert: [N, D] -> [P, D]."""
    return _called(_Permute, x_ND, groups)


def combine(y_PD: Tensor, weight_NK: Tensor, groups: Groups) -> Tensor:
    """Return the weighted sum over each token's rows: [P, D] -> [N, D].

    Args: weight_NK: float32 [N, K], or float64 if `y_PD` is float64.
    Raises: ValueError: the weights have another dtype.
    """
    wanted = torch.float64 if y_PD.dtype == torch.float64 else torch.float32
    if weight_NK.dtype != wanted:
        raise ValueError(f"the weights of choices are {wanted}, not {weight_NK.dtype}")
    return _called(_Combine, y_PD, weight_NK, groups)


def grouped_matmul(x_PC: Tensor, weights: Sequence[Tensor], offset_E: Tensor) -> Tensor:
    """Multiply each expert's rows by the transpose of its matrix: [P, C] -> [P, R].

    Args:
        weights: E matrices [R, C], each a tensor of its own, so that each can be an autograd leaf. If they are evenly
            spaced in one flat buffer, they are read in place; otherwise a GPU first copies them into one.
        offset_E: int64 [E + 1], the first row of each expert, then P (`Groups.offset_E`).
    Raises: ValueError: the number of matrices is not E.
    """
    if len(weights) != len(offset_E) - 1:
        raise ValueError(f"{len(weights)} matrices for {len(offset_E) - 1} groups of rows")
    return _called(_GroupedMatmul, x_PC, offset_E, *weights)


@torch.no_grad()
def grouped_matmul_transposed(x_PR: Tensor, weights: Sequence[Tensor], offset_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix [R, C]: [P, R] -> [P, C]. This is the gradient of the input of
    `grouped_matmul`, for callers that make the matrices again in the backward. Autograd does not record it."""
    x_PR = x_PR.contiguous()
    result: Tensor = _twins(x_PR).grouped_matmul(x_PR, weights, offset_E, transposed=True)
    return result


def _called(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


_triton = partial(triton_twins, "shoal.kernels.dispatch.triton_dispatch")


def _twins(tensor: Tensor) -> ModuleType:
    fits = tensor.is_cuda and tensor.dtype in _NARROW_ENOUGH
    return (_triton() if fits else None) or reference


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        result: Tensor = _twins(x_ND).permute(x_ND.contiguous(), groups)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None]:
        return _twins(grad_PD).permute_backward(grad_PD.contiguous(), ctx.groups), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, weight_NK: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        y_PD, weight_NK = y_PD.contiguous(), weight_NK.contiguous()
        ctx.save_for_backward(y_PD, weight_NK)
        result: Tensor = _twins(y_PD).combine(y_PD, weight_NK, groups)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        y_PD, weight_NK = ctx.saved_tensors
        return *_twins(grad_ND).combine_backward(grad_ND.contiguous(), y_PD, weight_NK, ctx.groups), None


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PC: Tensor, offset_E: Tensor, *weights: Tensor) -> Tensor:
        x_PC = x_PC.contiguous()
        ctx.save_for_backward(x_PC, offset_E, *weights)
        result: Tensor = _twins(x_PC).grouped_matmul(x_PC, weights, offset_E)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PR: Tensor) -> tuple[Tensor | None, ...]:
        x_PC, offset_E, *weights = ctx.saved_tensors
        grad_PR, twins = grad_PR.contiguous(), _twins(grad_PR)
        of_x = twins.grouped_matmul(grad_PR, weights, offset_E, transposed=True) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_x, None, *(None for _ in weights)
        return of_x, None, *twins.grouped_outer(grad_PR, x_PC, offset_E)
