"""How likely a node is to fail soon, estimated from how often it has failed. Pure."""

import math

PRIOR_FAILURES = 1.0
PRIOR_S = 6 * 3600.0
"""The time in which a node of which nothing is known counts as having failed once: a volunteer's evening."""
PROBABILITY_MIN = 2.0**-20
"""The smallest result of `rounded`, since there is no node that never fails."""


def failure_probability(num_failures: float, seen_s: float, *, horizon_s: float, prior_s: float = PRIOR_S) -> float:
    """The chance of a failure within the horizon, if failures come at a constant rate.

    The rate's prior is a gamma distribution worth `PRIOR_FAILURES` in `PRIOR_S`: a newcomer is neither trusted nor
    condemned, and after a day or two only its own record counts.

    Args:
        num_failures: times it was lost without a good-bye, old ones in part.
        seen_s: seconds in which that could have happened.
        prior_s: the time in which others like it fail `PRIOR_FAILURES` times.
        horizon_s: as far ahead as a placement should last, about the time until the next is made.
    """
    rate_per_s = (num_failures + PRIOR_FAILURES) / (max(0.0, seen_s) + prior_s)
    return -math.expm1(-rate_per_s * horizon_s)


def rounded(probability: float) -> float:
    """Round to a power of two. Noise in an estimate must not move experts, and nodes that fail about as often can take
    each other's part in a placement."""
    return math.ldexp(1.0, round(math.log2(min(1.0, max(PROBABILITY_MIN, probability)))))
