"""Estimates the error of the objective in this run, for each number of stages. Pure.

The objective does not know everything that costs time: cores shared by peers of one machine, a busy router, a hot GPU.
A measurement with one number of stages is partial evidence for other numbers. For layouts with K stages, let y(K) be
log(measured / predicted tokens/s). With

    y(K) = a + b(K),   a ~ N(0, A^2),   cov(b(K), b(K')) = B^2 exp(-|log K - log K'|),   y seen with noise N^2 / steps

the estimate is the mean of y(K) given all measurements. So if a swarm is slower than predicted with one number of
stages, other numbers become more attractive, and the swarm tries one.

The posterior variance of y(K') - y(K) says how far a predicted gain of K' over K stages may be wrong.

Source: Gaussian process regression (Rasmussen, Williams 2006, eq. 2.25, 2.26). A, B and N are not fitted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.protocol.topology import Floats

_ERROR = 0.2
"""A and B: the standard deviations of the error common to all layouts, and of the error of one number of stages. In
shipped scenarios, simulated layouts reached 0.78 to 1.07 of the predicted tokens/s, real processes 0.6 to 0.95."""
_NOISE = 0.2
"""N: the standard deviation of one step's noise; after 64 steps the measurement has 99 % of the weight."""


@dataclass(frozen=True, slots=True)
class ForecastBias:
    """The measured errors of the objective, from which this class derives the errors to expect."""

    seen: tuple[tuple[int, float, int], ...] = ()
    """(number of stages, log(measured / predicted tokens/s), measured steps); each number of stages occurs once."""

    def factor(self, num_stages: int) -> float:
        """Return the expected ratio of measured to predicted tokens/s for layouts with `num_stages` stages."""
        mean_M, _ = self._posterior([num_stages])
        return math.exp(float(mean_M[0]))

    def variance(self, num_stages: int, other: int) -> float:
        """Return the variance of the error of log(predicted tokens/s with `other` stages / with `num_stages`)."""
        _, covariance_MM = self._posterior([num_stages, other])
        return max(0.0, float(np.trace(covariance_MM) - 2.0 * covariance_MM[0, 1]))

    def _posterior(self, numbers: Sequence[int]) -> tuple[Floats, Floats]:
        """Return the mean [M] and the covariance [M, M] of y for these numbers of stages, given `seen`."""
        wanted = np.log(np.array(numbers, dtype=np.float64))
        prior_MM = _covariance(wanted[:, None], wanted[None, :])
        if not self.seen:
            return np.zeros(len(wanted)), prior_MM
        stages, logs, steps = (np.array(column, dtype=np.float64) for column in zip(*self.seen, strict=True))
        at = np.log(stages)
        known = _covariance(at[:, None], at[None, :]) + np.diag(_NOISE**2 / np.maximum(steps, 1.0))
        across = _covariance(wanted[:, None], at[None, :])
        return across @ np.linalg.solve(known, logs), prior_MM - across @ np.linalg.solve(known, across.T)


UNBIASED = ForecastBias()


def _covariance(a: Floats, b: Floats) -> Floats:
    covariance: Floats = _ERROR**2 * (1.0 + np.exp(-np.abs(a - b)))
    return covariance
