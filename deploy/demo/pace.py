"""Says what faults cost in time, from the times of a run's steps and of the faults. Pure."""

import itertools
import statistics
from collections.abc import Sequence

WINDOW_STEPS = 6
"""The steps over which a pace is measured: validation makes every tenth step or so half as long again."""
PACE_SHARE = 0.9
"""The part of the pace before that counts as recovered."""
BEFORE_STEPS = 30
"""The steps before a fault whose pace a recovery is measured against."""


def gaps_s(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times_s)]


def longest_stall_s(times_s: Sequence[float], *, end_s: float | None = None) -> float:
    """The longest time between two steps; with `end_s` also from the last step to there, for a run that should not
    have ended.
    """
    times = [*times_s, end_s] if end_s is not None and times_s else times_s
    return max(gaps_s(times), default=0.0)


def recovery_s(times_s: Sequence[float], fault_s: float) -> float | None:
    """Seconds from a fault until the steps have their pace again.

    The pace before is the median, over the windows of `WINDOW_STEPS` consecutive steps among the last `BEFORE_STEPS`
    before the fault, of the seconds that a window took. The pace is back with the first step after the fault from
    which on a window takes at most 1 / `PACE_SHARE` of that: what is measured is how long the pace was gone, not how
    long one has to look to see that it is back. A later fault that comes in between lengthens it.

    Args:
        times_s: when each step was committed, ascending, [N].
    Returns: seconds; None where it cannot be told: too few steps before or after. An infinite value: the steps after
        the fault were enough to tell, and the pace has not come back.
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
    """Seconds of work that a fault has cost: from it until the pace is back, less what the steps in between take at the
    pace before.

    Args: times_s: as `recovery_s` has them.
    Returns: seconds, >= 0; None where it cannot be told; infinite if the pace has not come back.
    """
    gone_s = recovery_s(times_s, fault_s)
    if gone_s is None or gone_s == float("inf"):
        return gone_s
    before = [at_s for at_s in times_s if at_s <= fault_s][-BEFORE_STEPS:]
    pace_s = statistics.median(_windows_s(before)) / WINDOW_STEPS
    done = sum(fault_s < at_s <= fault_s + gone_s for at_s in times_s)
    return max(0.0, gone_s - done * pace_s)


def _windows_s(times_s: Sequence[float]) -> list[float]:
    """The seconds that each window of steps took, by its first step."""
    return [end_s - begin_s for begin_s, end_s in zip(times_s, times_s[WINDOW_STEPS:], strict=False)]
