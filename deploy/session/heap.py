"""Gives freed memory back to the system.

glibc keeps freed pages for reuse: after a few demo steps 86 MB of a peer's 420 MB. Returning them frees memory for the
volunteer, and a run of weeks does not hold memory that was needed once.
"""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.peer.model.state import StageState

_M_ARENA_MAX = -8
_INTERVAL_S = 10.0
"""Seconds between trims. A trim, and getting pages back after it, take milliseconds: a thousandth of a core's time."""
_LARGE_PARAMETERS = 4_000_000
"""The least parameters of a large stage. A step of a smaller stage leaves at most 48 MB for the next trim."""


def share_heap() -> None:
    """Use one heap for all threads that start from now on; no effect where the C library is not glibc.

    By default each thread has its own heap, which stays at its peak size, because one thread cannot reuse what another
    freed. Tensors are made by the device's thread and freed by the event loop's, and vice versa.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Turn the cycle collector off while modules are imported, then exempt their 300,000 objects from collection:
    nearly all stay alive, and each collection would take 0.1 s to visit them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_heap() -> None:
    """Collect garbage, then exempt all objects that are left, mostly of imported modules, from later collections."""
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return free pages to the system; no effect where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


async def trim_heap_forever() -> None:
    while True:
        await asyncio.sleep(_INTERVAL_S)
        await asyncio.to_thread(trim_heap)


class TrimsAfterSteps:
    """Trims the heap right after each step of a large stage; never two trims at a time.

    During a step the old and the new state exist at once. Later allocations do not fit into the holes that the old
    state leaves: a gradient is larger than a layer. So without a trim the process keeps both (`peer/MEASURED.md`).
    """

    def __init__(self) -> None:
        self._trimming: asyncio.Task[None] | None = None

    def stepped(self, stage: int, state: "StageState") -> None:
        """Trim if `state`, which has just been stepped or loaded, is large."""
        is_large = sum(layer.param_N.numel() for layer in state.layers.values()) >= _LARGE_PARAMETERS
        if is_large and (self._trimming is None or self._trimming.done()):
            self._trimming = asyncio.create_task(asyncio.to_thread(trim_heap), name="trim the heap")
