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
from shoal.deploy.dashboard.view import PeerState, peer_state
from shoal.deploy.expert_view import expert_table
from shoal.deploy.report import Contribution, Phase, StepDone
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_COLUMNS = 20
_NOTES_SHOWN = 4
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


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

_STATES: Mapping[PeerState, tuple[str, str]] = {
    "silent": ("silent", "red"),
    "draining": ("draining", "yellow"),
    "spare": ("waiting for work", "dim"),
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
    first_step_s: float | None = None
    status: SwarmStatus | None = None
    step: StepDone | None = None
    steps_total: int = 0
    validation: tuple[int, float] | None = None
    """(version, loss) of the newest."""
    num_steps: int = 0
    """Steps seen."""
    losses: list[float] = field(default_factory=list)
    mine: Contribution | None = None
    """What this peer gives, if this is a peer's view."""
    fetching: Phase | None = None
    """What this peer does before it can take part."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTES_SHOWN))

    def add_step(self, step: StepDone, now_s: float, *, num_steps: int = 1) -> None:
        """`num_steps`: how many steps this one stands for, itself the last."""
        if self.first_step_s is None:
            self.first_step_s = now_s
        self.step, self.phase = step, "training"
        self.num_steps += num_steps
        if step.loss is not None:
            self.losses.append(step.loss)
        if step.validation_loss is not None and step.validation_step is not None:
            self.validation = (step.validation_step, step.validation_loss)

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the last step at the average pace so far."""
        if self.first_step_s is None or self.step is None or self.num_steps < 2:
            return None
        pace_s = (now_s - self.first_step_s) / (self.num_steps - 1)
        return pace_s * max(self.steps_total - 1 - self.step.step, 0)


def render(board: Board, now_s: float) -> RenderableType:
    """The whole live view."""
    parts: list[RenderableType] = [_headline(board, now_s), _progress(board, now_s)]
    if board.fetching is not None:
        parts.append(_fetching(board.fetching))
    if board.losses:
        parts.append(_figures(board))
    if board.status is not None:
        parts.extend(tables(board.status))
    if board.mine is not None:
        parts.append(_contribution(board.mine, board.status))
    parts.extend(Text(f"· {printable(note)}", style="dim", overflow="ellipsis", no_wrap=True) for note in board.notes)
    return Panel(Group(*parts), title=Text(printable(board.title)), title_align="left")


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


def plain_line(board: Board) -> str:
    """One step for a terminal that cannot be redrawn, or a log."""
    assert board.step is not None
    step = board.step
    parts = [f"step {step.step + 1}/{board.steps_total}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    if board.validation is not None:
        parts.append(f"val {board.validation[1]:.4f}")
    parts += [
        f"{step.tokens_per_s:,.0f} tokens/s",
        f"staleness {step.staleness_mean:.2f}",
        f"term {step.term} ({short(step.coordinator)})",
    ]
    return "  ".join(parts)


def status_lines(status: SwarmStatus) -> Sequence[str]:
    """The head of `shoal status`."""
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    validation = "-" if status.validation_loss is None else f"{status.validation_loss:.4f}"
    return (
        f"run {printable(status.run)} ({printable(status.name)}), up {duration(status.elapsed_s)}",
        f"step {status.step}/{status.steps}  loss {loss}  val {validation}  {status.tokens_per_s:,.0f} tokens/s  "
        f"staleness {status.staleness_steps_mean:.2f}",
        f"term {status.term}, coordinator {name_of(status, status.coordinator)}; "
        f"plan {status.plan_sequence}: {printable(status.plan_reason)}",
    )


def name_of(status: SwarmStatus, peer: PeerID) -> str:
    return next((_name(seen) for seen in status.peers if seen.peer == peer), short(peer))


def _name(peer: PeerStatus) -> str:
    return printable(peer.name) or short(peer.peer)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def short(peer: PeerID) -> str:
    """The end of a PeerID: the beginning is the same for everyone."""
    return peer[-8:]


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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


def _headline(board: Board, now_s: float) -> Text:
    text = Text(board.phase, style="bold", no_wrap=True, overflow="ellipsis")
    text.append(f"   {duration(now_s - board.started_s)}", style="dim")
    if board.status is not None:
        holder = name_of(board.status, board.status.coordinator)
        text.append(f"   term {board.status.term}, coordinator {holder}   ", style="default")
        text.append(f"plan {board.status.plan_sequence}: {printable(board.status.plan_reason)}", style="dim")
    return text


def _progress(board: Board, now_s: float) -> Table:
    done = 0 if board.step is None else board.step.step + 1
    left_s = board.left_s(now_s)
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(board.steps_total, 1), completed=done)
    row.add_row(f"step {done}/{board.steps_total}", bar, "" if left_s is None else f"{duration(left_s)} left")
    return row


def _fetching(phase: Phase) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=1.0, completed=phase.part or 0.0)
    row.add_row(phase.name, bar, "" if phase.left_s is None else f"{duration(phase.left_s)} left")
    return row


def _figures(board: Board) -> Text:
    assert board.step is not None
    text = Text(f"loss {board.losses[-1]:.3f} ", no_wrap=True, overflow="ellipsis")
    text.append(sparkline(board.losses, _SPARKLINE_COLUMNS), style="green")
    if board.validation is not None:
        text.append(f"  val {board.validation[1]:.3f} (step {board.validation[0]})")
    text.append(f"  {board.step.tokens_per_s:,.0f} tokens/s  staleness {board.step.staleness_mean:.2f}")
    return text


def _contribution(mine: Contribution, status: SwarmStatus | None) -> Text:
    limits = limited_by(mine, status.peers if status else (), num_stages=len(status.stages) if status else 0)
    sent, received = sum(link[1] for link in mine.links), sum(link[2] for link in mine.links)
    text = Text("this peer gives ", overflow="fold")
    text.append(f"{quantity(mine.flop_per_s, 'FLOP/s')}", style="bold")
    text.append(f", sends {quantity(sent, 'B/s')}, receives {quantity(received, 'B/s')}; ")
    text.append(limits.text if limits.kind == "pause" else f"limited by {printable(limits.text)}", style="cyan")
    return text


def quantity(value: float, unit: str) -> str:
    """`9.72 TFLOP/s`."""
    power = 0
    while value >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000.0, power + 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"


def _ordered(peers: Iterable[PeerStatus]) -> list[PeerStatus]:
    return sorted(peers, key=lambda peer: (peer.name, peer.peer))


def _peer_cells(peer: PeerStatus, coordinator: PeerID) -> tuple[Text, str, str, str, str, str, Text]:
    name = Text(f"{_name(peer)}{' ★' if peer.peer == coordinator else ''}")
    window = str(peer.window) if peer.window else ""
    forward = f"{peer.forward_s * 1e3:.1f}" if peer.forward_s else ""
    state = peer_state(peer)
    words, style = _STATES[state]
    said = f"silent for {peer.seen_s_ago:.0f} s" if state == "silent" else words
    version = str(peer.version) if peer.version >= 0 else ""
    share = f"{100 * peer.share:.0f} %" if peer.share else ""
    speed = quantity(peer.flop_per_s, "FLOP/s") if peer.flop_per_s else ""
    return name, version, window, forward, share, speed, Text(said, style=style)
