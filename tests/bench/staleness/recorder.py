"""What a run shows, put together while it goes."""

import math
import time

from settings import Outcome, Point, Run
from tasks import Task, validate
from torch import Tensor

TAIL = 0.1
"""Share of the updates, the last ones, whose mean training loss is reported."""


class Diverged(Exception):
    """A loss is not finite: nothing more will be learnt."""


class Recorder:
    """Sees a run: losses, curve, staleness. `outcome` at the end."""

    def __init__(self, task: Task, run: Run) -> None:
        self.losses: list[float] = []
        """Of each update, with the weights of its forwards."""
        self._task = task
        self._run = run
        self._curve: list[Point] = []
        self._virtual_s = 0.0
        self._staleness = 0.0
        self._num_staleness = 0.0
        self._final: tuple[float, float] | None = None
        self._started_s = time.process_time()

    def stale(self, staleness_steps: float, weight: float = 1.0) -> None:
        """A forward, or the `weight` of several."""
        self._staleness += weight * staleness_steps
        self._num_staleness += weight

    def updated(self, loss: float, virtual_s: float) -> None:
        """The last layer has made an update. Raises: Diverged."""
        self._virtual_s = virtual_s
        if not math.isfinite(loss):
            raise Diverged
        self.losses.append(loss)

    def wants(self, version: int) -> bool:
        """Whether `reached` is to be called with the weights of this version."""
        return version % self._run.validate_every == 0 or version == self._run.updates

    def reached(self, version: int, weights: dict[str, Tensor], virtual_s: float) -> None:
        """All layers have made `version` updates, the last of them at `virtual_s`. Raises: Diverged."""
        leaves = {key: self._task.layout(key).views(weights_N) for key, weights_N in weights.items()}
        loss, _ = validate(self._task, leaves, brief=True)
        self._virtual_s = max(self._virtual_s, virtual_s)
        if not math.isfinite(loss):
            raise Diverged
        self._curve.append(Point(version, version * self._units, round(virtual_s, 3), round(loss, 4)))
        if version == self._run.updates:
            self._final = validate(self._task, leaves)

    def outcome(self) -> Outcome:
        tail = self.losses[-max(1, round(len(self.losses) * TAIL)) :]
        loss, right = self._final or (math.nan, math.nan)
        return Outcome(
            validation_loss=round(loss, 5) if self._final else None,
            right=round(right, 4) if self._final else None,
            training_loss=round(sum(tail) / len(tail), 5) if self._final else None,
            units=len(self.losses) * self._units,
            virtual_s=round(self._virtual_s, 3),
            staleness_mean=round(self._staleness / max(1e-9, self._num_staleness), 4),
            curve=tuple(self._curve),
            processor_s=round(time.process_time() - self._started_s, 2),
        )

    @property
    def _units(self) -> int:
        shape = self._run.shape
        return shape.microbatches_per_step * shape.microbatch_size * self._task.units_per_sample
