"""Predicts weights by running the optimizer's next steps with this peer's part of each step's gradients."""

from typing import ClassVar, Final

from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.compensation import Compensation, Seen, Settings

KEPT: Final = 0.7
"""The part of the deviation of earlier predicted weights that is kept in the next weights: gamma of `Eager`."""


class Eager(Compensation):
    """ŵ = w_v after optimizer steps with g_v, g_{v+1}, ..., plus γ^s e, for s steps of staleness.

    Each g is the mean of this member's gradients of one open step; e is the mean of ŵ - w_v over the weights ŵ at which
    the gradients in g_v were taken. Steps without any gradient here are predicted as in PipeOptim.

    A partial sum is a noisy gradient, but right along the directions in which the weights oscillate, where delay costs
    most. A member that has all gradients of a step computes with w_t itself. The part γ = KEPT of the deviation e is
    kept, so that deviations do not grow from step to step. EAGER.md explains both.

    Source: ours. DiLoCo's eager updates (Kale et al., 2025, arXiv 2502.12996) also replace a pending sum by a worker's
    own part. DiLoCo uses that part in the step itself; we use it only in the weights for the next microbatches.
    """

    sees: ClassVar[bool] = True

    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        weights_N = self._stepped(layer, settings, staleness_steps, seen)
        first = seen[0] if seen else None
        if first is None or first.displacement_N is None:
            return weights_N
        return weights_N.sub(first.displacement_N, alpha=KEPT**staleness_steps)

    def _stepped(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        tensors, version = layer.tensors, settings["step"]
        for ahead in range(staleness_steps):
            its = seen[ahead] if ahead < len(seen) else None
            here = {**settings, "step": version + ahead}
            if its is None:
                return self.optimizer.predict(*tensors, staleness_steps=staleness_steps - ahead, **here)
            if ahead == staleness_steps - 1:
                return self.optimizer.weights(tensors[0], its.gradient_N, *tensors[1:], **here)
            tensors = self.optimizer.step(tensors[0], its.gradient_N, *tensors[1:], **here)
        return tensors[0]
