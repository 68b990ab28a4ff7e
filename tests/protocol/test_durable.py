import random
from pathlib import PurePosixPath

from shoal.protocol.durable import RESERVED, next_incarnation
from shoal.protocol.sim.disk import SimDisk

PATH = PurePosixPath("run/incarnation")


def test_without_a_disk_the_clock_says() -> None:
    assert next_incarnation(None, PATH, wall_s=12.5) == 12_500_000


def test_a_clock_that_was_set_back_does_not_repeat_a_number() -> None:
    disk = SimDisk(random.Random(0))
    first = next_incarnation(disk, PATH, wall_s=1_000_030.0)
    second = next_incarnation(disk, PATH, wall_s=1_000_000.0)
    assert first == 1_000_030_000_000
    assert second == first + RESERVED


def test_a_clock_far_ahead_wins_over_what_was_reserved() -> None:
    disk = SimDisk(random.Random(0))
    next_incarnation(disk, PATH, wall_s=1.0)
    assert next_incarnation(disk, PATH, wall_s=1e9) == 10**15


def test_a_power_cut_at_any_moment_leaves_a_bound() -> None:
    for seed in range(50):
        disk = SimDisk(random.Random(seed))
        first = next_incarnation(disk, PATH, wall_s=100.0)
        disk = disk.crash()
        assert next_incarnation(disk, PATH, wall_s=50.0) >= first + RESERVED


def test_a_full_disk_keeps_nobody_from_starting() -> None:
    disk = SimDisk(random.Random(0))
    disk.limit(0)
    assert next_incarnation(disk, PATH, wall_s=2.0) == 2_000_000
