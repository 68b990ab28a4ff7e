"""What an operator sees of a swarm: pure functions from the latest status to something that rich can draw.

Names and reasons come from other peers: they are shown without control characters, and never read as markup.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.deploy.dashboard.limiting import limited_by
from shoal.deploy.dashboard.view import (
    DONE,
    STALE_S,
    TRAINING,
    PeerState,
    peer_state,
    run_phase,
    standstill,
    unanswered,
)
from shoal.deploy.expert_view import expert_table
from shoal.deploy.report import Contribution, Phase, StepDone
from shoal.deploy.words import ENDING
from shoal.deploy.words import duration as duration
from shoal.deploy.words import printable as printable
from shoal.deploy.words import quantity as quantity
from shoal.deploy.words import short as short
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_COLUMNS = 20
_NOTES_SHOWN = 4


_COLUMNS: Sequence[tuple[str, Literal["left", "right"]]] = (
    ("stage", "left"),
    ("layers", "left"),
    ("peer", "left"),
    ("version", "right"),
    ("window", "right"),
    ("fwd ms", "right"),
    ("share", "right"),
    ("speed", "right"),
    ("state", "left"),
)
_LEFT_OUT_FIRST = ("window", "layers", "fwd ms", "share", "speed", "version")
_WIDTH_MAX = 10_000
_GAP = 2

_STATES: Mapping[PeerState, tuple[str, str]] = {
    "silent": ("silent", "red"),
    "paused": ("paused", "yellow"),
    "draining": ("leaving", "yellow"),
    "spare": ("standing by", "dim"),
    "unheard": ("not heard yet", "dim"),
    "fetching": ("fetching state", "yellow"),
    "training": ("training", "green"),
}


@dataclass(slots=True, kw_only=True)
class Board:
    """Everything the view knows. Times are in seconds of one clock."""

    title: str
    started_s: float
    phase: str = "starting"
    status: SwarmStatus | None = None
    status_at_s: float = 0.0
    """When it came."""
    step: StepDone | None = None
    steps_total: int = 0
    validation: tuple[int, float] | None = None
    """(version, loss) of the newest."""
    losses: list[float] = field(default_factory=list)
    mine: Contribution | None = None
    """What this peer gives, if this is a peer's view."""
    fetching: Phase | None = None
    """What this peer does before it can take part."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTES_SHOWN))

    def add_step(self, step: StepDone) -> None:
        """The newest that is known."""
        self.step, self.phase = step, TRAINING
        if step.loss is not None:
            self.losses.append(step.loss)
        if step.validation_loss is not None and step.validation_step is not None:
            self.validation = (step.validation_step, step.validation_loss)

    def add_status(self, status: SwarmStatus, now_s: float) -> None:
        self.status, self.status_at_s = status, now_s

    def status_age_s(self, now_s: float) -> float | None:
        return None if self.status is None else now_s - self.status_at_s

    def spoken_phase(self, now_s: float) -> str:
        """What it does, or what it waits for."""
        if self.phase != TRAINING or self.status is None:
            return self.phase
        return unanswered(self.status_age_s(now_s)) or run_phase(self.status)

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the last step, by the coordinator's word; None: not known, or nothing moves."""
        age_s = self.status_age_s(now_s)
        if self.status is None or self.status.left_s is None or age_s is None or age_s > STALE_S:
            return None
        return max(0.0, self.status.left_s - age_s)

    def tokens_per_s(self, now_s: float) -> float | None:
        """The run's rate, by the coordinator's word; None: it has not answered for long."""
        age_s = self.status_age_s(now_s)
        if self.status is not None and age_s is not None:
            return self.status.tokens_per_s if age_s <= STALE_S else None
        return self.step.tokens_per_s if self.step is not None else None


