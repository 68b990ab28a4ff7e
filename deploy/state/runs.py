"""Lists, finds and removes the runs of this machine.

A run is in a peer's folder (`hosts/NAME`, `runs/RUN/peer-1`, or the `--state-dir`), or in a demo's folder, which has
the folders of several peers and a snapshot of the whole model.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.deploy.base.words import listed
from shoal.deploy.state import places
from shoal.deploy.state.run_folder import RunFolder, is_run_id, runs_in
from shoal.peer.disk.snapshot_name import SnapshotName
from shoal.protocol.errors import InviteError, LocalError
from shoal.protocol.invite import parse_invite
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run in one folder."""

    name: str
    """The run's name; empty: unknown."""
    run: str
    role: str
    """Which peer the folder belongs to: `host`, `volunteer`, or `demo` if it is the folder of a whole demo."""
    step: int
    steps: int | None
    loss: float | None
    finished: bool
    size_bytes: int
    used_s: float
    """When a peer last wrote to the run's files, in seconds since 1970."""
    running: bool
    """True if a peer is taking part from this folder."""
    folder: str
    """The peer's or the demo's folder."""

    @property
    def path(self) -> Path:
        """The folder of this run alone."""
        return Path(self.folder) if self.role == "demo" else Path(self.folder, self.run)


def all_runs() -> list[FoundRun]:
    """Return all runs of this user, the last used first. Raises: LocalError: the state folder cannot be read."""
    demos, up = (places.state_root() / "demo").glob("*"), _running()
    return _in_order([run for folder in (*peer_folders(), *demos) for run in _runs_at(folder, up)])


def peer_folders() -> list[Path]:
    """Return the folders of all peers of this user, including each `--state-dir`."""
    root = places.state_root()
    return [*sorted((root / "hosts").glob("*")), *sorted((root / "runs").glob("*/*")), *places.folders_elsewhere()]


# --- which run a person means ---


def find(wanted: str, runs: Iterable[FoundRun]) -> list[FoundRun]:
    """Return the run that `wanted` means, as an entry for each folder that has this run.

    Args: wanted: a name, an id or its first letters; or the folder of a run, of a peer or of a demo.
    Raises: LocalError: no run matches, or several do.
    """
    runs = list(runs)
    path = Path(wanted).expanduser()
    found = _named(wanted, runs)
    found = found or (_in_order(_runs_at(path.resolve(), _running())) if wanted and path.is_dir() else [])
    found = found or [run for run in runs if wanted and run.run.startswith(wanted)]
    if not found:
        raise LocalError(f"no run {wanted!r} is on this machine: `shoal runs` lists them")
    if len({run.run for run in found}) > 1:
        raise LocalError(f"{wanted!r} may mean {_listed(found)}: say the first letters of the id")
    return found


