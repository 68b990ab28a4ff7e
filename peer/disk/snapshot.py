"""Snapshots: one folder per version, complete or absent.

    FOLDER/RUN-era-0-step-00000050-9f86d081884c7d65/   version 50; the last part is the digest of manifest.json
        manifest.json                                  run, era, version, spec, and BLAKE3 of every other file
        layers.0.safetensors                           parameters under their Hugging Face names
        layers.0.moments.safetensors                   moment1 and moment2, flat

The era counts the run's roll-backs and repartitionings. After a roll-back, version 50 of era 1 is trained again from an
older version, and differs from version 50 of era 0. A higher era is newer.

A snapshot is written to a hidden folder and made durable; then the folder is renamed into place, and the rename is made
durable. An old snapshot is renamed away, the rename is made durable, and then the folder is removed. So after a crash
at any moment there is a valid snapshot if there was one before, and no snapshot lacks files. A peer's snapshot may have
only a part of the model's layers.
"""

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import msgspec
import safetensors.torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor

from shoal.peer.disk.snapshot_name import MANIFEST, UNFINISHED_PREFIX, SnapshotName
from shoal.peer.model.layout import state_layout
from shoal.peer.model.state import LayerState, moment2_numel
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Disk
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

MANIFEST_FORMAT: Final = 2
MANIFEST_DIGEST_CHARS: Final = 16
"""Hex digits of the manifest's digest in the folder's name: 64 bits, against bit rot, not against malice."""
LOCK_NAME: Final = ".lock"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class DamagedSnapshot(LocalError):
    """A snapshot is unreadable, torn, changed, or inconsistent with its own manifest."""

    def __init__(self, disk: Disk, path: PurePosixPath, reason: str) -> None:
        super().__init__(f"the snapshot {disk.where(path)} is damaged: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A snapshot as described by its manifest; the layer files have not been checked."""

    path: PurePosixPath
    run: str
    era: int
    version: int
    keys: tuple[str, ...]
    """Keys of the snapshot's layers, which may be only a part of the model."""
    spec: RunSpec

    @property
    def age(self) -> tuple[int, int]:
        """(era, version); a higher one is newer."""
        return (self.era, self.version)


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    run: str
    era: int
    version: int
    layers: tuple[str, ...]
    files: dict[str, str]
    """File name -> BLAKE3 hex of its bytes."""
    spec: RunSpec


OnDamage = Callable[[DamagedSnapshot], None]


def log_damage(damage: DamagedSnapshot) -> None:
    logger.warning("%s: using the one before it", damage)


# Writing --------------------------------------------------------------------------------------------------------------


def write_snapshot(
    disk: Disk,
    folder: PurePosixPath,
    *,
    run: str,
    version: int,
    layers: Mapping[str, LayerState],
    spec: RunSpec,
    era: int = 0,
    keep: int = 2,
    certified: Collection[tuple[int, int]] = (),
) -> PurePosixPath:
    """Write a snapshot into `folder`, which is made if it is missing; then `prune` old ones. Processes that share
    `folder` take turns.

    Returns: the snapshot's own folder, which is durable.
    Raises: LocalError: the disk is full or broken, or the folder cannot be written; earlier snapshots stay.
    """
    try:
        disk.make_folder(folder)
        with disk.lock(folder / LOCK_NAME):
            _remove_unfinished(disk, folder)  # we have the lock, so the processes that wrote them are dead
            manifest = _Manifest(
                format=MANIFEST_FORMAT, run=run, era=era, version=version, layers=tuple(layers), files={}, spec=spec
            )
            try:
                path = _write(disk, folder, manifest, layers)
            except OSError:
                with suppress(OSError):
                    _remove_unfinished(disk, folder)  # a full disk needs the room
                raise
            try:
                prune(disk, folder, run, keep, certified)
            except OSError as error:  # the next one tries again
                logger.warning("cannot remove old snapshots in %s: %s", disk.where(folder), error.strerror or error)
    except OSError as error:
        advice = ": make room, or restart with a --state-dir on another disk" if error.errno in _FULL else ""
        raise LocalError(
            f"cannot write a snapshot to {disk.where(folder)}: {error.strerror or error}{advice}"
        ) from error
    return path


def _write(disk: Disk, folder: PurePosixPath, manifest: _Manifest, layers: Mapping[str, LayerState]) -> PurePosixPath:
    run, era, version = manifest.run, manifest.era, manifest.version
    unfinished = folder / f"{UNFINISHED_PREFIX}{run}-{era}-{version}"
    disk.make_folder(unfinished)
    digests: dict[str, str] = {}
    for key, tensors in layers.items():
        for name, data in _layer_files(manifest.spec, key, tensors):
            disk.write(unfinished / name, data)
            digests[name] = blake3(data).hexdigest()
    data = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, files=digests)))
    disk.write(unfinished / MANIFEST, data)
    disk.sync_folder(unfinished)
    path = folder / str(SnapshotName(run, era, version, _manifest_digest(data)))
    if path.name in disk.list(folder):
        try:
            _check(disk, path)
        except DamagedSnapshot as damage:
            logger.warning("%s: writing it again", damage)
            disk.replace(path, folder / f"{UNFINISHED_PREFIX}{path.name}")
        else:  # the same snapshot, byte for byte, is there already
            disk.remove_tree(unfinished)
            return path
    disk.replace(unfinished, path)
    disk.sync_folder(folder)
    return path


