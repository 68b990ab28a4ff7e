"""Optimizer step and weight prediction on one layer's flat state. `reference.py` explains the arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from shoal.kernels.optimizer import muon, reference
from shoal.kernels.optimizer.reference import clip
from shoal.kernels.optimizer.rules import Hyperparameters, Matrices, State
from shoal.kernels.triton_twins import triton_twins

__all__ = ["OPTIMIZERS", "Matrices", "Optimizer", "clip"]

_triton = partial(triton_twins, "shoal.kernels.optimizer.triton_advance")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer: the functions `{name}_step`, `{name}_predict` ... of the module `rules`, or their Triton twins.
    The `settings` of the methods are the fields of `Hyperparameters`."""

    name: str
    rules: ModuleType
    moment2_of: Literal["all", "rest", "none"]
    """The elements that have a second moment: all, none, or the "rest" (those after the hidden matrices)."""

    def step(self, param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, **settings: Any) -> State:
        """Make one optimizer step from version `step`. Returns: the new (param_N, moment1_N, moment2_N)."""
        made: State = self._rule("step", param_N)(param_N, grad_N, moment1_N, moment2_N, Hyperparameters(**settings))
        return made

    def weights(self, param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, **settings: Any) -> Tensor:
        """Return only a step's new weights; a CPU does not compute the new moments. The weights may differ in the last
        bits from those of `step`, so they are for this peer only."""
        own = getattr(self.rules, f"{self.name}_weights", None)
        if own is None or not param_N.is_cpu:
            return self.step(param_N, grad_N, moment1_N, moment2_N, **settings)[0]
        made: Tensor = own(param_N, grad_N, moment1_N, moment2_N, Hyperparameters(**settings))
        return made

    def predict(
        self, param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, *, staleness_steps: int, **settings: Any
    ) -> Tensor:
        """Predict the weights of version `step + staleness_steps`: float32 [N]. If `staleness_steps` (>= 0) or `step`
        is 0, the result is `param_N` itself."""
        hyper = Hyperparameters(**settings)
        if staleness_steps == 0 or hyper.step == 0:
            return param_N
        ahead_N: Tensor = self._rule("predict", param_N)(param_N, moment1_N, moment2_N, hyper, staleness_steps)
        return ahead_N

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

    def _rule(self, what: str, param_N: Tensor) -> Callable[..., Any]:
        """Return the function `what` of this optimizer; for non-empty float32 tensors on CUDA its Triton twin."""
        name = f"{self.name}_{what}"
        fits = param_N.is_cuda and param_N.dtype == torch.float32 and param_N.numel() > 0
        plain: Callable[..., Any] = getattr(self.rules, name)
        return getattr(_triton(), name, plain) if fits else plain


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "sgd": Optimizer("sgd", reference, "none"),
    "adamw": Optimizer("adamw", reference, "all"),
    "nadam": Optimizer("nadam", reference, "all"),
    "muon": Optimizer("muon", muon, "rest"),
}
