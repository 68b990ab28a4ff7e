"""Runs work that may take minutes and for which the end of a process does not wait: reading a text, a search."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")
_NAME = "background"


def is_working() -> bool:
    """Whether such work runs now, whoever waits for it."""
    return any(thread.name == _NAME for thread in threading.enumerate())


async def in_background(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own. Unlike `asyncio.to_thread`'s it does not keep the process from ending, which
    for what must be on disk would be wrong.

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
