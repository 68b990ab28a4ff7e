"""Gives hosts a quota of processor time: a control group of Linux for each, version 1 (`cpu`) or 2, whichever is here.

Within each tenth of a second the processes of a host get so many processor seconds together and then stand still until
the next, as in a container with a limit. Nothing is left behind: a process of its own, whose standard input ends with
us, removes the groups after killing whatever is still in them, even if we are killed ourselves.
"""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

_ROOT = Path("/")
_PERIOD_US = 100_000
"""The kernel's own default, and what containers have."""
_ENDS_S = 15.0
_ENTER = 'echo $$ > "$0" && exec "$@"'
_SWEEP = """
cat > /dev/null
for try in 0 1 2 3 4 5 6 7 8 9; do
  left=
  for group; do
    for pid in $(cat "$group/cgroup.procs" 2> /dev/null); do kill -9 "$pid" 2> /dev/null; done
    sleep 0.1
    rmdir "$group" 2> /dev/null
    [ -d "$group" ] && left=yes
  done
  [ -z "$left" ] && exit 0
  sleep 0.3
done
exit 1
"""


class NoQuota(Exception):
    """No control group can be made here; the message says why, in one line."""


@dataclass(slots=True, eq=False)
class CpuGroups:
    """The groups of the hosts that have a quota, there between `__aenter__` and `__aexit__`. Root only.

    Args: cores: host -> processors that its processes get together; the other hosts are not named.
    """

    cores: Mapping[str, float]
    root: Path = _ROOT
    """The folder of /proc and /sys."""
    _groups: dict[str, Path] = field(default_factory=dict)
    _sweeper: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "CpuGroups":
        """Raises: NoQuota."""
        if not self.cores:
            return self
        folder, version = _parent(self.root)
        mark = f"shoal-lab-{os.getpid()}-{secrets.token_hex(4)}"
        groups = {host: folder / f"{mark}-{number}" for number, host in enumerate(self.cores)}
        sweep = ["sh", "-c", _SWEEP, "sweep", *map(str, groups.values())]
        self._sweeper = await asyncio.create_subprocess_exec(
            *sweep, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            for host, group in groups.items():
                _make(group, version, self.cores[host])
                self._groups[host] = group
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def inside(self, host: str) -> list[str]:
        """The words to put before a command, so that it and all that it starts share the host's quota. The command
        takes the process over."""
        return ["sh", "-c", _ENTER, f"{self._groups[host]}/cgroup.procs"] if host in self._groups else []

    async def _close(self) -> None:
        """Raises: NoQuota: a group is still there."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is None:
            return
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                await sweeper.wait()
        left = [str(group) for group in self._groups.values() if group.exists()]
        self._groups.clear()
        if left:
            raise NoQuota(f"cannot remove the control groups {', '.join(left)}: processes in them do not end")


def _make(group: Path, version: int, cores: float) -> None:
    """Raises: NoQuota."""
    quota_us = round(cores * _PERIOD_US)
    told = {"cpu.max": f"{quota_us} {_PERIOD_US}"}
    if version == 1:
        told = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
    try:
        group.mkdir()
        for file, value in told.items():
            (group / file).write_text(value)
    except OSError as error:
        raise NoQuota(
            f"cannot make the control group {group} with a quota of {cores:g} cores: {error.strerror or error}"
        ) from error


def _parent(root: Path) -> tuple[Path, int]:
    """The folder in which groups with a quota can be made, and the version. Limits of our own group hold inside, too.

    In version 2 a group with processes has no groups with a quota inside, so the nearest one above ours is taken that
    hands `cpu` on.

    Raises: NoQuota.
    """
    try:
        groups, mounts = ((root / "proc/self" / name).read_text().splitlines() for name in ("cgroup", "mountinfo"))
    except OSError as error:
        raise NoQuota("this system has no control groups") from error
    own = dict[str, str]()
    for line in groups:
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)  # version 2: without a name
    seen = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        top, at = (re.sub(r"\\(\d{3})", lambda byte: chr(int(byte[1], 8)), text) for text in before.split()[3:5])
        mount = root / at.lstrip("/")
        if kind == "cgroup" and "cpu" in options.split(","):
            return _within(mount, top, own.get("cpu", "/")), 1
        if kind == "cgroup2":
            ours = _within(mount, top, own.get("", "/"))
            for folder in (ours, *ours.parents):
                if not folder.is_relative_to(mount):
                    break
                seen.append(str(folder))
                with contextlib.suppress(OSError):
                    if "cpu" in (folder / "cgroup.subtree_control").read_text().split():
                        return folder, 2
    if seen:
        raise NoQuota(f"no control group here hands `cpu` on (cgroup.subtree_control of {', '.join(seen)})")
    raise NoQuota("this system has no control groups for processors")


def _within(mount: Path, top: str, path: str) -> Path:
    """The folder of a group. Args: top: the group that is mounted at `mount`; path: the group's."""
    if path == top or path.startswith(f"{top.rstrip('/')}/"):
        path = path[len(top.rstrip("/")) :]
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount
