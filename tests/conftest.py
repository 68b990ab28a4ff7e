"""What tests of several houses share."""

import shlex
from collections.abc import Callable

import pytest
from hypothesis import settings

# How long an example takes says what else the machine does.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@pytest.hookimpl(tryfirst=True)  # before xdist's own hook, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `-n 2 --dist loadgroup`: swarms of real processes one after the other, beside them the other files.

    The group of real processes takes longest by far, so it begins first.
    """
    for item in items:
        group = "processes" if item.get_closest_marker("process") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("process") is None)


def _parse(line: str) -> None:
    """Take `shoal …` apart as the shell and the command would, without running it.

    Raises: AssertionError, or click's UsageError: there is no such command, or it takes no such thing.
    """
    import typer

    from shoal.deploy import cli

    words = shlex.split(line.partition(" < ")[0].partition(" | ")[0], comments=True)
    assert words
    assert words[0] == "shoal", line
    command, rest = typer.main.get_command(cli.app), words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{line}: there is no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(" ".join(words), rest, resilient_parsing=False)


@pytest.fixture(scope="session")
def parse_command() -> Callable[[str], None]:
    """A command line that begins with `shoal` -> nothing, or an error that says what of it does not exist."""
    return _parse
