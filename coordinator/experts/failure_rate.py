"""Estimates of how likely a node is to fail soon, from its past failures. Pure."""

import math

PRIOR_FAILURES = 1.0
PRIOR_S = 6 * 3600.0
"""The time in which an unknown node is assumed to fail once: a volunteer's evening."""
PROBABILITY_MIN = 2.0**-20
"""The smallest result of `rounded`, since every node may fail."""


def failure_probability(num_failures: float, seen_s: float, *, horizon_s: float, prior_s: float = PRIOR_S) -> float:
    """Return the probability of a failure within the horizon, if failures come at a constant rate.

    The rate's prior is a gamma distribution worth `PRIOR_FAILURES` in `PRIOR_S`: a newcomer counts as average, and
    after a day or two only its own record counts.

    Args:
        num_failures: the times it was lost without a good-bye; old ones count in part.
        seen_s: the seconds in which that could have happened.
        prior_s: the time in which similar nodes fail `PRIOR_FAILURES` times.
        horizon_s: the expected life of a placement, about the time until the next.
    """
    rate_per_s = (num_failures + PRIOR_FAILURES) / (max(0.0, seen_s) + prior_s)
    return -math.expm1(-rate_per_s * horizon_s)


def rounded(probability: float) -> float:
    """Round to a power of two: noise must not move experts, and similar nodes can exchange parts of a placement."""
    return math.ldexp(1.0, round(math.log2(min(1.0, max(PROBABILITY_MIN, probability)))))
