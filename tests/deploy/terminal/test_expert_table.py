"""What a terminal shows of experts: who has which, and what they carry."""

import io

from rich.console import Console

from shoal.deploy.dashboard.view import View
from shoal.deploy.terminal.lines import expert_lines
from shoal.deploy.terminal.tables import EXPERTS_SHOWN, PEERS_SHOWN, expert_table, tables
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertStatus, PeerStatus
from statuses import swarm_status, view_of


def seen_of(*experts: ExpertStatus, peers: int = 3, stages: int = 1) -> View:
    told = tuple(
        PeerStatus(
            peer=PeerID(f"12D3KooW{at:044}"),
            name=f"peer-{at + 1}",
            device="cpu",
            stage=at % stages,
            version=1,
            synced=True,
            draining=False,
            seen_s_ago=0.1,
            forward_s=0.0,
            window=0,
        )
        for at in range(peers)
    )
    status = swarm_status(
        coordinator=told[0].peer,
        stages=tuple((stage, stage + 1) for stage in range(stages)),
        peers=told,
        elapsed_s=1.0,
        experts=experts,
    )
    return view_of(status)


def drawn(seen: View, *, width: int = 120) -> list[list[str]]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(expert_table(seen))
    return [line.split() for line in console.export_text().splitlines()]


def test_each_expert_has_its_load_its_copies_and_its_holders() -> None:
    seen = seen_of(
        ExpertStatus(stage=0, expert=0, load=0.7, holders=(0, 2)),
        ExpertStatus(stage=0, expert=1, load=0.1, holders=(1,), coming=(0,)),
        ExpertStatus(stage=0, expert=2, load=0.2, holders=(1, 2)),
    )
    assert drawn(seen) == [
        ["experts", "0", "0", "1", "2"],
        ["load", "70", "%", "10", "%", "20", "%"],
        ["copies", "2", "1", "2"],
        ["peer-1", "●", "○", "·"],
        ["peer-2", "·", "●", "●"],
        ["peer-3", "●", "·", "●"],
    ]
    assert expert_lines(seen) == ["experts of stage 0: load 70 10 20 %, copies 2 2 2"]


def test_no_figure_of_a_narrow_terminal_is_cut() -> None:
    experts = [ExpertStatus(stage=0, expert=100 + e, load=(e + 20) / 1580, holders=(e % 8,)) for e in range(40)]
    file = io.StringIO()
    Console(width=80, file=file).print(expert_table(seen_of(*experts, peers=8)))
    assert "…" not in file.getvalue()
    assert file.getvalue().split()[-1] == "●", "the busiest is there"


def test_a_stage_too_large_for_a_terminal_shows_its_busiest_experts_and_only_counts_copies() -> None:
    experts = [ExpertStatus(stage=0, expert=e, load=e / 780, holders=(e % 20, 3)) for e in range(40)]
    seen = seen_of(*experts, peers=20)
    head, load, copies = drawn(seen)
    assert head[2:] == [str(EXPERTS_SHOWN), "of", "40", *map(str, range(40 - EXPERTS_SHOWN, 40))]
    assert load[-2:] == ["5", "%"]
    assert copies == ["copies", *("2" * EXPERTS_SHOWN)]
    assert expert_lines(seen)[0].startswith(f"experts of stage 0, the busiest {EXPERTS_SHOWN}: load ")
    assert len(drawn(seen_of(*experts, peers=PEERS_SHOWN))) == 3 + PEERS_SHOWN


def test_while_nobody_has_told_there_is_no_load() -> None:
    seen = seen_of(ExpertStatus(stage=1, expert=0, holders=(1,)), peers=2, stages=2)
    assert drawn(seen)[:2] == [["experts", "1", "0"], ["load", "-"]]
    assert expert_lines(seen) == ["experts of stage 1: load - %, copies 1"]


def test_experts_are_a_table_of_their_own_where_there_are_any() -> None:
    assert len(tables(seen_of())) == 1
    assert len(tables(seen_of(ExpertStatus(stage=0, expert=0, holders=(0,))))) == 2
