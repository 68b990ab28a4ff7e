"""A run as a panel, as tables and as lines."""

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from shoal.deploy.base.words import duration
from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.record.report import Contribution, Joined, Note, Obeys, Report, Status, StepDone
from shoal.deploy.terminal.lines import status_lines, step_line
from shoal.deploy.terminal.panel import run_panel, sparkline
from shoal.deploy.terminal.tables import stage_table
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Comparison, FetchStatus, PeerStatus, SwarmStatus
from shoal.protocol.wire_format import Formats
from statuses import view_of

A, B, C = (PeerID("12D3KooW" + letter * 44) for letter in "ABC")

FETCH = FetchStatus(what="weights", total_bytes=60_000_000, left_bytes=30_000_000, left_s=12, sources=(A, B))


def peer(peer_id: PeerID, name: str, stage: int | None, **changes: object) -> PeerStatus:
    fields: dict[str, object] = {
        "peer": peer_id,
        "name": name,
        "device": "cpu",
        "stage": stage,
        "version": 7,
        "synced": True,
        "draining": False,
        "seen_s_ago": 0.2,
        "forward_s": 0.0125,
        "window": 0,
    }
    return PeerStatus(**(fields | changes))  # type: ignore[arg-type]


STATUS = SwarmStatus(
    run="0123456789abcdef",
    name="demo",
    coordinator=B,
    term=3,
    plan_sequence=2,
    plan_reason="peer-2 joined",
    step=7,
    steps=100,
    tokens_per_s=12345.6,
    loss=2.5,
    validation_loss=None,
    staleness_steps_mean=0.25,
    stages=((0, 2), (2, 6)),
    peers=(peer(B, "peer-2", 1), peer(A, "peer-1", 0, window=5), peer(C, "peer-3", None, synced=False)),
    elapsed_s=61,
)


def drawn(renderable: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def told(*reports: Report, at_s: float = 0.0) -> Feed:
    """A feed that has heard these reports at one time."""
    feed = Feed(RunFacts(name="demo", steps=100, num_layers=6), title="demo", wall_minus_clock_s=0.0)
    for report in reports:
        feed.take(report, at_s)
    return feed


def panel(feed: Feed, now_s: float, width: int = 110) -> str:
    return drawn(run_panel(feed.view(now_s), feed.curves), width=width)


def step(number: int, loss: float) -> StepDone:
    return StepDone(
        step=number,
        loss=loss,
        validation_loss=None,
        validation_step=None,
        tokens_per_s=12345.6,
        staleness_mean=0.25,
        duplicates=0,
        given_up=0,
        dissenting=0,
        era=0,
        term=3,
        peers=6,
        coordinator=B,
    )


def test_table_says_who_holds_what() -> None:
    lines = drawn(stage_table(view_of(STATUS))).splitlines()
    first, second, spare = lines[1:4]
    assert [word in first for word in ("0-1", "peer-1", "12.5", "training")] == [True] * 4
    assert first.split()[4] == "5"
    assert [word in second for word in ("2-5", "peer-2 ★", "training")] == [True] * 3
    assert spare.startswith("-"), "it has no stage"
    assert "standing by" in spare


@pytest.mark.parametrize("width", [50, 60, 70, 80, 110])
def test_a_narrow_terminal_has_fewer_columns_and_cuts_none(width: int) -> None:
    lines = drawn(stage_table(view_of(STATUS)), width=width).splitlines()
    assert len(lines) == 4
    assert all("…" not in line for line in lines)
    assert all(word in lines[1] for word in ("peer-1", "training"))
    assert ("window" in lines[0]) is (width >= 70)
    assert ("version" in lines[0]) is (width >= 50)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seen_s_ago": 9.0}, "silent for 9 s"),
        ({"draining": True}, "leaving"),
        ({"paused_s": 70.0, "draining": True}, "paused for 1:10"),
        ({"synced": False}, "fetching state"),
        ({"synced": False, "fetch": FETCH}, "fetching weights: 30 MB of 60 MB, 12 s left, from a, BBBBBBBB"),
        ({"synced": False, "light": (3, 22), "fetch": FETCH}, "layers of state here, fetching weights: 30 MB"),
        ({"synced": False, "fetch": FetchStatus(what="state")}, "fetching state: asking for holders"),
        ({"synced": False, "light": (3, 22)}, "training, 3/22 layers of state here"),
        ({"synced": False, "light": (3, 22), "draining": True}, "leaving"),
    ],
)
def test_a_peer_in_trouble_says_so(change: dict[str, object], text: str) -> None:
    status = SwarmStatus(
        **{name: getattr(STATUS, name) for name in STATUS.__struct_fields__} | {"peers": (peer(A, "a", 0, **change),)}
    )
    assert text in drawn(stage_table(view_of(status)))


def test_a_panel_before_the_first_step_has_no_figures() -> None:
    text = panel(told(), 4.0)
    assert "starting" in text
    assert "step 0/100" in text
    assert "loss" not in text


def test_a_panel_shows_progress() -> None:
    status = msgspec.structs.replace(STATUS, left_s=95.0, validation_loss=3.25, validation_step=5)
    feed = told(*(step(number, 5 - number / 2) for number in range(8)), Status(status=status), at_s=14.0)
    text = panel(feed, 17.0)
    for word in (
        "step 8/100",
        "loss 1.500",
        "val 3.250 (step 5)",
        "12,346 tokens/s",
        "coordinator peer-2",
        "plan 2: peer-2 joined",
        "1:32 left",
    ):
        assert word in text


