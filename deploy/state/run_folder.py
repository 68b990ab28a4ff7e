"""Reads and writes one peer's files about one run: `RUN/` in the peer's folder.

| file | content |
|---|---|
| `spec.record` | the newest revision of the run's spec that the peer has seen, signed by the owner |
| `era` | the newest era (training generation) and the last snapshot's version (`shoal.peer.disk.archive`) |
| `standing.json` | step, role and end of the run when the peer last looked |
| `snapshots/` | layers (`shoal.peer.disk.archive`) |
| other files | those of `coordinator/store.py`, `known_peers.py` and `../record/` |

Only `RunFolder.kept` needs torch. A damaged file counts as missing, which does no harm: the spec is in the snapshots
too, and `standing.json` only serves what commands print.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import msgspec

from shoal.deploy.state.spec_record import is_newer, open_spec
from shoal.peer.disk.snapshot_name import MANIFEST, SnapshotName
from shoal.protocol.durable import replace_file
from shoal.protocol.envelope import Envelope
from shoal.protocol.errors import RemoteError
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

RECORD: Final = "spec.record"
STANDING: Final = "standing.json"
_LOSSES: Final = "record.jsonl"

Role = Literal["host", "volunteer"]


class SavedStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The run's state when the peer last looked."""

    name: str
    role: Role
    step: int = 0
    """The number of steps that every stage had committed."""
    steps: int
    loss: float | None = None
    finished: bool = False
    used_s: float
    """When the peer last wrote this state, in seconds since 1970."""
    directory: str = ""
    """The host's working directory, to which paths in its run file are relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The snapshots of one run in one peer's folder: which layers can be read, and which snapshots are damaged."""

    layers: Mapping[tuple[int, int], Collection[str]]
    """(era, version) of each snapshot -> its readable layers; the era is the training generation."""
    damaged: Sequence[str]
    """A sentence for each unreadable snapshot."""
    saved: int
    """The version of the last snapshot that was ever written here, even if it is gone; 0: none was written."""

    def newest_whole(self, keys: Collection[str]) -> int | None:
        """Return the version of the newest snapshot that contains all the layers `keys`; None if there is none."""
        whole = [age for age, layers in self.layers.items() if set(keys) <= set(layers)]
        return max(whole)[1] if whole else None


