"""Decides how long a device rests, so that it works its share of the time. Pure.

A token bucket like that of `token_bucket.py`, filled with seconds of device time: `share` seconds come in per second,
and work takes them. Idle time counts as rest, up to `BURST_S`, since a pipeline peer waits for others anyway.

Other work of the program (a coordinator's search, compilation at start, networking) is repaid too, from half of the
income, which slows the device for a while and never stops it. Beyond `BESIDE_MAX_S` the whole income repays it.
"""

from typing import Final

BURST_S: Final = 10.0
"""Idle time that may be made up for, some steps of a small run. With more, work could fill whole minutes."""
BESIDE_MAX_S: Final = 30.0
"""Debt that half of the income repays: a coordinator needs 15 to 20 s to compile and make its first search."""
_BESIDE_PART: Final = 0.5


class Duty:
    """Limits a device's work to `share` of the time, in (0, 1]. Raises: ValueError."""

    def __init__(self, share: float) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of a device's time must be in (0, 1], is {share}")
        self._share = share
        self._credit_s = 0.0
        """Seconds of work allowed at once; negative: it has worked more than its share."""
        self._beside_s = 0.0
        self._at_s: float | None = None

    def spend(self, seconds: float) -> None:
        """Record seconds of work on the device."""
        self._credit_s -= seconds

    def spend_beside(self, seconds: float) -> None:
        """Record seconds of other work of this program."""
        self._beside_s += seconds

    def rest_s(self, now_s: float) -> float:
        """Return the seconds until the next job may begin, >= 0. `now_s` is of a clock that never goes back."""
        if self._at_s is not None:
            earned_s = (now_s - self._at_s) * self._share
            repaid_s = self._repaid_s(earned_s)
            self._beside_s -= repaid_s
            self._credit_s = min(BURST_S * self._share, self._credit_s + earned_s - repaid_s)
        self._at_s = now_s
        lacking_s = max(0.0, -self._credit_s)
        over_s = max(0.0, self._beside_s - BESIDE_MAX_S) if lacking_s else 0.0
        # The credit earned while the rest is repaid.
        at_half_s = (self._beside_s - over_s) * (1.0 - _BESIDE_PART) / _BESIDE_PART
        earned_s = lacking_s / (1.0 - _BESIDE_PART) if lacking_s <= at_half_s else lacking_s + self._beside_s - over_s
        return (over_s + earned_s) / self._share

    def _repaid_s(self, earned_s: float) -> float:
        over_s = min(earned_s, max(0.0, self._beside_s - BESIDE_MAX_S))
        return over_s + min(self._beside_s - over_s, _BESIDE_PART * (earned_s - over_s))
