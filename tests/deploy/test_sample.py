"""What the stages' snapshots are put together from."""

from pathlib import Path, PurePosixPath

import pytest

from shoal.deploy.sample import merge_snapshots, write_sample
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.pipeline.state import LayerState
from shoal.peer.snapshot import Snapshot, read_snapshot, write_snapshot
from shoal.protocol.errors import LocalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

MODEL = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8)
SPEC = RunSpec(seed=3, model=MODEL, swarm=SwarmSpec(stages=2))
KEYS = all_layer_keys(MODEL)
FRONT, BACK = KEYS[:2], KEYS[2:]
ROOT = PurePosixPath()


def layer(key: str, era: int, version: int) -> LayerState:
    param = init_layer(MODEL, key, version) + era
    return LayerState(param_N=param, moment1_N=param / 2, moment2_N=param.square())


def write(folder: Path, version: int, keys: tuple[str, ...], *, era: int = 0, run: str = "run") -> Path:
    layers = {key: layer(key, era, version) for key in keys}
    path = write_snapshot(LiveDisk(folder), ROOT, run=run, era=era, version=version, layers=layers, spec=SPEC)
    return folder / path


def merged(tmp_path: Path, *folders: str) -> Snapshot:
    path = merge_snapshots([tmp_path / folder for folder in folders], tmp_path / "whole")
    return read_snapshot(LiveDisk(path.parent), PurePosixPath(path.name))


def assert_is(got: Snapshot, *, era: int, version: int) -> None:
    assert (got.era, got.version, tuple(got.layers)) == (era, version, KEYS)
    for key in KEYS:
        assert got.layers[key].digest() == layer(key, era, version).digest()


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_version_that_is_whole_is_put_together(tmp_path: Path) -> None:
    for version in (1, 2):
        write(tmp_path / "a", version, FRONT)
        write(tmp_path / "b", version, BACK)
    write(tmp_path / "a", 3, FRONT)
    assert_is(merged(tmp_path, "a", "b"), era=0, version=2)
    assert write_sample(tmp_path / "whole" / next(iter((tmp_path / "whole").glob("run-*"))).name, num_tokens=3).text


def test_parts_of_two_eras_are_not_mixed_and_the_later_era_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", 9, FRONT, era=0)
    write(tmp_path / "b", 9, BACK, era=1)
    with pytest.raises(LocalError, match="no version has a snapshot of every layer"):
        merged(tmp_path, "a", "b")
    write(tmp_path / "b", 9, BACK, era=0)
    assert_is(merged(tmp_path, "a", "b"), era=0, version=9)
    write(tmp_path / "a", 4, FRONT, era=1)
    write(tmp_path / "b", 4, BACK, era=1)
    assert_is(merged(tmp_path, "a", "b"), era=1, version=4)


def test_a_damaged_part_is_taken_from_somebody_else(tmp_path: Path) -> None:
    rot(write(tmp_path / "a", 1, FRONT) / f"{FRONT[0]}.safetensors")
    write(tmp_path / "b", 1, BACK)
    write(tmp_path / "c", 1, FRONT)
    assert_is(merged(tmp_path, "a", "b", "c"), era=0, version=1)


def test_if_nobody_has_it_whole_the_version_before_is_taken(tmp_path: Path) -> None:
    for version in (1, 2):
        write(tmp_path / "a", version, FRONT)
        last = write(tmp_path / "b", version, BACK)
    rot(last / f"{BACK[0]}.moments.safetensors")
    assert_is(merged(tmp_path, "a", "b"), era=0, version=1)


def test_without_any_snapshot_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no peer has written a snapshot yet"):
        merged(tmp_path, "nowhere")
