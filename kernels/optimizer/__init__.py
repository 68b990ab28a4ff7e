"""Optimizer step and weight prediction on one layer's flat state. See `reference.py` for the arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from shoal.kernels.optimizer.reference import (
    adamw_predict,
    adamw_step,
    clip,
    nadam_predict,
    nadam_step,
    sgd_predict,
    sgd_step,
)

__all__ = [
    "OPTIMIZERS",
    "Optimizer",
    "adamw_predict",
    "adamw_step",
    "clip",
    "nadam_predict",
    "nadam_step",
    "sgd_predict",
    "sgd_step",
]


class Step(Protocol):
    """`step` is the version of `param_N`: step t of the swarm is made with `step=t`."""

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
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Predict(Protocol):
    """`step` is the version of `param_N`; the result estimates version `step + staleness_steps`."""

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
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A step and the prediction that belongs to it."""

    step: Step
    predict: Predict
    has_moment2: bool
    """Whether `moment2_N` is [N] or stays empty, [0]."""

    def moments(self, param_N: Tensor) -> tuple[Tensor, Tensor]:
        """(moment1_N, moment2_N) of version 0, on the device of `param_N`."""
        moment1_N = param_N.new_zeros(param_N.shape)
        return moment1_N, param_N.new_zeros(param_N.shape if self.has_moment2 else (0,))


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "sgd": Optimizer(step=sgd_step, predict=sgd_predict, has_moment2=False),
    "adamw": Optimizer(step=adamw_step, predict=adamw_predict, has_moment2=True),
    "nadam": Optimizer(step=nadam_step, predict=nadam_predict, has_moment2=True),
}
"""By the name that the run spec uses."""
