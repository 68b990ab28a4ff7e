"""Measures how long this peer's forwards take, for heartbeats. Pure."""

from collections import deque
from statistics import median
from typing import Final

from shoal.peer.replica.job import Job

_TOLD_FORWARDS: Final = 9
"""A median of 9: a device that slows down shows after five forwards, which is beyond noise."""
_SURE_FORWARDS: Final = 3
_SURE_TIMES: Final = 2.0
"""A far slower device may not be given five more forwards, so this many in a row also count, if all take over
`_SURE_TIMES` times the median, or less than its inverse."""
_KINDS: Final = ("forward", "loss")


class ForwardTimes:
    """Times forwards, and the whole loss jobs of the last stage. A job that waits for experts runs in parts, with parts
    of others in between; it counts when it has ended."""

    def __init__(self) -> None:
        self._open: dict[Job, float] = {}
        self._took_s: deque[float] = deque(maxlen=_TOLD_FORWARDS)

    def ran(self, job: Job, seconds: float) -> None:
        """Note that the job, or a part of it, had the device for `seconds`."""
        if job.kind in _KINDS:
            self._open[job] = self._open.get(job, 0.0) + seconds

    def ended(self, job: Job) -> None:
        """Note that all parts of the job have run."""
        took_s = self._open.pop(job, None)
        if took_s is not None:
            self._took_s.append(took_s)

    def dropped(self, job: Job) -> None:
        """Forget a job of which nothing more will run."""
        self._open.pop(job, None)

    @property
    def seconds(self) -> float:
        """Median of recent times, or of only the very last if these are all far from it; 0 before the first."""
        if not self._took_s:
            return 0.0
        usual_s, last_s = median(self._took_s), [*self._took_s][-_SURE_FORWARDS:]
        if min(last_s) > _SURE_TIMES * usual_s or max(last_s) * _SURE_TIMES < usual_s:
            return median(last_s)
        return usual_s
