"""What a newcomer sees while it waits."""

import io

import msgspec
import pytest
from rich.console import Console

from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.report import Phase
from shoal.deploy.session.fetch_watch import FetchWatch
from shoal.deploy.terminal.panel import phase_row
from shoal.deploy.terminal.presenter import Presenter
from shoal.peer.handoff.fetcher import FetchProgress


def drawn(what: object) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_says_what_and_how_long_still() -> None:
    row = drawn(phase_row(Phase(name="fetching state", part=0.5, left_s=12.3)))
    assert "fetching state" in row
    assert "12 s left" in row
    assert "left" not in drawn(phase_row(Phase(name="fetching state", part=0.0)))


def test_time_left_follows_the_pace() -> None:
    watch = FetchWatch()
    assert watch.look(None, 0.0) is None
    progress = FetchProgress()
    assert watch.look(progress, 10.0) == Phase(name="fetching state", part=0.0)
    progress.done, progress.total = 25, 100
    assert watch.look(progress, 15.0) == Phase(name="fetching state", part=0.25, left_s=15.0)
    progress.done = 75
    assert watch.look(progress, 20.0) == Phase(name="fetching state", part=0.75, left_s=pytest.approx(10 / 3))
    assert watch.look(None, 21.0) == Phase(name="catching up")
    assert watch.look(None, 22.0) is None
    again = FetchProgress(50, 100)
    assert watch.look(again, 30.0) == Phase(name="fetching state", part=0.5, left_s=0.0)


def test_who_waits_is_told_what_comes() -> None:
    watch = FetchWatch()
    assert watch.look(FetchProgress(1, 2, "weights"), 1.0) == Phase(name="fetching weights", part=0.5, left_s=0.0)
    state = FetchProgress(0, 4, "state while training")
    assert watch.look(state, 2.0) == Phase(name="fetching state while training", part=0.0)
    state.done = 2
    assert watch.look(state, 5.0) == Phase(name="fetching state while training", part=0.5, left_s=pytest.approx(3.0))


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
