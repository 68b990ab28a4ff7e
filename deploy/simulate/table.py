"""The table of a comparison, for a terminal, and everything as JSON."""

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from shoal.deploy.live_view import printable
from shoal.deploy.simulate.outcome import Row
from shoal.deploy.simulate.scenario import Scenario

LEGEND = (
    "predicted: by the planner's model of a steady run; ratio: measured / predicted; idle: of the devices that hold a "
    "stage, while it goes steadily; bound by: what the model finds busiest, or else what was seen."
)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    scenario: str
    title: str
    seed: int
    devices: tuple[str, ...]
    regions: tuple[str, ...]
    tokens_per_step: int
    rows: tuple[Row, ...]


def comparison(scenario: Scenario, seed: int, rows: Sequence[Row]) -> Comparison:
    return Comparison(
        scenario=scenario.name,
        title=scenario.title,
        seed=seed,
        devices=scenario.topology.names,
        regions=scenario.topology.regions,
        tokens_per_step=scenario.spec.tokens_per_step,
        rows=tuple(rows),
    )


def headings() -> tuple[str, ...]:
    return ("strategy", "tokens/s", "step", "predicted", "ratio", "moved/step", "idle", "bound by")


def cells(row: Row) -> tuple[str, ...]:
    """In the order of `headings`; names and sentences are without control characters."""
    return (
        printable(row.strategy),
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "-" if row.step_s is None else seconds(row.step_s),
        "-" if row.predicted_tokens_per_s is None else f"{row.predicted_tokens_per_s:,.0f}",
        "-" if row.measured_over_predicted is None else f"{row.measured_over_predicted:.2f}",
        "-" if row.bytes_per_step is None else size(row.bytes_per_step),
        "-" if row.idle_share is None else f"{row.idle_share:.0%}",
        printable(row.bound_by) or "-",
    )


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    *names, last = headings()
    for name in names:
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    table.add_column(last, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in cells(row)))
    return table


def seconds(value: float) -> str:
    """Three digits: `12.3 s`, `45.0 ms`."""
    return f"{_digits(value)} s" if value >= 1.0 else f"{_digits(value * 1e3)} ms"


def size(value: float) -> str:
    """Three digits, powers of ten: `12.3 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
