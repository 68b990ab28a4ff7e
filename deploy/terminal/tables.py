"""Draws stages and experts with their holders as tables for a terminal. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shoal.deploy.base.words import duration, quantity
from shoal.deploy.dashboard.view import ExpertView, PeerState, PeerView, View

EXPERTS_SHOWN = 16
"""The most experts shown per stage; if there are more, the busiest ones are shown."""
PEERS_SHOWN = 8
"""The table of experts has a row for each peer of a stage if the stage has at most this many peers; else no such
rows."""
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
_STATES: Mapping[PeerState, tuple[str, str]] = {
    "silent": ("silent", "red"),
    "paused": ("paused", "yellow"),
    "draining": ("leaving", "yellow"),
    "spare": ("standing by", "dim"),
    "unheard": ("not heard yet", "dim"),
    "fetching": ("fetching state", "yellow"),
    "light": ("training, state downloading", "green"),
    "training": ("training", "green"),
}


def tables(view: View) -> list[RenderableType]:
    """Return the table of stages and, if experts are placed on peers, the table of experts."""
    shown: list[RenderableType] = [stage_table(view)] if view.stages or view.peers else []
    return [*shown, expert_table(view)] if view.experts else shown


# --- stages ---


def stage_table(view: View) -> RenderableType:
    """Return the table of stages, with as many columns as there is room for."""
    numbers = range(len(_LEFT_OUT_FIRST) + 1)
    return _Fitting([partial(_stage_table, view, _LEFT_OUT_FIRST[:number]) for number in numbers])


class _Fitting:
    """Draws the first of several tables (most columns first) that fits the width; if none fits, the last."""

    def __init__(self, tables: Sequence[Callable[[], Table]]) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for draw in self._tables:
            table = draw()
            if console.measure(table, options=options.update(width=10_000)).maximum <= options.max_width:
                break
        yield table


def _stage_table(view: View, left_out: Collection[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    shown = [index for index, (name, _) in enumerate(_COLUMNS) if name not in left_out]
    for index in shown:
        name, justify = _COLUMNS[index]
        table.add_column(name, justify=justify, no_wrap=True)

    def add(*cells: str | Text) -> None:
        table.add_row(*(cells[index] for index in shown))

    for stage, (first, last) in enumerate(view.stages):
        for row, peer in enumerate(_holders(view, stage)):
            where = (str(stage), f"{first}-{last - 1}") if row == 0 else ("", "")
            add(*where, *_peer_cells(peer))
    for peer in _holders(view, None):
        add("-", "", *_peer_cells(peer))
    return table


def _holders(view: View, stage: int | None) -> list[PeerView]:
    return sorted((peer for peer in view.peers if peer.stage == stage), key=lambda peer: (peer.name, peer.id))


def _peer_cells(peer: PeerView) -> tuple[Text, str, str, str, str, str, Text]:
    words, style = _STATES[peer.state]
    if peer.state == "silent":
        words = f"silent for {duration(peer.seen_s_ago)}"
    elif peer.state == "paused" and peer.paused_s is not None:
        words = f"paused for {duration(peer.paused_s)}"
    elif peer.state == "light" and peer.light is not None:
        words = f"training, {peer.light[0]}/{peer.light[1]} layers of state here"
    if peer.fetch and peer.state in ("fetching", "light"):
        words = peer.fetch if peer.state == "fetching" else f"{words}, {peer.fetch}"
    if peer.shortages:
        words += ", short of memory"
    return (
        Text(f"{peer.name}{' ★' if peer.is_coordinator else ''}"),
        str(peer.version) if peer.version >= 0 else "",
        str(peer.window) if peer.window else "",
        f"{peer.forward_s * 1e3:.1f}" if peer.forward_s else "",
        f"{100 * peer.share:.0f} %" if peer.share else "",
        quantity(peer.flop_per_s, "FLOP/s") if peer.flop_per_s else "",
        Text(words, style=style),
    )


# --- experts ---


def expert_table(view: View) -> RenderableType:
    """Return a table of experts by stage. Each column shows an expert's share of the tokens, its number of copies, and
    in small stages which peers hold (●) or fetch (○) it. The busiest experts are shown, as many as fit."""
    return _Fitting([partial(_expert_table, view, most) for most in range(EXPERTS_SHOWN, 0, -1)])


def _expert_table(view: View, most: int) -> Table:
    stages = [(stage, experts, busiest(experts, most)) for stage, experts in experts_by_stage(view)]
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    for _ in range(max((len(shown) for *_, shown in stages), default=0)):
        table.add_column(justify="right", no_wrap=True)
    for stage, experts, shown in stages:
        first, second = f"experts {stage}", f"{len(shown)} of {len(experts)}" if len(shown) < len(experts) else ""
        numbers = [Text(f"{expert.expert}", style="dim") for expert in shown]
        table.add_row(Text(first, style="dim"), Text(second, style="dim"), *numbers)
        table.add_row("", "load", *(_load(expert, len(experts)) for expert in shown))
        table.add_row("", "copies", *(str(expert.replicas) for expert in shown))
        peers = [at for at, peer in enumerate(view.peers) if peer.stage == stage]
        for at in sorted(peers, key=lambda at: view.peers[at].name) if len(peers) <= PEERS_SHOWN else ():
            table.add_row("", Text(view.peers[at].name), *(_place(expert, at) for expert in shown))
    return table


def experts_by_stage(view: View) -> Iterator[tuple[int, list[ExpertView]]]:
    """Yield the stages with experts, in order."""
    ordered = sorted(view.experts, key=lambda expert: expert.stage)
    for stage, experts in groupby(ordered, key=lambda expert: expert.stage):
        yield stage, list(experts)


def busiest(experts: Sequence[ExpertView], most: int = EXPERTS_SHOWN) -> list[ExpertView]:
    """Return the experts with the highest loads, at most `most`, ordered by their numbers."""
    ranked = sorted(experts, key=lambda expert: (-(expert.load or 0.0), expert.expert))
    return sorted(ranked[:most], key=lambda expert: expert.expert)


def _load(expert: ExpertView, num_experts: int) -> Text:
    if expert.load is None:
        return Text("-", style="dim")
    return Text(f"{100 * expert.load / num_experts:.0f} %", style="bold yellow" if expert.load >= 1.5 else "")


def _place(expert: ExpertView, peer: int) -> Text:
    if peer in expert.holders:
        return Text("●", style="green")
    return Text("○", style="yellow") if peer in expert.coming else Text("·", style="dim")
