"""PipeOptim's prediction, scaled by how far the layer really moves in the predicted direction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.compensation import Seen, Settings
from shoal.peer.pipeline.prediction.extrapolation import PipeOptim

MEMORY = 0.9
"""Each new measurement of a gain multiplies the earlier ones by this, so that about the last ten count."""
GAIN_MAX = 2.0
"""Limit of the gain. The second step of SGD with momentum 0.9 is 1.9 times its first; a larger gain is noise."""


@dataclass(slots=True)
class _Gain:
    """The ratio of the actual to the predicted movement for one staleness: ⟨actual, predicted⟩ / ‖predicted‖².
    Numerator and denominator are sums over the measurements, with exponentially falling weights for older ones."""

    product: float = 0.0
    square: float = 0.0

    @property
    def value(self) -> float:
        return min(max(self.product / self.square, 0.0), GAIN_MAX) if self.square > 0 else 1.0

    def measured(self, product: float, square: float) -> None:
        self.product = MEMORY * self.product + product
        self.square = MEMORY * self.square + square


@dataclass(slots=True)
class _Trace:
    """A measurement of a gain: `way_N`, the predicted movement, and its scalar product with the steps made so far."""

    way_N: Tensor
    staleness_steps: int
    next_version: int
    product: float = 0.0
    steps: int = 0


class Calibrated(PipeOptim):
    """ŵ = w + k_s (p_s - w): p_s is PipeOptim's prediction over s steps, k_s the gain that fitted the latest steps.

    k_s = ⟨w_{v+s} - w_v, p_s - w_v⟩ / ‖p_s - w_v‖², measured over s steps, for one value of s after another; 1 before
    the first measurement. Steps that reverse each other give a small gain; a steady gradient gives 1.

    For s = 1 a measurement keeps no tensor; for s > 1 it keeps the predicted movement [N] until s steps are committed.
    It sums the products of each actual step with this movement, so w_v itself is not kept.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self._gains: dict[int, _Gain] = {}  # by staleness, the latest measured last
        self._trace: _Trace | None = None

    def gain(self, staleness_steps: int) -> float:
        """Return the gain k_s, in [0, GAIN_MAX], for s = `staleness_steps`."""
        return self._gains.get(staleness_steps, _Gain()).value

    def _ahead(self, layer: LayerState, settings: Settings, staleness_steps: int, seen: Seen) -> Tensor:
        self._gains.setdefault(staleness_steps, _Gain())
        predicted_N = self._predicted(layer, settings, staleness_steps)
        if predicted_N is layer.param_N:
            return predicted_N
        return layer.param_N.lerp(predicted_N, self.gain(staleness_steps))

    def committed(self, before: LayerState, after: LayerState, settings: Settings) -> None:
        trace = self._trace
        if trace is None or trace.next_version != settings["step"]:  # else a state was loaded meanwhile
            trace = self._begin(before, settings)
        if trace is None:
            return
        trace.product += float(torch.dot(after.param_N - before.param_N, trace.way_N))
        trace.steps += 1
        trace.next_version += 1
        self._trace = trace
        if trace.steps == trace.staleness_steps:
            self._trace = None
            gain = self._gains.pop(trace.staleness_steps)
            gain.measured(trace.product, float(torch.dot(trace.way_N, trace.way_N)))
            self._gains[trace.staleness_steps] = gain

    def _begin(self, layer: LayerState, settings: Settings) -> _Trace | None:
        """Begin a measurement for the staleness that was measured longest ago; None: no prediction was ever used."""
        if not self._gains:
            return None
        staleness_steps = next(iter(self._gains))
        way_N = self._predicted(layer, settings, staleness_steps) - layer.param_N
        return _Trace(way_N, staleness_steps, next_version=settings["step"])
