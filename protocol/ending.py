"""Ends background tasks."""

import asyncio
from typing import Any


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until all have ended; ignore their results and errors. An argument may be None."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
