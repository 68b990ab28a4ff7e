"""Runs strategies: makes the layout of a strategy, then simulates one run with it."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from shoal.coordinator.allocate.at_once import plan_at_once
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.planning.figures import Figures, Wishes, figures_of
from shoal.deploy.planning.layouts import LayoutRequest, layout
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, absent_at_first, run_modelled
from shoal.deploy.simulate.outcome import Outcome, pace
from shoal.deploy.simulate.result import SETTLED_S, STEPS_MIN, WARM_UP_STEPS, SimResult
from shoal.deploy.simulate.scenario import STEPS, STEPS_MAX, Scenario
from shoal.deploy.simulate.strategy import CHURN_DEFAULT, DEFAULT, KNOWN, Strategy
from shoal.deploy.simulate.traces import load_trace, replay
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.sim.dirt import CLEAN, Dirt
from shoal.protocol.spec import AUTO_STAGES, RunSpec

CHURN_SECONDS = 1800.0
"""The default length of a run with a trace, in virtual seconds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyOptions:
    """Options that the command line adds to a scenario."""

    seed: int = 0
    steps: int | None = None
    seconds: float | None = None
    trace: Path | None = None
    timeline: bool = True
    """True: keep each device's timeline, for idle shares and pages. It takes 100 bytes a job."""
    dirt: Dirt = CLEAN
    """The disturbances of all devices and lines."""
    wishes: Wishes = field(default_factory=Wishes)
    on_progress: Callable[[float], None] = lambda share: None
    """Called during a run with the share of the run that is over, in [0, 1]."""


def parse_dirt(text: str | None) -> Dirt:
    """Return the disturbances that `FIELD=NUMBER,…` describes; fields as in `Dirt`. Raises: LocalError: bad `text`."""
    try:
        fields = dict(part.strip().split("=") for part in text.split(",")) if text else {}
        return msgspec.convert(fields, Dirt, strict=False)
    except ValueError as error:  # ValidationError is a ValueError
        known = ", ".join(Dirt.__struct_fields__)
        raise LocalError(f"{text!r} is no dirt, as compute_sd=0.3,wander_sd=0.2 is ({error}): take {known}") from error


@dataclass(frozen=True, kw_only=True)
class StrategyPatience:
    """Limits for the strategies after the first one: a strategy that is far slower than the first is cut off."""

    name: str
    """The name of the first strategy."""
    virtual_s: float
    """The limit in virtual time: `VIRTUAL_TIMES` times as long as the first strategy ran."""
    step_s: float
    """The step time of the first strategy's run, in virtual seconds."""
    real_s: float
    """The limit in real time: seconds on the clock of this machine."""

    @classmethod
    def beside(cls, first: Outcome, real_seconds: float) -> "StrategyPatience | None":
        """Return the limits for later strategies; None: `first` has no pace. Args: real_seconds: the least `real_s`."""
        result = first.result
        if result is None or not math.isfinite(result.step_s):
            return None
        return cls(
            name=first.strategy.name,
            virtual_s=VIRTUAL_TIMES * result.ending.at_s,
            step_s=result.step_s,
            real_s=max(real_seconds, REAL_TIMES * result.ending.wall_s),
        )

    def watch(self) -> Callable[[], str]:
        """Start measuring real time. Return a function that says why a limit is exceeded; empty: none is."""
        begun_s = time.perf_counter()

        def ends() -> str:
            if asyncio.get_running_loop().time() >= self.virtual_s:
                return (
                    f"cut off at {self.virtual_s:,.0f} s of virtual time, {VIRTUAL_TIMES:g} times what {self.name} took"
                )
            if time.perf_counter() - begun_s >= self.real_s:
                return f"cut off after {self.real_s:,.0f} s of this machine's time (--patience)"
            return ""

        return ends


VIRTUAL_TIMES = 4.0
REAL_TIMES = 3.0
"""Later strategies may take `VIRTUAL_TIMES` times the virtual and `REAL_TIMES` times the real time of the first."""
LIVE_MEASURED_S = 60.0
"""The least virtual time that a `live` run lasts after `SETTLED_S`, so that its rate can be measured."""


def chosen_strategies(scenario: Scenario, names: str | None) -> tuple[Strategy, ...]:
    """Return the strategies with the comma-separated `names`, from the scenario or else from `strategy.KNOWN`. Without
    `names`, return all strategies of the scenario, or else the default ones.

    Raises: LocalError: a name is unknown, or `names` has no name.
    """
    if names is None:
        default = DEFAULT if scenario.trace is None else CHURN_DEFAULT
        return scenario.strategies or tuple(KNOWN[name] for name in default)
    known = KNOWN | {strategy.name: strategy for strategy in scenario.strategies}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise LocalError(f"{name!r} is not a strategy: take some of {', '.join(known)}")
    if not wanted:
        raise LocalError("no strategy is named")
    return tuple(known[name] for name in wanted)


def with_options(scenario: Scenario, options: StrategyOptions) -> Scenario:
    """Return the scenario with the run length and the trace of `options`. If `options` has a time or a trace, but no
    number of steps, only time ends the run. Raises: LocalError: the run has too few steps for a figure."""
    training = scenario.spec.training
    trace = options.trace or scenario.trace
    seconds = options.seconds or scenario.seconds
    if trace is not None and seconds is None and options.steps is None:
        seconds = CHURN_SECONDS
    if options.steps is not None:
        training = msgspec.structs.replace(training, steps=options.steps)
    elif options.seconds is not None or options.trace is not None:
        training = msgspec.structs.replace(training, steps=STEPS_MAX)
    if training.steps < STEPS_MIN:
        raise LocalError(
            f"{training.steps} step is too few: a figure needs {STEPS_MIN} steps at least, and "
            f"{STEPS_MIN + WARM_UP_STEPS} to leave the first two out as warm-up (--steps)"
        )
    return replace(
        scenario, spec=msgspec.structs.replace(scenario.spec, training=training), seconds=seconds, trace=trace
    )


