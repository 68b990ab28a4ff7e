"""What the stages' snapshots are put together from."""

from pathlib import Path, PurePosixPath

import msgspec
import pytest
from newest_snapshot import Snapshot, read_snapshot
from written_bytes import generate

from shoal.deploy.ship.sample import PROMPT, TEMPERATURE, merge_snapshots, write_sample
from shoal.peer.data.tokenizer import train_bpe
from shoal.peer.disk.snapshot import write_snapshot
from shoal.peer.model.layout import all_layer_keys, init_layer, layer_layout
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, SwarmSpec

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


def test_the_sample_of_a_byte_model_is_what_it_always_was(tmp_path: Path) -> None:
    params = {key: layer_layout(MODEL, key).views(layer(key, 0, 1).param_N) for key in KEYS}
    expected = generate(MODEL, params, PROMPT.encode(), 50, temperature=TEMPERATURE, seed=3)
    sample = write_sample(write(tmp_path, 1, KEYS), num_tokens=50, seed=3)
    assert sample.text == PROMPT + expected.decode(errors="replace")


def test_a_model_with_a_vocabulary_of_its_own_writes_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["def fish(): return größer"] * 9, 270))
    model = msgspec.structs.replace(MODEL, vocab_size=270)
    data = DataSpec(tokenizer=str(tmp_path / "tokenizer.json"))
    spec = RunSpec(model=model, data=data, swarm=SwarmSpec(stages=2))
    layers = {}
    for key in KEYS:
        param_N = init_layer(model, key, 1)
        layers[key] = LayerState(param_N=param_N, moment1_N=param_N / 2, moment2_N=param_N.square())
    path = write_snapshot(LiveDisk(tmp_path), ROOT, run="run", version=1, layers=layers, spec=spec)
    assert len(write_sample(tmp_path / path, num_tokens=40).text) > 40


def test_without_any_snapshot_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no peer has written a snapshot yet"):
        merged(tmp_path, "nowhere")
