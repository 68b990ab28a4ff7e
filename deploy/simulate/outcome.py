"""Turns the result of a strategy into figures, for a row of the table, the JSON file and the page."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shoal.coordinator.cost.placement import Cost, Placement
from shoal.deploy.base.words import counted
from shoal.deploy.planning.figures import Figures
from shoal.deploy.simulate.result import STEPS_MIN, WARM_UP_STEPS, JobKind, SimResult
from shoal.deploy.simulate.strategy import Strategy
from shoal.protocol.plan import Bound
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:  # this module loads torch, which `shoal plan` does not need
    from shoal.deploy.simulate.modelled import Churn

_BOUNDS: dict[Bound, str] = {
    "compute": "computing, stage {0}",
    "card": "the network of stage {0}",
    "paths": "paths beside stage {0}",
    "reduction": "reducing gradients, stage {0}",
    "round trip": "one step after the other",
    "commit": "one step after the other",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A strategy with its layout and its prediction; after the simulation, also with its result."""

    strategy: Strategy
    spec: RunSpec
    churn: "tuple[Churn, ...]" = ()
    placement: Placement | None = None
    """The layout; None: the simulated coordinators choose it, or `problem` says why there is none."""
    predicted: Cost | None = None
    """The cost by the throughput objective; None: the layout changes in the run, which the objective cannot model."""
    problem: str = ""
    """Why there is no result; empty: the strategy can be simulated."""
    planned_s: float = 0.0
    """The seconds of this machine's time that the search for the layout took."""
    result: SimResult | None = None
    figures: Figures | None = None
    """The costs, traffic and duration at the simulated pace; None: the run has no pace."""
    same_as: str = ""
    """The name of an earlier strategy with the same run; empty: there is none."""

    @property
    def run(self) -> object:
        """A value for finding strategies that have the same run: theirs are equal. None: the strategy cannot run."""
        if self.problem:
            return None
        return self.placement, self.strategy.layout == "live", self.spec, self.churn


