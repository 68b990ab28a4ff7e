"""Strategies that compute with the stale weights themselves: the baseline, and one that corrects gradients later."""

from typing import ClassVar

from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.compensation import Compensation, Seen, Settings

STRENGTH = 0.04
"""λ of DC-ASGD-c, tuned in the paper for SGD on CIFAR-10."""


class Stale(Compensation):
    """ŵ = w_v, the current weights. If the backward uses the forward's weights, this is PipeDream's weight stashing
    (`stash`); if it uses the weights that are current at the backward, there is no compensation (`none`).

    Source: PipeDream (Narayanan et al., 2019, arXiv 1806.03377), section 3.3. With NAdam and beta1 = 0.99 this is the
    setup of arXiv 2505.01099: NAdam's weights already are the look-ahead point.
    """

    predicts: ClassVar[bool] = False

    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        return layer.param_N


class DelayCompensation(Stale):
    """Corrects gradients once the step's weights w_t are known: to first order g(w_t) ~ g(ŵ) + λ g g (w_t - ŵ).

    g g, elementwise, approximates the diagonal of the Hessian. For a mean over B tokens that is dominated by noise,
    B g g would be the Fisher information, so λ depends on the batch size. The correction is linear in ŵ, so for several
    microbatches of one step at different ŵ, mean gradient and mean displacement suffice, except that g g is the square
    of the mean gradient.
    Source: DC-ASGD (Zheng et al., 2017, arXiv 1609.08326), equation 10.
    """

    corrects: ClassVar[bool] = True

    def corrected(self, gradient_N: Tensor, displacement_N: Tensor, layer: LayerState, settings: Settings) -> Tensor:
        return gradient_N + STRENGTH * gradient_N * gradient_N * displacement_N
