import functools
import itertools
import random
import threading
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import safetensors.torch
import torch
from newest_snapshot import Snapshot, read_newest, read_snapshot

from shoal.peer.disk.snapshot import (
    LOCK_NAME,
    DamagedSnapshot,
    list_snapshots,
    read_layers,
    write_snapshot,
)
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.ports import Disk
from shoal.protocol.sim.disk import SimDisk
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec

MODEL = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8, norm_eps=1e-7)
KEYS = all_layer_keys(MODEL)
SPEC = RunSpec(seed=3, model=MODEL, swarm=SwarmSpec(stages=2))
RUN = "0123456789abcdef"
FOLDER = PurePosixPath("run", "snapshots", "stage-0")


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(random.Random(0))


@functools.cache
def layer(key: str, version: int, era: int) -> LayerState:
    param = init_layer(MODEL, key, version) + era
    return LayerState(param_N=param, moment1_N=param / 3, moment2_N=param.square())


def state(version: int, keys: tuple[str, ...] = KEYS, era: int = 0) -> dict[str, LayerState]:
    return {key: layer(key, version, era) for key in keys}


def write(disk: Disk, version: int, *, era: int = 0, keys: tuple[str, ...] = KEYS, **kwargs: Any) -> PurePosixPath:
    layers = state(version, keys, era)
    return write_snapshot(disk, FOLDER, run=RUN, version=version, era=era, layers=layers, spec=SPEC, **kwargs)


def assert_is(got: Snapshot, version: int, *, era: int = 0, keys: tuple[str, ...] = KEYS) -> None:
    assert (got.run, got.era, got.version, got.spec) == (RUN, era, version, SPEC)
    assert_layers(got.layers, state(version, keys, era))


def assert_layers(got: Any, wanted: dict[str, LayerState]) -> None:
    assert list(got) == list(wanted)
    for key in wanted:
        assert all(map(torch.equal, got[key].tensors, wanted[key].tensors)), key


def no_damage(damage: DamagedSnapshot) -> None:
    raise AssertionError(damage)


def ages(disk: Disk) -> list[tuple[int, int]]:
    return [stored.age for stored in list_snapshots(disk, FOLDER, RUN, on_damage=no_damage)]


def unfinished(disk: Disk) -> list[str]:
    return [name for name in disk.list(FOLDER) if name.startswith(".") and name != LOCK_NAME]


# What is written and read


def test_what_was_written_is_read_bit_for_bit(disk: SimDisk) -> None:
    path = write(disk, 50, era=2)
    assert path.parent == FOLDER
    assert path.name.startswith(f"{RUN}-era-2-step-00000050-")
    assert_is(read_snapshot(disk, path), 50, era=2)
    assert_is(read_newest(disk, FOLDER), 50, era=2)


def test_parameters_have_their_hugging_face_names_and_shapes(tmp_path: Path) -> None:
    path = write(LiveDisk(tmp_path), 1)
    tensors = safetensors.torch.load_file(tmp_path / path / "layers.1.safetensors")
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (4, 8)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (8, 12)
    assert len(tensors) == 9


def test_experts_have_mixtrals_names_and_read_back(tmp_path: Path) -> None:
    model = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8, num_experts=3)
    spec = RunSpec(model=model, swarm=SwarmSpec(stages=2))
    param = init_layer(model, "layers.1", 0)
    layers = {"layers.1": LayerState(param_N=param, moment1_N=param / 3, moment2_N=param.square())}
    disk = LiveDisk(tmp_path)
    path = write_snapshot(disk, FOLDER, run=RUN, version=1, layers=layers, spec=spec)
    tensors = safetensors.torch.load_file(tmp_path / path / "layers.1.safetensors")
    at = "model.layers.1.block_sparse_moe."
    assert tensors[at + "gate.weight"].shape == (3, 8)
    assert [tensors[f"{at}experts.2.{w}.weight"].shape for w in ("w1", "w2", "w3")] == [(12, 8), (8, 12), (12, 8)]
    got = read_snapshot(disk, path)
    assert got.spec == spec
    assert_layers(got.layers, layers)


def test_a_person_can_read_the_manifest(tmp_path: Path) -> None:
    path = write(LiveDisk(tmp_path), 7, era=1)
    lines = (tmp_path / path / "manifest.json").read_text().splitlines()
    assert {'  "era": 1,', '  "version": 7,', f'  "run": "{RUN}",'} <= set(lines)