class OutcomeRow(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an `Outcome`; None: there is no such figure. The warm-up does not count in rates."""

    strategy: str
    layout: str
    stages: tuple[tuple[int, ...], ...] | None
    """The device indexes of each stage, in pipeline order."""
    bounds: tuple[int, ...] | None
    """The layers of stage k are bounds[k] to bounds[k + 1] - 1."""
    steps: int
    tokens_per_s: float | None
    """Tokens/s at the median pace; of a `live` layout after `SimResult.settled_from_s`, standstills included."""
    step_s: float | None
    tokens_per_s_below: float | None
    """An upper bound of tokens/s, for a run that committed only its first step although there was time for more."""
    predicted_tokens_per_s: float | None
    measured_over_predicted: float | None
    bytes_per_step: float | None
    """The mean bytes that all devices together send in a step; the first step counts only if it is the only one."""
    idle_share: float | None
    """The share of time after the warm-up in which devices with a stage have no job but probes; None: unknown."""
    bound_by: str
    """Why the row has no speed. If it has one: the predicted bottleneck or, without a prediction, how many plans were
    made and how many devices were lost."""
    note: str
    """A note on the figures: why the run was ended early, and if less warm-up than usual was left out; or empty."""
    same_as: str
    figures: Figures | None
    duplicates: int
    given_up: int
    failures: tuple[str, ...]
    simulated_s: float | None
    wall_s: float | None
    planned_s: float
    trace_hash: str


def row_of(outcome: Outcome) -> OutcomeRow:
    result, placement, predicted = outcome.result, outcome.placement, outcome.predicted
    tokens_per_s = _finite(pace(outcome.strategy, result)) if result is not None else None
    expected = _finite(predicted.parts.get("tokens_per_s", math.nan)) if predicted is not None else None
    return OutcomeRow(
        strategy=outcome.strategy.name,
        layout=outcome.strategy.layout,
        stages=placement.stages if placement is not None else None,
        bounds=placement.bounds if placement is not None else None,
        steps=len(result.steps) if result is not None else 0,
        tokens_per_s=tokens_per_s,
        step_s=result.tokens_per_step / tokens_per_s if result is not None and tokens_per_s else None,
        predicted_tokens_per_s=expected,
        measured_over_predicted=tokens_per_s / expected if tokens_per_s and expected else None,
        tokens_per_s_below=_below(result),
        bytes_per_step=float(result.bytes_per_step.sum()) if result and result.steps else None,
        idle_share=idle_share(outcome),
        bound_by=outcome.problem or _trouble(result) or bound_by(predicted) or _seen(outcome),
        note=_note(result),
        same_as=outcome.same_as,
        figures=outcome.figures,
        duplicates=result.duplicates if result is not None else 0,
        given_up=result.given_up if result is not None else 0,
        failures=result.failures if result is not None else (),
        simulated_s=result.ending.at_s if result is not None else None,
        wall_s=result.ending.wall_s if result is not None else None,
        planned_s=outcome.planned_s,
        trace_hash=result.trace_hash if result is not None else "",
    )


def pace(strategy: Strategy, result: SimResult) -> float:
    """Return tokens/s as in `OutcomeRow.tokens_per_s`; NaN if there are too few steps."""
    if strategy.layout != "live" or not math.isfinite(result.step_s):
        return result.tokens_per_s
    settled = result.tokens_per_s_from(result.settled_from_s)
    return settled if math.isfinite(settled) else result.tokens_per_s


def idle_share(outcome: Outcome) -> float | None:
    """Return the share of time, after the warm-up and over all devices with a stage, in which a device had no job but
    speed probes; None: there is no timeline, or there are too few steps."""
    result = outcome.result
    if result is None or len(result.steps) < STEPS_MIN or not any(result.timeline):
        return None
    begin_s = result.steps[result.left_out_steps].committed_at_s
    end_s = result.steps[-1].committed_at_s
    if outcome.placement is not None:
        devices = [device for stage in outcome.placement.stages for device in stage]
    else:
        devices = [device for device, spans in enumerate(result.timeline) if spans]
    seconds: dict[JobKind, float] = {}
    for device in devices:
        for kind, started_s, ended_s in result.timeline[device]:
            inside_s = max(0.0, min(ended_s, end_s) - max(started_s, begin_s))
            seconds[kind] = seconds.get(kind, 0.0) + inside_s
    steady_s = len(devices) * (end_s - begin_s)
    return max(0.0, 1.0 - sum(s / steady_s for kind, s in seconds.items() if kind != "probe"))


def bound_by(cost: Cost | None) -> str:
    """Return what limits a step by the throughput objective, or why no step is possible. Empty: unknown."""
    if cost is None or cost.bound is None:
        return cost.why if cost is not None else ""
    bound, stage = cost.bound
    return _BOUNDS[bound].format(stage)


def _seen(outcome: Outcome) -> str:
    """Summarise a run without a prediction: how many plans, divisions into other stages, and lost devices it had."""
    result = outcome.result
    if result is None:
        return ""
    number = result.count("division")
    divisions = f"{counted(number, 'other division')}, " if number else ""
    return f"{counted(result.count('plan'), 'plan')}, {divisions}{counted(result.count('left'), 'device')} lost"


def _trouble(result: SimResult | None) -> str:
    if result is None or math.isfinite(result.step_s):
        return ""
    if result.failures:
        return result.failures[0]
    done = f"{counted(len(result.steps), 'step') if result.steps else 'no steps'} in {result.ending.at_s:,.0f} s"
    return f"{done}: {result.ending.standstill}" if result.ending.standstill else done


def _below(result: SimResult | None) -> float | None:
    """Return an upper bound of tokens/s for a run that committed one step: the second step would have taken longer than
    the time left. (The first does not count, since it includes joining.)"""
    if result is None or len(result.steps) != 1 or result.ending.at_s <= result.steps[0].committed_at_s:
        return None
    return result.tokens_per_step / (result.ending.at_s - result.steps[0].committed_at_s)


def _note(result: SimResult | None) -> str:
    if result is None:
        return ""
    notes = [result.ending.cut_off] if result.ending.cut_off else []
    if math.isfinite(result.step_s) and result.left_out_steps < WARM_UP_STEPS:
        counted = len(result.steps) - result.left_out_steps - 1
        notes.append(
            f"of {len(result.steps)} steps {counted} {'is' if counted == 1 else 'are'} counted and "
            f"{result.left_out_steps or 'none'} left out as warm-up; from "
            f"{WARM_UP_STEPS + STEPS_MIN} steps on {WARM_UP_STEPS} are left out"
        )
    return "; ".join(notes)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
