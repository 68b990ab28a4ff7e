"""The weights as they are: what every other strategy is compared with."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from shoal.peer.pipeline.prediction.compensation import Compensation, Seen, Settings
from shoal.peer.pipeline.state import LayerState


class Stash(Compensation):
    """PipeDream's weight stashing: ŵ = w_v, and the backward uses the weights of its forward.

    Source: PipeDream (Narayanan et al., 2019, arXiv 1806.03377), section 3.3. With NAdam and beta1 = 0.99 as the
    optimizer this is what arXiv 2505.01099 trains with: NAdam's weights are the look-ahead point already.
    """

    predicts: ClassVar[bool] = False

    def _ahead(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[Seen | None]
    ) -> Tensor:
        return layer.param_N


class NoCompensation(Stash):
    """Forward with whatever weights are there, backward with whatever weights are there then."""

    stash: ClassVar[bool] = False
