"""Strategies that predict weights by extrapolating the optimizer's movement."""

import torch
from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.compensation import Compensation, Seen, Settings


class PipeOptim(Compensation):
    """ŵ = w - lr s Δw, s steps ahead. Δw is the optimizer's direction: m for SGD, m^ / (sqrt(v^) + eps) for Adam.

    Source: PipeOptim (2023, arXiv 2312.00839); `shoal.kernels.optimizer` has the formulas, with weight decay and bias
    correction. Our backward uses the ŵ of the forward, or with `keep = "recompute"` the weights that are current at the
    backward. The paper's backward uses the current weights.
    """

    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        return self._predicted(layer, settings, staleness_steps)


class SpecTrain(Compensation):
    """ŵ = w - lr s m: s steps along the momentum m. The backward predicts again, with its own staleness s.

    Source: SpecTrain (Chen et al., 2018, arXiv 1809.02839), equations 3 and 4, made for SGD with momentum. Adam's first
    moment is a mean of gradients, so lr s m is far shorter than Adam's movement.
    """

    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        return torch.add(layer.param_N, layer.moment1_N, alpha=-settings["learning_rate"] * staleness_steps)


class LookAhead(Compensation):
    """ŵ = w + (β + β² + … + β^s) d: s steps by momentum alone, without any new gradient.

    d is the optimizer's predicted next step, β its beta1. At s = 1 this is Nesterov's look-ahead w + β d, which arXiv
    2505.01099 shows to correct delay. (The paper uses s = 1 for every delay and, as we do, stashed weights.)
    """

    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        way = sum(settings["beta1"] ** step for step in range(1, staleness_steps + 1))
        return layer.param_N.lerp(self._predicted(layer, settings, 1), way)
