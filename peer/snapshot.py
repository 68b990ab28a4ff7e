"""Snapshots: one folder a version, complete or not there.

    FOLDER/RUN-step-00000050-9f86d081884c7d65/   version 50; the last part is the digest of manifest.json
        manifest.json                            run, version, spec, and BLAKE3 of every other file
        layers.0.safetensors                     parameters under their Hugging Face names
        layers.0.moments.safetensors             moment1 and moment2, flat

A snapshot is written to a hidden folder, synced to disk, renamed into place, and the parent synced; what is old is
renamed away before it is removed. So after a crash between any two of these there is a valid snapshot if there was
one before. A peer's snapshot may hold a part of the model's layers.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import safetensors.torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor

from shoal.peer.model.layout import layer_layout
from shoal.peer.pipeline.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import ModelSpec, RunSpec

MANIFEST: Final = "manifest.json"
MANIFEST_FORMAT: Final = 1
MANIFEST_DIGEST_CHARS: Final = 16
"""64 bits in the folder's name, against decay and not against malice."""
STEP: Final = "-step-"
UNFINISHED_PREFIX: Final = ".unfinished-"
LOCK_NAME: Final = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What `read_snapshot` verified."""

    path: Path
    run: str
    version: int
    spec: RunSpec
    layers: Mapping[str, LayerState]
    """By layer key, maybe not all of the model."""


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    run: str
    version: int
    layers: tuple[str, ...]
    files: dict[str, str]
    """File name -> BLAKE3 hex of its bytes."""
    spec: RunSpec


def write_snapshot(
    folder: Path, *, run: str, version: int, layers: Mapping[str, LayerState], spec: RunSpec, keep: int = 2
) -> Path:
    """Write a snapshot into `folder` (made if missing), then remove all but the run's `keep` newest versions.

    Several processes may share `folder`; they take turns.
    Returns: the snapshot's own folder.
    Raises: LocalError: the disk is full, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for leftover in folder.glob(f"{UNFINISHED_PREFIX}*"):
                shutil.rmtree(leftover)  # we have the lock, so its writer is dead
            path = _write(folder, run=run, version=version, layers=layers, spec=spec)
            _prune(folder, run, keep)
    except OSError as error:
        raise LocalError(f"cannot write a snapshot to {folder}: {error.strerror or error}") from error
    return path


def read_snapshot(folder: Path) -> Snapshot:
    """Read a snapshot and check every byte of it against its digests.

    Args:
        folder: a snapshot's own folder, or a folder of snapshots, of which the newest is read.
    Raises: LocalError: there is none, or a file is missing, torn, changed or not what the manifest says.
    """
    path = folder
    if not (folder / MANIFEST).exists():
        paths = list_snapshots(folder)
        if not paths:
            raise LocalError(f"there is no snapshot in {folder}")
        path = paths[-1]
    manifest = _read_manifest(path)
    layers = {key: _read_layer(path, manifest, key) for key in manifest.layers}
    return Snapshot(path=path, run=manifest.run, version=manifest.version, spec=manifest.spec, layers=layers)


def list_snapshots(folder: Path, run: str = "") -> list[Path]:
    """The snapshots in `folder` (of one run, or of all), oldest version first. Not verified."""
    paths = folder.glob(f"{run or '[!.]*'}{STEP}*")
    return sorted(paths, key=lambda path: (_version(path), path.name))


def _write(folder: Path, *, run: str, version: int, layers: Mapping[str, LayerState], spec: RunSpec) -> Path:
    unfinished = folder / f"{UNFINISHED_PREFIX}{run}-{version}"
    unfinished.mkdir()
    digests: dict[str, str] = {}
    for key, tensors in layers.items():
        for name, data in _layer_files(spec.model, key, tensors):
            _write_file(unfinished / name, data)
            digests[name] = blake3(data).hexdigest()
    manifest = _Manifest(
        format=MANIFEST_FORMAT, run=run, version=version, layers=tuple(layers), files=digests, spec=spec
    )
    data = msgspec.json.format(msgspec.json.encode(manifest))
    _write_file(unfinished / MANIFEST, data)
    _sync_folder(unfinished)
    path = folder / f"{run}{STEP}{version:08d}-{_manifest_digest(data)}"
    if path.exists():  # the very same snapshot, byte for byte
        shutil.rmtree(unfinished)
    else:
        unfinished.rename(path)
        _sync_folder(folder)
    return path


