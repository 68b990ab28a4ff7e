"""Keeps a run's history, step by step, in bounded memory. Pure."""

from collections.abc import Iterable

from shoal.deploy.dashboard.view import ValidationPoint
from shoal.deploy.record.lines import StepLine, merged

POINTS_MAX = 1200
"""The most points of a curve, about two per pixel of a wide screen. At this number, neighbours are merged in pairs."""
VALIDATIONS_MAX = 600


class Curves:
    """Keeps the points of the plots in the order of their steps. `generation` changes when older points are merged or
    removed: a reader must then fetch all points again."""

    def __init__(self) -> None:
        self.generation = 0
        self.points: list[StepLine] = []
        self.validations: list[ValidationPoint] = []
        self._stride = 1
        """How many added points are merged into one stored point."""
        self._open: list[StepLine] = []

    def add(self, point: StepLine) -> None:
        """Add a step, which must be later than all steps here."""
        self._open.append(point)
        if len(self._open) < self._stride:
            return
        self.points.append(merged(self._open))
        self._open.clear()
        if len(self.points) >= POINTS_MAX:
            self.points = [merged(self.points[index : index + 2]) for index in range(0, len(self.points), 2)]
            self._stride *= 2
            self.generation += 1

    def validate(self, at_s: float, step: int, loss: float) -> None:
        """Add the validation loss of version `step`, or replace it: a run that went back makes the version again."""
        made_s = next((point.time for point in reversed(self.points) if point.step <= step), None)
        made_s = at_s if made_s is None or step > self._newest else min(at_s, made_s)
        kept = [known for known in self.validations if known.step != step]
        kept.append(ValidationPoint(at_s=made_s, step=step, loss=loss))
        self.validations = sorted(kept, key=lambda known: known.step)
        if len(self.validations) > VALIDATIONS_MAX:
            self.validations = self.validations[:-1:2] + self.validations[-1:]

    def go_back(self, step: int) -> None:
        """Drop the points of `step` and of all later steps, because the run repeats these steps."""
        kept = [point for point in self.points if point.step < step]
        self.validations = [known for known in self.validations if known.step < step]
        self._open = [point for point in self._open if point.step < step]
        if len(kept) < len(self.points):
            self.points = kept
            self.generation += 1

    def restore(self, points: Iterable[StepLine]) -> None:
        """Add the points that the run's record has from earlier starts."""
        for point in points:
            self.add(point)
        self.generation += 1

    @property
    def _newest(self) -> int:
        return max((line.step for line in (*self.points[-1:], *self._open[-1:])), default=0)
