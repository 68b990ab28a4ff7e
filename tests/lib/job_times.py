"""How long a job of a kernel's takes, on a card and on a processor."""

import statistics
import time
from collections.abc import Callable

import torch


def cuda_ms(work: Callable[[], object], repeats: int) -> float:
    """Median of `repeats`, by the device's own clock, after three that do not count."""
    times = []
    for repeat in range(repeats + 3):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        if repeat >= 3:
            times.append(begun.elapsed_time(ended))
    return statistics.median(times)


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats`, in this thread's processor time: what else the machine does is left out."""
    times = []
    for _ in range(repeats):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return min(times) * 1e3
