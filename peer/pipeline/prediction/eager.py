"""The optimizer's own next steps, with as much of their gradients as this peer has."""

from collections.abc import Sequence
from typing import ClassVar, Final

from torch import Tensor

from shoal.peer.pipeline.prediction.compensation import Compensation, Seen, Settings
from shoal.peer.pipeline.state import LayerState

KEPT: Final = 0.7
"""Part of a displacement that stays in the next weights."""


class Eager(Compensation):
    """ŵ = w_v stepped with g_v, g_{v+1}, ...: for each step that is open, the mean over what this member has of it; and
    γ^s times as far from there as that gradient was taken from w_v.

    While microbatches of step t are let in at version t - 1, most of step t - 1 has been computed here already; what is
    missing are the last microbatches and what the mates have. A sum over a part of a step is a noisy gradient, but
    along the directions in which weights swing to and fro it is the right one, and those are what delay is paid for: an
    extrapolation of past steps always has them wrong. A step of which nothing is here is PipeOptim's.

    A member that is alone and has all of a step's gradients computes with w_t, and nothing is stale at all.

    **What is kept of a displacement** (γ = KEPT). Members of a stage have seen different things, so their ŵ lie around
    w_t. To first order the mean over them of what they compute is right; what they differ by, e = ŵ - w_t, feeds
    itself: at a curvature h the gradient seen is off by h e, and the next ŵ by -k h e, where k is how far the optimizer
    goes for a new gradient, 1 - β times its learning rate, with Nesterov 1 - β². For k h > 1 that grows, at curvatures
    at which training itself is stable yet (β = 0.9: h lr < 38, Nesterov 13.6; k h < 1 is 10 and 5.3). With γ e kept it
    is (γ - k h) e, which grows for k h > 1 + γ only: 17 and 8.9. Where the loss is flat e is the noise of what was not
    seen, and 1 / (1 - γ²) = 2 times its variance is what this costs.

    Ours. DiLoCo's eager updates (Kale et al., 2025, arXiv 2502.12996) put a worker's own part in the place of a sum
    that is still under way, too; there into the step itself, here only into the weights that others' gradients wait
    for.
    """

    sees: ClassVar[bool] = True

    def _ahead(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[Seen | None]
    ) -> Tensor:
        weights_N = self._stepped(layer, settings, staleness_steps, seen)
        first = seen[0] if seen else None
        if first is None or first.displacement_N is None:
            return weights_N
        return weights_N.sub(first.displacement_N, alpha=KEPT**staleness_steps)

    def _stepped(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[Seen | None]
    ) -> Tensor:
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
