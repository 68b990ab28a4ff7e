"""Reads a scenario from a TOML file, a network file or the name of a shipped scenario.

`SCENARIOS.md` explains the file. Sections `[model]`, `[training]` and `[wire]` are those of a run spec
(`protocol/spec.py`); `regions.py` defines `[network]`, and `strategy.py` `[[strategy]]`. `[experts]` sets fields of the
run spec's `swarm`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.simulate.regions import NetworkSection, Section, require, topology_of
from shoal.deploy.simulate.strategy import Strategy
from shoal.protocol.complaint import complaint
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.limits import EXPERTS_MAX, PEERS_MAX
from shoal.protocol.spec import AdapterSpec, ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec, WireSpec
from shoal.protocol.toml.defaults import fill_in
from shoal.protocol.toml_file import read_toml
from shoal.protocol.topology import ReadNetwork, Topology, WorkloadEntry, load_topology

SHIPPED = Path(__file__).parent / "scenarios"
STEPS = 8
"""The default number of steps: two to warm up, the others to measure."""
STEPS_MAX = 1_000_000
"""The most steps of a run. If a run shall end by time, its spec has this number, so that the time is up first."""
STRATEGIES_MAX = 64
_HEAD_SIZE = 128


class ChurnSection(Section, frozen=True):
    """The `[churn]` table: devices come and go as in a recorded trace."""

    trace: str
    """The path of the trace (`traces.py`), relative to the scenario's folder."""
    start_s: float | None = None
    """The second of the trace at which the run starts; None: when first half of the peak number of nodes is up."""
    speedup: float = 1.0
    """How many seconds of the trace pass in one simulated second."""

    def __post_init__(self) -> None:
        require(bool(self.trace), "trace is empty")
        require(self.start_s is None or 0.0 <= self.start_s < math.inf, f"start_s is {self.start_s}")
        require(0.0 < self.speedup < math.inf, f"speedup must be positive, is {self.speedup}")


class ExpertsSection(Section, frozen=True):
    """The `[experts]` table: experts are placed on members of each stage. `[model]` has the number of experts."""

    slots: int
    """The number of experts that a member of a stage holds in each layer of the stage."""
    holders: int | Literal["auto"] = "auto"
    """The least number of members that hold each expert, at most all members of the stage; "auto": a run's default. If
    `slots` are too few for it, members hold more experts. The coordinators choose the members by load."""
    loads: tuple[float, ...] = ()
    """The relative loads of the experts; empty: all equal."""

    def __post_init__(self) -> None:
        require(0 < self.slots <= EXPERTS_MAX, f"slots must be in [1, {EXPERTS_MAX}], is {self.slots}")
        if self.holders != "auto":
            require(0 < self.holders <= PEERS_MAX, f"holders must be in [1, {PEERS_MAX}], is {self.holders}")
        require(
            all(0.0 <= load < math.inf for load in self.loads) and (not self.loads or sum(self.loads) > 0.0),
            "loads must be 0 or more, and at least one above 0",
        )


