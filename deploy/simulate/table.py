"""Makes the table that compares strategies on a terminal, and the JSON of all figures."""

from collections.abc import Sequence

import msgspec

from shoal.deploy.base.words import digits, printable
from shoal.deploy.planning.rows import Column
from shoal.deploy.simulate.outcome import OutcomeRow
from shoal.deploy.simulate.reached import Reached
from shoal.deploy.simulate.scenario import Scenario

LEGEND = (
    "Simulated, with the real drivers in virtual time on modelled devices: tokens/s, step, moved/step, and idle (of "
    "devices with a stage, after the warm-up). By the planner's arithmetic: predicted, and bound by, unless it shows "
    "events. ratio: simulated / predicted. no model: the arithmetic does not model layouts that change. live: tokens/s "
    "and step are those from the 300th virtual second on, or from half of a shorter run on, standstills included. "
    "not kept: with a trace only --html keeps a timeline."
)
COLUMNS = (
    Column("strategy", 10, right=False),
    Column("tokens/s", 9),
    Column("step", 8),
    Column("predicted", 9),
    Column("ratio", 8),
    Column("moved/step", 10),
    Column("idle", 8),
)
LAST = "bound by"


class StrategyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of strategies, in the form that `--json` prints."""

    scenario: str
    title: str
    notes: tuple[str, ...] = ()
    """Sentences on the fields of the network file that were not read, and on values that were assumed."""
    seed: int
    devices: tuple[str, ...]
    regions: tuple[str, ...]
    tokens_per_step: int
    rows: tuple[OutcomeRow, ...]
    reached: Reached | None = None
    """The comparison of the live run with the planned layout; None: one of the two was not simulated or has no pace."""


def comparison(
    scenario: Scenario, seed: int, rows: Sequence[OutcomeRow], reached: Reached | None
) -> StrategyComparison:
    return StrategyComparison(
        scenario=scenario.name,
        title=scenario.title,
        notes=scenario.notes,
        seed=seed,
        devices=scenario.topology.names,
        regions=scenario.topology.regions,
        tokens_per_step=scenario.spec.tokens_per_step,
        rows=tuple(rows),
        reached=reached,
    )


def headings() -> tuple[str, ...]:
    return (*(column.heading for column in COLUMNS), LAST)


def cells(row: OutcomeRow) -> tuple[str, ...]:
    """Return the cells of a row of the terminal's table, one for each of `headings`, without control characters."""
    below = row.tokens_per_s_below
    tokens, step = "none", "none"
    if row.tokens_per_s is not None and row.step_s is not None:
        tokens, step = f"{row.tokens_per_s:,.0f}", seconds(row.step_s)
    elif below is not None:
        tokens, step = f"< {below:,.0f}", "no second"
    elif row.simulated_s is not None:
        tokens, step = "no step", "no step"
    ran = row.simulated_s is not None
    return (
        printable(row.strategy),
        tokens,
        step,
        ("no model" if ran else "none") if row.predicted_tokens_per_s is None else f"{row.predicted_tokens_per_s:,.0f}",
        "none" if row.measured_over_predicted is None else f"{row.measured_over_predicted:.2f}",
        "none" if row.bytes_per_step is None else size(row.bytes_per_step),
        ("not kept" if ran else "none") if row.idle_share is None else f"{row.idle_share:.0%}",
        "; ".join(printable(part) for part in (row.bound_by, row.note) if part) or "nothing was seen",
    )


def arithmetic_cells(tokens_per_s: float) -> tuple[str, ...]:
    """Return the cells of the `at once` row, which is shown before any strategy has run, without its last column."""
    return ("at once", "not run", "not run", f"{tokens_per_s:,.0f}", "none", "none", "none")


def seconds(value: float) -> str:
    """Return a duration with three digits and a unit: `12.3 s`, `45.0 ms`."""
    return f"{digits(value)} s" if value >= 1.0 else f"{digits(value * 1e3)} ms"


def size(value: float) -> str:
    """Return a number of bytes with three digits and a decimal unit: `12.3 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:.0f} B"
