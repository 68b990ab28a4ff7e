"""Decides how long a device rests between jobs, so that it works only a given share of the time. Pure.

This is a token bucket (`token_bucket.py`) of seconds of device time: `share` seconds are added per second, and work
takes seconds out. Idle time counts as rest, up to `BURST_S`, since a pipeline peer waits for other peers anyway.

Other work of the program (a coordinator's search, compilation at start, networking) counts as a debt. Half of the added
seconds repay it, so the device works more slowly for a while but never stops. The part of the debt above `BESIDE_MAX_S`
is repaid from all added seconds.
"""

from typing import Final

BURST_S: Final = 10.0
"""Longest idle time that counts as rest; a small run makes some steps in it. If more idle time counted, the device
could afterwards work for whole minutes without a rest."""
BESIDE_MAX_S: Final = 30.0
"""Largest debt of other work, in seconds, that only half of the added seconds repay; the part above it is repaid from
all of them. A coordinator needs 15 to 20 s to compile and to make its first search."""
_BESIDE_PART: Final = 0.5


class Duty:
    """Limits a device's work to `share` of the time. Raises: ValueError: `share` is not in (0, 1]."""

    def __init__(self, share: float) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of a device's time must be in (0, 1], is {share}")
        self._share = share
        self._credit_s = 0.0
        """Seconds of device time in the bucket; negative: the device has worked more than its share, and must rest."""
        self._beside_s = 0.0
        self._at_s: float | None = None

    def spend(self, seconds: float) -> None:
        """Record seconds of work on the device."""
        self._credit_s -= seconds

    def spend_beside(self, seconds: float) -> None:
        """Record seconds of other work of this program, as a debt that device time repays."""
        self._beside_s += seconds

    def rest_s(self, now_s: float) -> float:
        """Return the seconds until the next job may begin, >= 0. Args: now_s: a monotonic clock's time."""
        if self._at_s is not None:
            earned_s = (now_s - self._at_s) * self._share
            repaid_s = self._repaid_s(earned_s)
            self._beside_s -= repaid_s
            self._credit_s = min(BURST_S * self._share, self._credit_s + earned_s - repaid_s)
        self._at_s = now_s
        lacking_s = max(0.0, -self._credit_s)
        over_s = max(0.0, self._beside_s - BESIDE_MAX_S) if lacking_s else 0.0
        # Credit that the device earns while it repays the debt below `BESIDE_MAX_S`.
        at_half_s = (self._beside_s - over_s) * (1.0 - _BESIDE_PART) / _BESIDE_PART
        earned_s = lacking_s / (1.0 - _BESIDE_PART) if lacking_s <= at_half_s else lacking_s + self._beside_s - over_s
        return (over_s + earned_s) / self._share

    def _repaid_s(self, earned_s: float) -> float:
        over_s = min(earned_s, max(0.0, self._beside_s - BESIDE_MAX_S))
        return over_s + min(self._beside_s - over_s, _BESIDE_PART * (earned_s - over_s))
