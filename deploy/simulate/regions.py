"""Describes networks by regions of equal devices and paths between places, and makes a topology of them."""

import math

import msgspec
import numpy as np

from shoal.protocol.errors import LocalError
from shoal.protocol.limits import SCENARIO_DEVICES_MAX
from shoal.protocol.topology import Floats, Topology, check_everybody_is_reached, close_paths, make_topology


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a scenario file. Its checks raise ValueError, to which msgspec adds the path of the field."""


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


class Region(Section, frozen=True):
    """A region: `count` equal devices at one place."""

    name: str
    count: int
    place: str = ""
    """The name of the region's place, as paths use it; empty: `name`. Regions may share a place, for example the DSL
    and the fibre machines of one town."""
    tflops: float = 45.0
    """The speed of a device in TFLOP/s, as measured on real microbatches; the peak in a data sheet is higher."""
    memory_gb: float = 16.0
    up_mbps: float = math.inf
    """The upload rate of a machine's network card, in Mbit/s."""
    down_mbps: float = math.inf
    devices_per_card: int = 1
    """The number of devices in a machine; they share its network card."""
    last_mile_ms: float = 0.0
    """The one-way latency that a device of this region adds to each of its paths."""
    inside_ms: float = 0.1
    """The one-way latency between two machines at the region's place."""
    inside_mbps: float = 10_000.0
    machine_ms: float = 0.01
    """The one-way latency between two devices of one machine."""
    machine_mbps: float = 100_000.0
    has_text: bool = True
    """True if the devices have the run's text, so that they may hold stage 0."""
    watts: float | None = None
    """Watts that a device takes while it trains, with its share of the rest of its machine; None: unknown."""
    behind_nat: bool = False
    """True if each machine is behind its own router: two such machines cannot connect."""

    def __post_init__(self) -> None:
        require(bool(self.name), "a region needs a name")
        for name in ("count", "devices_per_card"):
            value = getattr(self, name)
            require(0 < value <= SCENARIO_DEVICES_MAX, f"{name} must be in [1, {SCENARIO_DEVICES_MAX}], is {value}")
        for name in ("tflops", "memory_gb", "inside_mbps", "machine_mbps"):
            require(0.0 < getattr(self, name) < math.inf, f"{name} must be positive, is {getattr(self, name)}")
        for name in ("up_mbps", "down_mbps"):
            require(getattr(self, name) > 0.0, f"{name} must be positive, is {getattr(self, name)}")
        require(self.watts is None or 0.0 < self.watts < math.inf, f"watts must be positive, is {self.watts}")
        for name in ("last_mile_ms", "inside_ms", "machine_ms"):
            require(0.0 <= getattr(self, name) < math.inf, f"{name} must be 0 or more, is {getattr(self, name)}")

    @property
    def at(self) -> str:
        return self.place or self.name


class Elsewhere(Section, frozen=True):
    """The default path, between any two places for which the file gives no path."""

    latency_ms: float
    mbps: float

    def __post_init__(self) -> None:
        require(0.0 <= self.latency_ms < math.inf, f"latency_ms must be 0 or more, is {self.latency_ms}")
        require(0.0 < self.mbps < math.inf, f"mbps must be positive, is {self.mbps}")


class Path(Elsewhere, frozen=True):
    """A network path between two places; a path that names one place twice is between machines at this place."""

    between: tuple[str, str]
    back_mbps: float | None = None
    """The rate from the second place to the first, in Mbit/s; None: `mbps`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        back = self.back_mbps
        require(back is None or 0.0 < back < math.inf, f"mbps must be positive, is {back}")


class NetworkSection(Section, frozen=True):
    """The network: either `file`, or regions and paths."""

    file: str = ""
    """The path of a network file (`protocol/topology.py`), relative to the scenario's folder; empty: no file."""
    region: tuple[Region, ...] = ()
    path: tuple[Path, ...] = ()
    elsewhere: Elsewhere | None = None
    unreachable: tuple[tuple[str, str], ...] = ()
    """Pairs of device names (such as `home-0`) that cannot reach each other."""

    def __post_init__(self) -> None:
        require(bool(self.file) != bool(self.region), "give either file or regions")
        require(
            not self.file or not (self.path or self.elsewhere or self.unreachable),
            "paths are for regions, not for a file",
        )
        names = [region.name for region in self.region]
        require(len(set(names)) == len(names), "two regions have one name")
        devices = sum(region.count for region in self.region)
        require(devices <= SCENARIO_DEVICES_MAX, f"{devices} devices are more than {SCENARIO_DEVICES_MAX}")
        places = {region.at for region in self.region}
        for path in self.path:
            for place in path.between:
                require(place in places, f"a path names {place!r}, where no region is")


