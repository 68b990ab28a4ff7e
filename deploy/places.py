"""Where shoal keeps things on this machine: one folder per peer, and a note for each run that is up right now.

Everything is under `$XDG_STATE_HOME/shoal` (`~/.local/state/shoal`), because it is state that a restart wants back
(identity, highest plan obeyed, snapshots) and not configuration.
"""

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from shoal.protocol.errors import LocalError


def state_root() -> Path:
    """The folder of everything shoal remembers for this user."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "shoal"


def cache_root() -> Path:
    """The folder of what can be made again: prepared text."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


class FolderLock:
    """Holds a peer's folder for one process; two peers with one identity would look like a replay to the others."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


def claim_folder(path: Path) -> FolderLock:
    """Make `path` and hold it.

    Raises: LocalError: another process holds it, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalError(f"cannot use the state folder {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LocalError(f"another shoal runs in {path}: stop it, or give this one another --state-dir") from error
    return FolderLock(path, descriptor)


def claim_first_free(parent: Path, prefix: str) -> FolderLock:
    """Hold the first of `parent/prefix-1`, `parent/prefix-2`, … that nobody holds, so that a restart finds itself.

    Raises: LocalError: the folder cannot be made.
    """
    for number in itertools.count(1):
        path = parent / f"{prefix}-{number}"
        try:
            return claim_folder(path)
        except LocalError as error:
            if isinstance(error.__cause__, BlockingIOError):
                continue
            raise
    raise AssertionError("unreachable")


class Running(msgspec.Struct, frozen=True):
    """A run that a process of this user takes part in now. `created_s` tells a reused process number from the same
    process.
    """

    pid: int
    created_s: float
    started_s: float
    invite: str
    folder: str = ""
    """The peer's own: its control socket is there."""


@contextlib.contextmanager
def announced(invite: str, folder: Path | None = None) -> Iterator[None]:
    """While this lasts, `shoal status` without an argument finds the run, and `shoal leave` the peer in `folder`."""
    me = psutil.Process()
    notes = state_root() / "running"
    notes.mkdir(parents=True, exist_ok=True)
    path = notes / f"{me.pid}.json"
    note = Running(me.pid, me.create_time(), time.time(), invite, str(folder.resolve()) if folder else "")
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(note))
    temporary.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def last_running() -> Running | None:
    """The run that came up last among those whose process still lives."""
    return next(iter(all_running()), None)


def all_running() -> list[Running]:
    """Peers of this user whose process still lives, the newest first; notes of dead ones are swept."""
    alive = []
    for path in sorted((state_root() / "running").glob("*.json")):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=Running)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # being removed by its owner, or of another version
        if _lives(note):
            alive.append(note)
        else:
            path.unlink(missing_ok=True)
    return sorted(alive, key=lambda note: (note.started_s, note.pid), reverse=True)


def _lives(note: Running) -> bool:
    try:
        return psutil.Process(note.pid).create_time() == note.created_s
    except psutil.NoSuchProcess:
        return False
