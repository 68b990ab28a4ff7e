"""Picks the device, and the limits that it keeps for us: memory, and how far its thread stands back."""

import os
import sys
import threading

import psutil
import torch

from shoal.deploy.manners.limits import Limits
from shoal.protocol.errors import LocalError


def pick_device(wanted: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises: LocalError: torch sees no such device here."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LocalError(f"--device {wanted}: torch sees {torch.cuda.device_count()} CUDA devices on this machine")
    return device


def memory_claim(limits: Limits, device: torch.device) -> int | None:
    """How many bytes the swarm may plan with; None: whatever is free. On a GPU torch takes no more from now on.

    A CPU's memory is only claimed, not enforced: what a stage needs is known before it is given one.
    """
    if limits.memory_gb == 0.0:
        return None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limits.memory_bytes / total), device)
    else:
        free = psutil.virtual_memory().available
    return int(min(free, limits.memory_bytes))


def spare_threads() -> int:
    """How many threads torch has at a volunteer: its own choice, but of more than two cores one is left to the
    machine's user."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    own = torch.get_num_threads()
    return min(own, cores - 1) if cores > 2 else own


def stand_back(limits: Limits) -> None:
    """Lower the priority of the thread that calls and of those it starts; the network's stays as it is. Elsewhere than
    on Linux a process has one priority, and the network would stand back too, so it is left alone there."""
    if limits.nice and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), limits.nice)
