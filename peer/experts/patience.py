"""How long a holder of experts may take for its tokens, by what others take. Pure.

An answer may be late because its holder waits for a version, as all of an expert's holders do then, or because the
device or the path is slow. So nobody is given up before others have answered for the same step or a later one, and one
who is stays out of the way for a time that grows as long as it does not answer in time.
"""

from collections import deque
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID

LIMIT_S_MIN = 1.0
LIMIT_TIMES = 4.0
"""Times the longest of late. That has waits for a version in it, so it is seldom less than a step."""
REMEMBERED = 256
"""Answers, of all holders."""
APART = 20.0
"""Who has been given up is tried again after so many times what that took: it costs at most a twentieth."""


@dataclass(slots=True)
class Patience:
    _took: deque[tuple[PeerID, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _answered: dict[PeerID, tuple[int, float]] = field(default_factory=dict)
    """Holder -> (step, when) of its newest answer."""
    _shunned: dict[PeerID, tuple[float, float]] = field(default_factory=dict)
    """Holder -> (until when, for how long)."""

    def answered(self, holder: PeerID, step: int, *, sent_s: float, now_s: float) -> None:
        """`holder` has answered what was sent at `sent_s` for a microbatch of `step`."""
        self._took.append((holder, now_s - sent_s))
        self._answered[holder] = (step, now_s)
        self._shunned.pop(holder, None)

    def limit_s(self, holder: PeerID) -> float:
        """For its answer; infinite where nothing is known of others."""
        others = [seconds for other, seconds in self._took if other != holder]
        return max(LIMIT_S_MIN, LIMIT_TIMES * max(others)) if others else float("inf")

    def is_over(self, holder: PeerID, step: int, *, sent_s: float, now_s: float) -> bool:
        """Whether somebody else should have what `holder` was sent at `sent_s` for a microbatch of `step`."""
        others_do = any(
            other != holder and newest >= step and at_s > sent_s for other, (newest, at_s) in self._answered.items()
        )
        return others_do and now_s - sent_s >= self.limit_s(holder)

    def gave_up(self, holder: PeerID, *, after_s: float, now_s: float) -> None:
        until_s, before_s = self._shunned.get(holder, (0.0, 0.0))
        if now_s < until_s:
            return  # several of its microbatches are given up at once
        for_s = max(APART * after_s, 2.0 * before_s)
        self._shunned[holder] = (now_s + for_s, for_s)

    def shunned(self, now_s: float) -> frozenset[PeerID]:
        """Who is given nothing now, if there is somebody else."""
        return frozenset(holder for holder, (until_s, _) in self._shunned.items() if now_s < until_s)
