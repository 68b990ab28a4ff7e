"""What a newcomer sees while it waits."""

import io
from collections import Counter

import msgspec
from rich.console import Console

from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.report import Phase
from shoal.deploy.terminal.panel import phase_row
from shoal.deploy.terminal.presenter import Presenter
from shoal.peer.handoff.fetcher import FetchProgress
from shoal.protocol.messages import FetchStatus


def drawn(what: object) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_says_what_and_how_long_still() -> None:
    row = drawn(phase_row(Phase(name="fetching state", part=0.5, left_s=12.3)))
    assert "fetching state" in row
    assert "12 s left" in row
    assert "left" not in drawn(phase_row(Phase(name="fetching state", part=0.0)))


def test_time_left_follows_the_rate() -> None:
    progress = FetchProgress()
    assert progress.status(10.0) == FetchStatus(what="state")
    progress.done, progress.total = 25, 100
    assert progress.status(15.0) == FetchStatus(what="state", total_bytes=400, left_bytes=300, left_s=15)
    progress.done = 75
    assert progress.status(20.0).left_s == 3


def test_the_peers_that_sent_most_are_named_first() -> None:
    told = FetchProgress(1, 2, "weights", Counter({"a": 1, "b": 3, "c": 2})).status(1.0)
    assert told.sources == ("b", "c", "a")
    assert told.left_bytes == 2, "weights are in bf16"


def test_the_panel_of_a_run_shows_the_fetch_until_it_is_over() -> None:
    presenter = Presenter(RunFacts(name="shoal", steps=10, num_layers=1), console=Console(file=io.StringIO()))
    assert "fetching" not in drawn(presenter.panel())
    presenter.take(Phase(name="fetching state", part=0.25, left_s=75.0))
    assert "fetching state" in drawn(presenter.panel())
    assert "1:15 left" in drawn(presenter.panel())
    presenter.take(Phase(name="catching up"))
    assert "1:15 left" not in drawn(presenter.panel())
    assert "catching up" in drawn(presenter.panel())


def test_a_phase_is_one_json_line() -> None:
    assert msgspec.json.decode(msgspec.json.encode(Phase(name="x", part=0.5)))["event"] == "Phase"
