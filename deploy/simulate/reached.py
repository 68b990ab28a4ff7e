"""Compares a live run, in which the swarm's own coordinators choose the layouts, with a run that has the planned layout
from the beginning.
"""

import math
from collections.abc import Sequence

import msgspec

from shoal.deploy.base.words import printable
from shoal.deploy.simulate.outcome import Outcome
from shoal.deploy.simulate.result import SETTLED_S

WORK_S = 600.0
"""Tokens are compared over the first `WORK_S` virtual seconds, or over the live run if it is shorter."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A live run compared with the run of the planned layout."""

    live: str
    planned: str
    from_s: float
    """`tokens_per_s` is measured from this virtual time on."""
    tokens_per_s: float
    """Tokens/s of the live run, standstills included."""
    planned_tokens_per_s: float
    """Tokens/s of the planned layout, at its simulated pace."""
    work_by_s: float
    """`work_share` counts the tokens up to this virtual time."""
    work_share: float
    """The tokens of the live run up to `work_by_s`, divided by the tokens that the planned pace gives in that time."""
    first_step_s: float
    """The virtual time at which the live run's first step ended, after measuring, planning and filling the pipeline."""
    standstill_s: float
    num_plans: int
    num_divisions: int

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.planned_tokens_per_s


def reached(outcomes: Sequence[Outcome]) -> Reached | None:
    """Compare the first live strategy with the first planned one of the same staleness, wire formats, number of stages
    and churn. None: one of the two is missing or has no pace."""
    live = next((outcome for outcome in outcomes if outcome.strategy.layout == "live"), None)
    if live is None or live.result is None or not live.result.steps:
        return None
    planned = next((o for o in outcomes if o.strategy.layout == "ours" and _alike(o, live)), None)
    result, from_s = live.result, live.result.settled_from_s
    tokens_per_s = result.tokens_per_s_from(from_s)
    if planned is None or planned.result is None or not math.isfinite(planned.result.step_s + tokens_per_s):
        return None
    planned_tokens_per_s = planned.result.tokens_per_s
    work_by_s = min(WORK_S, result.ending.at_s)
    return Reached(
        live=live.strategy.name,
        planned=planned.strategy.name,
        from_s=from_s,
        tokens_per_s=tokens_per_s,
        planned_tokens_per_s=planned_tokens_per_s,
        work_by_s=work_by_s,
        work_share=result.tokens_by(work_by_s) / (planned_tokens_per_s * work_by_s),
        first_step_s=result.steps[0].committed_at_s,
        standstill_s=result.standstill_s,
        num_plans=result.count("plan"),
        num_divisions=result.count("division"),
    )


def _alike(one: Outcome, other: Outcome) -> bool:
    a, b = one.strategy, other.strategy
    return (a.s_max, a.wire, a.stages, a.churn) == (b.s_max, b.wire, b.stages, b.churn)


def said_of(found: Reached) -> str:
    """Return the comparison `found` in sentences."""
    shorter = ""
    if found.from_s < SETTLED_S:
        shorter = f", though a swarm has {SETTLED_S:,.0f} s to settle as a rule (--patience lets it run longer)"
    return (
        f"{printable(found.live)}: the live swarm reaches {found.share:.2f} of what is planned "
        f"({found.tokens_per_s:,.0f} of {found.planned_tokens_per_s:,.0f} tokens/s of {printable(found.planned)}) from "
        f"{found.from_s:,.0f} s of virtual time on{shorter}. By {found.work_by_s:,.0f} s it has done "
        f"{found.work_share:.2f} of the work: its first step was over after {found.first_step_s:,.0f} s, then it stood "
        f"still for {found.standstill_s:,.0f} s in all. It made {found.num_plans} plans, and divided the layers into "
        f"other stages {_times(found.num_divisions)}."
    )


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


def how_to_compare(scenario: str) -> str:
    """Tell people with which command to simulate a live run of `scenario`."""
    return (
        "Arithmetic does not say which of these rows a live swarm reaches: its coordinators measure, search and move. "
        f"`shoal simulate {printable(scenario)} --strategies ours,live` plays one, and says it."
    )
