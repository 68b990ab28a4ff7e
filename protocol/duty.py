"""Decides how long a device rests so that it works its share of the time. Pure.

A token bucket (as for rates, `token_bucket.py`) whose tokens are seconds of the device: they come in at `share` a
second, and work takes them. Time in which the device had nothing to do counts as rest, up to `BURST_S`: a peer of a
pipeline waits for the others anyway, and must not rest for its owner on top of that.

What the program does beside the device's jobs (a coordinator that searches, what is compiled at the start, the network)
is repaid as well, out of half of what comes in: so it makes the device slower for a while, and never makes it stand
still. Beyond `BESIDE_MAX_S` all that comes in goes there, or the share would be exceeded for ever.
"""

from typing import Final

BURST_S: Final = 10.0
"""Idle time that is made up for: some steps of a small run. Longer, and a machine that was idle for a minute would be
taken wholly for the next."""
BESIDE_MAX_S: Final = 30.0
"""A coordinator that compiles its search and makes the first one has worked for 15 to 20 s."""
_BESIDE_PART: Final = 0.5


class Duty:
    """Args: share: of the time, above 0 and at most 1. Raises: ValueError."""

    def __init__(self, share: float) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of {share} of a device's time cannot be")
        self._share = share
        self._credit_s = 0.0
        """Seconds that it may work at once; negative: it has worked more than its share."""
        self._beside_s = 0.0
        """Seconds of other work that have yet to be repaid."""
        self._at_s: float | None = None

    def spend(self, seconds: float) -> None:
        """The device has worked."""
        self._credit_s -= seconds

    def spend_beside(self, seconds: float) -> None:
        """The program has worked beside it."""
        self._beside_s += seconds

    def rest_s(self, now_s: float) -> float:
        """Seconds from now until it may begin to work again, >= 0. Args: now_s: of a clock that never goes back."""
        if self._at_s is not None:
            earned_s = (now_s - self._at_s) * self._share
            repaid_s = self._repaid_s(earned_s)
            self._beside_s -= repaid_s
            self._credit_s = min(BURST_S * self._share, self._credit_s + earned_s - repaid_s)
        self._at_s = now_s
        lacking_s = max(0.0, -self._credit_s)
        over_s = max(0.0, self._beside_s - BESIDE_MAX_S) if lacking_s else 0.0
        # The credit that comes in while the rest is repaid.
        at_half_s = (self._beside_s - over_s) * (1.0 - _BESIDE_PART) / _BESIDE_PART
        earned_s = lacking_s / (1.0 - _BESIDE_PART) if lacking_s <= at_half_s else lacking_s + self._beside_s - over_s
        return (over_s + earned_s) / self._share

    def _repaid_s(self, earned_s: float) -> float:
        """How much of what has come in goes to the work beside."""
        over_s = min(earned_s, max(0.0, self._beside_s - BESIDE_MAX_S))
        return over_s + min(self._beside_s - over_s, _BESIDE_PART * (earned_s - over_s))
