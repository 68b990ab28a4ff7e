"""What staleness costs: the one model that the pipeline's control and the allocator both decide by.

A run whose microbatches are on average s steps stale needs 1 + price s times as many steps to a loss as a synchronous
one. So what counts is not tokens/s but

    seconds a step x (1 + price s)

The price depends on what is done about staleness, `training.compensation`. s is the mean over the microbatches of a
step and over the stages, as commit reports have it.

Source: ours. The form is an assumption, and the prices are not measured yet: `tests/bench/staleness` is to give both.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PRICES: Final[Mapping[str, float]] = MappingProxyType(
    {  # Placeholders by eye, from the first runs of regime C; the study's own are to take their place.
        "none": 0.9,
        "stash": 0.9,
        "spectrain": 0.8,
        "pipeoptim": 0.6,
        "lookahead": 0.6,
        "calibrated": 0.6,
        "dc": 0.9,
        "eager": 0.2,
    }
)
"""Further steps that one step of mean staleness costs, as a part of all steps; by compensation."""


def more_steps(price: float, staleness_steps: float) -> float:
    """Times as many steps to a loss as without staleness, >= 1.

    Args:
        price: one of `PRICES`, >= 0.
        staleness_steps: mean, >= 0.
    """
    return 1.0 + price * staleness_steps
