"""What staleness costs: the one model that the pipeline's control and the allocator both decide by.

A run whose microbatches are on average s steps stale needs 1 + price s^power times as many steps to a loss as a
synchronous one. So what counts is not tokens/s but

    seconds a step x (1 + price s^power)

Both depend on what is done about staleness, `training.compensation`. s is the mean over the microbatches of a step and
over the stages, as commit reports have it.

Source: ours, from `tests/bench/staleness`: a run's loss says how many steps a synchronous run would have taken to it
(runs of 100, 150, 200, 300 and 400 steps, a schedule each, interpolated). NAdam at 4e-3, one seed, 400 steps, the byte
GPT. Two shares of stale microbatches were measured, 10 of 16 and all, which gives two numbers; above s = 1 the form is
a guess. In other words: `eager` makes up for nearly all of it as long as some microbatches of each step are fresh.

    compensation            s = 0.625          s = 1
    eager, two members      1.515 = 365 steps  1.836 = 226 steps
    pipeoptim               1.972 = 188 steps  2.077 = 167 steps
    none                                       2.282 = 135 steps

Not in this yet: what `eager` costs depends on what a peer has seen of the open step when a stale microbatch begins.
With the whole step in flight that is nothing, and it costs what `pipeoptim` does: the drivers themselves in eight
cities with 16 microbatches a step (AdamW, s = 0.44) came to 2.114, 181 steps' worth, 2.2 times as many for steps that
were 1.94 times as fast. There synchronous training is sooner, and the control does not know it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Price:
    """Of mean staleness."""

    at_one: float
    """Further steps that one step of it costs, as a part of all; >= 0."""
    power: float = 1.0
    """How it grows with staleness, > 0."""

    def more_steps(self, staleness_steps: float) -> float:
        """Times as many steps to a loss as without staleness, >= 1. Args: staleness_steps: mean, >= 0."""
        return 1.0 + self.at_one * math.pow(staleness_steps, self.power)


_EAGER = Price(0.77, 4.4)
_PREDICTED = Price(1.4, 0.5)
_NOTHING = Price(1.97, 0.5)
"""Measured with all stale only; the power is a prediction's."""

PRICES: Final[Mapping[str, Price]] = MappingProxyType(
    {
        "none": _NOTHING,
        "stash": _NOTHING,
        "dc": _NOTHING,
        "spectrain": _PREDICTED,
        "pipeoptim": _PREDICTED,
        "lookahead": _PREDICTED,
        "calibrated": _PREDICTED,
        "eager": _EAGER,
    }
)
"""By compensation. Measured are `eager`, `pipeoptim` and `none`; the others are given what is most like them."""
