"""Decides how long a device rests so that it works its share of the time. Pure.

A token bucket (as for rates, `token_bucket.py`) whose tokens are seconds of the device: they come in at `share` a
second, and work takes them. Time in which the device had nothing to do counts as rest, up to `BURST_S`: a peer of a
pipeline waits for the others anyway, and must not rest for its owner on top of that.
"""

from typing import Final

BURST_S: Final = 10.0
"""Idle time that is made up for: some steps of a small run. Longer, and a machine that was idle for a minute would be
taken wholly for the next."""


class Duty:
    """Args: share: of the time, above 0 and at most 1. Raises: ValueError."""

    def __init__(self, share: float) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of {share} of a device's time cannot be")
        self._share = share
        self._credit_s = 0.0
        """Seconds that it may work at once; negative: it has worked more than its share."""
        self._at_s: float | None = None

    def spend(self, seconds: float) -> None:
        """It has worked."""
        self._credit_s -= seconds

    def rest_s(self, now_s: float) -> float:
        """Seconds from now until it may begin to work again, >= 0. Args: now_s: of a clock that never goes back."""
        if self._at_s is not None:
            earned_s = self._credit_s + (now_s - self._at_s) * self._share
            self._credit_s = min(BURST_S * self._share, earned_s)
        self._at_s = now_s
        return max(0.0, -self._credit_s / self._share)
