"""Weights of one stage that are alive, and what is remembered of those that gradients were taken at.

N parameters of the stage, its layers one behind the other
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WeightSet:
    """Parameters of a stage. Equal only to itself."""

    params: Mapping[str, Tensor]
    """Layer key -> float32 [numel]."""
    version: int
    """That it was made at."""
    num_seen: int = 0
    """Gradients of open steps that it was made with."""
    _narrow: dict[str, Tensor] = field(default_factory=dict)

    def computed_in(self, dtype: torch.dtype, key: str) -> Tensor:
        """The parameters of one layer as jobs compute with them; those in another dtype than float32 are made once."""
        if dtype == torch.float32:
            return self.params[key]
        if key not in self._narrow:
            self._narrow[key] = self.params[key].to(dtype)
        return self._narrow[key]


@dataclass(slots=True)
class Places:
    """Where gradients of one step were taken, of those that were not taken at the step's own weights.

    A sum, because what counts is the mean, and the weights themselves may go. A set is added to it when another one
    comes, and once for all gradients that were taken there: most steps see few sets.
    """

    num: int = 0
    """Gradients."""
    sum_N: Tensor | None = None
    """Of the weights that all but the last `_times` were taken at, float32 [N]; None: there are no others."""
    _last: WeightSet | None = None
    _times: int = 0
    """Gradients taken at `_last`."""

    def is_at(self, weights: WeightSet) -> bool:
        """Whether the last ones were taken there, too."""
        return weights is self._last

    def add(self, weights: WeightSet) -> None:
        """One more was taken there."""
        if not self.is_at(weights):
            self.settle()
            self._last = weights
        self._times += 1
        self.num += 1

    def settle(self, put: Callable[[Tensor], Tensor] = lambda tensor_N: tensor_N) -> None:
        """Let go of the last set of weights. Args: put: where a new sum is to lie."""
        if self._last is None:
            return
        first, parts = 0, tuple(self._last.params.values())
        if self.sum_N is None:
            self.sum_N = put(torch.cat(parts).mul_(self._times))
        else:
            for param_N in parts:
                part_N = self.sum_N[first : first + param_N.numel()]
                part_N.add_(param_N.to(part_N.device), alpha=self._times)
                first += param_N.numel()
        self._last, self._times = None, 0

    def copy(self) -> "Places":
        """Nothing that happens to one of the two changes the other."""
        sum_N = None if self.sum_N is None else self.sum_N.clone()
        return Places(self.num, sum_N, self._last, self._times)

    def displacement(self, key: str, span: slice, param_N: Tensor, total: int) -> Tensor:
        """The way from there to `param_N`, where the step's own weights are, in the layer `key` at `span`: its mean
        over `total` gradients, of which the others were taken there. Float32, as `param_N`."""
        way_N = param_N * self.num
        if self._last is not None:
            way_N.sub_(self._last.params[key], alpha=self._times)
        if self.sum_N is not None:
            way_N.sub_(self.sum_N[span].to(param_N.device))
        return way_N.div_(total)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class OpenSum:
    """What a member has of an open step at one moment. Nothing changes in it for as long as somebody has it."""

    sum_N: Tensor
    """Of its gradients: float32 [N]."""
    num: int
    places: Places | None
    """None: all were taken at the step's own weights, or nobody wanted to know."""
