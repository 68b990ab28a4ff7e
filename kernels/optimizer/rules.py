"""The signatures of every optimizer rule: a step and a prediction.

N elements of one layer
"""

from typing import Protocol

from torch import Tensor

Matrices = tuple[tuple[int, int, int], ...]
"""(first element, rows, columns) of each hidden matrix in a flat layer. All rules take them, only Muon's uses them."""


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
