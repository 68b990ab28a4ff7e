"""Models what staleness costs: the pipeline's control and the allocator both decide by this one model. Pure.

A run whose microbatches are on average s steps stale needs 1 + price s^power times as many steps to a loss as a
synchronous one. So what counts is not tokens/s but

    seconds a step x (1 + price s^power)

Both depend on what is done about staleness, `training.compensation`. s is the mean over the microbatches of a step and
over the stages, as commit reports have it.

What `eager` makes of it depends on what a peer has *seen* when a stale microbatch begins: the part of its own gradients
of the open step that are back. Where nothing is, it is `pipeoptim`; in between the price is taken to be in between.

**The beginning is another matter.** Runs that are stale from the first step pay most of it for the first few: `eager`
of two members, NAdam 8e-3, all stale, ends 0.054 nats behind synchronous training, and 0.018 behind when the first 40
steps are synchronous (warm-up: 20). So a run begins synchronously (`synchronous_steps`), and the prices are of the
steps after that. Muon begins at once.

Source: ours, from `tests/bench/staleness`: a run's loss says how many steps a synchronous run would have taken to it
(runs of 200, 300 and 400 steps, a schedule each, interpolated), of which its own synchronous steps are taken off. 400
steps, the byte GPT, NAdam 4e-3, one seed:

    synchronous                               400 steps 1.201, 300 steps 1.327, 200 steps 1.551
    eager, two members, all stale after 40    1.209 = 394 steps
    ... 10 of 16, half of them seeing less    1.214 = 390 steps
    pipeoptim, all stale after 40             1.361 = 285 steps
    none, all stale after 40                  1.395 = 270 steps

Above s = 1 the form is a guess. The powers, and all of Muon's prices, are of runs with initial weights of 0.02
throughout (Muon 8e-3, stale from the first step: `eager` 1.156 = 351 steps, `pipeoptim` 1.269 = 286, `none` 1.381 =
253, synchronous 1.091), in which staleness cost several times as much as since weights fit the width
(`shoal.peer.model.layout`): too careful, until they are measured again.

Beside it, the drivers themselves in eight cities with 16 microbatches a step, all of them in flight, so that hardly
anything was seen, NAdam 4e-3, s = 0.4: 400 steps end 0.001 behind synchronous training, 1,000 at its loss. The price
is careful there, too: `pipeoptim`'s says 1.12 times as many steps.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Price:
    """The price of mean staleness."""

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

_NADAM: Final = {"none": Price(0.57, 3), "pipeoptim": Price(0.47, 3), "eager": Price(0.02, 9, unseen=Price(0.47, 3))}
_MUON: Final = {"none": Price(0.58, 1), "pipeoptim": Price(0.4, 1), "eager": Price(0.14, 2, unseen=Price(0.4, 1))}
"""The powers of NAdam's `pipeoptim` and `eager` come of two shares, with the initial weights of before; that of its
`none`, and Muon's, are guesses."""


def synchronous_steps(optimizer: str, *, warmup_steps: int) -> int:
    """Choose how many of a run's first steps are best made without staleness, >= 0.

    Source: ours, with a warm-up of 20 steps: AdamW and NAdam were tried with 0, 20 and 40, NAdam with 80, Muon with 0
    and 20, SGD not at all.

    Args:
        optimizer: its name in the run spec.
        warmup_steps: of its learning rate.
    """
    return 0 if optimizer == "muon" else 2 * warmup_steps


def staleness_bound(step: int, *, s_max: int, synchronous_steps: int) -> int:
    """Bound how many steps stale a microbatch of `step` may be: `s_max`, and 0 in the first `synchronous_steps` of a
    run."""
    return s_max if step >= synchronous_steps else 0


def price_of(compensation: str, *, optimizer: str) -> Price:
    """Find what staleness costs a run with these two, by their names in the run spec. AdamW and SGD get NAdam's."""
    prices = _MUON if optimizer == "muon" else _NADAM
    return prices[_LIKE.get(compensation, compensation)]
