"""Token dispatch and the experts' products in plain torch: the CPU path, and the test reference of the fast twins.

Sums are computed in float32 (float64 if the tensors are) and rounded to the tensors' dtype at the end.

N tokens   K choices a token   P = N K rows, sorted by expert (`groups.py`)   E experts   D width
R rows and C columns of an expert's matrix
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shoal.kernels.dispatch.groups import Groups


def permute(x_ND: Tensor, groups: Groups) -> Tensor:
    """Copy each token once for each expert that it has chosen: [N, D] -> [P, D]."""
    return x_ND.index_select(0, groups.token_P)


def permute_backward(grad_PD: Tensor, groups: Groups) -> Tensor:
    """Return the gradient of `x_ND`, [N, D]: the sum over each token's rows, in the order of its choices."""
    return _wide(_rows(grad_PD, groups)).sum(1).to(grad_PD.dtype)


def combine(y_PD: Tensor, weight_NK: Tensor, groups: Groups) -> Tensor:
    """Return the weighted sum over each token's rows: [P, D] -> [N, D] of the same dtype.

    Args: weight_NK: float32 [N, K], or float64 if `y_PD` is float64.
    """
    return torch.bmm(weight_NK.unsqueeze(1), _wide(_rows(y_PD, groups))).squeeze(1).to(y_PD.dtype)


def combine_backward(grad_ND: Tensor, y_PD: Tensor, weight_NK: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the gradients of `y_PD` and `weight_NK`, in their dtypes."""
    weight_P = weight_NK.reshape(-1).index_select(0, groups.choice_P)
    grad_PD = _wide(grad_ND.index_select(0, groups.token_P))
    grad_NK = (grad_PD * _wide(y_PD)).sum(-1).index_select(0, groups.row_NK.reshape(-1)).view_as(weight_NK)
    return (grad_PD * weight_P.unsqueeze(1)).to(y_PD.dtype), grad_NK


def grouped_matmul(x_PC: Tensor, weights: Sequence[Tensor], offset_E: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply each expert's rows by the transpose of its matrix, as `functional.linear` does: [P, C] -> [P, R].

    Args:
        weights: E matrices [R, C], contiguous, of the dtype of `x_PC`.
        offset_E: int64 [E + 1], the first row of each expert, then P (`Groups.offset_E`).
        transposed: multiply by the matrix itself instead: [P, R] -> [P, C]. This is the gradient of the input.
    """
    width = weights[0].shape[1 if transposed else 0]
    y_PR = x_PC.new_empty(x_PC.shape[0], width)
    for weight_RC, (first, last) in zip(weights, pairwise(offset_E.tolist()), strict=True):
        torch.mm(x_PC[first:last], weight_RC if transposed else weight_RC.T, out=y_PR[first:last])
    return y_PR


def grouped_outer(grad_PR: Tensor, x_PC: Tensor, offset_E: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of each matrix in `grouped_matmul`: E tensors [R, C], zero for an expert without rows."""
    offsets = offset_E.tolist()
    # Each expert has its own tensor: it is added to a gradient and freed while it is in the processor's cache.
    return tuple(grad_PR[first:last].T @ x_PC[first:last] for first, last in pairwise(offsets))


def _rows(x_PD: Tensor, groups: Groups) -> Tensor:
    return x_PD.index_select(0, groups.row_NK.reshape(-1)).view(*groups.row_NK.shape, x_PD.shape[1])


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