def test_part_of_the_layers_and_an_empty_second_moment_are_fine(disk: SimDisk) -> None:
    param = init_layer(MODEL, "head", 0)
    layers = {"head": LayerState(param_N=param, moment1_N=param, moment2_N=torch.zeros(0))}
    got = read_snapshot(disk, write_snapshot(disk, FOLDER, run=RUN, version=2, layers=layers, spec=SPEC))
    assert list(got.layers) == ["head"]
    assert got.layers["head"].moment2_N.shape == (0,)


def test_a_second_moment_of_what_is_no_hidden_matrix_is_fine_where_the_spec_says_muon(disk: SimDisk) -> None:
    param, key = init_layer(MODEL, "layers.0", 0), "layers.0"
    layers = {key: LayerState(param_N=param, moment1_N=param, moment2_N=torch.ones(2 * MODEL.dim))}
    spec = RunSpec(seed=3, model=MODEL, swarm=SwarmSpec(stages=2), optimizer=OptimizerSpec(name="muon"))
    got = read_snapshot(disk, write_snapshot(disk, FOLDER, run=RUN, version=2, layers=layers, spec=spec))
    assert_layers(got.layers, layers)
    written = write_snapshot(disk, FOLDER, run=RUN, version=3, layers=layers, spec=SPEC)
    with pytest.raises(DamagedSnapshot, match="the moments of"):
        read_snapshot(disk, written)


def test_only_the_newest_are_kept_and_other_runs_left_alone(disk: SimDisk) -> None:
    other = write_snapshot(disk, FOLDER, run="f" * 16, version=1, layers=state(1), spec=SPEC)
    paths = [write(disk, version) for version in (9, 10, 100)]
    assert [stored.path for stored in list_snapshots(disk, FOLDER, RUN)] == paths[1:]
    assert [stored.path for stored in list_snapshots(disk, FOLDER)] == [other, *paths[1:]]
    assert_is(read_newest(disk, FOLDER, RUN), 100)
    write(disk, 101, keep=1)
    assert ages(disk) == [(0, 101)]


def test_a_later_era_is_newer_whatever_its_version(disk: SimDisk) -> None:
    for era, version in ((0, 40), (0, 50), (1, 40), (1, 45)):
        write(disk, version, era=era)
    assert ages(disk) == [(0, 40), (0, 50), (1, 40), (1, 45)]
    write(disk, 50, era=1)
    assert ages(disk) == [(0, 40), (0, 50), (1, 45), (1, 50)], "of each era the two newest"
    write(disk, 20, era=2)
    assert ages(disk)[-1] == (2, 20)
    assert_is(read_newest(disk, FOLDER), 20, era=2)


def test_one_version_of_two_eras_are_two_snapshots(disk: SimDisk) -> None:
    assert write(disk, 50, era=0) != write(disk, 50, era=1)
    assert ages(disk) == [(0, 50), (1, 50)]
    assert_is(read_newest(disk, FOLDER), 50, era=1)


def test_a_list_says_what_is_held_and_reads_no_layer(disk: SimDisk) -> None:
    write(disk, 3, keys=KEYS[:2])
    write(disk, 4, era=1, keys=KEYS[1:])
    before = disk.num_operations
    found = list_snapshots(disk, FOLDER, RUN)
    assert [(stored.era, stored.version, stored.keys, stored.spec) for stored in found] == [
        (0, 3, KEYS[:2], SPEC),
        (1, 4, KEYS[1:], SPEC),
    ]
    assert disk.num_operations - before == 3


def test_some_layers_are_read_without_the_others(disk: SimDisk) -> None:
    path = write(disk, 5)
    disk.rot(path / "embed.safetensors")
    wanted = ("head", "layers.0")
    assert_layers(read_layers(disk, path, wanted), state(5, wanted))
    with pytest.raises(DamagedSnapshot, match=r"embed\.safetensors"):
        read_layers(disk, path, ("embed",))
    with pytest.raises(LocalError, match=r"does not hold layers\.9"):
        read_layers(disk, path, ("layers.9",))