def topology_of(network: NetworkSection) -> Topology:
    """Return the topology of `network`. Devices are in the order of their regions, named `region-number`.

    Raises: LocalError: two places have no path, or `Topology` refuses a value.
    """
    regions = network.region
    latency_RR, rate_RR = _between_regions(network)
    region = np.repeat(np.arange(len(regions)), [r.count for r in regions])
    number = np.concatenate([np.arange(r.count) for r in regions])

    def each(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)[region]

    card_of = np.array([r.devices_per_card for r in regions])[region]
    # A card has the number of the first device of its machine.
    card = np.arange(len(region)) - number % card_of
    last_mile_s = each([r.last_mile_ms * 1e-3 for r in regions])
    latency_s = latency_RR[np.ix_(region, region)] + last_mile_s[:, None] + last_mile_s[None, :]
    bytes_per_s = rate_RR[np.ix_(region, region)].copy()
    same = card[:, None] == card[None, :]
    latency_s = np.where(same, each([r.machine_ms * 1e-3 for r in regions])[:, None], latency_s)
    bytes_per_s = np.where(same, each([_bytes_per_s(r.machine_mbps) for r in regions])[:, None], bytes_per_s)
    names = tuple(f"{regions[r].name}-{n}" for r, n in zip(region, number, strict=True))
    behind_nat = np.array([r.behind_nat for r in regions])[region]
    close_paths(bytes_per_s, card, names, behind_nat, network.unreachable)
    topology = make_topology(
        latency_s,
        bytes_per_s,
        flop_per_s=each([r.tflops * 1e12 for r in regions]),
        memory_bytes=each([r.memory_gb * 1e9 for r in regions]),
        up_bytes_per_s=each([_bytes_per_s(r.up_mbps) for r in regions]),
        down_bytes_per_s=each([_bytes_per_s(r.down_mbps) for r in regions]),
        card=card,
        names=names,
        regions=tuple(regions[r].name for r in region),
        may_feed=each([float(r.has_text) for r in regions]),
    )
    check_everybody_is_reached(topology)
    return topology


def _between_regions(network: NetworkSection) -> tuple[Floats, Floats]:
    """Return (one-way latency in seconds, bytes/s) between regions, each [R, R], without the latency of last miles.
    Raises: LocalError: two places have no path."""
    regions, elsewhere = network.region, network.elsewhere
    paths: dict[tuple[str, str], tuple[float, float]] = {}
    for path in network.path:
        a, b = path.between
        paths[b, a] = (path.latency_ms, path.mbps if path.back_mbps is None else path.back_mbps)
        paths[a, b] = (path.latency_ms, path.mbps)
    size = len(regions)
    latency_s, bytes_per_s = np.zeros((size, size)), np.zeros((size, size))
    for i, here in enumerate(regions):
        for j, there in enumerate(regions):
            found = paths.get((here.at, there.at))
            if found is None and here.at == there.at:
                found = (max(here.inside_ms, there.inside_ms), min(here.inside_mbps, there.inside_mbps))
            if found is None and elsewhere is not None:
                found = (elsewhere.latency_ms, elsewhere.mbps)
            if found is None:
                raise LocalError(f"there is no path between {here.at!r} and {there.at!r}, and no [network.elsewhere]")
            latency_s[i, j], bytes_per_s[i, j] = found[0] * 1e-3, _bytes_per_s(found[1])
    return latency_s, bytes_per_s


def _bytes_per_s(mbps: float) -> float:
    return mbps * 1e6 / 8.0
