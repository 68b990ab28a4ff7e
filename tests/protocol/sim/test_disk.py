"""What a simulated power cut may do to a disk, and what it may not; and the faults that are put on one."""

import asyncio
import errno
import gc
import math
import random
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from shoal.protocol.sim.disk import PowerCut, SimDisk
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

ROOT = PurePosixPath()
FILE, OTHER = PurePosixPath("file"), PurePosixPath("other")
DEEP = PurePosixPath("a", "b", "c")
OLD, NEW = b"old" * 100, b"a new text" * 200


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(random.Random(0))


def after_crashes(prepare: Callable[[SimDisk], object]) -> list[SimDisk]:
    """What 300 draws leave of a disk on which `prepare` was done until the power was cut."""
    left = []
    for seed in range(300):
        disk = SimDisk(random.Random(seed))
        prepare(disk)
        left.append(disk.crash())
    return left


def content(disk: SimDisk, path: PurePosixPath) -> bytes | None:
    try:
        return disk.read(path)
    except FileNotFoundError:
        return None


# What survives


def test_synced_content_under_a_synced_name_survives() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.write(FILE, NEW)
        disk.sync_folder(ROOT)

    assert {disk.read(FILE) for disk in after_crashes(prepare)} == {NEW}


def test_a_name_that_was_not_synced_may_be_gone_but_its_content_is_whole() -> None:
    assert {content(disk, FILE) for disk in after_crashes(lambda disk: disk.write(FILE, NEW))} == {None, NEW}


def test_a_rename_that_was_not_synced_has_happened_or_not_and_never_half() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.write(FILE, OLD)
        disk.write(OTHER, NEW)
        disk.sync_folder(ROOT)
        disk.replace(OTHER, FILE)

    assert {(content(disk, FILE), content(disk, OTHER)) for disk in after_crashes(prepare)} == {
        (OLD, NEW),
        (NEW, None),
    }


def test_changes_of_names_survive_in_any_combination() -> None:
    def prepare(disk: SimDisk) -> None:
        for name in "abc":
            disk.write(PurePosixPath(name), b"")

    assert len({disk.list(ROOT) for disk in after_crashes(prepare)}) == 8


def test_made_folders_survive_and_what_was_in_the_ones_above_with_them() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.make_folder(DEEP.parent)
        disk.write(DEEP.parent.with_name("file"), b"x")
        disk.make_folder(DEEP)

    for disk in after_crashes(prepare):
        assert disk.list(DEEP.parent) == ("c",)
        assert disk.read(DEEP.parent.with_name("file")) == b"x"


def test_a_removal_may_be_undone_in_part() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.make_folder(DEEP)
        for name in "xyz":
            disk.write(DEEP / name, name.encode())
        disk.sync_folder(DEEP)
        disk.remove_tree(DEEP.parent)

    left = {disk.list(DEEP) for disk in after_crashes(prepare)}
    assert ("x", "y", "z") in left
    assert () in left
    assert len(left) > 4


def test_a_write_that_was_cut_leaves_any_mixture_of_old_and_new() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.write(FILE, OLD)
        disk.sync_folder(ROOT)
        disk.cut_power()
        with pytest.raises(PowerCut):
            disk.write(FILE, NEW)

    left = [disk.read(FILE) for disk in after_crashes(prepare)]
    assert {OLD, NEW, b""} <= set(left)
    prefixes = {data for data in left if NEW.startswith(data)} - {b"", NEW}
    assert len(prefixes) > 30
    assert len({len(data) % 10 for data in prefixes}) == 10, "torn at any byte"
    others = set(left) - prefixes - {OLD, NEW, b""}
    assert any(b"\0" in data for data in others), "a length without its blocks"
    assert any(b"old" in data and b"a new" in data for data in others)


def test_a_name_may_come_back_without_its_content() -> None:
    """What happens to those who go on after a failed write."""

    def prepare(disk: SimDisk) -> None:
        disk.fail(only={"write"})
        with pytest.raises(OSError, match="Input/output"):
            disk.write(OTHER, NEW)
        if OTHER.name in disk.list(ROOT):
            disk.replace(OTHER, FILE)
            disk.sync_folder(ROOT)

    assert {b"", NEW} <= {content(disk, FILE) for disk in after_crashes(prepare)}


def test_what_survived_is_durable() -> None:
    for disk in after_crashes(lambda disk: disk.write(FILE, NEW)):
        before = content(disk, FILE)
        assert content(disk.crash().crash(), FILE) == before


def test_one_seed_leaves_one_disk() -> None:
    def left(seed: int) -> list[bytes | None]:
        disk = SimDisk(random.Random(seed))
        found = []
        for _ in range(50):
            disk.cut_power(after=1)
            disk.write(FILE, NEW)
            with pytest.raises(PowerCut):
                disk.write(FILE, OLD)
            disk = disk.crash()
            found.append(content(disk, FILE))
        return found

    assert left(1) == left(1)
    assert left(1) != left(2)


# Faults


