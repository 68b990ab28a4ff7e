"""Work that may take a minute and that nobody waits for at the end: a search for a layout, or compiling it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable


async def in_background(work: Callable[[], object]) -> object:
    """Run `work` in a thread of its own. Unlike `asyncio.to_thread`'s it does not keep the process from ending, which
    for what must be on disk would be wrong.

    Raises: whatever `work` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def tell(result: object, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="background", daemon=True).start()
    return await done
