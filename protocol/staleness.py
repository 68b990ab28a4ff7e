"""Models how many more steps a run needs because of staleness. The pipeline and the coordinator share this model. Pure.

A run with microbatches that are s steps stale on average needs 1 + price s^power times as many steps to a loss as a
synchronous run. So the aim is not the most tokens/s, but the least

    seconds a step x (1 + price s^power)

Price and power depend on the compensation (`training.compensation`). s is the mean over a step's microbatches and over
the stages, as in commit reports.

The price of `eager` also depends on what a peer has *seen* when a stale microbatch begins: the fraction of the peer's
gradients of the uncommitted step that have returned. With none seen, the price is that of `pipeoptim`; the price in
between is interpolated.

A run that is stale from the first step pays most of the price in its first few steps. So a run begins synchronously
(`synchronous_steps`), and the prices hold for the later steps. Muon needs no synchronous steps.

Source: ours, from `tests/bench/staleness`; `MEASURED.md` has the figures, and says which prices are guesses.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Price:
    """Price and power of mean staleness in the factor 1 + price s^power."""

    at_one: float
    """Additional steps at a staleness of one step, as a fraction of a synchronous run's steps; >= 0."""
    half_powers: int = 2
    """Twice the power, > 0. It is whole, because products and square roots have the same digits on all machines."""
    unseen: "Price | None" = None
    """The price if a stale microbatch's weights lack all gradients of the uncommitted step; None: the same price."""

    def more_steps(self, staleness_steps: float, *, seen: float = 1.0) -> float:
        """Return the factor, >= 1, by which staleness raises the number of steps to a loss.

        Args:
            staleness_steps: mean, >= 0.
            seen: fraction of the uncommitted step that a stale microbatch's weights include, in [0, 1].
        """
        steps = 1.0 + self.at_one * raised(staleness_steps, self.half_powers)
        if self.unseen is None:
            return steps
        return seen * steps + (1.0 - seen) * self.unseen.more_steps(staleness_steps)


def raised(base: float, half_powers: int) -> float:
    """Return base^(half_powers / 2) for base >= 0."""
    power = math.sqrt(base) if half_powers % 2 else 1.0
    for _ in range(half_powers // 2):
        power *= base
    return power


FREE: Final = Price(0.0)
_LIKE: Final = MappingProxyType(
    {
        "stash": "none",
        "dc": "none",
        "spectrain": "pipeoptim",
        "lookahead": "pipeoptim",
        "calibrated": "pipeoptim",
    }
)
"""Name of a compensation that was not measured -> name of the most similar one that was measured."""

_NADAM: Final = {"none": Price(0.57, 3), "pipeoptim": Price(0.47, 3), "eager": Price(0.02, 9, unseen=Price(0.47, 3))}
_MUON: Final = {"none": Price(0.58, 1), "pipeoptim": Price(0.4, 1), "eager": Price(0.14, 2, unseen=Price(0.4, 1))}
"""Muon's prices, and NAdam's powers but that of `none`, are from earlier initial weights; other powers are guesses."""


def synchronous_steps(optimizer: str, *, warmup_steps: int) -> int:
    """Return the best number of synchronous first steps, >= 0.

    Source: our runs with 20 warm-up steps. They had 0, 20 and 40 synchronous steps with AdamW and NAdam, also 80 with
    NAdam, and 0 and 20 with Muon; SGD was not measured.
    """
    return 0 if optimizer == "muon" else 2 * warmup_steps


def staleness_bound(step: int, *, s_max: int, synchronous_steps: int) -> int:
    """Return how many steps a microbatch of `step` may be stale: 0 in the synchronous first steps, then `s_max`."""
    return s_max if step >= synchronous_steps else 0


def price_of(compensation: str, *, optimizer: str) -> Price:
    """Return the price of a compensation and optimizer, named as in the spec. AdamW and SGD get NAdam's prices."""
    prices = _MUON if optimizer == "muon" else _NADAM
    return prices[_LIKE.get(compensation, compensation)]
