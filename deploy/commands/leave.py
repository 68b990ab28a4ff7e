"""`shoal leave`, `pause` and `resume`: send a command to the peers on this machine."""

import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from shoal.deploy.commands.options import EXIT_FAILED, Json, examples
from shoal.deploy.commands.running import Everyone, Name, Running, which_peers
from shoal.deploy.control.control_socket import ask
from shoal.deploy.terminal.plain import say, say_result

_DRAIN_S_MAX = 120.0
"""Seconds to wait for a peer to end: it drains for at most half a minute, and then may write a large state."""


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
    json: Json = False,
) -> None:
    """Ask the peer on this machine to leave without losing work."""
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
    left = [
        {"name": label, "folder": note.folder, "left": all(note.pid != late.pid for late in still)}
        for label, note in leaving
    ]
    say_result(left, (), as_json=json)
    for process in still:
        say(f"process {process.pid} has not ended in {_DRAIN_S_MAX:.0f} s: `shoal leave --now` again", err=True)
    if still:
        raise typer.Exit(EXIT_FAILED)


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for the processes; return those that have not ended in time. A zombie, not yet reaped, counts as ended."""

    def ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    deadline = time.monotonic() + _DRAIN_S_MAX
    while (still := [process for process in processes if not ended(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return still


@examples(
    "shoal pause  # the device is free within a second; the peer stays in the swarm",
    "shoal pause bob  # of several peers on this machine, the one called bob",
    "shoal pause --all  # every peer on this machine",
)
def pause(name: Name = None, everyone: Everyone = False, state_dir: Running = None, json: Json = False) -> None:
    """Take the device back until `shoal resume`."""
    _do("pause", name, everyone, state_dir, json)


@examples("shoal resume  # end a pause", "shoal resume bob  # of several peers on this machine, the one called bob")
def resume(name: Name = None, everyone: Everyone = False, state_dir: Running = None, json: Json = False) -> None:
    """End a pause. The set hours still hold."""
    _do("resume", name, everyone, state_dir, json)


def _do(verb: str, name: str | None, everyone: bool, state_dir: Path | None, json: bool) -> None:
    found = which_peers(verb, name=name, everyone=everyone, state_dir=state_dir)
    answers = [{"name": label, "folder": note.folder} | ask(Path(note.folder), verb) for label, note in found]
    states = [f"paused: {'; '.join(answer['reasons'])}" if answer["paused"] else "computing" for answer in answers]
    words = [f"{answer['name']}: {state}" for answer, state in zip(answers, states, strict=True)]
    say_result(answers, words, as_json=json)
