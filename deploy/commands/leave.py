"""`shoal leave`: asks the peer on this machine to leave without losing work."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.deploy.commands.options import EXIT_FAILED, examples
from shoal.deploy.commands.running import Everyone, Name, Running, which_peers
from shoal.deploy.control.control_socket import ask
from shoal.deploy.terminal.plain import say, say_json

if TYPE_CHECKING:
    import psutil

_DRAIN_S_MAX = 120.0
"""Leaving takes at most half a minute, plus the time to write a large state."""


@examples(
    "shoal leave  # finish the work in flight, save state that no other peer has, end",
    "shoal leave bob  # of several peers on this machine, the one called bob",
    "shoal leave --all  # every peer of this user on this machine",
    "shoal leave --now  # without waiting for work in flight",
)
def leave(
    name: Name = None,
    everyone: Everyone = False,
    state_dir: Running = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not finish the work in hand; other peers do it again.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the peers that left, as JSON.")] = False,
) -> None:
    """Ask the peer on this machine to leave without losing work."""
    import psutil

    leaving = which_peers("leave", name=name, everyone=everyone, state_dir=state_dir)
    processes = []
    for label, note in leaving:
        ask(Path(note.folder), "leave", drains=not now)
        try:
            processes.append(psutil.Process(note.pid))
        except psutil.NoSuchProcess:
            continue  # it has already ended
        if not json:
            say(f"{label}: leaving, once its work in flight is done")
    still = _wait(processes)
    if json:
        left = [
            {"name": label, "folder": note.folder, "left": all(note.pid != late.pid for late in still)}
            for label, note in leaving
        ]
        say_json(left)
    for process in still:
        say(f"process {process.pid} has not ended in {_DRAIN_S_MAX:.0f} s: `shoal leave --now` again", err=True)
    if still:
        raise typer.Exit(EXIT_FAILED)


def _wait(processes: "list[psutil.Process]") -> "list[psutil.Process]":
    """Return the processes that have not ended in time. A zombie, which only its parent has not noticed, has ended."""
    import psutil

    def ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    deadline = time.monotonic() + _DRAIN_S_MAX
    while (still := [process for process in processes if not ended(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return still
