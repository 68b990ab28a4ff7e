"""Weights of one stage that are alive, and what is remembered of those that gradients were taken at.

N parameters of the stage, its layers one behind the other
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WeightSet:
    """Parameters of a stage. Equal only to itself."""

    params: Mapping[str, Tensor]
    """Layer key -> float32 [numel]; bfloat16 [numel] at a light member."""
    version: int
    """That it was made at."""
    num_seen: int = 0
    """Gradients of open steps that it was made with."""
    _narrow: dict[str, Tensor] = field(default_factory=dict)

    def computed_in(self, dtype: torch.dtype, key: str) -> Tensor:
        """The parameters of one layer as jobs compute with them; those in another dtype than they are in are made
        once."""
        if self.params[key].dtype == dtype:
            return self.params[key]
        if key not in self._narrow:
            self._narrow[key] = self.params[key].to(dtype)
        return self._narrow[key]


@dataclass(slots=True)
class Places:
    """Where gradients of one step were taken, of those that were not taken at the step's own weights.

    A sum, because what counts is the mean, and the weights themselves may go.
    """

    sum_N: Tensor
    """Of their weights, float32 [N]."""
    num: int = 0

    def add(self, weights: WeightSet) -> None:
        first = 0
        for param_N in weights.params.values():
            self.sum_N[first : first + param_N.numel()] += param_N.to(self.sum_N.device)
            first += param_N.numel()
        self.num += 1

    def displacement(self, span: slice, param_N: Tensor, total: int) -> Tensor:
        """The way from there to `param_N`, where the step's own weights are, in the layer at `span`: its mean over
        `total` gradients, of which the others were taken there. Float32, as `param_N`."""
        return (param_N * self.num).sub_(self.sum_N[span].to(param_N.device)).div_(total)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class OpenSum:
    """What a member has of an open step at one moment. Nothing changes in it for as long as somebody has it."""

    sum_N: Tensor
    """Of its gradients: float32 [N]."""
    num: int
    places: Places | None
    """None: all were taken at the step's own weights, or nobody wanted to know."""
