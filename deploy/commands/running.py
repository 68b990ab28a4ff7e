"""Finds the run or the peers on this machine that a command means."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.base.words import printable
from shoal.deploy.state import places
from shoal.deploy.terminal.plain import say
from shoal.protocol.errors import LocalError
from shoal.protocol.invite import Invite, parse_invite

Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="The peer's name, if several run here.", autocompletion=lambda: names_here()),
]
Running = Annotated[
    Path | None, typer.Option("--state-dir", help="The peer's state folder, if several peers run here.")
]
Everyone = Annotated[bool, typer.Option("--all", help="All peers of this user on this machine.")]


def which_peers(
    command: str, *, name: str | None, everyone: bool, state_dir: Path | None
) -> list[tuple[str, places.Running]]:
    """Return (label, entry about the running process) of each peer on this machine that the command means.

    Raises: LocalError: no peer runs here, or several could be meant; the sentence says how to choose.
    """
    labelled = labelled_here()
    if sum([name is not None, everyone, state_dir is not None]) > 1:
        raise LocalError("say one of them: NAME, --all or --state-dir")
    if state_dir is not None:
        found = [(label, note) for label, note in labelled if note.folder == str(state_dir.resolve())]
        if not found:
            raise LocalError(f"no peer runs in {state_dir}")
        return found
    if not labelled:
        raise LocalError("no peer runs on this machine, or another user started it")
    if name is not None:
        found = [(label, note) for label, note in labelled if name in (label, note.name, note.folder)]
        if len(found) == 1:
            return found
        what = f"no peer called {name} runs here" if not found else f"{len(found)} peers called {name} run here"
        raise LocalError(f"{what}: {_choice(command, labelled)}")
    if len(labelled) > 1 and not everyone:
        raise LocalError(f"{len(labelled)} peers run on this machine: {_choice(command, labelled)}")
    return labelled


def names_here() -> list[str]:
    """Return peers' names for shell completion."""
    return [label for label, _ in labelled_here()]


def labelled_here() -> list[tuple[str, places.Running]]:
    """Return (unique label, entry) of each peer here. The label is its name, or its folder if that is not unique."""
    notes = [note for note in places.all_running() if note.folder]
    ways = [[printable(note.name), Path(note.folder).name, note.folder] for note in notes]
    counts = [Counter(names) for names in zip(*ways, strict=True)]
    found = (
        next(name for name, count in zip(names, counts, strict=True) if name and count[name] == 1) for names in ways
    )
    return list(zip(found, notes, strict=True))


def _choice(command: str, labelled: Sequence[tuple[str, places.Running]]) -> str:
    runs = [
        f"`shoal {command} {label}`" + (f" (run {printable(note.run_name)})" if note.run_name else "")
        for label, note in labelled
    ]
    return f"{', '.join(runs)}, or all of them with `shoal {command} --all`"


def given_invite(text: str) -> Invite:
    """Read a command's invite; `-` stands for a line of standard input, which no other user can read.

    Raises: InviteError: the invite is invalid, or of another version.
    """
    if text != "-":
        return parse_invite(text)
    if sys.stdin.isatty():
        say("paste the invite and press Enter:", err=True)
    return parse_invite(sys.stdin.readline())


def running_invite(command: str) -> Invite:
    """Return the invite of the run that was started last on this machine and is up.

    Args: command: the command of the user, for the error message. Raises: LocalError: no run is up here."""
    note = places.last_running()
    if note is None:
        raise LocalError(f"no run is up on this machine: give its invite, as in `shoal {command} INVITE`")
    return parse_invite(note.invite)


def running_here(state_dir: Path | None, *, hosts: bool = False) -> Path:
    """Return the folder of the peer in `state_dir`, or of the one last started on this machine.

    Args: hosts: prefer the peer of a run's host, because only the host can do what the command asks.
    Raises: LocalError: no peer runs here.
    """
    if state_dir is not None:
        return state_dir
    here = places.all_running()
    note = next((note for note in here if note.hosts and hosts), here[0] if here else None)
    if note is None or not note.folder:
        raise LocalError("no peer runs on this machine, or another user started it")
    return Path(note.folder)
