"""The stale weights themselves: the baseline of all other strategies."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.compensation import Compensation, OwnGradients, Settings


class Stash(Compensation):
    """PipeDream's weight stashing: ŵ = w_v, and the backward uses the weights of its forward.

    Source: PipeDream (Narayanan et al., 2019, arXiv 1806.03377), section 3.3. With NAdam and beta1 = 0.99 this is the
    setup of arXiv 2505.01099: NAdam's weights are the look-ahead point already.
    """

    predicts: ClassVar[bool] = False

    def _ahead(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[OwnGradients | None]
    ) -> Tensor:
        return layer.param_N


class NoCompensation(Stash):
    """Forward and backward each use the weights of their own moment."""

    stash: ClassVar[bool] = False
