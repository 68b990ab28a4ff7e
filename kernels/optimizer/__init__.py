"""Optimizer step and weight prediction on one layer's flat state. `reference.py` explains the arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final, Literal, TypeVar, cast

import torch
from torch import Tensor

from shoal.kernels.optimizer import muon, reference
from shoal.kernels.optimizer.reference import clip
from shoal.kernels.optimizer.rules import Matrices, NextWeights, Predict, Step
from shoal.kernels.triton_twins import triton_twins

__all__ = ["OPTIMIZERS", "Matrices", "NextWeights", "Optimizer", "Predict", "Step", "clip"]

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A step and its prediction; the device of the tensors decides which twin computes."""

    step: Step
    weights: NextWeights
    """The step's weights up to rounding, for use on this peer only."""
    predict: Predict
    moment2_of: Literal["all", "rest", "none"]
    """The elements with a second moment; "rest": those after the hidden matrices."""

    def moment2_numel(self, numel: int, matrices: Matrices = ()) -> int:
        """Return the length of `moment2_N` for a layer of `numel` elements with these hidden matrices."""
        match self.moment2_of:
            case "all":
                return numel
            case "rest":
                return numel - muon.hidden_numel(matrices)
            case "none":
                return 0

    def moments(self, param_N: Tensor, matrices: Matrices = ()) -> tuple[Tensor, Tensor]:
        """Return (moment1_N, moment2_N) of version 0, on the device of `param_N`."""
        num_elements = self.moment2_numel(param_N.numel(), matrices)
        return param_N.new_zeros(param_N.shape), param_N.new_zeros(num_elements)


_triton = partial(triton_twins, "shoal.kernels.optimizer.triton_advance")


def _by_device(name: str, function: _F) -> _F:
    """Return `function`, with its Triton twin `name` for non-empty float32 tensors on a CUDA device."""

    @wraps(function)
    def choose(param_N: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = param_N.is_cuda and param_N.dtype == torch.float32 and param_N.numel() > 0
        twin = getattr(_triton(), name, function) if fits else function
        return twin(param_N, *args, **kwargs)

    return cast(_F, choose)


def _next_weights(name: str, rules: ModuleType) -> NextWeights:
    """Return a function that uses the rule's own one on a CPU, if any; otherwise it takes the weights of the step."""
    step = _by_device(f"{name}_step", getattr(rules, f"{name}_step"))
    own = getattr(rules, f"{name}_weights", None)

    def weights(param_N: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = own(param_N, *args, **kwargs) if own and param_N.is_cpu else step(param_N, *args, **kwargs)[0]
        return made

    return weights


def _optimizer(name: str, rules: ModuleType, moment2_of: Literal["all", "rest", "none"]) -> Optimizer:
    return Optimizer(
        step=_by_device(f"{name}_step", getattr(rules, f"{name}_step")),
        weights=_next_weights(name, rules),
        predict=_by_device(f"{name}_predict", getattr(rules, f"{name}_predict")),
        moment2_of=moment2_of,
    )


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "sgd": _optimizer("sgd", reference, "none"),
    "adamw": _optimizer("adamw", reference, "all"),
    "nadam": _optimizer("nadam", reference, "all"),
    "muon": _optimizer("muon", muon, "rest"),
}
