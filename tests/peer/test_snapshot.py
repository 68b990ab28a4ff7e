import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shoal.peer import snapshot
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.pipeline.state import LayerState
from shoal.peer.snapshot import Snapshot, list_snapshots, read_snapshot, write_snapshot
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

MODEL = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8, norm_eps=1e-7)
SPEC = RunSpec(seed=3, model=MODEL, swarm=SwarmSpec(stages=2))
RUN = "0123456789abcdef"


def state(version: int, keys: tuple[str, ...] = all_layer_keys(MODEL)) -> dict[str, LayerState]:
    layers = {}
    for key in keys:
        param = init_layer(MODEL, key, version)
        layers[key] = LayerState(param_N=param, moment1_N=param / 3, moment2_N=param.square())
    return layers


def write(folder: Path, version: int, **kwargs: Any) -> Path:
    return write_snapshot(folder, run=RUN, version=version, layers=state(version), spec=SPEC, **kwargs)


def assert_is_version(got: Snapshot, version: int) -> None:
    assert (got.run, got.version, got.spec) == (RUN, version, SPEC)
    for key, wanted in state(version).items():
        for name in ("param_N", "moment1_N", "moment2_N"):
            assert torch.equal(getattr(got.layers[key], name), getattr(wanted, name)), (key, name)


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    path = write(tmp_path / "new" / "folder", 50)
    assert path.parent == tmp_path / "new" / "folder"
    assert path.name.startswith(f"{RUN}-step-00000050-")
    assert_is_version(read_snapshot(path), 50)
    assert_is_version(read_snapshot(path.parent), 50)
    assert tuple(read_snapshot(path).layers) == all_layer_keys(MODEL)


