"""The optimizer's own next steps, with as much of their gradients as this peer has."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from shoal.peer.pipeline.prediction.compensation import Compensation, Settings
from shoal.peer.pipeline.state import LayerState


class Eager(Compensation):
    """ŵ = w_v stepped with g_v, g_{v+1}, ...: for each step that is open, the mean over what this member has of it.

    While microbatches of step t are let in at version t - 1, most of step t - 1 has been computed here already; what is
    missing are the last microbatches and what the mates have. A sum over a part of a step is a noisy gradient, but
    along the directions in which weights swing to and fro it is the right one, and those are what delay is paid for: an
    extrapolation of past steps always has them wrong. A step of which nothing is here is PipeOptim's.

    A member that is alone and has all of a step's gradients computes with w_t, and nothing is stale at all.

    Ours. DiLoCo's eager updates (Kale et al., 2025, arXiv 2502.12996) put a worker's own part in the place of a sum
    that is still under way, too; there into the step itself, here only into the weights that others' gradients wait
    for.
    """

    sees: ClassVar[bool] = True

    def _ahead(
        self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Sequence[Tensor | None]
    ) -> Tensor:
        tensors, version = layer.tensors, settings["step"]
        for ahead in range(staleness_steps):
            gradient_N = seen[ahead] if ahead < len(seen) else None
            here = {**settings, "step": version + ahead}
            if gradient_N is None:
                return self.optimizer.predict(*tensors, staleness_steps=staleness_steps - ahead, **here)
            tensors = self.optimizer.step(tensors[0], gradient_N, *tensors[1:], **here)
        return tensors[0]
