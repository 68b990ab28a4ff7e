"""What tests of several houses share."""

import gc
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

# The models are tiny: a second thread costs each operation more than it gives, and beside other work a hundred times as
# much, because OpenMP's threads wait for one another by spinning. torch reads this once; processes inherit it. So do
# the network daemons of real peers, whose scheduler would spin on the other cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMAXPROCS", "1")

# Where nothing compiled may be kept, each worker spends half of its time before the first test on rewriting the asserts
# of all files, every time, and each of the hundred processes that tests start most of a second on compiling shoal.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected stays until the end. Looking through it for garbage, again and again, is a quarter of
# the time that collecting the tests takes, and some of what each simulated swarm takes afterwards.
gc.disable()

# How long an example takes says what else the machine does.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with real processes: together they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("process") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `-n 2 --dist loadgroup`: the first worker takes the files with real processes, the other one the other files.

    Two swarms of real processes at a time would wait for each other on two cores, so this lasts until one kind of file
    has run out: then both workers take what is left. What a worker takes is a whole file.
    xdist's own groups do nothing with pytest 9.2: xdist writes a group into an attribute of tests that is gone.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    live = " live"  # the tests of `any_world` with real daemons; the same file has them in virtual time

    @cache
    def has_processes(scope: str) -> bool:
        return scope.endswith(live) or "mark.process" in (config.rootpath / scope).read_text()

    class ByKind(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, name = nodeid.partition("::")
            return path + live if "[live" in name else path

        def _assign_work_unit(self, node: Any) -> None:
            is_first = node is self.nodes[0]
            scopes = sorted(self.workqueue, key=lambda scope: has_processes(scope) != is_first)
            self.workqueue.move_to_end(scopes[0], last=False)
            super()._assign_work_unit(node)

    return ByKind(config, log)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


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