def test_a_panel_says_who_came_and_went_and_what_this_peer_was_told() -> None:
    plan = Obeys(term=3, sequence=3, coordinator=B, reason="CCCCCCCC left", peers=2)
    feed = told(Status(status=STATUS), plan, Note(text="the limit was raised"), at_s=30.0)
    text = panel(feed, 90.0)
    assert "1:00 ago  peer-3 left  (plan 3, term 3, by peer-2)" in text
    assert "the limit was raised" in text


def test_a_line_for_a_step_has_its_figures() -> None:
    feed = told(Status(status=STATUS), step(11, 2.5), step(12, 2.25))
    wanted = "step 12/100  loss 2.5000  val -  12,346 tokens/s  staleness 0.25  term 3, coordinator peer-2"
    assert step_line(feed.view(1.0), step(11, 2.5)) == wanted
    assert step_line(feed.view(1.0)).startswith("step 13/100  loss 2.2500")


def test_status_head_says_how_the_run_is() -> None:
    run, phase, figures, why = status_lines(view_of(msgspec.structs.replace(STATUS, left_s=95.0)))
    assert run == "run 0123456789abcdef (demo), up 1:01"
    assert phase == "training, 1:35 left"
    assert figures == "step 7/100  loss 2.5000  val -  12,346 tokens/s  staleness 0.25  term 3, coordinator peer-2"
    assert why == "plan 2: peer-2 joined"


def test_status_says_what_was_foreseen_and_what_is_seen_until_the_run_is_done() -> None:
    sentence = "foreseen 12,400 tokens/s, seen 11,900 over 40 steps; stage 2 bounds it (its devices compute)"
    known = msgspec.structs.replace(STATUS, comparison=Comparison(12_400.0, sentence, 11_900.0, 40))
    assert status_lines(view_of(known))[-1] == sentence
    assert sentence not in status_lines(view_of(msgspec.structs.replace(known, step=100)))
    formats = Formats(("bf16", "int8"), ("int8", "int8", "int8"))
    told = msgspec.structs.replace(known, formats=formats)
    assert status_lines(view_of(told))[-1] == "activations travel in bf16 (int8 after stage 1), reductions in int8"


STANDING = msgspec.structs.replace(
    STATUS,
    tokens_per_s=0.0,
    stands_s=42.0,
    waits_for="stage 1: its only holder, peer-2, is paused, for 40 s",
    risks=("only peer-2 has the state of stage 1: no other machine has a copy",),
)


def test_a_standstill_is_said_with_its_cause_and_what_is_at_risk() -> None:
    _, phase, figures, *_, risk = status_lines(view_of(STANDING))
    assert phase == "waiting for stage 1: its only holder, peer-2, is paused, for 40 s, no step for 42 s"
    assert "  0 tokens/s" in figures
    assert risk == "careful: only peer-2 has the state of stage 1: no other machine has a copy"


def test_after_its_first_step_a_run_has_no_rate_yet() -> None:
    first = msgspec.structs.replace(STATUS, tokens_per_s=0.0)
    assert "  - tokens/s" in status_lines(view_of(first))[2]


@pytest.mark.parametrize("width", [80, 60])
def test_on_a_narrow_terminal_no_figure_is_cut(width: int) -> None:
    mine = Contribution(
        peer=A,
        name="peer-1",
        stage=0,
        synced=True,
        busy=0.3,
        sending=0.1,
        waiting=0,
        flop_per_s=1e9,
        microbatches_per_s=1.0,
        flop_total=1e9,
        microbatches_total=9,
        sent_bytes_total=0.0,
        received_bytes_total=0.0,
        links=((B, 1e6, 1e6),),
        memory_bytes=0,
        uptime_s=9.0,
    )
    standing = msgspec.structs.replace(STANDING, validation_loss=3.25, validation_step=5)
    steps = [step(number, 5 - number / 20) for number in range(40)]
    note = Note(text="dashboard: http://127.0.0.1:8731/#" + "k" * 60)
    feed = told(Joined(peer=A, name="peer-1", invite=""), *steps, Status(status=standing), note, mine, at_s=17.0)
    text = panel(feed, 18.0, width=width)
    assert "…" not in text
    words = " ".join(text.replace("│", " ").split())
    for part in (
        "waiting for stage 1: its only holder, peer-2, is paused, for 40 s",
        "no step for 42 s",
        "0 tokens/s",
        "val 3.250 (step 5)",
        "only peer-2 has the state of stage 1: no other machine has a copy",
        "sends 1 MB/s",
        "waiting for other peers: the device computes 30 % of the time",
    ):
        assert part in words, text


def test_figures_of_a_coordinator_that_has_not_answered_for_long_are_not_shown() -> None:
    text = panel(told(step(1, 2.5), Status(status=STATUS), at_s=10.0), 50.0)
    assert "the coordinator has not answered for 40 s" in text
    assert "- tokens/s" in text


def test_names_from_the_network_are_not_markup() -> None:
    status = SwarmStatus(
        **{name: getattr(STATUS, name) for name in STATUS.__struct_fields__}
        | {"peers": (peer(A, "[red]x[/red]\x1b[2J", 0),)}
    )
    text = drawn(stage_table(view_of(status)))
    assert "[red]x[/red]" in text
    assert "\x1b" not in text


def test_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert sparkline([1.0] * 5, 3) == "▁▁▁"
    assert len(sparkline(list(range(1000)), 32)) == 32
    assert sparkline([], 5) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.6, "1:00"), (3661, "1:01:01"), (7_775_000, "89 d 23 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
