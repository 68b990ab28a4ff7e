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
        share: of the device's time. After each job it rests, and a job is said to have taken the rest as well: that is
            how fast the device is for those who plan with it.
    """

    def __init__(
        self,
        *,
        initializer: Callable[[], None] | None = None,
        probe_clock: Callable[[], float] = time.monotonic,
        share: float = 1.0,
    ) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of {share} of a device's time cannot be")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._initializer = initializer
        self._probe_clock = probe_clock
        self._initialized = False
        self._is_closed = False
        self._rest_per_s = 1.0 / share - 1.0
        self._rests_until_s = 0.0
        self._turn = asyncio.Lock()

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Cancelling does not stop a job that has begun: its result is dropped, and the next job waits for it.

        Raises: whatever `work` raises. LocalError: the device is closed.
        """
        if self._is_closed:
            raise LocalError("this device is closed")
        loop = asyncio.get_running_loop()
        if self._rest_per_s == 0.0:
            return await loop.run_in_executor(self._thread, self._timed, kind, work)
        async with self._turn:
            await asyncio.sleep(max(0.0, self._rests_until_s - time.monotonic()))
            if self._is_closed:
                raise LocalError("this device is closed")
            return await loop.run_in_executor(self._thread, self._timed, kind, work)

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
        took_s = clock() - clock_started_s
        rest_s = (time.monotonic() - started_s) * self._rest_per_s
        self._rests_until_s = time.monotonic() + rest_s
        return Timed(value=value, started_s=started_s, ended_s=started_s + took_s * (1.0 + self._rest_per_s))
