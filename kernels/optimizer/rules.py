"""The arguments and results that the functions of all optimizers share.

N elements of one layer
"""

from dataclasses import dataclass

from torch import Tensor

Matrices = tuple[tuple[int, int, int], ...]
"""(first element, rows, columns) of each hidden matrix in a flat layer. Only Muon uses them."""
State = tuple[Tensor, Tensor, Tensor]
"""(param_N, moment1_N, moment2_N) of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """The settings of a step or a prediction from one version of a layer."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    num_decayed: int
    """Elements [0, num_decayed) get weight decay; the others do not."""
    step: int
    """The version of `param_N`, >= 0: step t of the swarm is made with `step=t` (torch.optim would count t + 1)."""
    matrices: Matrices = ()
