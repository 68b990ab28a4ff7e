"""`Compute` in virtual time: one device, one job at a time, seconds = FLOP / rate."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import xxhash

from shoal.protocol.errors import LocalError
from shoal.protocol.ports import JobKind, Timed
from shoal.protocol.sim.clock import Agenda
from shoal.protocol.sim.dirt import DevicePace
from shoal.protocol.sim.machine import Machine
from shoal.protocol.sim.trace import Kind, Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job on a device's timeline. `label` is the work's own `label`, else its `__qualname__`."""

    kind: JobKind
    started_s: float
    ended_s: float
    label: str


@dataclass(slots=True, eq=False)
class _Queued:
    kind: JobKind
    work: Callable[[], Any]
    flop: float
    done: asyncio.Future[Timed[Any]]


class SimCompute:
    """The device's queue and timeline. Changes of speed or slowdown apply to jobs that start afterwards.

    Args:
        number: the peer's number in the trace.
        overhead_s: time of every job beside its arithmetic.
        is_modelled: jobs only take their time, and their value is None, despite its type. Otherwise the work is done
            when the job starts (real gradients in virtual time), and its result comes when the job ends.
    """

    def __init__(
        self,
        agenda: Agenda,
        trace: Trace,
        *,
        number: int,
        machine: Machine,
        device_flop_per_s: float,
        overhead_s: float,
        is_modelled: bool,
    ) -> None:
        if not (device_flop_per_s > 0.0 and overhead_s >= 0.0):
            raise LocalError(f"a device cannot do {device_flop_per_s} FLOP/s with {overhead_s} s overhead")
        self.device_flop_per_s = device_flop_per_s
        self.overhead_s = overhead_s
        self._is_modelled = is_modelled
        self.timeline: list[SimJob] = []
        """Jobs in order; the last one's end may lie ahead."""
        self._agenda = agenda
        self._trace = trace
        self._number = number
        self._machine = machine
        self._queue: deque[_Queued] = deque()
        self._is_busy = False
        self._is_closed = False
        self._looks: asyncio.TimerHandle | None = None
        """When the running job of a dirty device is looked at again."""

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Raises: any error of `work`. LocalError: the device is closed."""
        if self._is_closed:
            raise LocalError("this device is closed")
        if not flop >= 0.0:
            raise LocalError(f"a job cannot have {flop} FLOP")
        job = _Queued(kind, work, flop, self._agenda.loop.create_future())
        self._queue.append(job)
        if not self._is_busy:
            self._next()
        return cast("Timed[T]", await job.done)

    async def run_on_host(self, work: Callable[[], T]) -> T:
        """Run `work` now, in no time, even if jobs are modelled, since its result decides on later messages."""
        return work()

    def close(self) -> None:
        """Cancel waiting jobs and drop the running one's result."""
        self._is_closed = True
        for job in self._queue:
            job.done.cancel()
        self._queue.clear()

    def _next(self) -> None:
        """Start the first job that is not cancelled. A started job runs to its end."""
        while self._queue and not self._is_busy:
            job = self._queue.popleft()
            if job.done.done():
                continue
            try:
                value = None if self._is_modelled else job.work()
            except Exception as error:
                job.done.set_exception(error)
                continue
            started_s = self._agenda.now_s()
            takes_s = (self.overhead_s + job.flop / self.device_flop_per_s) * self._machine.slowdown
            digest = xxhash.xxh3_64_intdigest(job.kind.encode())
            self._trace.add(started_s, Kind.JOB_STARTED, self._number, -1, int(job.flop), digest)
            self._is_busy = True
            if self._machine.pace is not None:
                self._begin(self._machine.pace, job, value, takes_s)
                continue
            self._note(job, started_s, started_s + takes_s)
            # In the peer's context, not the agenda's: a frozen peer starts no further job.
            self._agenda.loop.call_at(started_s + takes_s, self._end, job, value, started_s)

    def _begin(self, pace: DevicePace, job: _Queued, value: object, takes_s: float) -> None:
        """Start a job on a dirty device. It is on the timeline when it has ended, since nobody knows before when."""
        context, started_s = contextvars.copy_context(), self._agenda.now_s()
        takes_s *= pace.factor()

        def look_again() -> None:
            if self._looks is not None:
                self._looks.cancel()
            self._looks = self._agenda.at(self._agenda.now_s() + pace.lasts_s(), look)

        def look() -> None:
            pace.advance(self._agenda.now_s())
            if not pace.is_done:
                look_again()
                return
            self.halt()
            self._note(job, started_s, self._agenda.now_s())
            says_s = started_s + takes_s if job.kind == "probe" and not pace.probe_waits else None
            self._agenda.loop.call_soon(self._end, job, value, started_s, says_s, context=context)

        pace.on_change = look_again
        pace.begin(takes_s, started_s)

    def halt(self) -> None:
        """Stop the running job of a dirty device, which then rests: its process is gone, and nobody awaits the job."""
        if self._looks is not None and self._machine.pace is not None:
            self._looks.cancel()
            self._looks = None
            self._machine.pace.end(self._agenda.now_s())

    def _note(self, job: _Queued, started_s: float, ended_s: float) -> None:
        label = str(getattr(job.work, "label", None) or getattr(job.work, "__qualname__", ""))
        self.timeline.append(SimJob(job.kind, started_s, ended_s, label))

    def _end(self, job: _Queued, value: object, started_s: float, says_s: float | None = None) -> None:
        """Hand out the result. `says_s`: the end that the job reports; None: now."""
        self._is_busy = False
        if not job.done.done():
            ended_s = self._agenda.now_s() if says_s is None else says_s
            job.done.set_result(Timed(value=value, started_s=started_s, ended_s=ended_s))
        self._next()
