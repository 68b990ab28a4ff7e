"""Observes the use of a machine: keyboard and mouse, the GPU, the processors. Reading blocks for up to a few seconds.

| what               | source                                                                                |
|--------------------|---------------------------------------------------------------------------------------|
| keyboard and mouse | `ioreg` (macOS); Mutter by `gdbus` (GNOME); `xprintidle` (X11); input on terminals    |
| GPU                | `nvidia-smi pmon`: processes that are not ours. It fails in most containers           |
| processors         | if the CPU is the peer's device: all busy time, minus ours and our children's         |

If no source answers, the value is unknown. If several report an idle time, the shortest counts.
"""

import contextlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil


def input_idle_s() -> float | None:
    """Return seconds since the last use of keyboard or mouse; None: unknown."""
    readers: list[Callable[[], float | None]] = [_terminal_idle_s]
    if platform.system() == "Darwin":
        readers.append(_mac_idle_s)
    elif os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        readers += [_mutter_idle_s, _x11_idle_s]
    known = [seconds for reader in readers if (seconds := reader()) is not None]
    return min(known, default=None)


def parse_pmon(text: str, ours: Iterable[int]) -> float:
    """Parse `nvidia-smi pmon -c 1 -s u`. Returns: the GPU's share, in [0, 1], that processes besides `ours` use."""
    own, percent = set(ours), 0.0
    for line in text.splitlines():
        columns = line.split()
        if not line.startswith("#") and len(columns) > 3 and columns[1].isdecimal() and int(columns[1]) not in own:
            percent += float(columns[3]) if columns[3].isdecimal() else 0.0
    return min(1.0, percent / 100.0)


def gpu_others_share(index: int) -> float | None:
    """Return the share of GPU `index`, in [0, 1], that other programs use; None: the driver does not say."""
    text = _run("nvidia-smi", "pmon", "-c", "1", "-s", "u", "-i", str(index))
    return None if text is None else parse_pmon(text, [process.pid for process in _our_processes()])


class ProcessorUse:
    """Measures the use of all processors between two calls of `others_share`."""

    def __init__(self) -> None:
        self._before = self._now()

    def others_share(self) -> float | None:
        """Return the share of all processors' time since the last call, in [0, 1], that other programs used. None: the
        system's counts have not advanced."""
        before, now = self._before, self._now()
        self._before = now
        whole_s, busy_s, own_s = (b - a for a, b in zip(before, now, strict=True))
        return None if whole_s <= 0.0 else min(1.0, max(0.0, busy_s - max(0.0, own_s)) / whole_s)

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        whole_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own_s = 0.0
        for process in _our_processes():
            try:
                own = process.cpu_times()
            except psutil.Error:
                continue
            own_s += own.user + own.system
        return whole_s, whole_s - times.idle - getattr(times, "iowait", 0.0), own_s


def _our_processes() -> list[psutil.Process]:
    me = psutil.Process()
    try:
        return [me, *me.children(recursive=True)]
    except psutil.Error:
        return [me]


def _terminal_idle_s() -> float | None:
    """Return seconds since the last input on a terminal of this user, as `w` shows. None: there is no terminal, or the
    user is root: root's terminals say nothing about the person at the machine."""
    now_s, used_s = time.time(), []
    for path in (*Path("/dev/pts").glob("[0-9]*"), *Path("/dev").glob("tty[0-9]*")):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() != 0:
                used_s.append(status.st_atime)
    return max(0.0, now_s - max(used_s)) if used_s else None


def _mac_idle_s() -> float | None:
    text = _run("ioreg", "-c", "IOHIDSystem", "-d", "4")
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', text or "")
    return int(found[1]) / 1e9 if found else None


def _mutter_idle_s() -> float | None:
    monitor = "org.gnome.Mutter.IdleMonitor"
    where = ("--dest", monitor, "--object-path", "/org/gnome/Mutter/IdleMonitor/Core")
    text = _run("gdbus", "call", "--session", *where, "--method", f"{monitor}.GetIdletime")
    found = re.search(r"uint64 (\d+)", text or "")
    return int(found[1]) / 1e3 if found else None


def _x11_idle_s() -> float | None:
    text = (_run("xprintidle") or "").strip()
    return int(text) / 1e3 if text.isdecimal() else None


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
