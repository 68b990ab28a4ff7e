"""Stale gradients, corrected to first order once the weights that they were meant for are known."""

from typing import ClassVar

from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.compensation import Settings
from shoal.peer.pipeline.prediction.stale import Stash

STRENGTH = 0.04
"""λ of DC-ASGD-c, tuned in the paper for SGD on CIFAR-10."""


class DelayCompensation(Stash):
    """g(w_t) ~ g(ŵ) + λ g g (w_t - ŵ), elementwise; ŵ are the weights of the version at the forward.

    g g stands in for the diagonal of the Hessian. For a mean over B tokens dominated by noise, B g g would be the
    Fisher information, so λ depends on the batch size. The correction is linear in ŵ: for several microbatches of one
    step at different ŵ, mean gradient and mean displacement suffice, apart from g itself being a mean.
    Source: DC-ASGD (Zheng et al., 2017, arXiv 1609.08326), equation 10.
    """

    corrects: ClassVar[bool] = True

    def __init__(self, optimizer: str, *, strength: float = STRENGTH) -> None:
        super().__init__(optimizer)
        self.strength = strength

    def corrected(self, gradient_N: Tensor, displacement_N: Tensor, layer: LayerState, settings: Settings) -> Tensor:
        return gradient_N + self.strength * gradient_N * gradient_N * displacement_N
