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
    """

    def __init__(self, *, initializer: Callable[[], None] | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._initializer = initializer
        self._initialized = False
        self._is_closed = False

    async def run(self, kind: JobKind, work: Callable[[], T], *, flop: float) -> Timed[T]:
        """Cancelling does not stop a job that has begun: its result is dropped, and the next job waits for it.

        Raises: whatever `work` raises. LocalError: the device is closed.
        """
        if self._is_closed:
            raise LocalError("this device is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, work)

    def close(self) -> None:
        """Cancel the jobs that have not begun; one that has runs to its end, and the thread ends with it."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _timed(self, work: Callable[[], T]) -> Timed[T]:
        if not self._initialized and self._initializer is not None:
            self._initializer()
        self._initialized = True
        # time.monotonic is also what the loop's time() reads, so these seconds compare with the Clock's
        started_s = time.monotonic()
        value = work()
        return Timed(value=value, started_s=started_s, ended_s=time.monotonic())