def test_two_peers_may_write_their_layers_of_one_version_to_one_folder(tmp_path: Path) -> None:
    halves = [KEYS[:2], KEYS[2:]]
    disks = [LiveDisk(tmp_path), LiveDisk(tmp_path)]
    threads = [
        threading.Thread(target=write, args=(disks[half], version), kwargs={"keys": halves[half]})
        for version, half in itertools.product((1, 2, 3), (0, 1))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list_snapshots(disks[0], FOLDER, on_damage=no_damage)
    # The last writer may have been one of an older version.
    assert {stored.version for stored in found} == {2, 3}
    for stored in found:
        assert_is(read_snapshot(disks[0], stored.path), stored.version, keys=stored.keys)
    assert sorted((stored.version, stored.keys) for stored in found) == sorted(itertools.product((2, 3), halves))
    assert not unfinished(disks[0])


def test_writing_the_same_state_again_changes_nothing(disk: SimDisk) -> None:
    assert write(disk, 4) == write(disk, 4)
    assert ages(disk) == [(0, 4)]
    assert not unfinished(disk)


def test_writing_the_same_state_again_mends_a_damaged_one(disk: SimDisk) -> None:
    path = write(disk, 4)
    disk.rot(path / "head.safetensors")
    assert write(disk, 4) == path
    assert_is(read_snapshot(disk, path), 4)
    assert not unfinished(disk)


# Damage


def one_sentence(disk: Disk, path: PurePosixPath) -> str:
    with pytest.raises(LocalError) as caught:
        read_snapshot(disk, path)
    assert isinstance(caught.value, DamagedSnapshot)
    assert caught.value.path == path
    assert "\n" not in str(caught.value)
    assert disk.where(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["layers.0.safetensors", "head.moments.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "tear", "empty", "grow"])
def test_damage_to_any_file_is_one_clear_line(disk: SimDisk, name: str, damage: str) -> None:
    path = write(disk, 1)
    data = bytearray(disk.read(path / name))
    if damage == "flip":
        data[len(data) // 2] ^= 1
    damaged = {"flip": data, "tear": data[:-5], "empty": bytearray(), "grow": data + b" "}
    disk.write(path / name, damaged[damage])
    assert name in one_sentence(disk, path)


def test_a_missing_file_is_one_clear_line(disk: SimDisk) -> None:
    path = write(disk, 1)
    disk.remove_tree(path / "embed.safetensors")
    assert "embed.safetensors" in one_sentence(disk, path)


def test_a_file_that_the_disk_cannot_read_is_one_clear_line(disk: SimDisk) -> None:
    path = write(disk, 1)
    disk.fail(after=1, only={"read"})
    assert "Input/output error" in one_sentence(disk, path)


def test_a_damaged_snapshot_is_named_and_the_one_before_it_read(disk: SimDisk) -> None:
    write(disk, 1, keep=3)
    for version, name in ((2, "layers.1.safetensors"), (3, "manifest.json")):
        disk.rot(write(disk, version, keep=3) / name)
    told: list[DamagedSnapshot] = []
    assert_is(read_newest(disk, FOLDER, on_damage=told.append), 1)
    assert {(damage.path.name.split("-")[4], damage.reason.split()[0]) for damage in told} == {
        ("00000002", "layers.1.safetensors"),
        ("00000003", "manifest.json"),
    }


def test_a_bit_anywhere_in_a_snapshot_is_found(disk: SimDisk) -> None:
    """Every file, bits drawn: 300 flips."""
    write(disk, 1)
    newest = write(disk, 2)
    rng = random.Random(1)
    for name, _ in itertools.product(disk.list(newest), range(34)):
        bit = rng.randrange(8 * len(disk.read(newest / name)))
        disk.rot(newest / name, bit=bit)
        told: list[DamagedSnapshot] = []
        assert_is(read_newest(disk, FOLDER, on_damage=told.append), 1)
        assert [damage.path for damage in told] == [newest]
        assert name in told[0].reason
        disk.rot(newest / name, bit=bit)
    assert_is(read_newest(disk, FOLDER, on_damage=no_damage), 2)


def rewritten(disk: Disk, path: PurePosixPath, old: str, new: str) -> PurePosixPath:
    """The snapshot under a name of its own (which no digest vouches for), its manifest changed."""
    mine = path.with_name("mine")
    disk.remove_tree(mine)
    disk.replace(path, mine)
    manifest = disk.read(mine / "manifest.json").decode()
    assert old in manifest
    disk.write(mine / "manifest.json", manifest.replace(old, new).encode())
    return mine


def test_a_renamed_snapshot_is_read(disk: SimDisk) -> None:
    assert_is(read_snapshot(disk, rewritten(disk, write(disk, 1), "", "")), 1)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"format": 2', '"format": 3', "format 3"),
        ('"format": 2', '"format": "x"', "damaged"),
        ('"ffn_dim": 12', '"ffn_dim": 13', "does not fit"),
        ('"layers.0",', '"../layers.0",', "does not fit"),
        ('"seed": 3', '"sead": 3', "damaged"),
        ("{", "", "damaged"),
    ],
)
def test_a_manifest_that_does_not_fit_is_one_clear_line(disk: SimDisk, old: str, new: str, sentence: str) -> None:
    assert sentence in one_sentence(disk, rewritten(disk, write(disk, 1), old, new))


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(LocalError, match="cannot write a snapshot to"):
        write(LiveDisk(tmp_path), 1)
