"""The interface of all strategies against staleness.

A microbatch of step t wants the weights w_t. Where the layer is at version v < t it is stale by s = t - v steps, and a
strategy says what it computes with instead (ŵ), whether its backward uses the same weights again, and what becomes of
its gradient once w_t is known.

What a strategy learns stays on this peer, and so do its weights; members of a group may differ in both. What all must
have bit for bit is the optimizer's step, which no strategy touches: `corrected` comes before the reduction.

N parameters of one layer
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.pipeline.state import LayerState

Settings = Mapping[str, Any]
"""Keyword arguments of the optimizer at the layer's version (`state.hyperparameters`); "step" is that version."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a member has of one open step t by itself: means over the same microbatches. Not changed."""

    gradient_N: Tensor
    """Clipped as the step will clip it: float32 [N]."""
    displacement_N: Tensor | None = None
    """w_t - ŵ, float32 [N]; None: all were taken at w_t, or nobody knows w_t yet, or what they were taken at."""


class Compensation(ABC):
    """Of one layer. Subclasses say what is ahead (`_ahead`), and change the flags where these do not fit.

    Args:
        optimizer: a name of `shoal.kernels.optimizer.OPTIMIZERS`.
    """

    stash: ClassVar[bool] = True
    """The backward uses the forward's weights, kept until then. False: it runs the forward again, with `weights` of the
    version that is there by then."""
    predicts: ClassVar[bool] = True
    """`weights` makes a new tensor. False: they are the layer's own."""
    sees: ClassVar[bool] = False
    """`weights` makes use of what this member has of the open steps' gradients, and is worth asking again for more."""
    corrects: ClassVar[bool] = False
    """`corrected` does something."""

    def __init__(self, optimizer: str) -> None:
        self.optimizer = OPTIMIZERS[optimizer]

    def weights(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[Seen | None] = ()
    ) -> Tensor:
        """ŵ, what a microbatch of step `settings["step"] + staleness_steps` computes with: float32 [N].

        At staleness 0 (or less: a repair) `layer.param_N` itself, whatever the strategy.

        Args:
            seen: of the steps from the layer's version on; None where there is nothing. Only for who `sees`.
        """
        return self._ahead(layer, settings, staleness_steps, seen) if staleness_steps > 0 else layer.param_N

    def corrected(self, gradient_N: Tensor, displacement_N: Tensor, layer: LayerState, settings: Settings) -> Tensor:
        """What the gradient would have been at w_t, as far as the strategy can tell: float32 [N].

        Called for a step t that is about to be committed, on one member's own mean gradient, before it is reduced.

        Args:
            gradient_N: float32 [N], mean over the member's microbatches of the step; not changed.
            displacement_N: float32 [N], w_t - ŵ, mean over the same microbatches (0 for those with s = 0).
            layer, settings: at version t.
        """
        return gradient_N

    def committed(  # noqa: B027 - most have nothing to learn
        self, before: LayerState, after: LayerState, settings: Settings
    ) -> None:
        """The layer has stepped. `settings` are those of `before`. Not called for a step that left the layer alone."""

    @abstractmethod
    def _ahead(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[Seen | None]
    ) -> Tensor:
        """As `weights`, for `staleness_steps` > 0. May not change `layer`."""

    def _predicted(self, layer: LayerState, settings: Settings, staleness_steps: int) -> Tensor:
        """Where the optimizer expects its own next steps to lead: float32 [N]; `layer.param_N` itself at version 0."""
        return self.optimizer.predict(
            layer.param_N, layer.moment1_N, layer.moment2_N, staleness_steps=staleness_steps, **settings
        )