def _layer_files(spec: RunSpec, key: str, tensors: LayerState) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of a layer's files; only one of them is in memory at a time."""
    params = state_layout(spec, key).views(tensors.param_N.detach().cpu())
    yield f"{key}.safetensors", safetensors.torch.save(params, metadata={"format": "pt"})
    moments = {"moment1": tensors.moment1_N.detach().cpu(), "moment2": tensors.moment2_N.detach().cpu()}
    yield f"{key}.moments.safetensors", safetensors.torch.save(moments, metadata={"format": "pt"})


def prune(disk: Disk, folder: PurePosixPath, run: str, keep: int, certified: Collection[tuple[int, int]] = ()) -> None:
    """Remove the snapshots of a run in `folder`, except the `keep` newest versions of each era and those in
    `certified`, (era, version). Snapshots with different layers may share a version. Older eras stay, since the run may
    return to them (`PastEras`). Raises: OSError."""
    ages = {name: age for name in disk.list(folder) if (age := _age(name, run)) is not None}
    old = []
    for name, (era, version) in ages.items():
        newer = {other for of_era, other in ages.values() if of_era == era and other > version}
        if len(newer) >= keep and (era, version) not in certified:
            old.append(name)
    _remove(disk, folder, old)


def remove_old(disk: Disk, folder: PurePosixPath, run: str, is_old: Callable[[tuple[int, int]], bool]) -> None:
    """Remove those snapshots of a run for which `is_old((era, version))` is true, and unfinished ones. Then remove
    `folder` if it is empty. No process may be writing there. Raises: OSError."""
    _remove(disk, folder, [name for name in disk.list(folder) if (age := _age(name, run)) is not None and is_old(age)])
    if set(disk.list(folder)) <= {LOCK_NAME}:
        disk.remove_tree(folder)


def _remove(disk: Disk, folder: PurePosixPath, names: Iterable[str]) -> None:
    for name in names:
        disk.replace(folder / name, folder / f"{UNFINISHED_PREFIX}{name}")
    _remove_unfinished(disk, folder)


def _remove_unfinished(disk: Disk, folder: PurePosixPath) -> None:
    names = [name for name in disk.list(folder) if name.startswith(UNFINISHED_PREFIX)]
    if names:
        # Else a crash could undo the renaming of an old snapshot but not its removal: it would be there without files.
        disk.sync_folder(folder)
    for name in names:
        disk.remove_tree(folder / name)


# Reading --------------------------------------------------------------------------------------------------------------


def list_snapshots(
    disk: Disk, folder: PurePosixPath, run: str = "", *, on_damage: OnDamage = log_damage
) -> list[StoredSnapshot]:
    """List the snapshots in `folder` (of one run; of all runs if `run` is empty), oldest first. Only manifests are
    read.

    Args: on_damage: gets each snapshot with a bad manifest; the list omits it.
    Raises: LocalError: the folder cannot be read.
    """
    try:
        names = disk.list(folder)
    except OSError as error:
        raise LocalError(f"cannot read {disk.where(folder)}: {error.strerror or error}") from error
    found = []
    for name in names:
        if _age(name, run) is None:
            continue
        path = folder / name
        try:
            found.append(look_at(disk, path))
        except DamagedSnapshot as damage:
            on_damage(damage)
    return sorted(found, key=lambda stored: (stored.age, stored.path))


def look_at(disk: Disk, path: PurePosixPath) -> StoredSnapshot:
    """Read only the manifest of the snapshot in the folder `path`. Raises: DamagedSnapshot: the manifest is bad."""
    found = _read_manifest(disk, path)
    return StoredSnapshot(
        path=path, run=found.run, era=found.era, version=found.version, keys=found.layers, spec=found.spec
    )


