"""A bar for a person, and silence for everybody else."""

import io

import pytest
from rich.console import Console

from shoal.deploy.terminal.progress import progress_bar, sign_of_life


def shown(*shares: float, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)
    with progress_bar("reading [the] text", console=console) as tell:
        for share in shares:
            tell(share)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_what_is_done_and_what_is_left() -> None:
    text = shown(0.0, 0.25, 0.5, is_terminal=True)
    assert "reading [the] text" in text
    assert " 50%" in text
    assert "left" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_goes_on_to_the_next_phase_and_leaves_the_terminal_as_it_was(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with progress_bar("", console=console) as bar:
        bar.begin("starting the network")
        bar(0.5)
        bar.begin("looking for the run")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert ("looking for the run" in text) is is_terminal
    assert not is_terminal or "\x1b[2K" in text.rpartition("left")[2], "the line was not wiped"


def test_a_script_sees_nothing() -> None:
    assert shown(0.5, 1.0, is_terminal=False) == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_sign_of_life_is_for_a_terminal(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)
    with sign_of_life("starting", console=console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert ("starting" in console.file.getvalue()) is is_terminal


def test_an_error_ends_the_bar_and_goes_on() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(ValueError, match="no"), progress_bar("reading", console=console):
        raise ValueError("no")
    assert not console._live_stack
