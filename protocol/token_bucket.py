"""Decides how fast bytes may pass: a bucket fills at the permitted rate. Pure: the caller says what time it is.

Whoever finds it not empty may send, and pays afterwards what that was, so the bucket may owe: a message need not fit
into it, what must not wait (a vote, a heartbeat) goes at once, and what follows waits until the debt is paid. Over any
time T no more than `rate * T + burst` and one message pass.
"""

import math
from dataclasses import dataclass, field

BURST_S = 0.1
"""What may leave at once after a silence, in seconds of the rate."""


@dataclass(kw_only=True, slots=True)
class TokenBucket:
    """Args:
    rate: bytes/s, > 0.
    now_s: of the clock that all calls are given.
    """

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
        """These have passed, or are about to."""
        self._fill(now_s)
        self._level -= nbytes

    def wait_s(self, *, now_s: float) -> float:
        """The seconds until something may pass; 0: it may pass now."""
        self._fill(now_s)
        # Less than a byte is no debt: what is rounded away would be waited for again and again, no time at all.
        return -self._level / self.rate if self._level < -1.0 else 0.0

    def _fill(self, now_s: float) -> None:
        # A clock that went back, as one may between two machines' worlds in a test, fills nothing and takes nothing.
        self._level = min(self.burst, self._level + max(0.0, now_s - self.now_s) * self.rate)
        self.now_s = max(self.now_s, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """The limits on all that one peer sends and receives, in bytes/s as the network sees them; infinite: there is no
    limit.

    Raises: ValueError: a rate that is not above 0.
    """

    upload_bytes_per_s: float = math.inf
    download_bytes_per_s: float = math.inf
    relay_bytes_per_s: float = 0.0
    """The part of the upload that may be lent to members who cannot reach each other; 0: none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.relay_bytes_per_s < math.inf:
            raise ValueError("what is carried for others must be bounded, and at least 0")
        if not (self.upload_bytes_per_s > 0.0 and self.download_bytes_per_s > 0.0):
            raise ValueError("a rate limit must be above 0")
