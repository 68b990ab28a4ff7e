"""Loss, throughput and staleness over the life of a run, in bounded memory. Pure."""

from collections.abc import Sequence

from shoal.deploy.dashboard.view import Point

POINTS_MAX = 1200
"""About two a pixel of a wide screen. When they are reached, neighbours are merged and half of it is free again."""


class Curves:
    """Points in the order in which they came. `generation` changes whenever older points were merged: who holds a copy
    must then take all of them anew.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.points: list[Point] = []
        self._every_s = 0.0
        self._open: list[Point] = []

    def add(self, point: Point) -> None:
        self._open.append(point)
        if self.points and point.at_s < self.points[-1].at_s + self._every_s and point.validation_loss is None:
            return
        self.points.append(_merged(self._open))
        self._open.clear()
        if len(self.points) >= POINTS_MAX:
            self._thin()

    def _thin(self) -> None:
        pairs = [self.points[index : index + 2] for index in range(0, len(self.points), 2)]
        self.points = [_merged(pair) for pair in pairs]
        self._every_s = (self.points[-1].at_s - self.points[0].at_s) / len(self.points)
        self.generation += 1


def _merged(points: Sequence[Point]) -> Point:
    """One for all: where the last one is, as high as they are on average."""
    last = points[-1]
    losses = [point.loss for point in points if point.loss is not None]
    validations = [point.validation_loss for point in points if point.validation_loss is not None]
    return Point(
        at_s=last.at_s,
        step=last.step,
        loss=sum(losses) / len(losses) if losses else None,
        validation_loss=validations[-1] if validations else None,
        tokens_per_s=sum(point.tokens_per_s for point in points) / len(points),
        staleness_steps_mean=sum(point.staleness_steps_mean for point in points) / len(points),
    )
