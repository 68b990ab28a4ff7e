"""What our process may use of a machine, from files that say so."""

import os
from pathlib import Path

import psutil
import pytest

from shoal.peer.compute.cgroup import free_memory_bytes, processors, total_memory_bytes

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
UNLIMITED = "9223372036854771712"


class Machine:
    """A folder that stands for a machine of 64 processors."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def mounts(self, *lines: str, root: str = "/") -> None:
        self._write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "\n".join(lines).format(root=root))

    def is_in(self, *lines: str) -> None:
        self._write("proc/self/cgroup", "\n".join(lines))

    def group(self, path: str, **files: str) -> None:
        for name, text in files.items():
            self._write(f"sys/fs/cgroup/{path}/{name.replace('__', '.')}", text)

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    @property
    def memory(self) -> tuple[int, int]:
        return total_memory_bytes(self.root), free_memory_bytes(self.root)

    @property
    def processors(self) -> float:
        return processors(self.root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    return Machine(tmp_path)


def is_unlimited(machine: Machine) -> bool:
    total, free = machine.memory
    return total == psutil.virtual_memory().total and free > 1_000_000 and machine.processors == 64.0


def test_without_control_groups_the_machine_counts(machine: Machine) -> None:
    assert is_unlimited(machine)


def test_the_group_of_a_unit_is_below_the_mount(machine: Machine) -> None:
    machine.mounts(V2)
    machine.is_in("0::/system.slice/shoal.service")
    stat = "anon 250000\ninactive_anon 7\ninactive_file 50000\nactive_file 9"
    unit = {"memory__max": "400000", "memory__current": "300000", "memory__stat": stat, "cpu__max": "150000 100000"}
    machine.group("system.slice/shoal.service", **unit)
    assert machine.memory == (400_000, 150_000)
    assert machine.processors == 1.5
    machine.group("system.slice/shoal.service", memory__max="max", cpu__max="max 100000")
    assert is_unlimited(machine)


@pytest.mark.parametrize("tight", ["pod", "pod/container", ""])
def test_the_smallest_limit_along_the_path_counts(machine: Machine, tight: str) -> None:
    machine.mounts(V2)
    machine.is_in("0::/pod/container")
    for group in ("", "pod", "pod/container"):
        limit, quota = ("400000", "25000 100000") if group == tight else ("900000", "800000 100000")
        machine.group(group, memory__max=limit, memory__current="100000", cpu__max=quota)
    assert machine.memory == (400_000, 300_000)
    assert machine.processors == 0.25


def test_a_wide_limit_that_others_have_used_up_leaves_the_least(machine: Machine) -> None:
    machine.mounts(V2)
    machine.is_in("0::/pod/container")
    machine.group("pod", memory__max="900000", memory__current="850000")
    machine.group("pod/container", memory__max="400000", memory__current="100000")
    assert machine.memory == (400_000, 50_000)


def test_memory_above_which_a_group_is_slowed_down_is_not_taken(machine: Machine) -> None:
    machine.mounts(V2)
    machine.is_in("0::/unit")
    machine.group("unit", memory__max="max", memory__high="400000", memory__current="500000")
    assert machine.memory == (400_000, 0)


def test_in_a_namespace_the_mount_is_our_own_group(machine: Machine) -> None:
    machine.mounts(V2)
    machine.is_in("0::/")
    machine.group("", memory__max="400000", memory__current="300000", cpu__max="25000 100000")
    assert machine.memory == (400_000, 100_000)
    assert machine.processors == 0.25


def test_a_mount_may_begin_at_a_group_of_its_own(machine: Machine) -> None:
    machine.mounts(V1_MEMORY, V1_CPU, root="/docker/a\\134x2db")
    machine.is_in("4:memory:/docker/a\\x2db/inner", "1:cpu,cpuacct:/docker/a\\x2db")
    machine.group("memory", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes="0")
    machine.group("memory/inner", memory__limit_in_bytes="400000", memory__usage_in_bytes="300000")
    machine.group("cpu,cpuacct", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert machine.memory == (400_000, 100_000)
    assert machine.processors == 2.0


@pytest.mark.parametrize(("root", "group"), [("/", "/../other"), ("/..", "/"), ("/docker/a", "/docker/b")])
def test_of_a_group_that_is_not_below_the_mount_the_mounts_counts(machine: Machine, root: str, group: str) -> None:
    machine.mounts(V2, root=root)
    machine.is_in(f"0::{group}")
    machine.group("", memory__max="400000", memory__current="300000")
    machine.group("../other", memory__max="1", memory__current="1")
    assert machine.memory == (400_000, 100_000)


def test_both_versions_beside_each_other(machine: Machine) -> None:
    machine.mounts(V1_MEMORY, V1_CPU, V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    machine.is_in("4:memory:/user", "2:cpu,cpuacct:/user", "1:name=systemd:/user", "0::/user")
    stat = "inactive_file 1\ntotal_inactive_file 50000"
    limits = {"memory__limit_in_bytes": "400000", "memory__usage_in_bytes": "300000", "memory__stat": stat}
    machine.group("memory/user", **limits)
    machine.group("cpu,cpuacct/user", cpu__cfs_quota_us="25000", cpu__cfs_period_us="100000")
    machine.group("unified/user", cgroup__procs="1")
    assert machine.memory == (400_000, 150_000)
    assert machine.processors == 0.25
    machine.group("memory/user", memory__limit_in_bytes=UNLIMITED)
    machine.group("cpu,cpuacct/user", cpu__cfs_quota_us="-1")
    assert is_unlimited(machine)


def test_the_processors_we_may_run_on_are_no_fewer_for_a_wide_quota(machine: Machine) -> None:
    machine.mounts(V2)
    machine.is_in("0::/unit")
    machine.group("unit", cpu__max="9900000 100000")
    assert machine.processors == 64.0
