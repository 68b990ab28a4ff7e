"""Measures how long this peer's forwards take, for heartbeats. Pure."""

from collections import deque
from statistics import median
from typing import Final

from shoal.peer.replica.job import Job

_TOLD_FORWARDS: Final = 9
"""Number of forwards of which the median is reported; it changes after five slower ones, which is beyond noise."""
_SURE_FORWARDS: Final = 3
_SURE_TIMES: Final = 2.0
"""If the last `_SURE_FORWARDS` forwards all took more than this multiple of the median, or all less than the median
divided by it, only they count: a far slower device may never run the five forwards that change the median."""
_KINDS: Final = ("forward", "loss")


class ForwardTimes:
    """Measures how long forwards take; at the last stage, whole loss jobs. A job that waits for experts runs in parts,
    between which other jobs run; its parts are added up, and count when the job has ended."""

    def __init__(self) -> None:
        self._open: dict[Job, float] = {}
        self._took_s: deque[float] = deque(maxlen=_TOLD_FORWARDS)

    def ran(self, job: Job, seconds: float) -> None:
        """Record that the job, or a part of the job, had the device for `seconds`."""
        if job.kind in _KINDS:
            self._open[job] = self._open.get(job, 0.0) + seconds

    def ended(self, job: Job) -> None:
        """Record that all parts of the job have run."""
        took_s = self._open.pop(job, None)
        if took_s is not None:
            self._took_s.append(took_s)

    def dropped(self, job: Job) -> None:
        """Forget a job that will not be finished."""
        self._open.pop(job, None)

    @property
    def seconds(self) -> float:
        """Median of recent times, or of the last three if all three are far from that median; 0 before any forward."""
        if not self._took_s:
            return 0.0
        usual_s, last_s = median(self._took_s), [*self._took_s][-_SURE_FORWARDS:]
        if min(last_s) > _SURE_TIMES * usual_s or max(last_s) * _SURE_TIMES < usual_s:
            return median(last_s)
        return usual_s
