"""The time of a simulated world: the clock of each peer, and the world's own timers."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import TypeVarTuple

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import VirtualTimeLoop
from shoal.protocol.sim.machine import Machine

Ts = TypeVarTuple("Ts")

WALL_AT_ZERO_S = 1_800_000_000.0
"""The wall clock at virtual second 0: 2027-01-15; it is fixed so that files with times in them are reproducible."""


class Agenda:
    """The world's own timers. They belong to no peer, so a message arrives even if its sender is paused or dead."""

    def __init__(self) -> None:
        self._loop: VirtualTimeLoop | None = None
        self._nobody = contextvars.Context()

    @property
    def loop(self) -> VirtualTimeLoop:
        """Return the running event loop. Raises: LocalError: it is no VirtualTimeLoop, or another one than before."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None or not isinstance(loop, VirtualTimeLoop):
                raise LocalError("a simulated world lives inside one shoal.protocol.sim.loop.run()")
            self._loop = loop
        return self._loop

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    def now_s(self) -> float:
        loop = self._loop
        if loop is None or loop is not asyncio.get_running_loop():  # fast path: several calls a message
            loop = self.loop
        return loop.time()

    def at(self, when_s: float, callback: Callable[[*Ts], object], *args: *Ts) -> asyncio.TimerHandle:
        return self.loop.call_at(when_s, callback, *args, context=self._nobody)


class SimClock:
    """The `Clock` port in virtual time."""

    def __init__(self, agenda: Agenda, machine: Machine) -> None:
        self._agenda = agenda
        self._machine = machine

    def now_s(self) -> float:
        return self._agenda.now_s()

    def wall_s(self) -> float:
        return WALL_AT_ZERO_S + self._agenda.now_s() + self._machine.clock_ahead_s
