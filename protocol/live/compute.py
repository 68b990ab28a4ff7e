"""The port `Compute` on two worker threads, one for the device and one for host memory; the event loop stays free."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.protocol.duty import Duty
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import JobKind, Timed

T = TypeVar("T")


class ThreadCompute:
    """Runs jobs on two threads (device and host memory), one at a time on each, in the order of the calls.

    Args:
        initializer: runs in each of the two threads before the first job, and sets for example torch's number of
            threads. If it raises, every job raises the same error.
        probe_clock: the clock that times probes. For a CPU it is `time.thread_time`: by wall time, six peers that start
            together on one machine slow each other's probes down, and their measured speeds differ by a factor of four.
        share: the share of time in which the device may work. Beyond it the device rests (`duty.py`). A job's reported
            duration is at least its device time divided by the share: so planners see the speed that the share allows.
        spent_s: returns the seconds of device time that this process has used; None: the jobs' durations count. For a
            CPU, processor seconds are more exact: a job may wait for other programs or use one of two threads, and
            network work uses the processor, too.
    """

    def __init__(
        self,
        *,
        initializer: Callable[[], None] | None = None,
        probe_clock: Callable[[], float] = time.monotonic,
        share: float = 1.0,
        spent_s: Callable[[], float] | None = None,
    ) -> None:
        self._duty = Duty(share)
        self._share = share
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._host_thread = ThreadPoolExecutor(1, thread_name_prefix="host memory")
        self._initializer = initializer
        self._probe_clock = probe_clock
        self._initialized: set[int] = set()
        """Ids of the threads that have run `initializer`."""
        self._is_closed = False
        self._spent_s = spent_s
        self._jobs_s = 0.0
        self._charged_s = spent_s() if spent_s is not None else 0.0
        self._by_jobs_s = 0.0
        """Device seconds that jobs have used and that we have not reported to `Duty` yet."""
        self._turn = asyncio.Lock()

    @property
    def used_s(self) -> float:
        """Seconds of device time that this process has used: `spent_s()` or, without it, the jobs' total duration."""
        return self._jobs_s if self._spent_s is None else self._spent_s()

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Run a job. Cancelling does not stop a job that has begun: the next job waits, and the result is dropped.

        Raises: the errors of `work`. LocalError: the device is closed.
        """
        if self._is_closed:
            raise LocalError("this device is closed")
        loop = asyncio.get_running_loop()
        if self._share == 1.0:
            return await loop.run_in_executor(self._thread, self._timed, kind, work)
        async with self._turn:
            await asyncio.sleep(self._rest_s())
            if self._is_closed:
                raise LocalError("this device is closed")
            return await loop.run_in_executor(self._thread, self._timed, kind, work)

    async def run_on_host(self, work: Callable[[], T]) -> T:
        """Run `work` on the host-memory thread. Raises: the errors of `work`. LocalError: the device is closed."""
        if self._is_closed:
            raise LocalError("this device is closed")
        return await asyncio.get_running_loop().run_in_executor(self._host_thread, self._prepared, work)

    def close(self) -> None:
        """Cancel the jobs that have not begun. A running job finishes, and then its thread ends."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._host_thread.shutdown(wait=False, cancel_futures=True)

    def _rest_s(self) -> float:
        used_s, by_jobs_s = self.used_s, self._by_jobs_s
        self._duty.spend(by_jobs_s)
        self._duty.spend_beside(max(0.0, used_s - self._charged_s - by_jobs_s))
        self._charged_s, self._by_jobs_s = used_s, 0.0
        return self._duty.rest_s(time.monotonic())

    def _prepared(self, work: Callable[[], T]) -> T:
        self._prepare_thread()
        return work()

    def _prepare_thread(self) -> None:
        thread = threading.get_ident()
        if thread not in self._initialized and self._initializer is not None:
            self._initializer()
        self._initialized.add(thread)

    def _timed(self, kind: JobKind, work: Callable[[], T]) -> Timed[T]:
        self._prepare_thread()
        # time.monotonic is also the clock of the loop and of `LoopClock`, so these times can be compared
        clock = self._probe_clock if kind == "probe" else time.monotonic
        started_s, clock_started_s, used_before_s = time.monotonic(), clock(), self.used_s
        try:
            value = work()
            took_s = clock() - clock_started_s
        finally:
            self._jobs_s += time.monotonic() - started_s
            self._by_jobs_s += self.used_s - used_before_s
        if kind == "probe":
            took_s /= self._share
        else:
            took_s = max(took_s, (self.used_s - used_before_s) / self._share)
        return Timed(value=value, started_s=started_s, ended_s=started_s + took_s)
