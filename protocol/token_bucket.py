"""Limits a byte rate by a token bucket that may go into debt. Pure: the caller says what time it is.

A sender may send while the bucket is not empty and pays afterwards. So a message may be larger than the bucket, and
urgent ones (a vote, a heartbeat) go at once. In any time T at most `rate * T + burst` and one message pass.
"""

import math
from dataclasses import dataclass, field

BURST_S = 0.1
"""Burst after a silence, in seconds of the rate."""


@dataclass(kw_only=True, slots=True)
class TokenBucket:
    """A token bucket of `rate` bytes/s, > 0; all calls take `now_s` of one clock."""

    rate: float
    now_s: float
    _level: float = field(init=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < math.inf:
            raise ValueError(f"a bucket cannot fill at {self.rate} bytes/s")
        self._level = self.burst

    @property
    def burst(self) -> float:
        return BURST_S * self.rate

    def take(self, nbytes: float, *, now_s: float) -> None:
        """Charge `nbytes` that have passed, or are about to."""
        self._fill(now_s)
        self._level -= nbytes

    def wait_s(self, *, now_s: float) -> float:
        """Return the seconds until something may pass; 0: now."""
        self._fill(now_s)
        # A rounding error below one byte is no debt, or the caller would wait for no time again and again.
        return -self._level / self.rate if self._level < -1.0 else 0.0

    def _fill(self, now_s: float) -> None:
        # A clock that went back, as between two machines' worlds in a test, changes nothing.
        self._level = min(self.burst, self._level + max(0.0, now_s - self.now_s) * self.rate)
        self.now_s = max(self.now_s, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Limits on all of one peer's traffic, in bytes/s on the network; infinite: no limit.

    Raises: ValueError: a rate is not above 0.
    """

    upload_bytes_per_s: float = math.inf
    download_bytes_per_s: float = math.inf
    relay_bytes_per_s: float = 0.0
    """The part of the upload for carrying traffic of members that cannot reach each other; 0: none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.relay_bytes_per_s < math.inf:
            raise ValueError("the rate for traffic of other members must be finite and at least 0")
        if not (self.upload_bytes_per_s > 0.0 and self.download_bytes_per_s > 0.0):
            raise ValueError("a rate limit must be above 0")
