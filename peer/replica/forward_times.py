"""How long this peer's forwards take, as heartbeats tell it. Pure."""

from collections import deque
from statistics import median
from typing import Final

from shoal.peer.replica.job import Job

_TOLD_FORWARDS: Final = 9
"""A device that becomes slower is given less to do. It says so after five forwards, which still are no noise."""
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
        """The median of the last ones; 0 before the first has ended."""
        return median(self._took_s) if self._took_s else 0.0
