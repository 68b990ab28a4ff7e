"""The interface of all strategies against stale weights.

A microbatch of step t needs the weights w_t. If the layer is at version v < t, the microbatch is s = t - v steps stale.
A strategy decides which other weights ŵ the microbatch uses, whether its backward uses the same weights as its forward,
and how its gradient is corrected before the reduction, once w_t is known. What a strategy learns from past steps, and
so ŵ, may differ between the members of a group.

N parameters of one layer
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.model.state import LayerState

Settings = Mapping[str, Any]
"""Keyword arguments of the optimizer at the layer's version (`state.hyperparameters`); "step" is that version."""


@dataclass(frozen=True, slots=True)
class OwnGradients:
    """A member's own gradients of one step t that is not committed yet. `gradient_N` and `displacement_N` are means
    over the same microbatches; both are read-only."""

    gradient_N: Tensor
    """The mean gradient, clipped as in the step: float32 [N]."""
    displacement_N: Tensor | None = None
    """The mean of w_t - ŵ (the step's own weights minus those used), float32 [N]; None: it is zero or unknown."""


Seen = Sequence[OwnGradients | None]
"""This member's gradients of step v (the layer's version), v + 1 ...; None: the member has none of that step."""


class Compensation(ABC):
    """A strategy for one layer trained by `optimizer` (a name of `OPTIMIZERS`). Subclasses implement `_ahead`, and set
    the flags that differ. If `TrainingSpec.wants_newer_weights`, the backward calls `weights` again."""

    predicts: ClassVar[bool] = True
    """True: `weights` makes a new tensor. False: it returns the layer's own parameters."""
    sees: ClassVar[bool] = False
    """True: `weights` uses this member's gradients of uncommitted steps, and improves with each further gradient."""
    corrects: ClassVar[bool] = False

    def __init__(self, optimizer: str) -> None:
        self.optimizer = OPTIMIZERS[optimizer]

    def weights(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen = ()) -> Tensor:
        """Return the weights ŵ, float32 [N], for a microbatch of step `settings["step"] + staleness_steps`.

        At staleness 0 (or less, if a microbatch runs again) every strategy returns `layer.param_N` itself.
        Args: seen: our gradients of the steps not yet committed; needed only if `sees`.
        """
        return self._ahead(layer, settings, staleness_steps, seen) if staleness_steps > 0 else layer.param_N

    def corrected(self, gradient_N: Tensor, displacement_N: Tensor, layer: LayerState, settings: Settings) -> Tensor:
        """Estimate what the gradient would have been at w_t, the step's own weights: float32 [N].

        Args:
            gradient_N: float32 [N], mean over this member's microbatches of the step; left unchanged.
            displacement_N: float32 [N], w_t - ŵ, mean over the same microbatches (0 for microbatches with s = 0).
            layer, settings: the layer's state and the optimizer's arguments at version t.
        """
        return gradient_N

    def committed(  # noqa: B027 - most have nothing to learn
        self, before: LayerState, after: LayerState, settings: Settings
    ) -> None:
        """Learn from a committed step, which changed the layer from `before` to `after`. Args: settings: the
        optimizer's arguments at the version of `before`."""

    @abstractmethod
    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        """Return the result of `weights` for `staleness_steps` > 0. This must not change `layer`."""

    def _predicted(self, layer: LayerState, settings: Settings, staleness_steps: int) -> Tensor:
        """Return the optimizer's own prediction of its next steps: float32 [N]; `layer.param_N` itself at version 0."""
        return self.optimizer.predict(
            layer.param_N, layer.moment1_N, layer.moment2_N, staleness_steps=staleness_steps, **settings
        )
