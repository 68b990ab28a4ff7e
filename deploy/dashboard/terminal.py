"""`shoal status --watch`: the dashboard's facts on a terminal. Pure; rich draws."""

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.deploy.dashboard.curves import Curves
from shoal.deploy.dashboard.view import ChangeView, View
from shoal.deploy.live_view import Flow, risk_lines, sparkline, tables
from shoal.deploy.words import duration, quantity
from shoal.protocol.messages import SwarmStatus

CHANGES_SHOWN = 6
SPARKLINE_COLUMNS = 20
_SIGNS = {"plan": ("◆", "cyan"), "joined": ("+", "green"), "left": ("-", "red"), "note": ("·", "dim")}


def render_view(view: View, status: SwarmStatus | None, curves: Curves) -> RenderableType:
    """`status`: the one that the view was made of; None: nobody has answered yet."""
    parts: list[RenderableType] = [Text(view.phase, style="bold"), _about(view), _progress(view)]
    if view.step:
        parts.append(_figures(view, curves))
    parts += risk_lines(status)
    if status is not None:
        parts += tables(status)
    parts += [Text(f"- {gone.name} left {duration(gone.ago_s)} ago", style="red") for gone in view.gone]
    if view.changes:
        parts.append(Text("what changed, and why", style="dim"))
        parts += [_change(change, view.now_s) for change in view.changes[:CHANGES_SHOWN]]
    return Panel(Group(*parts), title=Text(f"{view.name or 'shoal'}  {view.run}"), title_align="left")


def _about(view: View) -> RenderableType:
    return Flow(
        Text(f"up {duration(view.elapsed_s)}", style="dim"),
        Text(f"term {view.term}, coordinator {view.coordinator_name}"),
        Text(_went_back(view.era), style="yellow"),
    )


def _went_back(times: int) -> str:
    if not times:
        return ""
    return "went back to a snapshot once" if times == 1 else f"went back to a snapshot {times} times"


def _progress(view: View) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(view.steps, 1), completed=view.step)
    left = Text("" if view.left_s is None else f"{duration(view.left_s)} left")
    if view.standstill:
        left = Text(view.standstill, style="yellow")
    row.add_row(f"step {view.step}/{view.steps}", bar, left)
    return row


def _figures(view: View, curves: Curves) -> Table:
    points = curves.points
    grid = Table.grid(padding=(0, 2))
    validation = (
        "" if view.validation_loss is None else f"validation {view.validation_loss:.3f} at step {view.validation_step}"
    )
    loss = "-" if view.loss is None else f"{view.loss:.3f}"
    losses = [point.loss for point in points if point.loss is not None]
    grid.add_row(
        "loss", Text(loss, style="bold"), Text(sparkline(losses, SPARKLINE_COLUMNS), style="green"), validation
    )
    paces = [point.tokens_per_s for point in points if point.tokens_per_s is not None]
    pace = Text("-" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f} tokens/s", style="bold")
    flow = f"{quantity(view.flows[0], 'B/s')} between stages" if view.flows and view.flows[0] else ""
    grid.add_row("throughput", pace, Text(sparkline(paces, SPARKLINE_COLUMNS), style="cyan"), flow)
    stale = [point.staleness_steps_mean for point in points]
    value = Text(f"{view.staleness_steps_mean:.2f} steps", style="bold")
    grid.add_row("staleness", value, Text(sparkline(stale, SPARKLINE_COLUMNS), style="magenta"), "")
    return grid


def _change(change: ChangeView, now_s: float) -> Text:
    sign, style = _SIGNS[change.kind]
    text = Text(f"{sign} ", style=style)
    text.append(f"{duration(max(0.0, now_s - change.at_s))} ago  ", style="dim")
    text.append(change.text or "a plan", style="default")
    if change.kind == "plan":
        text.append(f"  (plan {change.sequence}, by {change.coordinator})", style="dim")
    return text
