"""Returns the memory of a large stage's old state right after each step.

During a step two states exist. The allocations that follow do not fit into the holes of the old one (a gradient is
larger than a layer), so without a trim the peak of the step and that of the jobs add up (`peer/MEASURED.md`).
"""

import asyncio

from shoal.deploy.session.heap import trim_heap
from shoal.peer.model.state import StageState

_LARGE_PARAMETERS = 4_000_000
"""A smaller stage leaves at most 48 MB, which the next regular trim returns."""


class TrimsAfterSteps:
    """Trims the heap of one session; never two trims at a time."""

    def __init__(self) -> None:
        self._trimming: asyncio.Task[None] | None = None

    def stepped(self, stage: int, state: StageState) -> None:
        """Trim if `state`, after a step or a load, is large."""
        is_large = sum(layer.param_N.numel() for layer in state.layers.values()) >= _LARGE_PARAMETERS
        if is_large and (self._trimming is None or self._trimming.done()):
            self._trimming = asyncio.create_task(asyncio.to_thread(trim_heap), name="trim the heap")