class ScenarioFile(Section, frozen=True):
    """The content of a scenario file."""

    network: NetworkSection
    title: str = ""
    steps: int | None = None
    """The number of steps of every strategy's run; None: `STEPS`, or with `seconds` or churn as many as fit."""
    seconds: float | None = None
    """The virtual seconds after which a run ends; None: it is unlimited, or with churn `strategies.CHURN_SECONDS`."""
    stages: int | None = None
    """The number of stages; None: each layout's own choice or default."""
    model: ModelSpec = msgspec.field(default_factory=ModelSpec)
    training: TrainingSpec = msgspec.field(default_factory=TrainingSpec)
    wire: WireSpec = msgspec.field(default_factory=WireSpec)
    adapter: AdapterSpec | None = None
    """The adapters that train; the first device has the frozen base, the others fetch it. None: all weights train."""
    experts: ExpertsSection | None = None
    """How experts are placed; None: each member of a stage holds all experts of its layers."""
    churn: ChurnSection | None = None
    strategy: tuple[Strategy, ...] = ()
    """The strategies to compare; empty: `strategy.DEFAULT`, or with churn `strategy.CHURN_DEFAULT`."""

    def __post_init__(self) -> None:
        require(
            self.steps is None or 0 < self.steps <= STEPS_MAX, f"steps must be in [1, {STEPS_MAX}], is {self.steps}"
        )
        require(
            self.training.steps == TrainingSpec().steps,
            "training.steps has no effect here, since all strategies run as many steps: set `steps` above all tables",
        )
        require(self.seconds is None or 0.0 < self.seconds < math.inf, f"seconds must be positive, is {self.seconds}")
        require(
            self.stages is None or 0 < self.stages <= self.model.num_layers,
            f"stages must be in [1, {self.model.num_layers}], is {self.stages}",
        )
        require(len(self.strategy) <= STRATEGIES_MAX, f"more than {STRATEGIES_MAX} strategies")
        if self.experts is not None:
            self._check_experts(self.experts)
        names = [strategy.name for strategy in self.strategy]
        require(len(set(names)) == len(names), "two strategies have one name")

    def _check_experts(self, experts: ExpertsSection) -> None:
        num_experts = self.model.num_experts
        require(num_experts > 0, "[experts] means nothing in a dense model: model.num_experts is 0 or missing")
        require(experts.slots <= num_experts, f"experts.slots is {experts.slots}, of {num_experts} experts")
        require(
            len(experts.loads) in (0, num_experts), f"experts.loads has {len(experts.loads)} of {num_experts} experts"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A scenario as it was read: the common input of all strategies."""

    name: str
    title: str
    topology: Topology
    spec: RunSpec
    """The run spec; `training.steps` is the length of each strategy's run."""
    stages: int | None
    seconds: float | None = None
    watts: tuple[float | None, ...]
    """[N], the power of each device in watts while it trains; None: the scenario does not give it."""
    network: ReadNetwork | None
    """The network file; None: the scenario describes the network by regions."""
    trace: Path | None = None
    churn: ChurnSection | None = None
    expert_loads: tuple[float, ...] = ()
    """The relative loads of the experts; empty: all equal, or the run places no experts on single peers."""
    strategies: tuple[Strategy, ...] = ()

    @property
    def paper(self) -> WorkloadEntry | None:
        """The network file's figures of a run, from which the DT-FM objective computes a cost; None: there are none."""
        return self.network.file.workload if self.network is not None else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the fields of the network file that were not read, and on values that were assumed."""
        return self.network.notes if self.network is not None else ()


def shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def find_scenario(what: str) -> Scenario:
    """Return the scenario that `what` names: a scenario file, a network file, or a shipped scenario.

    Raises: LocalError, in one line: there is no such scenario, or the scenario is invalid.
    """
    path = Path(what).expanduser()
    if path.suffix == ".json":
        return _of_network(path)
    if path.suffix == ".toml" or path.is_file():
        return load_scenario(path)
    if what in shipped_names():
        return load_scenario(SHIPPED / f"{what}.toml")
    raise LocalError(f"{what!r} is neither a file nor a shipped scenario: {', '.join(shipped_names())}")


def read_scenario(path: Path) -> ScenarioFile:
    """Read a scenario file. Raises: LocalError: the file is missing or invalid."""
    try:
        with or_say(f"cannot read the scenario {path}"):
            return msgspec.convert(_fitted(read_toml(path)), ScenarioFile)
    except msgspec.DecodeError as error:  # ValidationError is a DecodeError
        raise LocalError(f"{path} is not a scenario: {complaint(error, ScenarioFile)}") from error


def _fitted(tables: dict[str, Any]) -> dict[str, Any]:
    stages = {"stages": tables["stages"]} if "stages" in tables else {}
    of_a_run = {name: tables[name] for name in ("model", "training") if name in tables} | {"swarm": stages}
    filled, _ = fill_in(of_a_run, RunSpec())
    return tables | {name: filled[name] for name in ("model", "training")}


def load_scenario(path: Path) -> Scenario:
    """Load a scenario with its network and trace. Raises: LocalError: a file is missing or invalid."""
    file = read_scenario(path)
    network: ReadNetwork | None = None
    watts = tuple(region.watts for region in file.network.region for _ in range(region.count))
    if file.network.file:
        topology, network = load_topology(path.parent / file.network.file)
        watts = network.file.watts
    else:
        try:
            topology = topology_of(file.network)
        except ShoalError as error:
            raise LocalError(f"{path}: {error}") from error
    steps = file.steps or (STEPS if file.seconds is None and file.churn is None else STEPS_MAX)
    try:
        training = msgspec.structs.replace(file.training, steps=steps)
        spec = _spec(path.stem, file.model, training, file.wire, file.experts, file.adapter)
        for strategy in file.strategy:
            strategy.applied_to(spec)
    except ValueError as error:
        raise LocalError(f"{path} is not a scenario: {error}") from error
    trace = None
    if file.churn is not None:
        trace = path.parent / file.churn.trace
        if not trace.is_file():
            raise LocalError(f"{path}: there is no trace {trace}")
    return Scenario(
        name=path.stem,
        title=file.title or path.stem,
        topology=topology,
        spec=spec,
        stages=file.stages,
        seconds=file.seconds,
        watts=watts,
        network=network,
        trace=trace,
        churn=file.churn,
        expert_loads=file.experts.loads if file.experts is not None else (),
        strategies=file.strategy,
    )


def _of_network(path: Path) -> Scenario:
    topology, network = load_topology(path)
    file = network.file
    try:
        model, training = run_of_workload(file.workload)
        spec = _spec(path.stem, model, training, WireSpec())
    except ValueError as error:
        raise LocalError(f"the workload of {path} is invalid: {error}") from error
    if file.num_stages is not None and not 0 < file.num_stages <= model.num_layers:
        raise LocalError(f"{path}: num_stages must be in [1, {model.num_layers}], is {file.num_stages}")
    return Scenario(
        name=path.stem,
        title=file.title or file.name or path.stem,
        topology=topology,
        spec=spec,
        stages=file.num_stages,
        watts=file.watts,
        network=network,
    )


def run_of_workload(paper: WorkloadEntry | None) -> tuple[ModelSpec, TrainingSpec]:
    """Return a decoder with the size that a network file gives, trained in microbatches of one sample.

    The feed-forward part of a layer has two matrices of 4 D² parameters each in the papers, and three of D · F each in
    our models; F = 8 D / 3 makes the sizes equal. `paper` None: GPT-3 XL on 2^20 tokens a step, as in the DT-FM paper.
    """
    dim = _HEAD_SIZE * max(1, round((paper.hidden_dim_of_model if paper else 0) / _HEAD_SIZE)) if paper else 2048
    context = (paper.sequence_length_tokens if paper else 0) or 2048
    tokens = (paper.global_batch_tokens if paper else 0.0) or 2.0**20
    heads = dim // _HEAD_SIZE
    model = ModelSpec(
        vocab_size=50_304,
        dim=dim,
        num_layers=(paper.num_layers if paper else 0) or 24,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_dim=8 * dim // 3,
        context=context,
    )
    training = TrainingSpec(
        steps=STEPS, microbatches_per_step=max(1, round(tokens / context)), microbatch_size=1, keep="recompute"
    )
    return model, training


def _spec(
    name: str,
    model: ModelSpec,
    training: TrainingSpec,
    wire: WireSpec,
    experts: ExpertsSection | None = None,
    adapter: AdapterSpec | None = None,
) -> RunSpec:
    swarm = SwarmSpec() if experts is None else SwarmSpec(expert_slots=experts.slots)
    if experts is not None and experts.holders != "auto":
        swarm = msgspec.structs.replace(swarm, expert_replicas=experts.holders)
    return RunSpec(
        name=name[:64],
        model=model,
        training=msgspec.structs.replace(training, validation_interval_steps=0),
        wire=wire,
        optimizer=OptimizerSpec(warmup_steps=0),
        swarm=swarm,
        adapter=adapter,
    )
