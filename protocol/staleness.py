"""What staleness costs: the one model that the pipeline's control and the allocator both decide by.

A run whose microbatches are on average s steps stale needs 1 + price s^power times as many steps to a loss as a
synchronous one. So what counts is not tokens/s but

    seconds a step x (1 + price s^power)

Both depend on what is done about staleness, `training.compensation`. s is the mean over the microbatches of a step and
over the stages, as commit reports have it.

What `eager` makes of it depends on what a peer has *seen* when a stale microbatch begins: the part of its own gradients
of the open step that are back. Where nothing is, it is `pipeoptim`; in between the price is taken to be in between.

Source: ours, from `tests/bench/staleness`: a run's loss says how many steps a synchronous run would have taken to it
(runs of 100, 150, 200, 300 and 400 steps, a schedule each, interpolated). NAdam at 4e-3, one seed, 400 steps, the byte
GPT. Two shares of stale microbatches were measured, 10 of 16 and all, which gives two numbers; above s = 1 the form is
a guess. In other words: `eager` makes up for nearly all of it as long as some microbatches of each step are fresh.

    compensation                    s = 0.625          s = 1
    eager, two members, who see     1.515 = 365 steps  1.836 = 226 steps
    pipeoptim                       1.972 = 188 steps  2.077 = 167 steps
    none                                               2.282 = 135 steps

Beside it, the drivers themselves in eight cities with 16 microbatches a step, all of them in flight, so that hardly
anything was seen (AdamW, s = 0.44): 2.114 = 181 steps, 2.2 times as many for steps 1.94 times as fast; the price of
`pipeoptim` says 1.9.
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
    half_powers: int = 2
    """Twice the power with which it grows with staleness, > 0. Only multiplications and square roots give the same
    digits on every machine, and plans must."""
    unseen: "Price | None" = None
    """Where nothing of the open step has been seen; None: that makes no difference."""

    def more_steps(self, staleness_steps: float, *, seen: float = 1.0) -> float:
        """Times as many steps to a loss as without staleness, >= 1.

        Args:
            staleness_steps: mean, >= 0.
            seen: the part of the open step that a stale microbatch's weights were made with, in [0, 1].
        """
        steps = 1.0 + self.at_one * raised(staleness_steps, self.half_powers)
        if self.unseen is None:
            return steps
        return seen * steps + (1.0 - seen) * self.unseen.more_steps(staleness_steps)


def raised(base: float, half_powers: int) -> float:
    """base^(half_powers / 2), base >= 0."""
    power = math.sqrt(base) if half_powers % 2 else 1.0
    for _ in range(half_powers // 2):
        power *= base
    return power


FREE: Final = Price(0.0)
"""Staleness costs nothing: what is best is what is fastest."""
_PREDICTED = Price(1.4, 1)
_EAGER = Price(0.77, 9, unseen=_PREDICTED)
_NOTHING = Price(1.97, 1)
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
