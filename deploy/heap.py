"""Give freed memory back to the system.

glibc keeps what was freed in case it is needed again: after a few steps of the demo 86 MB of a peer's 420. A volunteer
would rather have them, and a run of weeks must not grow by what was needed once.
"""

import asyncio
import contextlib
import ctypes
import gc

_INTERVAL_S = 10.0
"""A trim costs a few milliseconds, and as many when the pages are needed again: a thousandth of a core."""


def freeze_heap() -> None:
    """Spare the cycle collector what is there by now: imported modules mostly, half a million objects that no later
    collection could free."""
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return free pages; nothing where the C library cannot."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


async def trim_heap_forever() -> None:
    while True:
        await asyncio.sleep(_INTERVAL_S)
        await asyncio.to_thread(trim_heap)