def without_damaged(disk: Disk, stored: Iterable[StoredSnapshot], *, on_damage: OnDamage) -> list[StoredSnapshot]:
    """Return `stored` without damaged snapshots. In each folder, snapshots are checked byte by byte, newest first,
    until one is undamaged; older ones are not checked."""
    newest_first = sorted(stored, key=lambda found: (found.age, found.path), reverse=True)
    left, has_sound = [], set[PurePosixPath]()
    for found in newest_first:
        if found.path.parent not in has_sound:
            try:
                _check(disk, found.path)
            except DamagedSnapshot as damage:
                on_damage(damage)
                continue
        has_sound.add(found.path.parent)
        left.append(found)
    return left


def _check(disk: Disk, path: PurePosixPath) -> None:
    """Check all files of a snapshot. Raises: DamagedSnapshot: a file is missing, torn, changed or unreadable."""
    manifest = _read_manifest(disk, path)
    for name in manifest.files:
        _read_checked(disk, path, manifest, name)


def read_layers(disk: Disk, path: PurePosixPath, keys: Iterable[str]) -> dict[str, LayerState]:
    """Read the layers `keys` of the snapshot in the folder `path`, in that order, and check every byte of them.

    Raises: DamagedSnapshot: a file is missing, torn, changed, unreadable or not what the manifest says. LocalError: the
        snapshot does not hold one of the layers.
    """
    manifest = _read_manifest(disk, path)
    layers = {}
    for key in keys:
        if key not in manifest.layers:
            raise LocalError(f"the snapshot {disk.where(path)} does not hold {key}")
        layers[key] = _read_layer(disk, path, manifest, key)
    return layers


def _read_manifest(disk: Disk, path: PurePosixPath) -> _Manifest:
    data = _read_file(disk, path, MANIFEST)
    name = SnapshotName.parse(path.name)  # a person may have renamed it
    if name is not None and name.manifest_digest != _manifest_digest(data):
        raise DamagedSnapshot(disk, path, f"{MANIFEST} is not the one its folder is named after")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedSnapshot(disk, path, f"{MANIFEST}: {str(error).splitlines()[0]}") from error
    if manifest.format != MANIFEST_FORMAT:
        raise DamagedSnapshot(disk, path, f"it has format {manifest.format}, this shoal reads {MANIFEST_FORMAT}")
    return manifest


def _read_layer(disk: Disk, path: PurePosixPath, manifest: _Manifest, key: str) -> LayerState:
    try:
        layout = state_layout(manifest.spec, key)
        moments = _read_tensors(disk, path, manifest, f"{key}.moments.safetensors")
        layer = LayerState(
            param_N=layout.flatten(_read_tensors(disk, path, manifest, f"{key}.safetensors")),
            moment1_N=moments["moment1"],
            moment2_N=moments["moment2"],
        )
        moment2_shapes = ((layout.numel,), (moment2_numel(manifest.spec, key),), (0,))
        if layer.moment1_N.shape != (layout.numel,) or layer.moment2_N.shape not in moment2_shapes:
            raise ValueError(
                f"the moments of {key} have {tuple(layer.moment1_N.shape)} and {tuple(layer.moment2_N.shape)}"
            )
    except (KeyError, ValueError) as error:
        raise DamagedSnapshot(disk, path, f"it does not fit its own spec: {error}") from error
    return layer


def _read_tensors(disk: Disk, path: PurePosixPath, manifest: _Manifest, name: str) -> dict[str, Tensor]:
    data = _read_checked(disk, path, manifest, name)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except SafetensorError as error:
        raise DamagedSnapshot(disk, path, f"{name}: {error}") from error
    return tensors


def _read_checked(disk: Disk, path: PurePosixPath, manifest: _Manifest, name: str) -> bytes:
    data = _read_file(disk, path, name)
    if blake3(data).hexdigest() != manifest.files.get(name):
        raise DamagedSnapshot(disk, path, f"{name} has changed since it was written")
    return data


def _read_file(disk: Disk, path: PurePosixPath, name: str) -> bytes:
    try:
        return disk.read(path / name)
    except OSError as error:
        raise DamagedSnapshot(disk, path, f"cannot read {name}: {error.strerror or error}") from error


def _age(name: str, run: str = "") -> tuple[int, int] | None:
    """Return (era, version) from the name of a snapshot's folder. None: not a snapshot, or not one of `run` (if `run`
    is empty, any run will do)."""
    found = SnapshotName.parse(name)
    if found is None or run not in ("", found.run):
        return None
    return (found.era, found.version)


def _manifest_digest(data: bytes) -> str:
    return blake3(data).hexdigest()[:MANIFEST_DIGEST_CHARS]
