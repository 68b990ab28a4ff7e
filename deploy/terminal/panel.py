"""Draws a run as one panel, the same for a peer, `shoal demo` and `shoal status --watch`. Pure; rich renders it.

Names of peers and reasons of plans have no control characters (`dashboard/feed.py` removes them); the panel draws them
as text and never reads them as markup.
"""

import itertools
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.deploy.base.words import duration, printable, quantity, times
from shoal.deploy.dashboard.curves import Curves
from shoal.deploy.dashboard.view import ChangeView, MineView, View
from shoal.deploy.record.report import Phase
from shoal.deploy.terminal.lines import current_pace, current_risks, said_rate
from shoal.deploy.terminal.tables import tables

CHANGES_SHOWN = 6
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_COLUMNS = 20
_GAP = 2
_SIGNS = {"plan": ("◆", "cyan"), "joined": ("+", "green"), "left": ("-", "red"), "note": ("·", "dim")}


def run_panel(
    view: View, curves: Curves, *, up_s: float | None = None, fetching: Phase | None = None, footer: Sequence[Text] = ()
) -> RenderableType:
    """Return the whole panel.

    Args:
        up_s: how long this view has been up; None: show the run's age instead.
        fetching: progress of this peer's state fetch.
        footer: sentences at the bottom.
    """
    parts: list[RenderableType] = [Text(view.phase, style="bold"), _about(view, up_s), _progress(view)]
    if fetching is not None:
        parts.append(phase_row(fetching))
    if view.step:
        parts.append(_figures(view, curves))
    parts += [Text(pace, style="dim") for pace in current_pace(view)]
    parts += [Text(risk, style="yellow") for risk in current_risks(view)]
    parts += tables(view)
    parts += [Text(f"- {gone.name} left {duration(gone.ago_s)} ago", style="red") for gone in view.gone]
    if view.mine is not None:
        parts.append(_mine(view.mine))
    if view.changes:
        parts.append(Text("what changed, and why", style="dim"))
        parts += [_change(change, view.now_s) for change in view.changes[:CHANGES_SHOWN]]
    parts += footer
    title = f"{view.title or view.name or 'shoal'}  {view.run}".rstrip()
    return Panel(Group(*parts), title=Text(title), title_align="left")


def phase_row(phase: Phase) -> RenderableType:
    """Return one line: the activity, a bar, the time left."""
    left = "" if phase.left_s is None else f"{duration(phase.left_s)} left"
    return _row(phase.name, ProgressBar(total=1.0, completed=phase.part or 0.0), Text(left))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a text of at most `width` bars, one for each mean of neighbouring `values`; the least has the lowest."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


class WrappedParts:
    """Draws parts of text, on several lines if needed. Only a part wider than a line is broken, and none is cut."""

    def __init__(self, *parts: Text) -> None:
        self._parts = [part for part in parts if part.plain]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for part in self._parts:
            if line.plain and line.cell_len + _GAP + part.cell_len > options.max_width:
                yield line
                line = Text()
            line = line + Text(" " * _GAP) + part if line.plain else part
        if line.plain:
            yield line


def _about(view: View, up_s: float | None) -> RenderableType:
    return WrappedParts(
        Text(f"up {duration(view.elapsed_s if up_s is None else up_s)}", style="dim"),
        Text(f"term {view.term}, coordinator {view.coordinator_name}" if view.coordinator else ""),
        Text(f"plan {view.sequence}: {view.reason}" if view.sequence else "", style="dim"),
        Text(f"went back to a snapshot {times(view.rollbacks)}" if view.rollbacks else "", style="yellow"),
    )


def _progress(view: View) -> RenderableType:
    bar = ProgressBar(total=max(view.steps, 1), completed=view.step)
    left = Text("" if view.left_s is None else f"{duration(view.left_s)} left")
    if view.standstill:
        left = Text(view.standstill, style="yellow")
    return _row(f"step {view.step}/{view.steps}", bar, left)


def _row(what: str, bar: ProgressBar, right: Text) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(what, bar, right)
    return row


def _figures(view: View, curves: Curves) -> RenderableType:
    points = curves.points
    loss = Text(f"loss {'-' if view.loss is None else f'{view.loss:.3f}'} ")
    losses = [point.loss for point in points if point.loss is not None]
    loss.append(sparkline(losses, _SPARKLINE_COLUMNS), style="green")
    rate = Text(f"{said_rate(view)} ", style="bold")
    rates = [point.tokens_per_s for point in points if point.tokens_per_s is not None]
    rate.append(sparkline(rates, _SPARKLINE_COLUMNS), style="not bold cyan")
    validated = "" if view.validation_loss is None else f"val {view.validation_loss:.3f} (step {view.validation_step})"
    stale = Text(f"staleness {view.staleness_steps_mean:.2f} ", style="dim")
    stale.append(sparkline([point.staleness for point in points], _SPARKLINE_COLUMNS), style="magenta")
    flow = f"{quantity(view.flows[0], 'B/s')} between stages" if view.flows and view.flows[0] else ""
    return WrappedParts(rate, loss, Text(validated), stale, Text(flow, style="dim"))


def _mine(mine: MineView) -> RenderableType:
    says = Text(printable(mine.limited_by.text), style="cyan", overflow="fold")
    if mine.limited_by.kind == "place":
        return says
    return WrappedParts(
        Text(f"this peer gives {quantity(mine.flop_per_s, 'FLOP/s')}", style="bold"),
        Text(f"sends {quantity(mine.sent_bytes_per_s, 'B/s')}"),
        Text(f"receives {quantity(mine.received_bytes_per_s, 'B/s')}"),
        says,
    )


def _change(change: ChangeView, now_s: float) -> Text:
    sign, style = _SIGNS[change.kind]
    text = Text(f"{sign} ", style=style, overflow="fold")
    text.append(f"{duration(max(0.0, now_s - change.at_s))} ago  ", style="dim")
    text.append(change.text or "a plan", style="default")
    if change.kind == "plan":
        text.append(f"  (plan {change.sequence}, term {change.term}, by {change.coordinator})", style="dim")
    return text
