"""Background work that belongs to somebody: it ends when its owner does, and what it raises is heard."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """`spawn` and forget; `on_failure` gets what a task raises, since nobody awaits it."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        """End them all."""
        for task in tuple(self._running):
            task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Until all have ended by themselves."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
