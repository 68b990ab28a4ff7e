"""Snapshots on disks that lose power, are full or fail: what was read before is read after, or something newer."""

import errno
import functools
import itertools
import random
from pathlib import PurePosixPath

import pytest
import torch
from newest_snapshot import Snapshot, read_newest, read_snapshot

from shoal.peer.disk.snapshot import (
    LOCK_NAME,
    DamagedSnapshot,
    list_snapshots,
    write_snapshot,
)
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.model.state import LayerState
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Disk
from shoal.protocol.sim.disk import PowerCut, SimDisk
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

MODEL = ModelSpec(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12, context=8)
SPEC = RunSpec(seed=3, model=MODEL, swarm=SwarmSpec(stages=2))
RUN = "0123456789abcdef"
FOLDER = PurePosixPath("run", "snapshots", "stage-0")


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(random.Random(0))


@functools.cache
def state(version: int) -> dict[str, LayerState]:
    layers = {}
    for key in all_layer_keys(MODEL):
        param = init_layer(MODEL, key, version)
        layers[key] = LayerState(param_N=param, moment1_N=param / 3, moment2_N=param.square())
    return layers


def write(disk: Disk, version: int) -> PurePosixPath:
    return write_snapshot(disk, FOLDER, run=RUN, version=version, layers=state(version), spec=SPEC)


def assert_is(got: Snapshot, version: int) -> None:
    assert (got.run, got.version, got.spec) == (RUN, version, SPEC)
    for key, layer in state(version).items():
        assert all(map(torch.equal, got.layers[key].tensors, layer.tensors)), key


def no_damage(damage: DamagedSnapshot) -> None:
    raise AssertionError(damage)


def ages(disk: Disk) -> list[tuple[int, int]]:
    return [stored.age for stored in list_snapshots(disk, FOLDER, RUN, on_damage=no_damage)]


def unfinished(disk: Disk) -> list[str]:
    return [name for name in disk.list(FOLDER) if name.startswith(".") and name != LOCK_NAME]


def num_operations(disk: SimDisk) -> int:
    """Of one write into a folder that has two snapshots."""
    for version in (1, 2):
        write(disk, version)
    before = disk.num_operations
    write(disk, 3)
    return disk.num_operations - before


def test_after_a_power_cut_at_any_moment_the_newest_snapshot_is_sound(disk: SimDisk) -> None:
    """1,000 crash points on 25 disks: every operation of a write, each 33 times or more; a third of them while a write
    cleans up behind the crash before it."""
    per_write = num_operations(disk)
    assert per_write > 20
    num_crashes, num_seen_late = 0, 0
    for seed in range(25):
        disk = SimDisk(random.Random(seed))
        acknowledged = 0
        for version in itertools.count(1):
            disk.cut_power(after=num_crashes % per_write)
            try:
                write(disk, version)
            except PowerCut:
                num_crashes += 1
            else:
                acknowledged = version
            disk = disk.crash()
            held = ages(disk)  # of all that is there every manifest holds, and so do the layers:
            for stored in list_snapshots(disk, FOLDER):
                assert_is(read_snapshot(disk, stored.path), stored.version)
            newest = held[-1][1] if held else 0
            assert newest in (acknowledged, version)
            num_seen_late += newest != acknowledged
            acknowledged = newest
            if num_crashes % 3:
                write(disk, version)
                acknowledged = version
                assert not unfinished(disk)
                assert len(ages(disk)) <= 2
            if num_crashes == 40 * (seed + 1):
                break
    assert num_crashes == 1000
    assert num_seen_late > 20, "no crash fell behind the rename"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_any_operation_is_one_clear_line_and_the_old_snapshot_stays(code: int, disk: SimDisk) -> None:
    failed = 0
    for after in range(num_operations(disk)):
        disk = SimDisk(random.Random(after))
        for version in (1, 2):
            write(disk, version)
        disk.fail(after=after, code=code)
        complaint = ""
        try:
            write(disk, 3)
        except LocalError as error:
            complaint = str(error)
            failed += 1
        held: tuple[int, ...] = (3,)  # if only removing what is old failed
        if complaint:
            held = (2, 3)  # a write whose last sync failed may be there
            assert complaint.startswith("cannot write a snapshot to disk:/run/snapshots/stage-0: ")
            assert ("make room" in complaint) == (code == errno.ENOSPC)
        for crashes in (False, True):
            later = disk.crash() if crashes else disk
            newest = read_newest(later, FOLDER, on_damage=no_damage)
            assert_is(newest, newest.version)
            assert newest.version in held
            for stored in list_snapshots(later, FOLDER, on_damage=no_damage):
                read_snapshot(later, stored.path)
        later.mend()
        write(later, 4)
        assert ages(later)[-1] == (0, 4)
        assert not unfinished(later)
    assert failed > 15


def test_a_full_disk_keeps_the_old_snapshot_and_gives_the_room_back(disk: SimDisk) -> None:
    path = write(disk, 1)
    size = sum(len(disk.read(path / name)) for name in disk.list(path))
    for free_bytes in range(0, size, 257):
        disk.limit(free_bytes)
        with pytest.raises(LocalError, match=r"No space left on device: make room, or restart with a --state-dir"):
            write(disk, 2)
        assert not unfinished(disk)
        assert_is(read_newest(disk, FOLDER, on_damage=no_damage), 1)
    disk.limit(size + 100)
    write(disk, 2)
    assert ages(disk) == [(0, 1), (0, 2)]


def test_what_a_crash_left_unfinished_makes_room_for_the_next_write(disk: SimDisk) -> None:
    path = write(disk, 1)
    size = sum(len(disk.read(path / name)) for name in disk.list(path))
    disk.cut_power(after=12)
    with pytest.raises(PowerCut):
        write(disk, 2)
    for _ in range(50):  # until a draw has left enough of it
        survivor = disk.crash()
        if unfinished(survivor):
            break
    survivor.limit(size - 1000)
    write(survivor, 3)
    assert ages(survivor) == [(0, 1), (0, 3)]
