"""How far stage 0 runs ahead of its version: what the model in `protocol/running_ahead.py` makes of what it measures.

**Measuring does not fulfil itself**: g is never below 1, so the pipeline never holds less than it takes to fill it, and
the rate is the largest of late, measured while a step's own microbatches have the whole window to themselves.

**One choice for a group.** A step ends for all replicas of stage 0 at once, so the lead's choice comes with what it
grants and is everybody's. In eight cities with thirty replicas near and far ones chose differently, and steps took
6.1 s where 4.6 were planned.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import mean

from shoal.peer.pipeline.commits import STEPS
from shoal.peer.pipeline.window import Window
from shoal.protocol.running_ahead import Choice, Measured, choose
from shoal.protocol.staleness import Price


@dataclass(kw_only=True, slots=True)
class Control:
    """Chooses anew at each version. Before there is something to choose by, nothing is held back.

    Args:
        s_max: as `choose` has it.
        price: likewise.
        synchronous_steps: how many of the run's first steps nothing runs ahead of. A rate that is measured there says
            nothing: where a step is shorter than the way through all stages the pipeline is never full.
    """

    s_max: int
    price: Price
    synchronous_steps: int = 0
    choice: Choice | None = None
    """The newest of our own."""
    _led: tuple[int, float] | None = None
    """(k, g) as the group's lead has chosen."""
    _begun: dict[int, int] = field(default_factory=dict)
    """Step -> microbatches of ours."""
    _own: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))

    def begun(self, step: int) -> None:
        """A microbatch of ours, for the first time."""
        self._begun[step] = self._begun.get(step, 0) + 1

    def reached(self, version: int, window: Window, *, commit_s: float) -> None:
        """Choose. `commit_s`: the longest of all stages; 0: not known yet."""
        self._own.append(self._begun.get(version - 1, 0))
        self._begun = {step: count for step, count in self._begun.items() if step >= version}
        if version <= self.synchronous_steps:
            return
        if not (any(self._own) and window.rate_per_s > 0.0 and window.round_trip_s > 0.0 and commit_s > 0.0):
            return
        measured = Measured(
            rate_per_s=window.rate_per_s,
            round_trip_s=window.round_trip_s,
            commit_s=commit_s,
            microbatches=mean(self._own),
        )
        self.choice = choose(measured, s_max=self.s_max, price=self.price, gain_max=window.gain)

    def follow(self, steps_ahead: int, gain: float) -> None:
        """What the group's lead has chosen, < 0: nothing yet. A step ends for all replicas at once, so where some run
        ahead and others do not it is as stale as if all did, and as late as if none.

        Raises: ValueError: no control chooses that.
        """
        if not 1.0 <= gain < math.inf:
            raise ValueError(f"wants {gain} times what the pipeline holds in flight")
        self._led = (steps_ahead, gain) if steps_ahead >= 0 else None

    def lets_in(self, steps_ahead: int, window: Window) -> bool:
        """Whether a microbatch so many steps ahead of the version, at least one, may begin."""
        if self.in_force is None:
            return True
        most_ahead, gain = self.in_force
        fits = gain >= window.gain or window.in_flight < window.size_at(gain)
        return fits and steps_ahead <= most_ahead

    @property
    def in_force(self) -> tuple[int, float] | None:
        """(k, g): the lead's choice, or ours while it has none."""
        if self._led is None and self.choice is not None:
            return self.choice.steps_ahead, self.choice.gain
        return self._led
