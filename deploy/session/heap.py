"""Gives freed memory back to the system.

glibc keeps what was freed in case it is needed again: after a few steps of the demo 86 MB of a peer's 420. A volunteer
would rather have them, and a run of weeks must not grow by what was needed once.
"""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_ARENA_MAX = -8
_INTERVAL_S = 10.0
"""A trim costs a few milliseconds, and as many when the pages are needed again: a thousandth of a core."""


def share_heap() -> None:
    """One heap for all threads that begin from now on; nothing where the C library cannot.

    glibc gives each thread its own, and each stays as large as its peak was, since what one thread has freed another
    cannot use. The device's thread makes tensors that the loop's frees, and the other way about.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Let nothing be collected while modules are imported, nor what they have made later on.

    Of some 300,000 objects nearly all stay, and each walk of the collector through them takes a tenth of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