def _layer_files(model: ModelSpec, key: str, tensors: LayerState) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of a layer's files, one in memory at a time."""
    params = layer_layout(model, key).views(tensors.param_N.detach().cpu())
    yield f"{key}.safetensors", safetensors.torch.save(params, metadata={"format": "pt"})
    moments = {"moment1": tensors.moment1_N.detach().cpu(), "moment2": tensors.moment2_N.detach().cpu()}
    yield f"{key}.moments.safetensors", safetensors.torch.save(moments, metadata={"format": "pt"})


def _prune(folder: Path, run: str, keep: int) -> None:
    """Remove all but the `keep` newest versions of a run (several folders may have one version)."""
    paths = list_snapshots(folder, run)
    kept = sorted({_version(path) for path in paths})[-keep:]
    for path in paths:
        if _version(path) not in kept:
            doomed = folder / f"{UNFINISHED_PREFIX}{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed)


def _read_manifest(path: Path) -> _Manifest:
    data = _read_file(path / MANIFEST)
    digest = path.name.rpartition("-")[2]
    if STEP in path.name and digest != _manifest_digest(data):
        raise LocalError(f"the snapshot {path} is damaged: {MANIFEST} is not the one its folder is named after")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except msgspec.DecodeError as error:
        raise LocalError(f"the snapshot {path} is damaged: {MANIFEST}: {str(error).splitlines()[0]}") from error
    if manifest.format != MANIFEST_FORMAT:
        raise LocalError(f"the snapshot {path} has format {manifest.format}, this shoal reads {MANIFEST_FORMAT}")
    return manifest


def _read_layer(path: Path, manifest: _Manifest, key: str) -> LayerState:
    try:
        layout = layer_layout(manifest.spec.model, key)
        moments = _read_tensors(path, manifest, f"{key}.moments.safetensors")
        layer = LayerState(
            param_N=layout.flatten(_read_tensors(path, manifest, f"{key}.safetensors")),
            moment1_N=moments["moment1"],
            moment2_N=moments["moment2"],
        )
        if layer.moment1_N.shape != (layout.numel,) or layer.moment2_N.shape not in ((layout.numel,), (0,)):
            raise ValueError(
                f"the moments of {key} have {tuple(layer.moment1_N.shape)} and {tuple(layer.moment2_N.shape)}"
            )
    except (KeyError, ValueError) as error:
        raise LocalError(f"the snapshot {path} does not fit its own spec: {error}") from error
    return layer


def _read_tensors(path: Path, manifest: _Manifest, name: str) -> dict[str, Tensor]:
    data = _read_file(path / name)
    if blake3(data).hexdigest() != manifest.files.get(name):
        raise LocalError(f"the snapshot {path} is damaged: {name} has changed since it was written")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except SafetensorError as error:
        raise LocalError(f"the snapshot {path} is damaged: {name}: {error}") from error
    return tensors


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(f"cannot read the snapshot file {path}: {error.strerror or error}") from error


def _write_file(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable; a rename is not before this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; the kernel drops the lock of a writer that dies."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _version(path: Path) -> int:
    """Of a snapshot's folder, from its name; -1 for a folder that only looks like one."""
    version = path.name.rpartition("-")[0].rpartition("-")[2]
    return int(version) if version.isdecimal() else -1


def _manifest_digest(data: bytes) -> str:
    return blake3(data).hexdigest()[:MANIFEST_DIGEST_CHARS]
