"""The `Compute` port in virtual time: one device that runs one job at a time, each for about FLOP / rate seconds."""

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
    """A job that a device has run. `label` is the attribute `label` of the job's function, else its `__qualname__`."""

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
    """A device with its queue of jobs. A change of its speed or slowdown applies to jobs that start afterwards.

    Args:
        number: the peer's number in the trace.
        overhead_s: time that every job takes in addition to its arithmetic.
        is_modelled: if True, a job's function is not called: the job takes its time, and its value is None, whatever
            its type says. If False, the function runs when the job starts (real gradients in virtual time), and the
            caller gets the value when the job ends.
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
        """All jobs in the order of their starts; the last may end in the future (not if the device's speed varies)."""
        self._agenda = agenda
        self._trace = trace
        self._number = number
        self._machine = machine
        self._queue: deque[_Queued] = deque()
        self._is_busy = False
        self._is_closed = False
        self._looks: asyncio.TimerHandle | None = None
        """Timer of the next update of the running job's progress, on a device with varying speed."""

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Run `work` after the queued jobs. Raises: any error of `work`. LocalError: the device is closed."""
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
        """Run `work` now; it takes no virtual time. It runs even if jobs are modelled, since later messages depend on
        the result of `work`."""
        return work()

    def close(self) -> None:
        """Cancel all waiting jobs. The running job ends as usual."""
        self._is_closed = True
        for job in self._queue:
            job.done.cancel()
        self._queue.clear()

    def _next(self) -> None:
        """Start the first queued job that is not cancelled. A started job runs to its end."""
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
            # This timer belongs to the peer, not to the world: a paused peer then starts no further job.
            self._agenda.loop.call_at(started_s + takes_s, self._end, job, value, started_s)

    def _begin(self, pace: DevicePace, job: _Queued, value: object, takes_s: float) -> None:
        """Start a job on a device with varying speed. The timeline gets the job when the job ends, since its end is not
        known before."""
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
        """Stop the running job of a device with varying speed when its peer's process is gone. The device rests."""
        if self._looks is not None and self._machine.pace is not None:
            self._looks.cancel()
            self._looks = None
            self._machine.pace.end(self._agenda.now_s())

    def _note(self, job: _Queued, started_s: float, ended_s: float) -> None:
        label = str(getattr(job.work, "label", None) or getattr(job.work, "__qualname__", ""))
        self.timeline.append(SimJob(job.kind, started_s, ended_s, label))

    def _end(self, job: _Queued, value: object, started_s: float, says_s: float | None = None) -> None:
        """Give the job's result to its caller. Args: says_s: the end time that the result reports; None: now."""
        self._is_busy = False
        if not job.done.done():
            ended_s = self._agenda.now_s() if says_s is None else says_s
            job.done.set_result(Timed(value=value, started_s=started_s, ended_s=ended_s))
        self._next()