def test_parameters_have_their_hugging_face_names_and_shapes(tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(write(tmp_path, 1) / "layers.1.safetensors")
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (4, 8)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (8, 12)
    assert len(tensors) == 9


def test_part_of_the_layers_and_an_empty_second_moment_are_fine(tmp_path: Path) -> None:
    param = init_layer(MODEL, "head", 0)
    layers = {"head": LayerState(param_N=param, moment1_N=param, moment2_N=torch.zeros(0))}
    got = read_snapshot(write_snapshot(tmp_path, run=RUN, version=2, layers=layers, spec=SPEC))
    assert list(got.layers) == ["head"]
    assert got.layers["head"].moment2_N.shape == (0,)


def test_only_the_newest_are_kept_and_other_runs_left_alone(tmp_path: Path) -> None:
    other = write_snapshot(tmp_path, run="f" * 16, version=1, layers=state(1), spec=SPEC)
    paths = [write(tmp_path, version) for version in (9, 10, 100)]
    assert list_snapshots(tmp_path, RUN) == paths[1:]
    assert list_snapshots(tmp_path) == [other, *paths[1:]]
    assert_is_version(read_snapshot(tmp_path), 100)
    assert write(tmp_path, 101, keep=1).exists()
    assert len(list_snapshots(tmp_path, RUN)) == 1


def test_two_peers_may_write_their_layers_of_one_version_to_one_folder(tmp_path: Path) -> None:
    halves = [("embed", "layers.0"), ("layers.1", "head")]
    threads = [
        threading.Thread(
            target=write_snapshot,
            args=(tmp_path,),
            kwargs={"run": RUN, "version": version, "layers": state(version, keys), "spec": SPEC},
        )
        for version, keys in itertools.product((1, 2, 3), halves)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [read_snapshot(path) for path in list_snapshots(tmp_path)]
    assert sorted((s.version, *s.layers) for s in got) == [
        (version, *keys) for version, keys in itertools.product((2, 3), halves)
    ]
    assert not list(tmp_path.glob(".unfinished*"))


def test_writing_the_same_state_again_changes_nothing(tmp_path: Path) -> None:
    assert write(tmp_path, 4) == write(tmp_path, 4)
    assert len(list_snapshots(tmp_path)) == 1


class Crash(BaseException):
    """Like the process dying: no handler for errors may run anything."""


class CrashingFiles:
    """Replaces every file operation that snapshots use; the `fatal`-th one never happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int) -> None:
        self.count = 0
        self.fatal = fatal
        self.dead = False
        for owner, name in (
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "open"),
            (os, "fsync"),
            (os, "open"),
            (os, "unlink"),
            (os, "rmdir"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name), torn=name == "open" and owner is Path))

    def wrap(self, operation: Any, *, torn: bool) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.dead:
                self.count += 1
                self.dead = self.count > self.fatal
            if self.dead:
                raise Crash
            file = operation(*args, **kwargs)
            if torn and self.count == self.fatal:  # dies in the middle of this file
                file.write(b"half of")
                file.flush()
            return file

        return counted


def test_a_crash_between_any_two_file_operations_leaves_a_valid_snapshot(tmp_path: Path) -> None:
    versions = set()
    for fatal in itertools.count():
        folder = tmp_path / str(fatal)
        write(folder, 1)
        write(folder, 2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            files = CrashingFiles(monkeypatch, fatal)
            try:
                write(folder, 3)
            except Crash:
                pass
            else:
                break
        assert files.dead
        got = read_snapshot(folder)
        assert_is_version(got, got.version)
        versions.add(got.version)
        for path in list_snapshots(folder):
            read_snapshot(path)
        # The next one cleans up behind the dead.
        assert_is_version(read_snapshot(write(folder, 4)), 4)
        assert not list(folder.glob(".unfinished*"))
        assert len(list_snapshots(folder)) == 2
    assert fatal > 30
    assert versions == {2, 3}


def one_sentence(folder: Path) -> str:
    with pytest.raises(LocalError) as caught:
        read_snapshot(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["layers.0.safetensors", "head.moments.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "tear", "empty", "grow"])
def test_damage_to_any_file_is_one_clear_line(tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path, 1)
    data = bytearray((path / name).read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    damaged = {"flip": data, "tear": data[:-5], "empty": bytearray(), "grow": data + b" "}
    (path / name).write_bytes(damaged[damage])
    assert name in one_sentence(path)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "embed.safetensors").unlink()
    assert "embed.safetensors" in one_sentence(path)


def test_no_snapshot_is_one_clear_line(tmp_path: Path) -> None:
    assert "no snapshot" in one_sentence(tmp_path)
    assert "no snapshot" in one_sentence(tmp_path / "nowhere")


def rewritten(path: Path, old: str, new: str) -> Path:
    """The snapshot under a name of its own (which no digest vouches for), its manifest changed."""
    mine = path.rename(path.parent / "mine")
    manifest = (mine / "manifest.json").read_text()
    assert old in manifest
    (mine / "manifest.json").write_text(manifest.replace(old, new))
    return mine


def test_a_renamed_snapshot_is_read(tmp_path: Path) -> None:
    assert_is_version(read_snapshot(rewritten(write(tmp_path, 1), "", "")), 1)


def test_a_manifest_that_does_not_fit_is_one_clear_line(tmp_path: Path) -> None:
    for i, (old, new, sentence) in enumerate(
        [
            ('"format": 1', '"format": 2', "format 2"),
            ('"format": 1', '"format": "x"', "damaged"),
            ('"ffn_dim": 12', '"ffn_dim": 13', "does not fit"),
            ('"layers.0",', '"../layers.0",', "does not fit"),
            ('"seed": 3', '"sead": 3', "damaged"),
            ("{", "", "damaged"),
        ]
    ):
        assert sentence in one_sentence(rewritten(write(tmp_path / str(i), 1), old, new))


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LocalError, match="cannot write a snapshot to"):
        write(tmp_path / "file", 1)


def test_a_full_disk_is_one_clear_line_and_the_old_snapshot_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_write_file", no_space)
        with pytest.raises(LocalError, match="No space left"):
            write(tmp_path, 2)
    assert_is_version(read_snapshot(tmp_path), 1)
