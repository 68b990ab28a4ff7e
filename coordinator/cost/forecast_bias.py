"""Estimates by how much the objective errs in this run, for each number of stages. Pure.

A swarm pays for things that the objective does not know: cores that peers of one machine share, a router that is busy,
a card that gets hot. Layouts with one stage and layouts with eight pay for different things, so what was seen of one
number of stages says something of another number, but not everything. With y(K) = log(seen / foreseen tokens/s) of
layouts with K stages,

    y(K) = a + b(K),   a ~ N(0, A^2),   cov(b(K), b(K')) = B^2 exp(-|log K - log K'|),   y seen with noise N^2 / steps

and the estimate is the mean of y(K) given all that was seen. By it a swarm that is slower than foreseen with one number
of stages comes to try another one.

Source: Gaussian process regression (Rasmussen, Williams 2006, eq. 2.25). A, B and N are not fitted.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.protocol.topology import Floats

_COMMON = 0.2
"""A. In shipped scenarios simulated layouts made 0.78 to 1.07 of what was foreseen, real processes 0.6 to 0.95."""
_OWN = 0.2
"""B, as large as A: nobody knows which part of an error is common to all layouts."""
_NOISE = 0.2
"""N, of one step: after 64 steps what was seen counts for 99 %."""


@dataclass(frozen=True, slots=True)
class ForecastBias:
    """The errors of the objective that were seen, and the ones that are to be expected."""

    seen: tuple[tuple[int, float, int], ...] = ()
    """(number of stages, log(seen / foreseen tokens/s), the steps behind it), each number of stages once."""

    def factor(self, num_stages: int) -> float:
        """The expected ratio of seen to foreseen tokens/s for a layout of `num_stages` stages.

        Returns: > 0 and without a unit; 1.0 if nothing has been seen. Source: as of this module.
        """
        if not self.seen:
            return 1.0
        stages, logs, steps = (np.array(column, dtype=np.float64) for column in zip(*self.seen, strict=True))
        at = np.log(stages)
        known = _covariance(at[:, None], at[None, :]) + np.diag(_NOISE**2 / np.maximum(steps, 1.0))
        return math.exp(float(_covariance(np.array(math.log(num_stages)), at) @ np.linalg.solve(known, logs)))


UNBIASED = ForecastBias()


def _covariance(a: Floats, b: Floats) -> Floats:
    covariance: Floats = _COMMON**2 + _OWN**2 * np.exp(-np.abs(a - b))
    return covariance
