"""Measures how much of this machine's memory and processors our process may use.

A container, a systemd unit and a pod are control groups of Linux. A group's limits apply to all groups inside it, so
the smallest limit on the path from the root to our group counts. `/proc/self/cgroup` names our group in each hierarchy;
`/proc/self/mountinfo` says where a hierarchy is mounted and which of its groups is the root there. Groups above that
root are invisible.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that our process can still allocate. Args: root: the folder that has /proc and /sys."""
    return int(min([psutil.virtual_memory().available, *(group.free_bytes for group in _memory_groups(root))]))


def total_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that our process could have if it ran alone. Args: root: the folder that has /proc and /sys."""
    return int(min([psutil.virtual_memory().total, *(group.limit_bytes for group in _memory_groups(root))]))


def processors(root: Path = _ROOT) -> float:
    """Return how many processors our process may keep busy, such as 1.5. Args: root: the folder of /proc and /sys."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(affinity), *(quota for folder in _groups(root) if (quota := _quota(folder)) is not None)])


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    limit_bytes: int
    free_bytes: int


def _memory_groups(root: Path) -> Iterator[_MemoryGroup]:
    for folder in _groups(root):
        for limits, usage, inactive in (
            (("memory.max", "memory.high"), "memory.current", "inactive_file"),  # version 2
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            found = [int(text) for name in limits if (text := _read(folder / name)).isdecimal()]  # else "max", or none
            if found:
                # The kernel counts these pages as used, but frees them on demand.
                cached = re.search(rf"^{inactive} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                used_bytes = int(_read(folder / usage) or 0) - (int(cached[1]) if cached else 0)
                yield _MemoryGroup(min(found), max(0, min(found) - used_bytes))


def _quota(folder: Path) -> float | None:
    """Return how many processors the control group in `folder` may keep busy, such as 1.5; None: no limit."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")  # version 2
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None  # "max" and -1: no limit


def _groups(root: Path) -> Iterator[Path]:
    """Yield, in each hierarchy, the folder of our process's control group, then the folders of the groups around it."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            if set(controllers.split(",")) <= mount.controllers:
                inside = PurePosixPath()
                group = PurePosixPath(path)
                if group.is_relative_to(mount.root) and ".." not in group.parts:  # else it is not below the mount
                    inside = group.relative_to(mount.root)
                yield from (mount.folder / part for part in (inside, *inside.parents))


@dataclass(frozen=True, slots=True)
class _Mount:
    folder: Path
    root: str
    """The path, in its hierarchy, of the control group that is mounted at `folder`."""
    controllers: frozenset[str]
    """The hierarchy's controllers, such as "cpu" and "memory". Version 2 has one hierarchy; its set here is {""}."""


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            group, folder = (_unescaped(text) for text in before.split()[3:5])
            controllers = options.split(",") if kind == "cgroup" else [""]
            yield _Mount(root / folder.lstrip("/"), group, frozenset(controllers))


def _unescaped(text: str) -> str:
    """Decode a path of mountinfo, in which `\\040` is a space; a backslash stays unless three digits follow it."""
    return re.sub(r"\\(\d{3})", lambda byte: chr(int(byte[1], 8)), text)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
