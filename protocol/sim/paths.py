"""The present path between two places: the network's link or its replacement, changed by disturbances and cuts."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.network import LinkSpec, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A temporary change of a `LinkSpec`. Fields without a description here mean the same as in `LinkSpec`.

    Several disturbances of one path combine, in any order: delays add, probabilities combine as if independent.
    """

    slowness: float = 1.0
    """The factor by which the path's rate falls, if the rate is finite. Of several disturbances the largest factor
    counts: the narrowest point of a path sets its speed."""
    delay_s: float = 0.0
    """Seconds to add to the latency."""
    loss: float = 0.0
    corruption: float = 0.0
    duplication: float = 0.0
    spikes: float = 0.0
    spike_s: float = 0.0
    """The longest spike; of several disturbances the largest value counts."""

    def __post_init__(self) -> None:
        if not self.slowness >= 1.0:
            raise LocalError(f"a disturbed path is slower by a factor of 1 or more, not {self.slowness}")
        if not self.delay_s >= 0.0:
            raise LocalError(f"a disturbed path takes 0 s longer or more, not {self.delay_s}")

    def on(self, spec: LinkSpec) -> LinkSpec:
        """Return `spec` with this disturbance applied, except for the field `slowness`. Raises: LocalError: a
        probability is invalid."""
        return replace(
            spec,
            latency_s=spec.latency_s + self.delay_s,
            loss=_either(spec.loss, self.loss),
            corruption=_either(spec.corruption, self.corruption),
            duplication=_either(spec.duplication, self.duplication),
            spikes=_either(spec.spikes, self.spikes),
            spike_s=max(spec.spike_s, self.spike_s),
        )

    def __str__(self) -> str:
        changed = ((field.name, getattr(self, field.name)) for field in fields(self))
        defaults = Disturbance()
        return ", ".join(f"{name} {value:g}" for name, value in changed if value != getattr(defaults, name))


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """The directed pairs from each place in `sources` to each in `destinations`; unless `one_way`, also the reverse."""

    sources: frozenset[int]
    destinations: frozenset[int]
    one_way: bool

    def covers(self, source: int, destination: int) -> bool:
        return (source in self.sources and destination in self.destinations) or (
            not self.one_way and source in self.destinations and destination in self.sources
        )

    def pairs(self) -> Iterable[tuple[int, int]]:
        for source in sorted(self.sources):
            for destination in sorted(self.destinations):
                yield source, destination
                if not self.one_way:
                    yield destination, source


@dataclass(frozen=True, slots=True, eq=False)
class Disturbed(Between):
    """A disturbance that is in force between these places."""

    disturbance: Disturbance


@dataclass(frozen=True, slots=True, eq=False)
class Cut(Between):
    """A cut in force: nothing passes between these places."""

    since_s: float


class Paths:
    """The present paths between places. A change applies to later messages and to the unsent rest of frames."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._set: dict[tuple[int, int], LinkSpec] = {}
        self._disturbed: list[Disturbed] = []
        self._now: dict[tuple[int, int], LinkSpec] = {}
        """(source, destination) -> path, for changed paths; computed once per change because every message reads it."""

    def link(self, source: int, destination: int) -> LinkSpec:
        return self._now.get((source, destination)) or self._network.link(source, destination)

    def set(self, source: int, destination: int, spec: LinkSpec) -> None:
        """Replace the network's link between two places; disturbances apply to the replacement, too."""
        self._set[source, destination] = spec
        self._fold([(source, destination)])

    def disturb(
        self, sources: Iterable[int], destinations: Iterable[int], disturbance: Disturbance, *, one_way: bool
    ) -> Disturbed:
        """Begin a disturbance. Returns: the handle for `calm`. Raises: LocalError: a probability is invalid."""
        disturbed = Disturbed(frozenset(sources), frozenset(destinations), one_way, disturbance)
        disturbance.on(LinkSpec(latency_s=0.0))  # raises before anything changes
        self._disturbed.append(disturbed)
        self._fold(disturbed.pairs())
        return disturbed

    def calm(self, disturbed: Disturbed | None) -> None:
        """End the disturbance `disturbed`; None: end all of them."""
        ended = [other for other in self._disturbed if disturbed is None or other is disturbed]
        self._disturbed = [other for other in self._disturbed if other not in ended]
        for other in ended:
            self._fold(other.pairs())

    def _fold(self, pairs: Iterable[tuple[int, int]]) -> None:
        for pair in pairs:
            present = [disturbed.disturbance for disturbed in self._disturbed if disturbed.covers(*pair)]
            if pair not in self._set and not present:
                self._now.pop(pair, None)
                continue
            spec = self._set.get(pair) or self._network.link(*pair)
            slowness = max((disturbance.slowness for disturbance in present), default=1.0)
            spec = replace(spec, rate_bytes_per_s=spec.rate_bytes_per_s / slowness)
            for disturbance in present:
                spec = disturbance.on(spec)
            self._now[pair] = spec


class Cuts:
    """All cuts in force, by place."""

    def __init__(self) -> None:
        self._cuts: list[Cut] = []
        self._found: dict[tuple[int, int], bool] = {}
        """(source, destination) -> cached result of `is_cut`; each change empties it. Many cuts make a search slow."""

    def add(self, sources: Iterable[int], destinations: Iterable[int], *, one_way: bool, now_s: float) -> Cut:
        cut = Cut(frozenset(sources), frozenset(destinations), one_way, now_s)
        self._cuts.append(cut)
        self._found.clear()
        return cut

    def remove(self, cut: Cut | None) -> None:
        """End the cut `cut`; None: end all cuts."""
        self._cuts = [] if cut is None else [other for other in self._cuts if other is not cut]
        self._found.clear()

    def __bool__(self) -> bool:
        return bool(self._cuts)

    def is_cut(self, source: int, destination: int) -> bool:
        # A fast path: every frame and call asks, and usually nothing is cut.
        if not self._cuts:
            return False
        found = self._found.get((source, destination))
        if found is None:
            found = any(cut.covers(source, destination) for cut in self._cuts)
            self._found[source, destination] = found
        return found

    def since_s(self, source: int, destination: int) -> float | None:
        """Return the time since which traffic between the pair is cut, in either direction; None: it is not cut."""
        return min(
            (cut.since_s for cut in self._cuts if cut.covers(source, destination) or cut.covers(destination, source)),
            default=None,
        )


def _either(one: float, other: float) -> float:
    """Return the probability of at least one of two independent events; exactly `one` if the other never happens."""
    return one + other - one * other if other else one
