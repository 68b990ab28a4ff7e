"""Backward from tensors whose gradients have come from elsewhere."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Meeting(torch.autograd.Function):
    """A scalar; backward from it hands each of its inputs the gradient that was given with it."""

    @staticmethod
    def forward(ctx: Any, num: int, *values: Tensor) -> Tensor:
        ctx.gradients = values[num:]
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, ...] = ctx.gradients
        return (None, *gradients, *(None for _ in gradients))


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """As `torch.autograd.backward`, the same bits; each gradient has the shape of its output.

    `torch.autograd.backward` with given gradients compares shapes by way of `torch.fx`, which imports sympy at the
    first call: 0.6 s and 33 MB in each process. From a scalar it does not.
    """
    meeting: Tensor = _Meeting.apply(len(outputs), *outputs, *gradients)  # type: ignore[no-untyped-call]
    torch.autograd.backward(meeting)