class RunFolder:
    """One run in one peer's folder. Args: peer_folder: the folder with the peer's key."""

    def __init__(self, peer_folder: Path, run: str) -> None:
        self.peer_folder, self.run = peer_folder, run
        self.path = peer_folder / run

    # --- the spec ---

    def spec(self) -> RunSpec | None:
        """Return the newest revision of the spec that this peer knows; None if it knows none."""
        kept = self.record()
        return kept[0] if kept is not None else self._spec_of_snapshots()

    def record(self) -> tuple[RunSpec, bytes] | None:
        """Return the spec and its signed record if they match the run's name (a hash of spec and owner), else None."""
        try:
            data = (self.path / RECORD).read_bytes()
            owner = msgspec.msgpack.decode(data, type=Envelope).sender
            return open_spec(data, run=self.run, owner=owner, source=owner), data
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RemoteError) as error:
            logger.warning("%s cannot be read and is not used: %s", self.path / RECORD, error)
            return None

    def keep_record(self, spec: RunSpec, record: bytes) -> None:
        """Write this revision of the spec unless the folder has a newer one. A full disk is only logged."""
        kept = self.record()
        if kept is not None and not is_newer(spec, kept[0]):
            return
        try:
            self._write(RECORD, record)
        except OSError as error:
            logger.warning("the run's spec could not be kept in %s: %s", self.path, error.strerror or error)

    def _spec_of_snapshots(self) -> RunSpec | None:
        for _, folder in sorted(self._snapshots(), reverse=True):
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_WithSpec).spec
        return None

    # --- the run's progress ---

    def standing(self) -> SavedStanding | None:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode((self.path / STANDING).read_bytes(), type=SavedStanding)
        return None

    def keep_standing(self, standing: SavedStanding) -> None:
        try:
            self._write(STANDING, msgspec.json.format(msgspec.json.encode(standing)))
        except OSError as error:
            logger.debug("no note of how far the run is: %s", error)

    def version(self) -> int:
        """Return the version of the newest snapshot here, even if it lacks layers; 0 if there is none."""
        return max((name.version for name, _ in self._snapshots()), default=0)

    def kept(self) -> Kept:
        """Read the newest snapshots, and list the undamaged ones. Raises: LocalError: their folder is unreadable."""
        from shoal.peer.disk import snapshot  # imports torch: not for commands that only look
        from shoal.protocol.live.disk import LiveDisk

        disk, folder = LiveDisk(self.peer_folder), PurePosixPath(self.run, "snapshots")
        damaged: list[snapshot.DamagedSnapshot] = []
        listed = [
            stored
            for group in disk.list(folder)
            for stored in snapshot.list_snapshots(disk, folder / group, self.run, on_damage=damaged.append)
        ]
        sound = snapshot.without_damaged(disk, listed, on_damage=damaged.append)
        layers: dict[tuple[int, int], set[str]] = {}
        for stored in sound:
            layers.setdefault(stored.age, set()).update(stored.keys)
        saved = self.version()
        with contextlib.suppress(OSError, ValueError, IndexError):
            saved = max(saved, int((self.path / "era").read_bytes().split()[2]))
        return Kept(layers=layers, damaged=tuple(map(str, damaged)), saved=saved)

    def has_met_others(self) -> bool:
        """True if this peer's folder names another peer of the run to which it was connected."""
        from shoal.deploy.state.known_peers import KnownPeers
        from shoal.protocol.live.disk import LiveDisk

        return bool(KnownPeers(LiveDisk(self.peer_folder), self.run).read())

    def reached(self) -> int:
        """Return the number of steps done by the files here: the newest snapshot's or `standing.json`'s, if higher."""
        standing = self.standing()
        return max(self.version(), standing.step if standing is not None else 0)

    def is_finished(self) -> bool:
        spec, standing = self.spec(), self.standing()
        if spec is None:
            return False
        said = standing is not None and standing.finished and standing.steps == spec.training.steps
        return said or self.version() >= spec.training.steps

    def last_loss(self) -> float | None:
        """Return the last known loss: from the run's record if this peer keeps one, else from `standing.json`."""
        with contextlib.suppress(OSError), (self.path / _LOSSES).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            for line in reversed(file.read().splitlines()):
                loss = _loss_of(line)
                if loss is not None:
                    return loss
        standing = self.standing()
        return standing.loss if standing is not None else None

    def _snapshots(self) -> Iterator[tuple[SnapshotName, Path]]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for group in (self.path / "snapshots").iterdir():
                if not group.is_dir():
                    continue
                for folder in group.iterdir():
                    name = SnapshotName.parse(folder.name)
                    if name is not None and name.run == self.run:
                        yield name, folder

    def _write(self, name: str, data: bytes) -> None:
        from shoal.protocol.live.disk import LiveDisk  # imports numpy: not for commands that only look

        replace_file(LiveDisk(self.peer_folder), PurePosixPath(self.run, name), data)


class _WithSpec(msgspec.Struct):
    spec: RunSpec


def runs_in(peer_folder: Path) -> list[RunFolder]:
    """Return the runs in a peer's folder, ordered by name."""
    try:
        names = sorted(entry.name for entry in peer_folder.iterdir() if entry.is_dir())
    except OSError:
        return []
    return [RunFolder(peer_folder, name) for name in names if is_run_id(name)]


def is_run_id(text: str) -> bool:
    return len(text) == 16 and all(letter in "0123456789abcdef" for letter in text)


def _loss_of(line: bytes) -> float | None:
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    loss = value.get("loss") if isinstance(value, dict) and value.get("kind", "step") == "step" else None
    return float(loss) if isinstance(loss, int | float) else None
