"""Optimizer step and weight prediction on one layer's flat state. See `reference.py` for the arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from torch import Tensor

from shoal.kernels.optimizer.muon import hidden_numel, muon_predict, muon_step
from shoal.kernels.optimizer.reference import (
    Matrices,
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
    "Matrices",
    "Optimizer",
    "adamw_predict",
    "adamw_step",
    "clip",
    "muon_predict",
    "muon_step",
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
        matrices: Matrices = (),
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
        matrices: Matrices = (),
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A step and the prediction that belongs to it."""

    step: Step
    predict: Predict
    moment2_of: Literal["all", "rest", "none"]
    """The elements that have a second moment; "rest": those behind the hidden matrices."""

    def moment2_numel(self, numel: int, matrices: Matrices = ()) -> int:
        """Elements of `moment2_N` for a layer of `numel` elements with these hidden matrices."""
        match self.moment2_of:
            case "all":
                return numel
            case "rest":
                return numel - hidden_numel(matrices)
            case "none":
                return 0

    def moments(self, param_N: Tensor, matrices: Matrices = ()) -> tuple[Tensor, Tensor]:
        """(moment1_N, moment2_N) of version 0, on the device of `param_N`."""
        num_elements = self.moment2_numel(param_N.numel(), matrices)
        return param_N.new_zeros(param_N.shape), param_N.new_zeros(num_elements)


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "sgd": Optimizer(step=sgd_step, predict=sgd_predict, moment2_of="none"),
    "adamw": Optimizer(step=adamw_step, predict=adamw_predict, moment2_of="all"),
    "nadam": Optimizer(step=nadam_step, predict=nadam_predict, moment2_of="all"),
    "muon": Optimizer(step=muon_step, predict=muon_predict, moment2_of="rest"),
}
"""By the name that the run spec uses."""
