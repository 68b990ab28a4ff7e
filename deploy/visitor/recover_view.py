"""Formats the output of `shoal recover`: reachable and missing peers, and the result."""

from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.deploy.base.words import printable, short
from shoal.deploy.visitor.recover import Recovered, Situation

WARNING = (
    "Those that are missing may be alive where this machine cannot see them. If you go on, the run goes on without "
    "them, and what they have trained since is lost when they come back: a run has one history."
)


def situation_table(situation: Situation) -> Table:
    """Return a table with one row per peer."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("peer", "name", "stage", "version", "plan", "state"):
        table.add_column(column, no_wrap=column != "name", overflow="ellipsis")  # shorten long names
    for found in situation.found:
        standing = found.standing
        table.add_row(
            short(found.peer),
            Text(printable(found.advert.name)),  # Text, not str: markup in a stranger's name has no effect
            _stage(standing.stage),
            str(standing.version),
            "{}.{}".format(*found.plan.plan.order) if found.plan else "-",
            "holds its stage" if standing.synced else "in reach",
        )
    for peer in situation.missing:
        table.add_row(short(peer), "", _stage(situation.base.plan.stage_of(peer)), "", "", "missing")
    return table


def _stage(stage: int | None) -> str:
    return "-" if stage is None else str(stage)


def headline(situation: Situation) -> str:
    plan = situation.base.plan
    here = len(plan.members) - len(situation.missing)
    return f"{here} of the {len(plan.members)} members of plan {plan.sequence} (term {plan.term}) are in reach"


def going_back(situation: Situation) -> str:
    """Return a sentence that states the effect of `--era`."""
    back = situation.beginning
    assert back is not None
    return (
        f"The run goes back to step {back.version} of era {back.from_era} and goes on from there as era {back.era}. "
        "What was trained since is lost, unless you come back to it in the same way within a week."
    )


def outcome(recovered: Recovered, situation: Situation) -> str:
    plan = recovered.plan
    return (
        f"plan {plan.sequence} of term {plan.term} is live: {len(recovered.following)} of "
        f"{len(situation.found)} peers in reach obey it ({printable(plan.reason)})"
    )


def as_json(situation: Situation, recovered: Recovered | None) -> dict[str, Any]:
    """Return the situation and the result, for scripts."""
    plan = situation.base.plan
    return {
        "run": plan.run,
        "term": plan.term,
        "sequence": plan.sequence,
        "in_reach": [
            {
                "peer": found.peer,
                "name": found.advert.name,
                "stage": found.standing.stage,
                "era": found.standing.era,
                "version": found.standing.version,
                "synced": found.standing.synced,
                "order": list(found.plan.plan.order) if found.plan else None,
            }
            for found in situation.found
        ],
        "missing": list(situation.missing),
        "reset": recovered
        and {
            "term": recovered.plan.term,
            "sequence": recovered.plan.sequence,
            "coordinator": recovered.plan.coordinator,
            "era": recovered.plan.era,
            "following": list(recovered.following),
            "step": recovered.status.step if recovered.status else None,
        },
    }
