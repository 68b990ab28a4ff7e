"""Finds the newest whole snapshot of a run on this machine, for `shoal export` and `shoal generate`.

A peer's snapshots have the layers of its own stage and copies of other layers; `shoal demo` leaves one snapshot of the
whole model. So a version is assembled from all folders with some of its layers; it is whole if no layer is missing.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import torch
from torch import Tensor

from shoal.deploy.base.words import listed
from shoal.deploy.state.runs import look_for
from shoal.peer.disk.snapshot import DamagedSnapshot, StoredSnapshot, log_damage, look_at, read_layers
from shoal.peer.disk.snapshot_name import MANIFEST, UNFINISHED_PREFIX
from shoal.peer.model.layout import all_layer_keys, unit_keys
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.layers import held_keys
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.ports import Disk
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSnapshot:
    """One version of a run, with a copy of every layer on this machine. `read` finds out whether a layer is damaged."""

    run: str
    era: int
    version: int
    spec: RunSpec
    parts: Mapping[str, Sequence[tuple[Disk, PurePosixPath]]]
    """Layer -> the snapshot folders with a copy of it, each as (disk, path). If peers hold single experts, the keys are
    the experts and the rests of their layers instead."""

    @property
    def keys(self) -> tuple[str, ...]:
        return all_layer_keys(self.spec.model)

    def read(self, key: str) -> Tensor:
        """Return a layer's parameters, float32 [numel], from its first undamaged copy.

        Raises: DamagedSnapshot: every copy is damaged.
        """
        if key in self.parts:
            return self.state(key).param_N
        return torch.cat([self.state(unit).param_N for unit in unit_keys(self.spec.model, key)])

    def state(self, part: str) -> LayerState:
        """Read parameters and moments of `part`, a key of `parts`. Raises: DamagedSnapshot: every copy is damaged."""
        for disk, path in self.parts[part][:-1]:
            try:
                return read_layers(disk, path, [part])[part]
            except DamagedSnapshot as damage:
                log_damage(damage)
        disk, path = self.parts[part][-1]
        return read_layers(disk, path, [part])[part]


def use_first_sound(snapshots: Iterable[FoundSnapshot], use: Callable[[FoundSnapshot], Made]) -> Made:
    """Call `use` with the first undamaged snapshot, and return its result. Raises: LocalError: no snapshot is sound."""
    damaged: DamagedSnapshot | None = None
    for snapshot in snapshots:
        try:
            return use(snapshot)
        except DamagedSnapshot as damage:
            log_damage(damage)
            damaged = damaged or damage
    raise damaged or LocalError("there is no snapshot")


def find_snapshots(wanted: str | os.PathLike[str] = "") -> list[FoundSnapshot]:
    """Return the whole versions of one run, newest first.

    Args: wanted: a run's name or id; a folder with snapshots; empty: the last used run that has snapshots.
    Raises: LocalError: no version is whole.
    """
    return snapshots_in(look_for("snapshot", os.fspath(wanted), has=has_snapshots))


def has_snapshots(folder: Path) -> bool:
    return next(_manifests(folder), None) is not None


def snapshots_in(folders: Sequence[Path]) -> list[FoundSnapshot]:
    """Return the whole versions in these folders, newest first; if they have several runs, of the run written last.

    Raises: LocalError: no version is whole.
    """
    where = ", ".join(map(str, folders))
    manifests = [manifest for folder in folders for manifest in _manifests(folder)]
    if not manifests:
        raise LocalError(f"there is no snapshot in {where}: name a run, or a folder of a peer or a demo")
    stored = [seen for manifest in manifests if (seen := _look_at(manifest)) is not None]
    if not stored:
        raise LocalError(f"there is no sound snapshot in {where}")
    newest = max(stored, key=lambda seen: (seen[0], seen[2].path))[2]
    if others := {f"{one.spec.name} ({one.run})" for _, _, one in stored if one.run != newest.run}:
        told = ", ".join(sorted(others))
        logger.warning(
            "this is run %s (%s), which was written to last; %s has also %s", newest.spec.name, newest.run, where, told
        )
    of_run = [(disk, snapshot) for _, disk, snapshot in stored if snapshot.run == newest.run]
    if whole := whole_versions(of_run):
        return whole
    last = max(snapshot.age for _, snapshot in of_run)
    here = {key for _, snapshot in of_run if snapshot.age == last for key in snapshot.keys}
    missing = [key for key in _held(newest.spec) if key not in here]
    raise LocalError(
        f"no version in {where} has every layer: of run {newest.run} it lacks "
        f"{listed(missing) or 'some of each version'}; other peers hold those stages, copy their snapshots here"
    )


def _manifests(root: Path) -> Iterator[Path]:
    if (root / MANIFEST).is_file():
        yield root / MANIFEST
        return
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(UNFINISHED_PREFIX)]
        if MANIFEST in names:
            yield Path(folder, MANIFEST)


def _look_at(manifest: Path) -> tuple[float, Disk, StoredSnapshot] | None:
    """Return (time of writing, disk, description) of the snapshot with this manifest; None: damaged or just removed."""
    folder = manifest.parent.resolve()
    disk = LiveDisk(folder.parent)
    try:
        return manifest.stat().st_mtime, disk, look_at(disk, PurePosixPath(folder.name))
    except DamagedSnapshot as damage:
        log_damage(damage)
    except FileNotFoundError:
        pass  # its peer has just removed it, and has newer ones
    return None


def whole_versions(parts: Sequence[tuple[Disk, StoredSnapshot]]) -> list[FoundSnapshot]:
    """Return the versions of which all layers are in `parts`, one run's snapshots with their disks; newest first."""
    whole = []
    for age in sorted({stored.age for _, stored in parts}, reverse=True):
        here = [(disk, stored) for disk, stored in parts if stored.age == age]
        spec = here[0][1].spec
        places = {key: [(disk, stored.path) for disk, stored in here if key in stored.keys] for key in _held(spec)}
        if all(places.values()):
            era, version = age
            whole.append(FoundSnapshot(run=here[0][1].run, era=era, version=version, spec=spec, parts=places))
    return whole


def _held(spec: RunSpec) -> tuple[str, ...]:
    """Return the keys of a model's snapshots: layers or, if peers hold single experts, experts and layers' rests."""
    return held_keys(spec.model, placed=spec.swarm.expert_slots > 0)