def test_a_power_cut_comes_at_its_operation_and_then_nothing_works(disk: SimDisk) -> None:
    cuts: list[str] = []
    disk.write(FILE, OLD)
    disk.cut_power(after=2, then=lambda: cuts.append("cut"))
    disk.read(FILE)
    disk.list(ROOT)
    with pytest.raises(PowerCut):
        disk.sync_folder(ROOT)
    with pytest.raises(PowerCut):
        disk.read(FILE)
    with pytest.raises(PowerCut), disk.lock(FILE):
        pass
    assert cuts == ["cut"]
    survivor = disk.crash()
    assert content(survivor, FILE) in (None, OLD)
    with pytest.raises(PowerCut):
        disk.write(OTHER, NEW)
    assert content(survivor, OTHER) is None, "a dead process wrote to the disk of the next"


def test_an_operation_with_a_power_cut_has_happened_or_not() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.cut_power()
        with pytest.raises(PowerCut):
            disk.make_folder(DEEP)

    made = [len(disk.list(DEEP.parent)) for disk in after_crashes(prepare)]
    assert 60 < sum(made) < 240


def test_a_full_disk_takes_what_fits_and_removing_makes_room(disk: SimDisk) -> None:
    disk.write(FILE, OLD)
    disk.limit(1000)
    with pytest.raises(OSError, match="No space left") as caught:
        disk.write(OTHER, NEW)
    assert caught.value.errno == errno.ENOSPC
    assert disk.read(OTHER) == NEW[:1000]
    disk.remove_tree(OTHER)
    disk.write(OTHER, NEW[:1000])
    disk.remove_tree(FILE)
    disk.write(FILE, OLD)
    with pytest.raises(OSError, match="No space left"):
        disk.write(FILE, OLD + b"!")
    disk.limit(None)
    disk.write(OTHER, NEW)


def test_a_full_disk_is_still_full_after_a_crash(disk: SimDisk) -> None:
    disk.limit(10)
    with pytest.raises(OSError, match="No space left"):
        disk.crash().write(FILE, NEW)


def test_an_error_comes_when_and_for_what_it_was_ordered(disk: SimDisk) -> None:
    disk.write(FILE, OLD)
    disk.fail(after=1, times=2, only={"read"})
    disk.read(FILE)
    disk.write(OTHER, NEW)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error") as caught:
            disk.read(FILE)
        assert caught.value.errno == errno.EIO
    assert disk.read(FILE) == OLD


def test_reads_fail_until_the_disk_is_mended(disk: SimDisk) -> None:
    disk.write(FILE, OLD)
    disk.fail(only={"read"}, times=math.inf)
    for _ in range(20):
        with pytest.raises(OSError, match="Input/output"):
            disk.read(FILE)
    disk.mend()
    assert disk.read(FILE) == OLD


def test_one_bit_rots(disk: SimDisk) -> None:
    disk.write(FILE, OLD)
    disk.sync_folder(ROOT)
    disk.rot(FILE)
    disk = disk.crash()
    rotten = disk.read(FILE)
    assert sum((a ^ b).bit_count() for a, b in zip(OLD, rotten, strict=True)) == 1
    disk.rot(FILE, bit=3)
    disk.rot(FILE, bit=3)
    assert disk.read(FILE) == rotten


def test_waiting_for_a_lock_that_cannot_come_free_is_said(disk: SimDisk) -> None:
    with disk.lock(FILE), pytest.raises(RuntimeError, match="deadlock"), disk.lock(FILE):
        pass


# In a world


def test_a_peers_disk_outlives_it_torn_and_is_nobody_elses() -> None:
    async def main(seed: int) -> tuple[bytes | None, bytes | None]:
        world = World(seed, uniform(0.01))
        peer, other = world.add_peer("a"), world.add_peer("b")
        peer.disk.write(FILE, OLD)
        peer.disk.sync_folder(ROOT)
        peer.disk.write(OTHER, NEW)
        world.crash(peer)
        with pytest.raises(PowerCut):
            peer.disk.read(FILE)
        back = world.add_peer("a")
        assert back.disk.read(FILE) == OLD
        assert other.disk.list(ROOT) == ()
        return content(back.disk, FILE), content(back.disk, OTHER)

    assert {run(main(seed)) for seed in range(20)} == {(OLD, None), (OLD, NEW)}
    assert run(main(3)) == run(main(3))


def test_a_peer_that_was_closed_finds_its_disk_as_it_left_it() -> None:
    async def main() -> None:
        world = World(0, uniform(0.01))
        peer = world.add_peer("a")
        peer.disk.write(FILE, NEW)
        await peer.transport.close()
        assert world.add_peer("a").disk.read(FILE) == NEW

    run(main())


def test_a_peer_may_die_in_the_middle_of_a_write(caplog: pytest.LogCaptureFixture) -> None:
    async def main(seed: int) -> int:
        world = World(seed, uniform(0.01))
        peer = world.add_peer("a")

        async def work() -> None:
            for number in range(100):
                peer.disk.write(OTHER, b"%d" % number)
                peer.disk.replace(OTHER, FILE)
                peer.disk.sync_folder(ROOT)
                await asyncio.sleep(1.0)

        peer.disk.cut_power(after=31, then=lambda: world.crash(peer))  # with the eleventh `replace`
        peer.spawn(work())
        await asyncio.sleep(50.0)
        assert not peer.is_alive
        await asyncio.sleep(50.0)
        return int(world.add_peer("a").disk.read(FILE))

    assert {run(main(seed)) for seed in range(20)} == {9, 10}
    gc.collect()
    assert not caplog.records, "a death that was meant is no news"
