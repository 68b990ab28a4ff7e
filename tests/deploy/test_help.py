"""Help that teaches: every command has it, with examples, and the examples are commands that exist."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.deploy import cli
from shoal.deploy.commands.options import examples

GROUP: Any = typer.main.get_command(cli.app)


def commands(group: Any = GROUP, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, those of groups included."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = list(commands())


GROUPS = sorted({path[:end] for path, _ in COMMANDS for end in range(len(path))})


@pytest.mark.parametrize(
    "path", [*GROUPS, *(path for path, _ in COMMANDS)], ids=lambda path: " ".join(("shoal", *path))
)
def test_a_short_flag_asks_every_command_and_group_for_help(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, [*path, "-h"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(" ".join(("Usage: root", *path))), result.output


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=" ".join)
def test_help_runs_and_says_what_for(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert "Examples:" in result.output


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_examples_are_commands_that_exist(
    path: tuple[str, ...], command: Any, parse_command: Callable[[str], None]
) -> None:
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    shown = [line for line in lines if line.startswith("shoal ")]
    assert shown, f"`shoal {' '.join(path)}` teaches by no example: give its function @examples(…)"
    assert any(line.startswith(" ".join(("shoal", *path))) for line in shown)
    for line in shown:
        parse_command(line)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_every_option_says_what_it_is(path: tuple[str, ...], command: Any) -> None:
    silent = [param.name for param in command.params if not getattr(param, "help", None)]
    assert not silent
    summary = command.get_short_help_str(limit=62)  # beside the longest name, in 80 columns
    assert not summary.endswith("..."), f"the list of commands would cut {summary!r}"


@pytest.mark.parametrize("line", ["shoal join --nobody", "shoal fly", "shoal join", "shoal demo --peers none"])
def test_an_example_that_does_not_exist_would_be_seen(line: str, parse_command: Callable[[str], None]) -> None:
    with pytest.raises(Exception, match=r"no command|No such option|[Mm]issing|valid integer"):
        parse_command(line)


def test_examples_keep_their_lines() -> None:
    app = typer.Typer(rich_markup_mode=None)

    @examples("shoal f  # do it", "shoal f --again  # do it again, a text that would be filled otherwise")
    def f() -> None:
        """F."""

    from shoal.deploy.commands.options import examples_of

    app.command(epilog=examples_of(f))(f)
    output = CliRunner().invoke(app, ["--help"]).output
    assert "  # do it again, a text that would be filled otherwise\n    shoal f --again\n" in output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shell asks for it: the words so far in variables, an instruction in another."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = CliRunner().invoke(cli.app, ["--show-completion", shell], prog_name="shoal")
    assert shown.exit_code == 0, shown.output
    assert "_SHOAL_COMPLETE" in shown.output


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("shoal st", "status", "demo"),
        ("shoal simulate home", "home-gpus", "two-universities"),
        ("shoal plan two", "two-universities", "home-gpus"),
        ("shoal join --device cu", "cuda", "cpu"),
    ],
)
def test_completion_knows_commands_scenarios_and_devices(
    words: str, offered: str, not_offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SHOAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    found = CliRunner().invoke(cli.app, [], prog_name="shoal").output.split()
    assert offered in found
    assert not_offered not in found
