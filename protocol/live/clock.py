"""The Clock port in real time."""

import time


class LoopClock:
    """Both asyncio's loop and uvloop count CLOCK_MONOTONIC; uvloop's own `time()` only in whole milliseconds, which is
    longer than a round trip on a local network.
    """

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
