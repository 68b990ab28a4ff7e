"""The signatures of every optimizer rule: a step, a prediction, and both in one pass over memory.

N elements of one layer
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

Matrices = tuple[tuple[int, int, int], ...]
"""(first element, rows, columns) of each hidden matrix in a flat layer. All rules take them, only Muon's uses them."""

Ahead = tuple[int, float]
"""(staleness_steps, gain): weights `gain` of the way to those `staleness_steps` ahead; (0, gain): the new ones."""

COMPUTE_DTYPES: Final = (torch.float32, torch.bfloat16)


class Step(Protocol):
    """A step. `step` is the version of `param_N`: step t of the swarm is made with `step=t`."""

    def __call__(
        self,
        param_N: Tensor,
        grad_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        matrices: Matrices = (),
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class NextWeights(Protocol):
    """The weights of a `Step` up to rounding, without its moments."""

    def __call__(
        self,
        param_N: Tensor,
        grad_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        matrices: Matrices = (),
    ) -> Tensor: ...


class Predict(Protocol):
    """A prediction. `step` is the version of `param_N`; the result estimates version `step + staleness_steps`."""

    def __call__(
        self,
        param_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        staleness_steps: int,
        matrices: Matrices = (),
    ) -> Tensor: ...


class Advance(Protocol):
    """A step, and the weights of the version it makes that microbatches of the next steps need.

    Args, besides those of a step:
        ahead: the weights to copy, counted from the new version.
        ahead_learning_rate: the schedule's at the new version.
        compute_dtype: of the copies, one of `COMPUTE_DTYPES`; masters and moments stay float32.
    Returns: (param_N, moment1_N, moment2_N, one copy for each of `ahead`). A float32 copy at staleness 0 is the new
        `param_N` itself, the same tensor.
    Raises: ValueError: another `compute_dtype`.
    """

    def __call__(
        self,
        param_N: Tensor,
        grad_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        matrices: Matrices = (),
        ahead: Sequence[Ahead],
        ahead_learning_rate: float,
        compute_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]: ...


def check_compute_dtype(dtype: torch.dtype) -> None:
    """Check a dtype. Raises: ValueError: it is not one of `COMPUTE_DTYPES`."""
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute copies are float32 or bfloat16, not {dtype}")
