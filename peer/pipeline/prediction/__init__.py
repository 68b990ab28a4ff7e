"""Strategies against stale weights: one interface (`Compensation`, in compensation.py), chosen by name.

    strategy = compensation("calibrated", "adamw")                  # one object for each layer; it may learn from steps
    w_N = strategy.weights(layer, settings, staleness_steps, seen)  # at the forward; for some also at the backward
    g_N = strategy.corrected(g_N, displacement_N, layer, settings)  # if .corrects: at the commit, before the reduction
    strategy.committed(before, after, settings)                     # after every step

`layer` is a `LayerState` at version v, `settings` the optimizer's arguments there (`state.hyperparameters`). This
package knows nothing of stages, microbatches or the run. The README compares the strategies.
"""

from collections.abc import Mapping
from typing import Final

from shoal.peer.pipeline.prediction.calibrated import Calibrated
from shoal.peer.pipeline.prediction.compensation import Compensation
from shoal.peer.pipeline.prediction.eager import Eager
from shoal.peer.pipeline.prediction.extrapolation import LookAhead, PipeOptim, SpecTrain
from shoal.peer.pipeline.prediction.stale import DelayCompensation, Stale

COMPENSATIONS: Final[Mapping[str, type[Compensation]]] = {
    "none": Stale,
    "stash": Stale,
    "spectrain": SpecTrain,
    "pipeoptim": PipeOptim,
    "lookahead": LookAhead,
    "calibrated": Calibrated,
    "dc": DelayCompensation,
    "eager": Eager,
}
"""Name in the run spec -> class of the strategy."""


def compensation(name: str, optimizer: str) -> Compensation:
    """Make the strategy `name` for one layer trained by `optimizer` (a name of `OPTIMIZERS`). Raises: KeyError."""
    return COMPENSATIONS[name](optimizer)
