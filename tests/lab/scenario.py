"""Reads a scenario of the lab: hosts, what lies between them, the run that they train, and what happens on the way.

One TOML file, closed: what is not a field is an error, in one line. `README.md` walks through one.
"""

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from internet.emulator import Line, NatKind, PathBetween
from shoal.protocol.complaint import complaint
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.sim.dirt import CLEAN, Dirt
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import convert_spec
from shoal.protocol.toml_file import read_toml

SCENARIOS = Path(__file__).parent / "scenarios"
WORDS = {
    "set": 2,
    "sever": 1,
    "join": 1,
    "cut": 0,
    "heal": 0,
    "kill": 0,
    "start": 0,
    "suspend": 0,
    "resume": 0,
    "address": 0,
    "leave": 0,
}
"""What may happen to a host, and how many words follow."""
SETTABLE = ("up_mbps", "down_mbps", "queue_ms", "last_mile_ms", "jitter_ms", "loss")
CLOSED_NATS = ("port-restricted", "symmetric")
"""Two hosts behind such routers do not meet: neither lets in who was not called first, at that very port."""
_ENDLESS = 1_000_000

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Probability = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Host(_Section, frozen=True):
    """A machine with one peer. The first one hosts the run."""

    name: str
    place: str = ""
    """The place, for `paths`; not said: the host's own name."""
    home: str = ""
    """Hosts of one home share its line, which the first of them describes, and need a NAT."""
    up_mbps: Positive = 1000.0
    down_mbps: Positive = 1000.0
    queue_ms: Positive = 100.0
    last_mile_ms: NotNegative = 0.0
    jitter_ms: NotNegative = 0.0
    loss: Probability = 0.0
    """Of a packet, on this line, each way."""
    nat: NatKind = "none"
    maps_ports: bool = False
    """The NAT opens ports for those who ask by NAT-PMP."""
    compute_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Share of one core that the peer may take."""
    cores: Annotated[float, msgspec.Meta(ge=0.01)] | None = None
    """Processors that the peer gets by a control group's quota, as a container does, over periods of 0.1 s
    (`cpu_groups.py`); None: no quota."""
    gflops: Positive | None = None
    """The speed of the simulated device within its share and quota; None: what the real one was seen to do."""
    probed_gflops: Positive | None = None
    """What the simulated device's probe finds; None: what the real one's found, or else its speed without a quota."""
    machine: str = ""
    """In virtual time, hosts of one machine share its `machine_cores`."""
    dirt: Dirt | None = None
    """In virtual time; None: the scenario's. Of hosts of one home the first one's is the line's."""
    joins_s: NotNegative = 0.0
    """When the peer gets its invite, after the run's host is up."""

    @property
    def line(self) -> Line:
        return Line(nat=self.nat, maps_ports=self.maps_ports, **{name: getattr(self, name) for name in SETTABLE})


class PathSection(_Section, frozen=True):
    between: tuple[str, str]
    """Two places."""
    ms: NotNegative
    """One way, without the last miles."""
    jitter_ms: NotNegative = 0.0


class Event(_Section, frozen=True):
    at_s: NotNegative
    """After the first step."""
    host: str
    do: str
    """One of `WORDS`, with what follows: `set up_mbps 5`, `sever OTHER`."""

    def __post_init__(self) -> None:
        word, *rest = self.do.split() or [""]
        if word not in WORDS:
            raise ValueError(f"do is {self.do!r}, and must be one of {', '.join(WORDS)}")
        if len(rest) != WORDS[word]:
            raise ValueError(f"do is {self.do!r}: {WORDS[word]} words follow {word!r}")
        if word == "set":
            if rest[0] not in SETTABLE:
                raise ValueError(f"do is {self.do!r}: only {', '.join(SETTABLE)} can be set")
            try:
                float(rest[1])
            except ValueError:
                raise ValueError(f"do is {self.do!r}: {rest[1]!r} is no number") from None

    @property
    def word(self) -> str:
        return self.do.split()[0]

    @property
    def rest(self) -> list[str]:
        return self.do.split()[1:]


