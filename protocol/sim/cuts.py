"""Knows which peers cannot hear which, and since when."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Stops everything from a place in `sources` to one in `destinations`, and back, unless the cut is one way."""

    sources: frozenset[int]
    destinations: frozenset[int]
    one_way: bool
    since_s: float

    def separates(self, source: int, destination: int) -> bool:
        return (source in self.sources and destination in self.destinations) or (
            not self.one_way and source in self.destinations and destination in self.sources
        )


class Cuts:
    """All cuts in force, by place."""

    def __init__(self) -> None:
        self._cuts: list[Cut] = []

    def add(self, sources: Iterable[int], destinations: Iterable[int], *, one_way: bool, now_s: float) -> Cut:
        cut = Cut(frozenset(sources), frozenset(destinations), one_way, now_s)
        self._cuts.append(cut)
        return cut

    def remove(self, cut: Cut | None) -> None:
        """Heal one; with None, all."""
        self._cuts = [] if cut is None else [other for other in self._cuts if other is not cut]

    def __bool__(self) -> bool:
        return bool(self._cuts)

    def is_cut(self, source: int, destination: int) -> bool:
        # Asked for every frame and call, while nearly always nothing is cut.
        return bool(self._cuts) and any(cut.separates(source, destination) for cut in self._cuts)

    def since_s(self, source: int, destination: int) -> float | None:
        """The time at which the pair lost touch in either direction; None if it has not."""
        return min(
            (
                cut.since_s
                for cut in self._cuts
                if cut.separates(source, destination) or cut.separates(destination, source)
            ),
            default=None,
        )
