"""Picks the device, and enforces the limits on its memory and on the priority of the computing thread."""

import math
import os
import sys
import threading

import torch

from shoal.deploy.base.words import counted
from shoal.deploy.manners.limits import GB, Limits
from shoal.peer.compute.cgroup import processors
from shoal.peer.compute.compute_device import free_bytes, total_bytes
from shoal.protocol.errors import LocalError


def pick_device(wanted: str) -> torch.device:
    """Parse `auto`, `cpu`, `mps`, `cuda`, `rocm` or `xpu`, some with `:N`. Raises: LocalError: torch cannot see it."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("rocm") and torch.version.hip is None:
        raise LocalError(f"--device {wanted}: this torch is not PyTorch's ROCm build, which sees AMD's GPUs")
    device = torch.device(wanted.replace("rocm", "cuda"))  # torch calls an AMD GPU cuda
    if device.type != "cpu":
        found = torch.get_device_module(device).device_count()
        if (device.index or 0) >= found:
            raise LocalError(f"--device {wanted}: torch sees {counted(found, 'device')} of that kind on this machine")
    return device


def devices_of(wanted: str) -> list[str]:
    """Return the devices that `--device` names; "all" means every GPU. Raises: LocalError: torch does not see all."""
    if wanted == "all":
        found = torch.cuda.device_count()
        if not found:
            raise LocalError("--device all: torch sees no GPU on this machine")
        return [f"cuda:{index}" for index in range(found)]
    names = wanted.split(",")
    for name in names:
        pick_device(name)
    return names


def untested(device: torch.device) -> str:
    """Return a warning if nobody has run shoal on this kind of device yet; empty if the kind is tested."""
    kind = "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type
    if kind in ("cpu", "cuda"):
        return ""
    return f"nobody has run shoal on {kind} yet: its steps are compared with known ones, its speed and memory are not"


def check_machine(limits: Limits, device: torch.device, threads: int) -> None:
    """Check limits and `--threads`. Raises: LocalError: they exceed the machine's memory or processors."""
    if limits.memory_gb * GB > (total := total_bytes(device)):
        raise LocalError(
            f"memory_gb is {limits.memory_gb:g}, and {device} has {math.floor(total / GB * 10) / 10:g} GB: set less; "
            "0 takes what is free"
        )
    if threads > (most := math.ceil(processors())):
        raise LocalError(f"--threads {threads}: this process may use {most} processors; 0 lets shoal choose")


def memory_claim(limits: Limits, device: torch.device) -> int | None:
    """Return the bytes of memory that a plan may use here; None: all that is free. On a GPU, also cap torch's memory.

    On a CPU nothing enforces the limit: the memory that a stage needs is known before a plan assigns the stage.
    """
    if limits.memory_gb == 0.0:
        return None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limits.memory_bytes / total), device)
    else:
        free = free_bytes(device)
    return int(min(free, limits.memory_bytes))


def own_threads() -> int:
    """Return torch's default number of threads, but at most one for each whole processor we may use."""
    return min(torch.get_num_threads(), max(1, int(processors())))


def take_own_threads() -> None:
    """Let torch use `own_threads()` threads, in a command that computes in its own process."""
    torch.set_num_threads(own_threads())


def spare_threads() -> int:
    """Return the number of torch's threads for a volunteer's peer: it leaves one of three or more processors free."""
    cores = int(processors())
    return min(own_threads(), cores - 1) if cores > 2 else own_threads()


def stand_back(limits: Limits) -> None:
    """Give the calling thread, and threads that it starts, the nice level `limits.nice`. Does so only on Linux:
    elsewhere a priority belongs to the whole process, so the network would slow down, too."""
    if limits.nice and sys.platform == "linux":
        thread = threading.get_native_id()
        # A process started with `nice` may already have a lower priority, and only root may raise it.
        os.setpriority(os.PRIO_PROCESS, thread, max(limits.nice, os.getpriority(os.PRIO_PROCESS, thread)))
