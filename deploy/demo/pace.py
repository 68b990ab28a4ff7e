"""Measures the time cost of faults, from the times of a run's steps and of the faults. Pure."""

import itertools
import statistics
from collections.abc import Sequence

WINDOW_STEPS = 6
"""Speed is averaged over this many steps: about every tenth step also validates, and takes 1.5 times as long."""
PACE_SHARE = 0.9
"""A run has recovered from a fault once its speed is at least this share of the speed before the fault."""
BEFORE_STEPS = 30
"""The speed before a fault is the median over this many steps before the fault."""


def gaps_s(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times_s)]


def longest_stall_s(times_s: Sequence[float], *, end_s: float | None = None) -> float:
    """Return the longest time between two steps. Args: end_s: the end of an unfinished run; counts as a step."""
    times = [*times_s, end_s] if end_s is not None and times_s else times_s
    return max(gaps_s(times), default=0.0)


def recovery_s(times_s: Sequence[float], fault_s: float) -> float | None:
    """Return the seconds from a fault until the run is about as fast as before.

    Speed is measured as the time that `WINDOW_STEPS` successive steps take. The reference is the median of these times
    among the last `BEFORE_STEPS` steps before the fault. The run has recovered at the first step after the fault from
    which on `WINDOW_STEPS` steps take at most 1 / `PACE_SHARE` times the reference. A second fault before the recovery
    lengthens it.

    Args: times_s: when each step was committed, ascending, [N]; fault_s: when the fault occurred, on the same clock.
    Returns: seconds; None: unknown, too few steps before or after; infinite: the run has not recovered.
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
    """Return the work lost to a fault, in seconds: the time until the run has recovered (`recovery_s`), minus the time
    that the steps of this period would have taken before the fault.

    Args: times_s: when each step was committed, ascending, [N]; fault_s: when the fault occurred, on the same clock.
    Returns: seconds, >= 0; None: unknown; infinite: the run has not recovered.
    """
    gone_s = recovery_s(times_s, fault_s)
    if gone_s is None or gone_s == float("inf"):
        return gone_s
    before = [at_s for at_s in times_s if at_s <= fault_s][-BEFORE_STEPS:]
    pace_s = statistics.median(_windows_s(before)) / WINDOW_STEPS
    done = sum(fault_s < at_s <= fault_s + gone_s for at_s in times_s)
    return max(0.0, gone_s - done * pace_s)


def _windows_s(times_s: Sequence[float]) -> list[float]:
    """Return, for each step, the seconds that the next `WINDOW_STEPS` steps took together."""
    return [end_s - begin_s for begin_s, end_s in zip(times_s, times_s[WINDOW_STEPS:], strict=False)]
