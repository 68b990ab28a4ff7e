"""Every strategy on the same path: a layout from whoever makes it, then one modelled run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.planning.layouts import LayoutName, Request, layout
from shoal.deploy.simulate.blocking import Lockstep
from shoal.deploy.simulate.modelled import Churn, ModelledRun, run_modelled
from shoal.deploy.simulate.outcome import Outcome
from shoal.deploy.simulate.scenario import STEPS_MAX, Scenario
from shoal.deploy.simulate.strategy import CHURN_DEFAULT, DEFAULT, KNOWN, Strategy
from shoal.deploy.simulate.traces import absent_at_first, load_trace, replay
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.spec import RunSpec

CHURN_SECONDS = 1800.0
"""How long a swarm lives through a trace if nothing else is said."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What the command line adds to a scenario."""

    seed: int = 0
    steps: int | None = None
    seconds: float | None = None
    trace: Path | None = None
    plan_seconds: float = 1.0
    """For a search, of one core."""
    timeline: bool = True
    """Keep what every device did when, which idle shares and pages need: 100 bytes a job."""
    on_progress: Callable[[float], None] = lambda share: None
    """Told which share of a strategy's run is over, in [0, 1]."""


def chosen_strategies(scenario: Scenario, names: str | None) -> tuple[Strategy, ...]:
    """Those of the scenario, or the comma-separated `names`: of the scenario first, then of `strategy.KNOWN`.

    Raises: LocalError: there is none of that name.
    """
    if names is None:
        default = DEFAULT if scenario.trace is None else CHURN_DEFAULT
        return scenario.strategies or tuple(KNOWN[name] for name in default)
    known = KNOWN | {strategy.name: strategy for strategy in scenario.strategies}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise LocalError(f"{name!r} is no strategy: take some of {', '.join(known)}")
    if not wanted:
        raise LocalError("no strategy is named")
    return tuple(known[name] for name in wanted)


def with_options(scenario: Scenario, options: Options) -> Scenario:
    """Lasts as long as `options` say: a time, or a trace, takes the place of the scenario's steps."""
    training = scenario.spec.training
    trace = options.trace or scenario.trace
    seconds = options.seconds or scenario.seconds
    if trace is not None and seconds is None and options.steps is None:
        seconds = CHURN_SECONDS
    if options.steps is not None:
        training = msgspec.structs.replace(training, steps=options.steps)
    elif options.seconds is not None or options.trace is not None:
        training = msgspec.structs.replace(training, steps=STEPS_MAX)
    return replace(
        scenario, spec=msgspec.structs.replace(scenario.spec, training=training), seconds=seconds, trace=trace
    )


def churn_of(scenario: Scenario, seed: int) -> tuple[Churn, ...]:
    """Raises: LocalError: the trace is none."""
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


def run_strategy(scenario: Scenario, strategy: Strategy, churn: Sequence[Churn], options: Options) -> Outcome:
    """Plan and simulate. What cannot be planned is an outcome too: one strategy's failure leaves the others alone."""
    events = tuple(churn) if strategy.churn else ()
    absent = absent_at_first(events)
    present = [device for device in range(scenario.topology.num_devices) if device not in absent]
    spec = spec_of(scenario, strategy)
    placement, cost = None, None
    begun_s = time.perf_counter()
    try:
        if strategy.layout == "live":
            spec = _live_spec(scenario, strategy, spec, present, options)
        else:
            placement = _placed(strategy.layout, _request(scenario, strategy, spec, present, options), present)
            if strategy.blocking == "no":  # which the objective is no model of
                cost = ThroughputObjective(scenario.topology, Workload.of(spec)).cost(placement)
        planned_s = time.perf_counter() - begun_s
        result = run_modelled(
            ModelledRun(
                topology=scenario.topology,
                spec=_longer(spec),
                stages=placement,
                seed=options.seed,
                churn=events,
                steps=spec.training.steps,
                seconds=scenario.seconds,
                record_timeline=options.timeline,
                blocking=Lockstep.of(strategy.blocking, placement),
                on_progress=options.on_progress,
            )
        )
    except ShoalError as error:
        return Outcome(strategy=strategy, placement=placement, predicted=cost, result=None, problem=str(error))
    return Outcome(strategy=strategy, placement=placement, predicted=cost, result=result, planned_s=planned_s)


def spec_of(scenario: Scenario, strategy: Strategy) -> RunSpec:
    spec = scenario.spec
    training = spec.training
    if strategy.s_max is not None:
        training = msgspec.structs.replace(training, s_max=strategy.s_max)
    return msgspec.structs.replace(spec, training=training, wire=strategy.wire or spec.wire)


def _longer(spec: RunSpec) -> RunSpec:
    """The run goes on after what we look at: its last steps would have nothing to overlap with."""
    steps = spec.training.steps + spec.training.s_max + 1
    return msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=steps))


def _request(
    scenario: Scenario, strategy: Strategy, spec: RunSpec, present: Sequence[int], options: Options
) -> Request:
    """For those who are there at the beginning. Raises: LocalError."""
    if not present:
        raise LocalError("nobody is there at the beginning")
    return Request(
        topology=scenario.topology.take(list(present)),
        workload=Workload.of(spec),
        paper=scenario.paper,
        stages=strategy.stages or scenario.stages,
        seed=options.seed,
        seconds=options.plan_seconds,
    )


def _placed(name: LayoutName, request: Request, present: Sequence[int]) -> Placement:
    """By the scenario's indexes. Raises: ShoalError."""
    found = layout(name, request)
    return Placement(
        stages=tuple(tuple(present[device] for device in stage) for stage in found.stages), bounds=found.bounds
    )


def _live_spec(
    scenario: Scenario, strategy: Strategy, spec: RunSpec, present: Sequence[int], options: Options
) -> RunSpec:
    """A run spec fixes how many stages there are: as many as our planner would take. Raises: ShoalError."""
    stages = strategy.stages or scenario.stages
    if stages is None:
        stages = len(layout("ours", _request(scenario, strategy, spec, present, options)).stages)
    swarm = msgspec.structs.replace(spec.swarm, stages=stages, min_peers=max(stages, len(present)))
    return msgspec.structs.replace(spec, swarm=swarm)