def churn_of(scenario: Scenario, seed: int) -> tuple[Churn, ...]:
    """Return the events of the scenario's trace; none without a trace. Raises: LocalError: the trace is invalid."""
    if scenario.trace is None:
        return ()
    section = scenario.churn
    return replay(
        load_trace(scenario.trace, seed=seed),
        num_devices=scenario.topology.num_devices,
        seconds=scenario.seconds or CHURN_SECONDS,
        start_s=section.start_s if section is not None else None,
        speedup=section.speedup if section is not None else 1.0,
    )


def prepare(scenario: Scenario, strategy: Strategy, churn: Sequence[Churn], options: StrategyOptions) -> Outcome:
    """Make the layout of a strategy. A failure becomes the outcome's `problem`: the other strategies still run."""
    events = tuple(churn) if strategy.churn else ()
    absent = absent_at_first(events)
    present = [device for device in range(scenario.topology.num_devices) if device not in absent]
    spec = strategy.applied_to(scenario.spec)
    placement, cost, problem = None, None, ""
    begun_s = time.perf_counter()
    try:
        if strategy.layout == "live":  # min_peers: the run begins when all present peers have joined
            stages = strategy.stages or scenario.stages or AUTO_STAGES
            swarm = msgspec.structs.replace(spec.swarm, stages=stages, min_peers=max(1, len(present)))
            spec = msgspec.structs.replace(spec, swarm=swarm)
        else:
            found = layout(strategy.layout, _request(scenario, strategy, spec, present, options))
            placement = Placement(
                stages=tuple(tuple(present[device] for device in stage) for stage in found.stages), bounds=found.bounds
            )
            cost = ThroughputObjective(scenario.topology, Workload.of(spec)).cost(placement)
            problem = cost.why
    except ShoalError as error:
        problem = str(error)
    return Outcome(
        strategy=strategy,
        spec=spec,
        churn=events,
        placement=placement,
        predicted=cost,
        problem=problem,
        planned_s=time.perf_counter() - begun_s,
    )


def at_once(scenario: Scenario, strategy: Strategy, options: StrategyOptions) -> tuple[Placement, Cost] | None:
    """Return (layout, its cost), made by the planner's rule without a search; None: no layout is possible."""
    request = _request(
        scenario, strategy, strategy.applied_to(scenario.spec), range(scenario.topology.num_devices), options
    )
    try:
        return plan_at_once(request.topology, request.workload, num_stages=request.stages)
    except ShoalError:
        return None


def play(
    scenario: Scenario, prepared: Outcome, options: StrategyOptions, *, patience: StrategyPatience | None = None
) -> Outcome:
    """Simulate a prepared strategy, and return its outcome with the result. Args: patience: limits; None: no limits."""
    if prepared.problem:
        return prepared
    strategy, spec = prepared.strategy, prepared.spec
    try:
        limits = RunLimits(steps=spec.training.steps, steps_after=spec.training.s_max + 1, seconds=scenario.seconds)
        if strategy.layout == "live" and options.steps is None and limits.seconds is None:
            measured_s = max(LIVE_MEASURED_S, STEPS * patience.step_s if patience is not None else 0.0)
            limits = replace(limits, steps=STEPS_MAX, seconds=SETTLED_S + measured_s)
        if patience is not None:
            # The patience is checked about once in a step of the first strategy, so a slow run is noticed soon.
            look_every_s = min(limits.look_every_s, max(patience.step_s, 0.1))
            if strategy.layout == "live":
                patience = replace(patience, virtual_s=math.inf)
            limits = replace(limits, look_every_s=look_every_s, is_enough=patience.watch())
        run = ModelledRun(
            topology=scenario.topology,
            spec=spec,
            stages=prepared.placement,
            seed=options.seed,
            churn=prepared.churn,
            limits=limits,
            record_timeline=options.timeline,
            dirt=options.dirt,
            expert_loads=scenario.expert_loads or None,
            on_progress=options.on_progress,
        )
        result = run_modelled(run)
    except ShoalError as error:
        return replace(prepared, problem=str(error))
    return replace(prepared, result=result, figures=_figures(scenario, strategy, result, options.wishes))


def _figures(scenario: Scenario, strategy: Strategy, result: SimResult, wishes: Wishes) -> Figures | None:
    tokens_per_s = pace(strategy, result)
    if not math.isfinite(tokens_per_s):
        return None
    card = scenario.topology.card
    crossed = np.where(card[:, None] == card[None, :], 0.0, result.bytes_per_step)
    worked = [device for device, busy_s in enumerate(result.busy_s) if busy_s > 0.0]
    return figures_of(
        scenario.topology,
        scenario.watts,
        wishes,
        scenario.spec,
        parameters=Workload.of(scenario.spec).num_parameters,
        tokens_per_s=tokens_per_s,
        step_s=result.tokens_per_step / tokens_per_s,
        sent_bytes={device: float(crossed[device].sum()) for device in worked},
        received_bytes={device: float(crossed[:, device].sum()) for device in worked},
    )


def _request(
    scenario: Scenario, strategy: Strategy, spec: RunSpec, present: Sequence[int], options: StrategyOptions
) -> LayoutRequest:
    """Return a request for a layout of the devices in `present`. Raises: LocalError: `present` is empty."""
    if not present:
        raise LocalError("no device is present at the beginning")
    return LayoutRequest(
        topology=scenario.topology.take(list(present)),
        workload=Workload.of(spec),
        paper=scenario.paper,
        stages=strategy.stages or scenario.stages,
        seed=options.seed,
    )
