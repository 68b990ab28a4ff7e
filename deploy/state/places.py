"""Locates shoal's files on this machine: one folder per peer, and a note for each run that is up.

Everything is under `$XDG_STATE_HOME/shoal`, since a restart needs it. No other user may read these files: an invite
lets its reader join, and a snapshot contains the weights.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from blake3 import blake3

from shoal.protocol.errors import LocalError

logger = logging.getLogger(__name__)

_IDENTITY = "identity.key"
_OTHERS = 0o077
"""The permission bits of a file (0o077) that let its group or other users use it."""


def state_root() -> Path:
    """Return the folder of all state of this user."""
    return own_folder("XDG_STATE_HOME", ".local/state")


def cache_root() -> Path:
    """Return the folder for files that shoal can make again, such as prepared text."""
    return own_folder("XDG_CACHE_HOME", ".cache")


def own_folder(variable: str, usual: str) -> Path:
    """Return `shoal` in the folder that the environment's `variable` names, else in `usual` in the home folder."""
    return Path(os.environ.get(variable) or Path.home() / usual) / "shoal"


@dataclass(frozen=True, slots=True)
class FolderLock:
    """Locks a peer's folder for one process: messages of two peers with one identity would look like replays."""

    path: Path
    descriptor: int

    def release(self) -> None:
        os.close(self.descriptor)


def claim_folder(path: Path) -> FolderLock:
    """Create and lock the folder `path`. Remove other users' permissions on it, its content and the state root, and set
    this process's umask to 077, which children inherit.

    Raises: LocalError: another process holds `path`, it cannot be made, or it is not UTF-8, which our notes need.
    """
    os.umask(_OTHERS)
    try:
        str(path.resolve()).encode()
    except UnicodeEncodeError as error:
        raise LocalError(f"cannot use the state folder {path}: its path is not UTF-8; name another one") from error
    try:
        path.mkdir(parents=True, exist_ok=True)
        close_to_others(state_root())
        close_to_others(path)
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalError(f"cannot use the state folder {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LocalError(f"another shoal runs in {path}: stop it, or give this one another --state-dir") from error
    return FolderLock(path, descriptor)


def close_to_others(folder: Path) -> None:
    """Remove other users' permissions on a folder of shoal's and on files that an older shoal left in it.

    A closed folder is skipped; so it is closed last, and an interrupted pass is repeated. Files of another user (as in
    a Kubernetes volume) and targets of links stay unchanged.
    """
    if not _is_open(folder):
        return
    # `--state-dir` may name a folder with other files than shoal's in it.
    ours = folder == state_root() or (folder / _IDENTITY).exists()
    if ours and not Path.home().is_relative_to(folder.absolute()):
        for parent, folders, files in os.walk(folder, topdown=False):
            for name in (*folders, *files):
                _close(Path(parent, name))
    _close(folder)


def _is_open(path: Path) -> bool:
    """True if other users have any permission on the file and we may change that."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # removed meanwhile by the peer that runs there
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and bool(found.st_mode & _OTHERS)


def _close(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if _is_open(path):
            path.chmod(stat.S_IMODE(path.lstat().st_mode) & ~_OTHERS)


def claim_first_free(parent: Path, prefix: str) -> FolderLock:
    """Lock the first of `parent/prefix-1`, `parent/prefix-2`, … that is not locked: a restart gets its folder again.

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


def note_folder(folder: Path) -> None:
    """Keep the path of a peer's folder on disk, if it is outside shoal's usual places: so commands find its runs."""
    folder, root = folder.resolve(), state_root().resolve()
    if any(folder.is_relative_to(root / usual) for usual in ("hosts", "runs", "demo")):
        return
    path = _elsewhere(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{folder}\n")
    except OSError as error:
        logger.warning("`shoal runs` will not find %s: %s", folder, error)


def forget_folder(folder: Path) -> None:
    """Delete the record that `note_folder` made of `folder`."""
    _remove(_elsewhere(folder.resolve()))


def folders_elsewhere() -> list[Path]:
    """Return the folders recorded by `note_folder` that still exist."""
    found = []
    for note in sorted((state_root() / "elsewhere").glob("*.txt")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            folder = Path(note.read_text().strip())
            if folder.is_dir():
                found.append(folder)
    return found


def _elsewhere(folder: Path) -> Path:
    return state_root() / "elsewhere" / f"{blake3(str(folder).encode()).hexdigest(length=8)}.txt"


class Running(msgspec.Struct, frozen=True):
    """A note of one process of this user that takes part in a run."""

    pid: int
    created_s: float
    """The process's start time, which distinguishes it from a later process with the same number."""
    started_s: float
    invite: str
    """An invite for commands on this machine; it may name local addresses."""
    folder: str = ""
    """The peer's folder, which contains its control socket."""
    name: str = ""
    run_name: str = ""
    hosts: bool = False


@contextlib.contextmanager
def announced(
    invite: str, folder: Path | None = None, *, name: str = "", run_name: str = "", hosts: bool = False
) -> Iterator[None]:
    """Inside the context keep a note on disk, by which `shoal status` finds the run, and `shoal leave` the peer.

    If the note cannot be written, that is only logged: the peer's own folder may be on another disk.
    """
    pid, where = os.getpid(), str(folder.resolve()) if folder else ""
    path = state_root() / "running" / f"{pid}.json"
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        note = Running(pid, _created_s(pid), time.time(), invite, where, name, run_name, hosts)
        temporary.write_bytes(msgspec.json.encode(note))
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)
        logger.warning("`shoal status` and `leave` will not find this peer by themselves: %s", error)
    try:
        yield
    finally:
        _remove(path)


def last_running() -> Running | None:
    """Return the note of this user's peer that started last and still runs; None: no peer runs."""
    return next(iter(all_running()), None)


def all_running() -> list[Running]:
    """Return the notes of this user's live peers, newest first; delete the notes of dead peers."""
    alive = []
    for path in sorted((state_root() / "running").glob("*.json")):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=Running)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # being removed by its owner, or written by another version
        if _lives(note):
            alive.append(note)
        else:
            _remove(path)
    return sorted(alive, key=lambda note: (note.started_s, note.pid), reverse=True)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _lives(note: Running) -> bool:
    try:
        return _created_s(note.pid) == note.created_s
    except (FileNotFoundError, ProcessLookupError, PermissionError, psutil.NoSuchProcess):  # or hidden from us
        return False


def _created_s(pid: int) -> float:
    """Return when a process started, in seconds; on Linux since boot, as setting the clock cannot change that."""
    if not psutil.LINUX:
        return psutil.Process(pid).create_time()
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the process name may contain blanks
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
