"""Formats a run as plain lines for a log, a pipe and the head of `shoal status`. Pure."""

import re
from collections.abc import Sequence

from shoal.deploy.base.words import duration, said_loss
from shoal.deploy.dashboard.view import View
from shoal.deploy.record.report import StepDone
from shoal.deploy.terminal.tables import busiest, experts_by_stage

_SPAN = re.compile(r", for \d+ (s|min|h)")


def status_lines(view: View) -> Sequence[str]:
    """Return the lines that `shoal status` prints above its tables; before the first plan there is only one line."""
    if view.sequence == 0:
        return (f"run {view.run} ({view.name}): {view.phase}",)
    left = f", {duration(view.left_s)} left" if view.left_s is not None and view.step < view.steps else ""
    stands = f", {view.standstill}" if view.standstill else left
    return (
        f"run {view.run} ({view.name}), up {duration(view.elapsed_s)}",
        f"{view.phase}{stands}",
        step_line(view),
        f"plan {view.sequence}: {view.reason}",
        *current_pace(view),
        *(f"careful: {risk}" for risk in current_risks(view)),
    )


def step_line(view: View, step: StepDone | None = None) -> str:
    """Return a line about `step` (None: the view's newest step), with figures of the run."""
    done, loss, staleness = view.step, view.loss, view.staleness_steps_mean
    if step is not None:
        done, loss, staleness = step.step + 1, step.loss, step.staleness_mean
    return "  ".join(
        (
            f"step {done}/{view.steps}",
            f"loss {said_loss(loss)}",
            f"val {said_loss(view.validation_loss)}",
            said_rate(view),
            f"staleness {staleness:.2f}",
            f"term {view.term}, coordinator {view.coordinator_name or 'unknown'}",
        )
    )


def said_rate(view: View) -> str:
    """Return the run's rate, such as `1,200 tokens/s`, with a dash as the number while the rate is unknown."""
    known = view.tokens_per_s or (view.tokens_per_s is not None and view.standstill)
    return f"{view.tokens_per_s:,.0f} tokens/s" if known else "- tokens/s"


def current_pace(view: View) -> tuple[str, ...]:
    """Return up to two sentences, on predicted and actual speed and on wire formats; none once the run is done."""
    return tuple(said for said in (view.foreseen, view.formats) if said and view.step < view.steps)


def current_risks(view: View) -> tuple[str, ...]:
    """Return the view's risks; empty once the run is done."""
    return view.risks if view.step < view.steps else ()


def trouble(view: View) -> str:
    """Return why the run stands still, without the growing duration, so that texts can be compared; "": it does not."""
    return _SPAN.sub("", view.phase) if view.standstill else ""


def expert_lines(view: View) -> list[str]:
    """Return a line per stage with experts: for the busiest, shares of the tokens in % and how many peers have them."""
    lines = []
    for stage, experts in experts_by_stage(view):
        shown = busiest(experts)
        what = f"experts of stage {stage}" + (f", the busiest {len(shown)}" if len(shown) < len(experts) else "")
        loads = " ".join("-" if e.load is None else f"{100 * e.load / len(experts):.0f}" for e in shown)
        copies = " ".join(str(len(e.holders) + len(e.coming)) for e in shown)
        lines.append(f"{what}: load {loads} %, copies {copies}")
    return lines
