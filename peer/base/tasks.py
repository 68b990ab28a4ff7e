"""Background tasks that end with their owner and report their errors."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Spawns background tasks; `on_failure` gets their exceptions, since no other task awaits these tasks."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        for task in tuple(self._running):
            task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Wait until all tasks have ended by themselves."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
