"""Pauses a peer while its owner uses the device: it stops computing, and other peers do not wait for its work.

    at once   closed       neighbours send nothing new; microbatches without a forward go back
    + 0.5 s   no backward  all other microbatches go back too; earlier contributions are still reduced
    + 10 s    leaving      heartbeats and presence updates say so; the next plan omits us, and the replica drains
    resume                 the peer goes on as before; if a plan was made without it, it joins again as a newcomer

The peer stays a member of the run throughout: it votes, answers, hands on its state and keeps its snapshots. If it is
the last holder of a stage's state, it stays in the plan until another peer has that state.
"""

import asyncio
import contextlib
from typing import Final

from shoal.peer.presence.life import Life
from shoal.peer.presence.neighbours import Neighbours
from shoal.peer.presence.parts import Parts
from shoal.protocol.ports import Clock

BACKWARDS_S: Final = 0.5
"""First seconds of a pause, in which backwards still begin: a peer with jobs below 0.5 s is idle within 1 s."""
HOLDS_PLACE_S: Final = 10.0
"""Seconds for which a paused peer keeps its place: a shorter pause causes no new plan and no transfer of state."""


class Pausing:
    """Pauses and resumes one peer."""

    def __init__(self, clock: Clock, life: Life, parts: Parts, neighbours: Neighbours) -> None:
        self._clock, self._life, self._parts, self._neighbours = clock, life, parts, neighbours
        self._since_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._life.is_paused

    @property
    def paused_s(self) -> float | None:
        """Seconds since the pause began; None: the peer is not paused."""
        return self._clock.now_s() - self._since_s if self.is_paused else None

    def pause(self) -> None:
        """Pause. Safe to call twice."""
        if self._task is None:
            self._life.is_paused = True
            self._since_s = self._clock.now_s()
            self._task = asyncio.create_task(self._pause(), name="pause")

    def resume(self) -> None:
        """End the pause. Safe to call twice."""
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        self._life.is_paused = self._life.is_away = False
        for part in self._parts.all:
            part.resume()
        self._neighbours.announce()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _pause(self) -> None:
        self._apply(at_once=False)
        await asyncio.sleep(BACKWARDS_S)
        self._apply(at_once=True)
        await asyncio.sleep(HOLDS_PLACE_S - BACKWARDS_S)
        self._life.is_away = True
        self._neighbours.announce()
        await asyncio.Event().wait()

    def _apply(self, *, at_once: bool) -> None:
        for part in self._parts.all:
            part.pause(at_once=at_once)
