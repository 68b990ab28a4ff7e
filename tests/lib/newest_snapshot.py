"""Reads whole snapshots, and the newest undamaged one of a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath

from shoal.peer.disk.snapshot import (
    DamagedSnapshot,
    StoredSnapshot,
    list_snapshots,
    log_damage,
    look_at,
    read_layers,
)
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(StoredSnapshot):
    """A snapshot all of whose layers have been checked."""

    layers: Mapping[str, LayerState]


def read_snapshot(disk: Disk, path: PurePosixPath) -> Snapshot:
    """Raises: DamagedSnapshot."""
    stored = look_at(disk, path)
    of_manifest = {field.name: getattr(stored, field.name) for field in fields(stored)}
    return Snapshot(**of_manifest, layers=read_layers(disk, path, stored.keys))


def read_newest(
    disk: Disk, folder: PurePosixPath, run: str = "", *, on_damage: Callable[[DamagedSnapshot], None] = log_damage
) -> Snapshot:
    """Read and check it. Args: on_damage: gets each damaged one that was passed over. Raises: LocalError: none is."""
    for stored in reversed(list_snapshots(disk, folder, run, on_damage=on_damage)):
        try:
            return read_snapshot(disk, stored.path)
        except DamagedSnapshot as damage:
            on_damage(damage)
    raise LocalError(f"there is no undamaged snapshot in {disk.where(folder)}")
