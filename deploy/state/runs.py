"""The runs of this machine: which there are, how large they are, and removing one.

A run is in a peer's folder (`hosts/NAME`, `runs/RUN/peer-1`, or wherever `--state-dir` said), or in a demo's, which has
the folders of several peers and a snapshot of the whole model.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.deploy.state import places
from shoal.deploy.state.run_folder import RunFolder, is_run_id, runs_in
from shoal.peer.snapshot_name import SnapshotName
from shoal.protocol.errors import InviteError, LocalError
from shoal.protocol.invite import parse_invite
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_NAMED_MAX: Final = 3


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run in one folder."""

    name: str
    """The name of the run; empty: nothing that is left of the run says it."""
    run: str
    role: str
    """host, volunteer or demo."""
    step: int
    steps: int | None
    loss: float | None
    finished: bool
    size_bytes: int
    used_s: float
    """Seconds since 1970 when a peer last wrote there."""
    running: bool
    """A peer takes part in it from this folder now."""
    folder: str
    """The folder of the peer, or of the demo."""

    @property
    def path(self) -> Path:
        """The folder that has this run and no other."""
        return Path(self.folder) if self.role == "demo" else Path(self.folder, self.run)


def all_runs() -> list[FoundRun]:
    """All runs, those used last first. Raises: LocalError: the state folder cannot be read."""
    demos, up = (places.state_root() / "demo").glob("*"), _running()
    return _in_order([run for folder in (*peer_folders(), *demos) for run in _runs_at(folder, up)])


def peer_folders() -> list[Path]:
    """The folders of all peers of this user on this machine, wherever `--state-dir` has put them."""
    root = places.state_root()
    return [*sorted((root / "hosts").glob("*")), *sorted((root / "runs").glob("*/*")), *places.folders_elsewhere()]


# --- which run a person means ---


def find(wanted: str, runs: Iterable[FoundRun]) -> list[FoundRun]:
    """The run that `wanted` means, in each folder that has it.

    Args: wanted: a name, an id or its first letters; or the folder of a run, of a peer or of a demo.
    Raises: LocalError: it means none, or several.
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
    """The folders in which a command looks for what it reads of a run.

    Args:
        what: that which it reads, for people.
        wanted: as of `find`, or any other path; empty: the run that was used last among those that have `what`. A line
            says so if there are others.
        has: whether there is any of it in a folder.
    Raises: LocalError: there is none, or `wanted` may mean several.
    """
    runs = all_runs()
    if not wanted:
        return _used_last(what, [run for run in runs if has(run.path)])
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


def _used_last(what: str, runs: Sequence[FoundRun]) -> tuple[Path, ...]:
    if not runs:
        raise LocalError(f"no run on this machine has a {what}: `shoal runs` lists the runs")
    newest = runs[0]
    if others := [run for run in runs if run.run != newest.run]:
        logger.warning(
            "this is run %s (%s), which was used last; there is also %s", newest.name, newest.run, _listed(others)
        )
    return tuple(run.path for run in runs if run.run == newest.run)


def _named(wanted: str, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs of this id, or else of this name."""
    return [run for run in runs if wanted and run.run == wanted] or [
        run for run in runs if wanted and run.name == wanted
    ]


def _listed(runs: Sequence[FoundRun]) -> str:
    each = list({run.run: f"{run.name} ({run.run}, step {run.step})" for run in runs}.values())
    return ", ".join(each[:_NAMED_MAX]) + (f" and {len(each) - _NAMED_MAX} more" if each[_NAMED_MAX:] else "")


def find_hosted(wanted: str, state_dir: Path | None) -> tuple[RunFolder, RunSpec]:
    """A run that was hosted on this machine, and the newest revision of its spec.

    Raises: LocalError: there is none such, or others host it.
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
    """The names that a shell completes."""
    return sorted({run.name for run in all_runs() if run.role == "host" and run.name.startswith(incomplete)})


def all_names(incomplete: str) -> list[str]:
    """What a shell completes: names, and ids where a name is not enough."""
    runs = all_runs()
    names = [run.name for run in runs]
    words = {run.name if names.count(run.name) == 1 and run.name else run.run for run in runs}
    return sorted(word for word in words if word.startswith(incomplete))


# --- removing ---


def remove(found: Sequence[FoundRun]) -> int:
    """Delete a run wherever it is on this machine, and the prepared text that only it used.

    Returns: bytes that were freed.
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
        return  # the key is that of the others too
    shutil.rmtree(folder)
    places.forget_folder(folder)
    parent = folder.parent
    if is_run_id(parent.name) and not any(parent.iterdir()):
        parent.rmdir()


def _texts_of(run: FoundRun) -> list[str]:
    """The digests of the texts on which the run was trained."""
    folder = Path(run.folder)
    known = [RunFolder(folder, run.run)] if run.role != "demo" else _peers_of_demo(folder)
    specs = [spec for one in known if (spec := one.spec()) is not None]
    return [digest for spec in specs for digest in spec.data.digests]


def _remove_texts(digests: set[str]) -> int:
    """Remove these texts from the cache. Returns: bytes that were freed."""
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
    """The runs in the folder of a peer or of a demo; the one run, if `folder` is that of a run in the folder of a peer.

    Args: up: `_running` gives it.
    """
    try:
        if folder.parent == places.state_root() / "demo" or (folder / "peers").is_dir():
            return [_look_at_demo(folder)] if folder.is_dir() else []
        run = [RunFolder(folder.parent, folder.name)] if is_run_id(folder.name) and folder.is_dir() else []
        return [_look_at(run, up) for run in run or runs_in(folder)]
    except OSError as error:
        raise LocalError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def _running() -> set[tuple[str, str]]:
    """(folder, run) of the peers that are up."""
    up = set()
    for note in places.all_running():
        with contextlib.suppress(InviteError):
            up.add((note.folder, parse_invite(note.invite).run))
    return up


def _look_at(folder: RunFolder, up: set[tuple[str, str]]) -> FoundRun:
    standing, spec = folder.standing(), folder.spec()
    size_bytes, used_s = _size_of(folder.path)
    return FoundRun(
        name=spec.name if spec is not None else standing.name if standing is not None else "",
        run=folder.run,
        role=standing.role if standing is not None else _role_of(folder.peer_folder),
        step=folder.reached(),
        steps=spec.training.steps if spec is not None else None,
        loss=folder.last_loss(),
        finished=folder.is_finished(),
        size_bytes=size_bytes,
        used_s=standing.used_s if standing is not None else used_s,
        running=(str(folder.peer_folder.resolve()), folder.run) in up,
        folder=str(folder.peer_folder),
    )


def _role_of(peer_folder: Path) -> str:
    """The role of a peer in a run that an earlier version of shoal took part in."""
    return "host" if peer_folder.parent.name == "hosts" else "volunteer"


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
    """(bytes of all files below it, when the last one was written)."""
    size, written_s = 0, 0.0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a peer is just removing it
            stat = path.lstat()
            written_s = max(written_s, stat.st_mtime)
            size += 0 if path.is_dir() else stat.st_size
    return size, written_s