def look_for(what: str, wanted: str, *, has: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Return the folders in which a command looks for its input.

    Args:
        what: the input's name, for people.
        wanted: a run's name, id or first letters of its id, or any path; empty: the last used run that has `what`. If
            other runs have it too, a warning names them.
        has: True if a folder contains such input.
    Raises: LocalError: no such folder is found, or `wanted` is ambiguous.
    """
    runs = all_runs()
    if not wanted:
        with_it = [run for run in runs if has(run.path)]
        if not with_it:
            raise LocalError(f"no run on this machine has a {what}: `shoal runs` lists the runs")
        newest = with_it[0]
        if others := [run for run in with_it if run.run != newest.run]:
            logger.warning(
                "this is run %s (%s), which was used last; there is also %s", newest.name, newest.run, _listed(others)
            )
        return tuple(run.path for run in with_it if run.run == newest.run)
    path, named = Path(wanted).expanduser(), _named(wanted, runs)
    if path.exists() and (not named or has(path)):
        if named:
            raise LocalError(
                f"{wanted!r} may mean the run {named[0].run} or what is in {path.resolve()}: "
                f"say {os.path.join(os.curdir, wanted)} or the run's id"
            )
        return (path,)
    if not named and (os.sep in wanted or not wanted.strip(".")):
        raise LocalError(f"there is no file or folder {path}")
    found = find(wanted, runs)
    if not any(has(run.path) for run in found):
        raise LocalError(f"run {found[0].name or '?'} ({found[0].run}) has no {what} on this machine yet")
    return tuple(run.path for run in found)


def _named(wanted: str, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the runs with this id or, if there are none, those with this name."""
    named = [run for run in runs if wanted in (run.run, run.name)] if wanted else []
    return [run for run in named if run.run == wanted] or named


def _listed(runs: Sequence[FoundRun]) -> str:
    return listed(list({run.run: f"{run.name} ({run.run}, step {run.step})" for run in runs}.values()))


def find_hosted(wanted: str, state_dir: Path | None) -> tuple[RunFolder, RunSpec]:
    """Return a run that was hosted on this machine, and the newest revision of its spec.

    Raises: LocalError: there is no such run, it was hosted elsewhere, several folders have it, or it has no spec here.
    """
    found = find(wanted, all_runs() if state_dir is None else _runs_at(state_dir.resolve(), _running()))
    hosted = [run for run in found if run.role == "host"]
    if not hosted:
        raise LocalError(
            f"run {found[0].name} ({found[0].run}) was not hosted on this machine: its host can continue it, "
            "and `shoal join` with its invite then takes part"
        )
    if hosted[1:]:
        raise LocalError(
            f"run {hosted[0].run} is in {hosted[0].folder} and in {hosted[1].folder}: say which with --state-dir"
        )
    folder = RunFolder(Path(hosted[0].folder), hosted[0].run)
    spec = folder.spec()
    if spec is None:
        raise LocalError(f"{folder.path} has neither a snapshot nor the run's spec: host its run file again")
    return folder, spec


def hosted_names(incomplete: str) -> list[str]:
    """Return the names of hosted runs for shell completion."""
    return sorted({run.name for run in all_runs() if run.role == "host" and run.name.startswith(incomplete)})


def all_names(incomplete: str) -> list[str]:
    """Return the names of runs for shell completion; for a run with a missing or ambiguous name, its id."""
    runs = all_runs()
    names = [run.name for run in runs]
    words = {run.name if names.count(run.name) == 1 and run.name else run.run for run in runs}
    return sorted(word for word in words if word.startswith(incomplete))


# --- removing ---


def remove(found: Sequence[FoundRun]) -> int:
    """Delete a run in all its folders, and the prepared text that only it used.

    Returns: freed bytes.
    Raises: LocalError: a process holds one of the folders (then nothing is deleted), or something cannot be deleted.
    """
    with contextlib.ExitStack() as stack:
        for run in found:
            if (Path(run.folder) / ".lock").exists():
                stack.callback(places.claim_folder(Path(run.folder)).release)
        digests = {digest for run in found for digest in _texts_of(run)}
        freed = 0
        try:
            for run in found:
                freed += run.size_bytes
                _remove(run)
            remaining = {digest for run in all_runs() for digest in _texts_of(run)}
            freed += _remove_texts(digests - remaining)
        except OSError as error:
            raise LocalError(f"cannot delete {error.filename}: {error.strerror or error}") from error
    return freed


def _remove(run: FoundRun) -> None:
    folder = Path(run.folder)
    if run.role == "demo":
        shutil.rmtree(folder)
        return
    shutil.rmtree(folder / run.run)
    (places.state_root() / "evaluations" / f"{run.run}.jsonl").unlink(missing_ok=True)
    (folder / f"mandated-{run.run}.txt").unlink(missing_ok=True)
    if runs_in(folder):
        return  # the other runs need the key
    shutil.rmtree(folder)
    places.forget_folder(folder)
    parent = folder.parent
    if is_run_id(parent.name) and not any(parent.iterdir()):
        parent.rmdir()


def _texts_of(run: FoundRun) -> list[str]:
    folder = Path(run.folder)
    known = [RunFolder(folder, run.run)] if run.role != "demo" else _peers_of_demo(folder)
    specs = [spec for one in known if (spec := one.spec()) is not None]
    return [digest for spec in specs for digest in spec.data.digests]


def _remove_texts(digests: set[str]) -> int:
    freed = 0
    for meta in sorted((places.cache_root() / "text").glob("*/meta.json")):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            about: Any = msgspec.json.decode(meta.read_bytes())
            if isinstance(about, dict) and about.get("digest") in digests:
                size, _ = _size_of(meta.parent)
                shutil.rmtree(meta.parent)
                freed += size
    return freed


# --- looking ---


def _in_order(runs: list[FoundRun]) -> list[FoundRun]:
    return sorted(runs, key=lambda run: (-run.used_s, run.folder, run.run))


def _runs_at(folder: Path, up: set[tuple[str, str]]) -> list[FoundRun]:
    """Return the runs in `folder`, a peer's or demo's; if it is a run's own folder, that run alone.

    Args: up: (folder, run) of the peers that are up.
    """
    try:
        if folder.parent == places.state_root() / "demo" or (folder / "peers").is_dir():
            return [_look_at_demo(folder)] if folder.is_dir() else []
        run = [RunFolder(folder.parent, folder.name)] if is_run_id(folder.name) and folder.is_dir() else []
        return [_look_at(run, up) for run in run or runs_in(folder)]
    except OSError as error:
        raise LocalError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def _running() -> set[tuple[str, str]]:
    """Return {(peer's folder, run)} of all peers of this user that are up."""
    up = set()
    for note in places.all_running():
        with contextlib.suppress(InviteError):
            up.add((note.folder, parse_invite(note.invite).run))
    return up


def _look_at(folder: RunFolder, up: set[tuple[str, str]]) -> FoundRun:
    standing, spec, at = folder.standing(), folder.spec(), folder.peer_folder
    size_bytes, used_s = _size_of(folder.path)
    return FoundRun(
        name=spec.name if spec is not None else standing.name if standing is not None else "",
        run=folder.run,
        # An earlier version of shoal wrote no `standing.json`.
        role=standing.role if standing is not None else "host" if at.parent.name == "hosts" else "volunteer",
        step=folder.reached(),
        steps=spec.training.steps if spec is not None else None,
        loss=folder.last_loss(),
        finished=folder.is_finished(),
        size_bytes=size_bytes,
        used_s=standing.used_s if standing is not None else used_s,
        running=(str(at.resolve()), folder.run) in up,
        folder=str(at),
    )


def _look_at_demo(folder: Path) -> FoundRun:
    size_bytes, used_s = _size_of(folder)
    kept = [name for path in (folder / "snapshot").glob("*") if (name := SnapshotName.parse(path.name)) is not None]
    peers = _peers_of_demo(folder)
    spec = next((spec for peer in peers if (spec := peer.spec()) is not None), None)
    up = _running()
    steps = spec.training.steps if spec is not None else None
    step = max([name.version for name in kept] + [peer.reached() for peer in peers], default=0)
    return FoundRun(
        name=f"demo {folder.name}",
        run=next(iter([name.run for name in kept] + [peer.run for peer in peers]), ""),
        role="demo",
        step=step,
        steps=steps,
        loss=next((loss for peer in peers if (loss := peer.last_loss()) is not None), None),
        finished=steps is not None and step >= steps,
        size_bytes=size_bytes,
        used_s=used_s,
        running=any((str(peer.peer_folder.resolve()), peer.run) in up for peer in peers),
        folder=str(folder),
    )


def _peers_of_demo(folder: Path) -> list[RunFolder]:
    return [run for peer in sorted((folder / "peers").glob("*")) for run in runs_in(peer)]


def _size_of(folder: Path) -> tuple[int, float]:
    """Return (bytes of all files below `folder`, time of the last write in seconds since 1970)."""
    size, written_s = 0, 0.0
    for place, _, names in os.walk(folder):  # skips a folder that a peer removes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stat = Path(place, name).lstat()
                written_s = max(written_s, stat.st_mtime)
                size += stat.st_size
    return size, written_s