class ScenarioFile(_Section, frozen=True):
    """The TOML file. The last six tables are those of a run file (`protocol/spec.py`)."""

    title: str
    seconds: Positive
    """How long the swarm trains from its first step on. Everything is measured in this time."""
    hosts: tuple[Host, ...]
    warm_up_s: NotNegative = 0.0
    """What is left out of it at the beginning, for the rate."""
    waits_s: Positive = 240.0
    """How long the first step may take."""
    inside_ms: NotNegative = 1.0
    """One way between two homes of one place, without the last miles."""
    elsewhere_ms: NotNegative = 20.0
    """One way between places that no path names."""
    machine_cores: Positive | None = None
    """In virtual time, the cores of each `machine`; hosts that name none are on one. None: enough."""
    dirt: Dirt = CLEAN
    """In virtual time: of every host that says none (`protocol/sim/dirt.py`)."""
    seed: int = 1
    nat_pairs: Literal["apart", "carried", "open"] = "apart"
    """What becomes, in virtual time, of two hosts behind NATs of their own, both port-restricted or symmetric: they do
    not meet; or a third host, behind no NAT, carries what they say to each other; or they meet as if there were no
    NATs. Real peers do what they can."""
    paths: tuple[PathSection, ...] = ()
    events: tuple[Event, ...] = ()
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    training: dict[str, Any] = {}
    swarm: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    wire: dict[str, Any] = {}

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names or len(set(names)) < len(names):
            raise ValueError("hosts must be one at least, and no two of one name")
        self._check_homes()
        for host in self.hosts:
            if host.cores is not None and (host.dirt or self.dirt).throttled < 1.0:
                raise ValueError(f"{host.name} has a quota of cores, and its dirt is throttled, too")
        for event in self.events:
            others = event.rest if event.word in ("sever", "join") else []
            for name in (event.host, *others):
                if name not in names:
                    raise ValueError(f"an event names {name!r}, and the hosts are {', '.join(names)}")
            if event.at_s > self.seconds:
                raise ValueError(f"an event comes at {event.at_s:g} s, and all is over at {self.seconds:g} s")
        places = {host.place or host.name for host in self.hosts}
        for path in self.paths:
            for place in path.between:
                if place not in places:
                    raise ValueError(f"a path names {place!r}, and the places are {', '.join(sorted(places))}")
        if self.warm_up_s >= self.seconds:
            raise ValueError(f"warm_up_s is {self.warm_up_s:g}, of {self.seconds:g} s in all")

    def _check_homes(self) -> None:
        first: dict[str, Host] = {}
        for host in self.hosts:
            before = first.setdefault(host.home or host.name, host)
            if before is host:
                continue
            if before.nat == "none":
                raise ValueError(f"{host.name} shares a home with {before.name}, and so {before.name} needs a nat")
            if host.line not in (Line(), before.line):
                raise ValueError(f"{host.name} shares the line of {before.name}, and says another one")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    file: ScenarioFile
    spec: RunSpec
    is_pinned: bool = False
    """The layers are divided evenly into `spec.swarm.stages` stages, and nobody ever moves (`pinned.py`)."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.file.hosts

    @property
    def lines(self) -> dict[str, Line]:
        """By the name of the home, or of the host that has a line of its own."""
        lines: dict[str, Line] = {}
        for host in self.hosts:
            lines.setdefault(host.home or host.name, host.line)
        return lines

    @property
    def line_of(self) -> dict[str, str]:
        return {host.name: host.home or host.name for host in self.hosts}

    @property
    def nat_pairs(self) -> list[tuple[str, str]]:
        """The pairs of hosts that no NAT lets meet, each once."""
        lines = {host.name: self.lines[self.line_of[host.name]] for host in self.hosts}
        closed = [name for name, line in lines.items() if line.nat in CLOSED_NATS and not line.maps_ports]
        pairs = itertools.combinations(closed, 2)
        return [(one, other) for one, other in pairs if self.line_of[one] != self.line_of[other]]

    def path(self, line: str, other: str) -> PathBetween:
        """Between two lines, one way, without their last miles."""
        places = dict[str, str]()
        for host in self.hosts:
            places.setdefault(host.home or host.name, host.place or host.name)
        ends = {places[line], places[other]}
        for path in self.file.paths:
            if set(path.between) == ends:
                return PathBetween(path.ms, path.jitter_ms)
        return PathBetween(self.file.inside_ms if len(ends) == 1 else self.file.elsewhere_ms)


def shipped() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.toml")))


def find_scenario(what: str) -> Scenario:
    """A file, or the name of one in `scenarios/`. Raises: LocalError, in one line."""
    path = Path(what)
    if path.suffix == ".toml":
        return load_scenario(path)
    if what not in shipped():
        raise LocalError(f"{what!r} is no scenario: take a file, or some of {', '.join(shipped())}")
    return load_scenario(SCENARIOS / f"{what}.toml")


def with_pin(scenario: Scenario, stages: int) -> Scenario:
    """The scenario with a layout of so many stages that never changes. Raises: LocalError, in one line."""
    if any(host.joins_s for host in scenario.hosts):
        raise LocalError(f"{scenario.name} cannot be pinned: a layout that stays has no place for who joins later")
    most = min(len(scenario.hosts), scenario.spec.model.num_layers)
    if not 0 < stages <= most:
        raise LocalError(f"{scenario.name} can be pinned to 1 to {most} stages, not {stages}")
    swarm = msgspec.structs.replace(scenario.spec.swarm, stages=stages)
    spec = msgspec.structs.replace(scenario.spec, swarm=swarm)
    return msgspec.structs.replace(scenario, name=f"{scenario.name}-pin{stages}", spec=spec, is_pinned=True)


def with_seconds(scenario: Scenario, seconds: float) -> Scenario:
    """The scenario, which is over after so many seconds; what would happen later does not."""
    events = tuple(event for event in scenario.file.events if event.at_s <= seconds)
    warm_up_s = min(scenario.file.warm_up_s, seconds / 4)
    file = msgspec.structs.replace(scenario.file, seconds=seconds, warm_up_s=warm_up_s, events=events)
    return msgspec.structs.replace(scenario, file=file)


def load_scenario(path: Path) -> Scenario:
    """Raises: LocalError, in one line: the file cannot be read, or says what cannot be."""
    try:
        file = msgspec.convert(read_toml(path), ScenarioFile)
    except OSError as error:
        raise LocalError(f"cannot read the scenario {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise LocalError(f"{path} is no scenario: {complaint(error, ScenarioFile)}") from error
    try:
        return Scenario(name=path.stem, file=file, spec=_spec(path.stem, file))
    except ShoalError as error:
        raise LocalError(f"{path} is no scenario: {error}") from error


def _spec(name: str, file: ScenarioFile) -> RunSpec:
    """The run, which never ends, validates only if the file says so, and begins when everybody has come.

    Its synchronous first steps are few, so that what is measured is what a run does for all of its time but the first
    minutes.
    """
    here = sum(host.joins_s == 0.0 for host in file.hosts)
    tables = {
        "name": f"lab-{name}",
        "model": file.model,
        "data": {"source": "python-library"} | file.data,
        "training": {"steps": _ENDLESS, "validation_interval_steps": 0, "synchronous_steps": 8} | file.training,
        "swarm": {"min_peers": here} | file.swarm,
        "optimizer": {"warmup_steps": 10} | file.optimizer,
        "wire": file.wire,
    }
    return convert_spec({table: said for table, said in tables.items() if said}, name=name)[0]


def changes(scenario: Scenario) -> list[float]:
    """The times at which something happens, the beginning and the end of what is measured among them."""
    file = scenario.file
    at_s = {event.at_s for event in file.events if file.warm_up_s < event.at_s < file.seconds}
    return sorted({file.warm_up_s, *at_s, file.seconds})


def spans(scenario: Scenario) -> list[tuple[float, float]]:
    """The stretches between events."""
    return list(itertools.pairwise(changes(scenario)))


World = Literal["real", "virtual"]