def render(board: Board, now_s: float) -> RenderableType:
    """The whole live view."""
    parts: list[RenderableType] = [Text(board.spoken_phase(now_s), style="bold"), _about(board, now_s)]
    parts.append(_progress(board, now_s))
    if board.fetching is not None:
        parts.append(_fetching(board.fetching))
    if board.losses:
        parts.append(_figures(board, now_s))
    parts.extend(risk_lines(board.status))
    if board.status is not None:
        parts.extend(tables(board.status))
    if board.mine is not None:
        parts.append(_contribution(board.mine, board.status))
    parts.extend(Text(f"· {printable(note)}", style="dim", overflow="fold") for note in board.notes)
    return Panel(Group(*parts), title=Text(printable(board.title)), title_align="left")


def risk_lines(status: SwarmStatus | None) -> list[Text]:
    """What would be lost with one peer."""
    risks = status.risks if status is not None and status.step < status.steps else ()
    return [Text(printable(risk), style="yellow") for risk in risks]


class Flow:
    """Parts of a line, on as many lines as they need: none is cut, and none broken as long as it fits on one."""

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


def tables(status: SwarmStatus) -> list[RenderableType]:
    """Who holds what, and which experts if these are spread."""
    shown: list[RenderableType] = [stage_table(status)]
    if status.experts:
        shown.append(expert_table(status, [_name(peer) for peer in status.peers]))
    return shown


def stage_table(status: SwarmStatus) -> RenderableType:
    """Who holds what, in as many columns as there is room for."""
    return _Fitting(lambda left_out: _stage_table(status, left_out), _LEFT_OUT_FIRST)


class _Fitting:
    """A table without the least important of its columns where there is no room for all of them."""

    def __init__(self, table: Callable[[Collection[str]], Table], columns: Sequence[str]) -> None:
        self._table, self._columns = table, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number in range(len(self._columns) + 1):
            table = self._table(self._columns[:number])
            if console.measure(table, options=options.update(width=_WIDTH_MAX)).maximum <= options.max_width:
                break
        yield table


