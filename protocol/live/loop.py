"""The event loop of real peers, and its clock."""

import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopClock:
    """Implements the port `Clock`.

    Both asyncio's loop and uvloop count CLOCK_MONOTONIC, but uvloop's `time()` in whole milliseconds, which is longer
    than a round trip on a local network.
    """

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a peer's main coroutine, cancel what is left and close the loop, as `asyncio.run` does. uvloop has twice the
    frame rate of the standard loop, at a third of its CPU per byte."""
    result: T = uvloop.run(main)
    return result
