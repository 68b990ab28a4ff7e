"""Limits a byte rate by a token bucket that may go into debt. Pure: the caller passes the clock.

A sender may send while the bucket is not in debt, and its bytes are charged afterwards. So a message may be larger than
the bucket, and urgent messages (a vote, a heartbeat) need not wait. In any time T at most `rate * T + burst` bytes and
one message pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

BURST_S = 0.1
"""Size of the bucket, in seconds at the rate: so much may pass at once after a silence."""


class TokenBucket:
    """A token bucket of `rate` bytes/s, > 0. Args: now_s: returns the time in seconds."""

    def __init__(self, rate: float, now_s: Callable[[], float]) -> None:
        if not 0.0 < rate < math.inf:
            raise ValueError(f"a bucket cannot fill at {rate} bytes/s")
        self.rate, self.burst = rate, BURST_S * rate
        self._level = self.burst
        self._now_s, self._filled_s = now_s, now_s()

    def take(self, nbytes: float) -> None:
        """Charge the bucket for `nbytes` that have passed or are about to pass."""
        self._fill()
        self._level -= nbytes

    def wait_s(self) -> float:
        """Return the seconds until the next bytes may pass; 0: now."""
        self._fill()
        # A rounding error below one byte is no debt: otherwise the caller would wait for zero seconds again and again.
        return -self._level / self.rate if self._level < -1.0 else 0.0

    def _fill(self) -> None:
        # A clock that goes back, as in a test with two simulated machines, adds nothing to the bucket.
        now_s = max(self._now_s(), self._filled_s)
        self._level = min(self.burst, self._level + (now_s - self._filled_s) * self.rate)
        self._filled_s = now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Limits on all of one peer's traffic, in bytes/s on the network; infinite: no limit.

    Raises: ValueError: a rate is not above 0.
    """

    upload_bytes_per_s: float = math.inf
    download_bytes_per_s: float = math.inf
    relay_bytes_per_s: float = 0.0
    """The part of the upload that may carry traffic between members that cannot reach each other; 0: none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.relay_bytes_per_s < math.inf:
            raise ValueError("the rate for traffic of other members must be finite and at least 0")
        if not (self.upload_bytes_per_s > 0.0 and self.download_bytes_per_s > 0.0):
            raise ValueError("a rate limit must be above 0")
