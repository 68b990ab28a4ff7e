"""Decides how long to wait for a holder of experts, by the times that other holders take. Pure.

All holders of an expert may be waiting for the same version of its weights. So a holder is given up only after other
holders have answered for the same step or a later one, and is avoided for a time that grows with each late answer.
"""

from collections import deque
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID

LIMIT_S_MIN = 1.0
LIMIT_TIMES = 4.0
"""A holder's time limit: this many times the longest recent answer time of the others, seldom less than a step."""
APART = 20.0
"""A slow holder is avoided for at least this many times the time lost with it: at most 1/20 of all time is lost."""


@dataclass(slots=True)
class Patience:
    _took: deque[tuple[PeerID, float]] = field(default_factory=lambda: deque(maxlen=256))
    """(holder, seconds until its answer) for each of the latest answers, of all holders together."""
    _answered: dict[PeerID, tuple[int, float]] = field(default_factory=dict)
    """Holder -> (step of the microbatch, arrival time in seconds) of its newest answer."""
    _shunned: dict[PeerID, tuple[float, float]] = field(default_factory=dict)
    """Holder -> (end, duration), in seconds, of the period in which the holder is avoided."""

    def answered(self, holder: PeerID, step: int, *, sent_s: float, now_s: float) -> None:
        """Record an answer of `holder` to a frame sent at `sent_s` for a microbatch of `step`."""
        self._took.append((holder, now_s - sent_s))
        self._answered[holder] = (step, now_s)
        self._shunned.pop(holder, None)

    def limit_s(self, holder: PeerID) -> float:
        """Return the time limit for the holder's answer, in seconds; infinite if no other holder has answered yet."""
        others = [seconds for other, seconds in self._took if other != holder]
        return max(LIMIT_S_MIN, LIMIT_TIMES * max(others)) if others else float("inf")

    def is_over(self, holder: PeerID, step: int, *, sent_s: float, now_s: float) -> bool:
        """True if another holder should get the frame sent to `holder` at `sent_s` for a microbatch of `step`."""
        others_do = any(
            other != holder and newest >= step and at_s > sent_s for other, (newest, at_s) in self._answered.items()
        )
        return others_do and now_s - sent_s >= self.limit_s(holder)

    def gave_up(self, holder: PeerID, *, after_s: float, now_s: float) -> None:
        until_s, before_s = self._shunned.get(holder, (0.0, 0.0))
        if now_s < until_s:
            return  # it is avoided already: several frames to it are given up at once
        for_s = max(APART * after_s, 2.0 * before_s)
        self._shunned[holder] = (now_s + for_s, for_s)

    def shunned(self, now_s: float) -> frozenset[PeerID]:
        """Return the holders to avoid at `now_s` if another holder can serve."""
        return frozenset(holder for holder, (until_s, _) in self._shunned.items() if now_s < until_s)