def _stage_table(status: SwarmStatus, left_out: Collection[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    shown = [index for index, (name, _) in enumerate(_COLUMNS) if name not in left_out]
    for index in shown:
        name, justify = _COLUMNS[index]
        table.add_column(name, justify=justify, no_wrap=True)

    def add(*cells: str | Text) -> None:
        table.add_row(*(cells[index] for index in shown))

    for stage, (first, last) in enumerate(status.stages):
        holders = _ordered(peer for peer in status.peers if peer.stage == stage)
        for row, peer in enumerate(holders):
            where = (str(stage), f"{first}-{last - 1}") if row == 0 else ("", "")
            add(*where, *_peer_cells(peer, status.coordinator))
    for peer in _ordered(peer for peer in status.peers if peer.stage is None):
        add("spare", "", *_peer_cells(peer, status.coordinator))
    return table


def plain_line(board: Board, now_s: float) -> str:
    """One step for a terminal that cannot be redrawn, or a log."""
    assert board.step is not None
    step, tokens_per_s = board.step, board.tokens_per_s(now_s)
    parts = [f"step {step.step + 1}/{board.steps_total}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    if board.validation is not None:
        parts.append(f"val {board.validation[1]:.4f}")
    parts += [
        "- tokens/s" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s",
        f"staleness {step.staleness_mean:.2f}",
        f"term {step.term} ({short(step.coordinator)})",
    ]
    return "  ".join(parts)


def status_lines(status: SwarmStatus) -> Sequence[str]:
    """The head of `shoal status`."""
    left = "" if status.left_s is None or status.step >= status.steps else f", {duration(status.left_s)} left"
    stands = standstill(status)
    return (
        f"run {printable(status.run)} ({printable(status.name)}), up {duration(status.elapsed_s)}",
        f"{run_phase(status)}{f', {stands}' if stands else left}",
        step_line(status),
        f"staleness {status.staleness_steps_mean:.2f}, term {status.term}, "
        f"coordinator {name_of(status, status.coordinator)}",
        f"plan {status.plan_sequence}: {_reason(status)}",
        *(f"careful: {printable(risk)}" for risk in (status.risks if status.step < status.steps else ())),
    )


def step_line(status: SwarmStatus) -> str:
    """How far the run is, in one line."""
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    validation = "-" if status.validation_loss is None else f"{status.validation_loss:.4f}"
    return f"step {status.step}/{status.steps}  loss {loss}  val {validation}  {status.tokens_per_s:,.0f} tokens/s"


def name_of(status: SwarmStatus, peer: PeerID) -> str:
    return next((_name(seen) for seen in status.peers if seen.peer == peer), short(peer))


def _reason(status: SwarmStatus) -> str:
    """Of the plan, which speaks of peers by the end of their identifiers."""
    names = {short(peer.peer): _name(peer) for peer in status.peers}
    return ENDING.sub(lambda found: names.get(found.group(), found.group()), printable(status.plan_reason))


def _name(peer: PeerStatus) -> str:
    return printable(peer.name) or short(peer.peer)


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` averaged into at most `width` bars, the lowest bar the least of them."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _about(board: Board, now_s: float) -> RenderableType:
    up = Text(f"up {duration(now_s - board.started_s)}", style="dim")
    status = board.status
    if status is None:
        return up
    coordinator = Text(f"term {status.term}, coordinator {name_of(status, status.coordinator)}")
    return Flow(up, coordinator, Text(f"plan {status.plan_sequence}: {_reason(status)}", style="dim"))


def _progress(board: Board, now_s: float) -> Table:
    done = 0 if board.step is None else board.step.step + 1
    left_s = board.left_s(now_s)
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(board.steps_total, 1), completed=done)
    stands = standstill(board.status) if board.status is not None and board.phase != DONE else ""
    left = Text(stands, style="yellow") if stands else Text("" if left_s is None else f"{duration(left_s)} left")
    row.add_row(f"step {done}/{board.steps_total}", bar, left)
    return row


def _fetching(phase: Phase) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=1.0, completed=phase.part or 0.0)
    row.add_row(phase.name, bar, "" if phase.left_s is None else f"{duration(phase.left_s)} left")
    return row


def _figures(board: Board, now_s: float) -> RenderableType:
    assert board.step is not None
    tokens_per_s = board.tokens_per_s(now_s)
    loss = Text(f"loss {board.losses[-1]:.3f} ")
    loss.append(sparkline(board.losses, _SPARKLINE_COLUMNS), style="green")
    return Flow(
        Text("- tokens/s" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s", style="bold"),
        loss,
        Text("" if board.validation is None else f"val {board.validation[1]:.3f} (step {board.validation[0]})"),
        Text(f"staleness {board.step.staleness_mean:.2f}", style="dim"),
    )


def _contribution(mine: Contribution, status: SwarmStatus | None) -> RenderableType:
    limits = limited_by(mine, status.peers if status else (), num_stages=len(status.stages) if status else 0)
    says = Text(printable(limits.text), style="cyan")
    if mine.stage is None:
        return says
    sent, received = sum(link[1] for link in mine.links), sum(link[2] for link in mine.links)
    return Flow(
        Text(f"this peer gives {quantity(mine.flop_per_s, 'FLOP/s')}", style="bold"),
        Text(f"sends {quantity(sent, 'B/s')}"),
        Text(f"receives {quantity(received, 'B/s')}"),
        says,
    )


def _ordered(peers: Iterable[PeerStatus]) -> list[PeerStatus]:
    return sorted(peers, key=lambda peer: (peer.name, peer.peer))


def _peer_cells(peer: PeerStatus, coordinator: PeerID) -> tuple[Text, str, str, str, str, str, Text]:
    name = Text(f"{_name(peer)}{' ★' if peer.peer == coordinator else ''}")
    window = str(peer.window) if peer.window else ""
    forward = f"{peer.forward_s * 1e3:.1f}" if peer.forward_s else ""
    state = peer_state(peer)
    words, style = _STATES[state]
    said = words
    if state == "silent":
        said = f"silent for {duration(peer.seen_s_ago)}"
    elif state == "paused" and peer.paused_s is not None:
        said = f"paused for {duration(peer.paused_s)}"
    version = str(peer.version) if peer.version >= 0 else ""
    share = f"{100 * peer.share:.0f} %" if peer.share else ""
    speed = quantity(peer.flop_per_s, "FLOP/s") if peer.flop_per_s else ""
    return name, version, window, forward, share, speed, Text(said, style=style)
