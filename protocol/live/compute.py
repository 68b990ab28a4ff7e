"""The Compute port on one worker thread: the device's jobs leave the loop free for the network."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.protocol.errors import LocalError
from shoal.protocol.ports import JobKind, Timed

T = TypeVar("T")


class ThreadCompute:
    """Jobs run one at a time in the order given.

    Args:
        initializer: runs in the thread before the first job (number of threads, device). If it raises, so does every
            job.
        probe_clock: what probes are timed with. `time.thread_time` for a CPU: six peers that start on one machine
            would otherwise measure each other's start, and differ by a factor of four.
    """

    def __init__(
        self,
        *,
        initializer: Callable[[], None] | None = None,
        probe_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._initializer = initializer
        self._probe_clock = probe_clock
        self._initialized = False
        self._is_closed = False

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Cancelling does not stop a job that has begun: its result is dropped, and the next job waits for it.

        Raises: whatever `work` raises. LocalError: the device is closed.
        """
        if self._is_closed:
            raise LocalError("this device is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, kind, work)

    def close(self) -> None:
        """Cancel the jobs that have not begun; one that has runs to its end, and the thread ends with it."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _timed(self, kind: JobKind, work: Callable[[], T]) -> Timed[T]:
        if not self._initialized and self._initializer is not None:
            self._initializer()
        self._initialized = True
        # time.monotonic is also what the loop's time() reads, so these seconds compare with the Clock's
        clock = self._probe_clock if kind == "probe" else time.monotonic
        started_s, clock_started_s = time.monotonic(), clock()
        value = work()
        return Timed(value=value, started_s=started_s, ended_s=started_s + clock() - clock_started_s)
