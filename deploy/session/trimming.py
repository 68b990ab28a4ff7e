"""Gives back what a large stage's old state leaves free, right after each step.

A step holds two states for a moment, and what follows wants memory elsewhere: a gradient is larger than any hole that a
layer leaves. Without this a peer's peak is that of a step and that of its jobs together (`peer/MEASURED.md`).
"""

import asyncio

from shoal.deploy.session.heap import trim_heap
from shoal.peer.pipeline.state import StageState

_LARGE_PARAMETERS = 4_000_000
"""A stage with fewer leaves an old state of 48 MB at most, which waits for the next of the regular trims."""


class TrimsAfterSteps:
    """Trims the heap of one session, once at a time."""

    def __init__(self) -> None:
        self._trimming: asyncio.Task[None] | None = None

    def stepped(self, stage: int, state: StageState) -> None:
        """The replica has stepped, or loaded a state."""
        is_large = sum(layer.param_N.numel() for layer in state.layers.values()) >= _LARGE_PARAMETERS
        if is_large and (self._trimming is None or self._trimming.done()):
            self._trimming = asyncio.create_task(asyncio.to_thread(trim_heap), name="trim the heap")
