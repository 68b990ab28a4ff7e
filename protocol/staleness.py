"""What staleness costs: the one model that the pipeline's control and the allocator both decide by.

A run whose microbatches are on average s steps stale needs 1 + price s^power times as many steps to a loss as a
synchronous one. So what counts is not tokens/s but

    seconds a step x (1 + price s^power)

Both depend on what is done about staleness, `training.compensation`. s is the mean over the microbatches of a step and
over the stages, as commit reports have it.

What `eager` makes of it depends on what a peer has *seen* when a stale microbatch begins: the part of its own gradients
of the open step that are back. Where nothing is, it is `pipeoptim`; in between the price is taken to be in between.

**The beginning is another matter.** Runs that are stale from the first step pay most of it for the first few, and by
chance: `eager` of two members, all stale, is 0.38 nats behind synchronous training with one seed and 0.10 with another.
When the first 40 steps are synchronous (warm-up: 20) both are 0.06 behind. So a run begins synchronously
(`synchronous_steps`), and the prices are of the steps after that. Muon pays the same for each step, and begins at once.

All of this was measured with initial weights of 0.02 throughout. Since they fit the width (`shoal.peer.model.layout`)
staleness has cost a third of it or less, and a stale beginning 0.05 nats (one seed): too careful, until it is measured
again.

Source: ours, from `tests/bench/staleness`: a run's loss says how many steps a synchronous run would have taken to it
(runs of 100, 150, 200, 300 and 400 steps, a schedule each, interpolated), of which its own synchronous steps are taken
off. 400 steps, the byte GPT, one seed, and a second one of `eager`. Two shares of stale microbatches were measured, 10
of 16 and all, which gives two numbers; above s = 1 the form is a guess. In other words: `eager` makes up for all of it
as long as some microbatches of each step are fresh, and Muon, whose steps have a length of their own, minds staleness
less where nothing has been seen.

    compensation               NAdam 4e-3, s = 0.625   NAdam, s = 1           Muon 8e-3, s = 1
    eager, two members         1.457 = 400 steps       1.521 = 361 steps      1.156 = 351 steps, stale from the first
    pipeoptim                  1.623 = 300 steps       1.771 = 249 steps      1.269 = 286 steps, stale from the first
    none                                               1.752 = 255 steps      1.381 = 253 steps, stale from the first
    synchronous                                        1.456                  1.091

Beside it, the drivers themselves in eight cities with 16 microbatches a step, all of them in flight, so that hardly
anything was seen: Muon 1.159 at s = 0.44, 349 steps, 1.15 times as many; its price says 1.27.
"""

import math
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
_LIKE: Final = MappingProxyType(
    {
        "stash": "none",
        "dc": "none",
        "spectrain": "pipeoptim",
        "lookahead": "pipeoptim",
        "calibrated": "pipeoptim",
    }
)
"""Compensations that were not measured, and what is most like them."""

_NADAM: Final = {"none": Price(0.67, 3), "pipeoptim": Price(0.72, 3), "eager": Price(0.12, 9, unseen=Price(0.72, 3))}
_MUON: Final = {"none": Price(0.58, 1), "pipeoptim": Price(0.4, 1), "eager": Price(0.14, 2, unseen=Price(0.4, 1))}
"""The powers of NAdam's `pipeoptim` and `eager` come of two shares; that of its `none`, and Muon's, are guesses."""


def synchronous_steps(optimizer: str, *, warmup_steps: int) -> int:
    """How many of a run's first steps are best made without staleness, >= 0.

    Source: ours, with a warm-up of 20 steps: AdamW and NAdam were tried with 0, 20 and 40, NAdam with 80, Muon with 0
    and 20, SGD not at all.

    Args:
        optimizer: its name in the run spec.
        warmup_steps: of its learning rate.
    """
    return 0 if optimizer == "muon" else 2 * warmup_steps


def staleness_bound(step: int, *, s_max: int, synchronous_steps: int) -> int:
    """How many steps stale a microbatch of `step` may be: `s_max`, and in the first `synchronous_steps` of a run 0."""
    return s_max if step >= synchronous_steps else 0


def price_of(compensation: str, *, optimizer: str) -> Price:
    """What staleness costs a run with these two, by their names in the run spec. AdamW and SGD are given NAdam's."""
    prices = _MUON if optimizer == "muon" else _NADAM
    return prices[_LIKE.get(compensation, compensation)]
