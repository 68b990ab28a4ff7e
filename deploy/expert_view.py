"""Experts on a terminal: which peer holds which expert of each stage, and what that carries. Pure."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from shoal.deploy.dashboard.experts import expert_views
from shoal.deploy.dashboard.view import ExpertView
from shoal.protocol.messages import SwarmStatus

EXPERTS_SHOWN = 16
"""Of a stage: where there are more, the busiest."""
PEERS_SHOWN = 8
"""Of a stage: where there are more, only how many copies there are."""
_HOT = 1.5
"""So many times the usual load stand out."""


def expert_table(status: SwarmStatus, names: Sequence[str]) -> Table:
    """A column an expert: its share of the stage's tokens, its copies, and who has one (●) or is fetching it (○).

    Args: names: of `status.peers`, as they may be shown.
    """
    stages = [(stage, experts, _busiest(experts)) for stage, experts in _by_stage(status)]
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    for _ in range(max((len(shown) for *_, shown in stages), default=0)):
        table.add_column(justify="right", no_wrap=True)
    for stage, experts, shown in stages:
        first, second = f"experts {stage}", f"{len(shown)} of {len(experts)}" if len(shown) < len(experts) else ""
        table.add_row(Text(first, style="dim"), Text(second, style="dim"), *_row(f"{e.expert}" for e in shown))
        table.add_row("", "load", *(_load(expert, len(experts)) for expert in shown))
        table.add_row("", "copies", *(str(expert.replicas) for expert in shown))
        peers = [at for at, peer in enumerate(status.peers) if peer.stage == stage]
        for at in sorted(peers, key=lambda at: names[at]) if len(peers) <= PEERS_SHOWN else ():
            table.add_row("", Text(names[at]), *(_place(expert, at) for expert in shown))
    return table


def expert_lines(status: SwarmStatus) -> list[str]:
    """A line a stage, for a log."""
    lines = []
    for stage, experts in _by_stage(status):
        shown = _busiest(experts)
        what = f"experts of stage {stage}" + (f", the busiest {len(shown)}" if len(shown) < len(experts) else "")
        loads = " ".join("-" if e.load is None else f"{100 * e.load / len(experts):.0f}" for e in shown)
        copies = " ".join(str(len(e.holders) + len(e.coming)) for e in shown)
        lines.append(f"{what}: load {loads} %, copies {copies}")
    return lines


def _by_stage(status: SwarmStatus) -> Iterator[tuple[int, list[ExpertView]]]:
    """Those that have experts."""
    experts = expert_views(status)
    for stage in range(len(status.stages)):
        of_stage = [expert for expert in experts if expert.stage == stage]
        if of_stage:
            yield stage, of_stage


def _busiest(experts: Sequence[ExpertView]) -> list[ExpertView]:
    """As many as are shown, in the order of their numbers."""
    ranked = sorted(experts, key=lambda expert: (-(expert.load or 0.0), expert.expert))
    return sorted(ranked[:EXPERTS_SHOWN], key=lambda expert: expert.expert)


def _row(texts: Iterator[str]) -> list[Text]:
    return [Text(text, style="dim") for text in texts]


def _load(expert: ExpertView, num_experts: int) -> Text:
    if expert.load is None:
        return Text("-", style="dim")
    return Text(f"{100 * expert.load / num_experts:.0f} %", style="bold yellow" if expert.load >= _HOT else "")


def _place(expert: ExpertView, peer: int) -> Text:
    if peer in expert.holders:
        return Text("●", style="green")
    return Text("○", style="yellow") if peer in expert.coming else Text("·", style="dim")
