"""How long this peer's forwards take, as heartbeats tell it. Pure."""

from collections import deque
from statistics import median
from typing import Final

from shoal.peer.replica.job import Job

_TOLD_FORWARDS: Final = 9
"""A device that becomes slower is given less to do. It says so after five forwards, which still are no noise."""
_SURE_FORWARDS: Final = 3
_SURE_TIMES: Final = 2.0
"""One that becomes far slower may not be given five any more. So many in a row that each take so many times what the
median is are no noise either, nor are they if each takes so small a part of it."""
_KINDS: Final = ("forward", "loss")


class ForwardTimes:
    """Times forwards, and the whole loss jobs of the last stage. A job that waits for experts runs in parts, while
    parts of others run in between; it counts once it has ended."""

    def __init__(self) -> None:
        self._open: dict[Job, float] = {}
        self._took_s: deque[float] = deque(maxlen=_TOLD_FORWARDS)

    def ran(self, job: Job, seconds: float) -> None:
        """The job, or a part of it, has had the device for so long."""
        if job.kind in _KINDS:
            self._open[job] = self._open.get(job, 0.0) + seconds

    def ended(self, job: Job) -> None:
        """All parts of the job have run."""
        took_s = self._open.pop(job, None)
        if took_s is not None:
            self._took_s.append(took_s)

    def dropped(self, job: Job) -> None:
        """Nothing more of the job will run."""
        self._open.pop(job, None)

    @property
    def seconds(self) -> float:
        """The median of the last ones, of the very last if these are all far from it; 0 before the first has ended."""
        if not self._took_s:
            return 0.0
        usual_s, last_s = median(self._took_s), [*self._took_s][-_SURE_FORWARDS:]
        if min(last_s) > _SURE_TIMES * usual_s or max(last_s) * _SURE_TIMES < usual_s:
            return median(last_s)
        return usual_s
