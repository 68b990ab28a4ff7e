"""The timer of a driver (a peer's asyncio program), set again whenever the driver's state machine names another
time."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from shoal.protocol.ports import Clock

_TICK_S: Final = 0.001
"""Least delay of a timer. uvloop rounds to whole milliseconds, so a timer may ring half a millisecond early. The driver
would then set the same time again, rounded to no delay, and driver and loop would take some ten turns per timer."""


class Timer:
    """Calls `ring` once, at the time that was last set, never earlier."""

    def __init__(self, clock: Clock, ring: Callable[[], object]) -> None:
        self._clock = clock
        self._ring = ring
        self._at_s = math.inf
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for_s = math.inf
        """Time for which the loop's timer handle is set; infinite: none. If a later time is set, the handle still fires
        at the earlier time, and is then set anew."""

    def set(self, at_s: float) -> None:
        """Ring at the clock's time `at_s`: at once if `at_s` is past, never if it is infinite."""
        if at_s == self._at_s:
            return
        self._at_s = at_s
        if at_s < self._armed_for_s:
            self._arm(max(0.0, at_s - self._clock.now_s()))

    def cancel(self) -> None:
        self._at_s = self._armed_for_s = math.inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, delay_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._rung)
        self._armed_for_s = self._at_s

    def _rung(self) -> None:
        self._handle, self._armed_for_s = None, math.inf
        if self._at_s == math.inf:
            return
        early_s = self._at_s - self._clock.now_s()
        if early_s > 1e-6:  # else it is the clock's rounding
            self._arm(max(early_s, _TICK_S))
        else:
            self._at_s = math.inf
            self._ring()
