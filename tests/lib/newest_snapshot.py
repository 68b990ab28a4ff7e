"""Reads the newest undamaged snapshot of a folder."""

from collections.abc import Callable
from pathlib import PurePosixPath

from shoal.peer.disk.snapshot import DamagedSnapshot, Snapshot, list_snapshots, log_damage, read_snapshot
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Disk


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
