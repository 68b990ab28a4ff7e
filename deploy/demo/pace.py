"""Measures the time cost of faults, from the times of a run's steps and of the faults. Pure."""

import itertools
import statistics
from collections.abc import Sequence

WINDOW_STEPS = 6
"""The window of a pace, in steps: about every tenth step takes half as long again because of validation."""
PACE_SHARE = 0.9
"""The share of the earlier pace that counts as recovered."""
BEFORE_STEPS = 30
"""The number of steps before a fault that define the earlier pace."""


def gaps_s(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times_s)]


def longest_stall_s(times_s: Sequence[float], *, end_s: float | None = None) -> float:
    """Return the longest time between two steps; with `end_s`, of an unfinished run, also from the last step to it."""
    times = [*times_s, end_s] if end_s is not None and times_s else times_s
    return max(gaps_s(times), default=0.0)


def recovery_s(times_s: Sequence[float], fault_s: float) -> float | None:
    """Return seconds from a fault until the steps have their former pace.

    The former pace is the median duration of windows of `WINDOW_STEPS` consecutive steps among the last `BEFORE_STEPS`
    before the fault. The pace is back at the first step after the fault that starts a window of at most 1 /
    `PACE_SHARE` of that: this measures how long the pace was lost, not how long it takes to notice its return. A second
    fault in between lengthens it.

    Args: times_s: when each step was committed, ascending, [N].
    Returns: seconds; None: unknown, with too few steps before or after; infinite: the pace has not come back.
    """
    before = [at_s for at_s in times_s if at_s <= fault_s][-BEFORE_STEPS:]
    after = [at_s for at_s in times_s if at_s > fault_s]
    if len(before) <= WINDOW_STEPS or len(after) <= WINDOW_STEPS:
        return None
    pace_s = statistics.median(_windows_s(before))
    for at_s, took_s in zip(after, _windows_s(after), strict=False):
        if took_s <= pace_s / PACE_SHARE:
            return at_s - fault_s
    return float("inf")


def lost_s(times_s: Sequence[float], fault_s: float) -> float | None:
    """Return the work lost to a fault in seconds: the time until the pace is back, minus the normal time of the steps
    in between.

    Args: times_s: as in `recovery_s`.
    Returns: seconds, >= 0; None: unknown; infinite: the pace has not come back.
    """
    gone_s = recovery_s(times_s, fault_s)
    if gone_s is None or gone_s == float("inf"):
        return gone_s
    before = [at_s for at_s in times_s if at_s <= fault_s][-BEFORE_STEPS:]
    pace_s = statistics.median(_windows_s(before)) / WINDOW_STEPS
    done = sum(fault_s < at_s <= fault_s + gone_s for at_s in times_s)
    return max(0.0, gone_s - done * pace_s)


def _windows_s(times_s: Sequence[float]) -> list[float]:
    """Return the duration of each window of steps, by its first step."""
    return [end_s - begin_s for begin_s, end_s in zip(times_s, times_s[WINDOW_STEPS:], strict=False)]
