"""Sets of weights of one stage, and sums of the weights at which gradients were taken.

N parameters of the stage; its layers follow one another
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WeightSet:
    """The parameters that a stage uses for one step. Sets are compared by identity, not by their numbers."""

    params: Mapping[str, Tensor]
    """Layer key -> float32 [numel]; bfloat16 [numel] at a learner."""
    version: int
    """The version of the state from which the set was made or predicted."""
    num_seen: int = 0
    """How many gradients of uncommitted steps the compensation for staleness used to predict the set."""
    _narrow: dict[str, Tensor] = field(default_factory=dict)

    def computed_in(self, dtype: torch.dtype, key: str) -> Tensor:
        """Return the parameters of one layer in `dtype`. Each layer is converted once."""
        if self.params[key].dtype == dtype:
            return self.params[key]
        if key not in self._narrow:
            self._narrow[key] = self.params[key].to(dtype)
        return self._narrow[key]


@dataclass(slots=True)
class Places:
    """The sum of the weights at which the stale gradients of one step were taken."""

    sum_N: Tensor
    """The sum of the weights, float32 [N], with one summand for each stale gradient."""
    num: int = 0

    def add(self, weights: WeightSet) -> None:
        first = 0
        for param_N in weights.params.values():
            self.sum_N[first : first + param_N.numel()] += param_N.to(self.sum_N.device)
            first += param_N.numel()
        self.num += 1

    def displacement(self, span: slice, param_N: Tensor, total: int) -> Tensor:
        """Return one layer's mean displacement, float32, over the step's `total` gradients. A gradient's displacement
        is the step's own weights minus the weights at which the gradient was taken.

        Args: span: the layer's slice; param_N: the step's own weights of the layer.
        """
        return (param_N * self.num).sub_(self.sum_N[span].to(param_N.device)).div_(total)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class OpenSum:
    """A member's sum of the gradients of an uncommitted step. It does not change while it is referenced."""

    sum_N: Tensor
    """The sum of the gradients, float32 [N]."""
    num: int
    places: Places | None
    """The sum of the weights at which the stale gradients were taken, with one summand for each of them. None: no
    gradient is stale, or the compensation for staleness does not use the sum."""
