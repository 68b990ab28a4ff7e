"""Runs work beside a session: tasks that end with a context, and daemon threads that nobody waits for."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_NAME = "background"


def is_working() -> bool:
    """True if a thread that `in_background` started still runs."""
    return any(thread.name == _NAME for thread in threading.enumerate())


async def in_background(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread. Unlike with `asyncio.to_thread`, the process can end before `work` does, so `work`
    must not write files.

    Raises: whatever `work` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(what: Callable[[], None]) -> None:
        if not done.cancelled():
            what()

    def run() -> None:
        try:
            what = partial(done.set_result, work())
        except BaseException as error:
            what = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, what)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return await done


@contextlib.asynccontextmanager
async def ending(*tasks: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Cancel `tasks` at the end of the context, wait until they have ended, and ignore their errors."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
