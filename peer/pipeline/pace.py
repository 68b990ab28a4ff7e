"""Who is out of all proportion slower than the plan thought: measured here, long before a plan could say so. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID

LAGS = 4.0
"""Beyond this many times the quickest one's time it is no longer a matter of shares."""
TRIES_APART = 20.0
"""A laggard is tried again after this many times what it took: a step that waits for it costs at most a twentieth."""
TRIES_APART_S = 5.0
_GAIN = 0.25
_TAKES_S_MAX = 3600.0
"""Where a run stands still nobody answers: what is doubled each time would come to infinity, a weight to zero."""


@dataclass(slots=True)
class Pace:
    """How long each peer takes for one microbatch, queues not counted: an average over the last few."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    _tried_s: dict[PeerID, float] = field(default_factory=dict)

    def took(self, peer: PeerID, seconds: float) -> None:
        """Quick to believe that it is quick: it is tried so rarely that each answer must count."""
        before_s = self._takes_s.get(peer, seconds)
        gain = _GAIN if seconds > before_s else 1.0 - _GAIN
        self._takes_s[peer] = before_s + gain * (seconds - before_s)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """It has not answered in time: the next try is at least twice as far away as the last."""
        self._takes_s[peer] = min(max(after_s, 2.0 * self._takes_s.get(peer, 0.0)), _TAKES_S_MAX)

    def given(self, peer: PeerID, now_s: float) -> None:
        self._tried_s[peer] = now_s

    def weight(self, peer: PeerID, among: Iterable[PeerID], *, waiting_s: float = 0.0) -> float:
        """1 for who keeps pace with the quickest of `among`, less for who does not.

        `waiting_s`: for how long it has had something that is not back.
        """
        best_s = min((self._takes_s[other] for other in among if other in self._takes_s), default=0.0)
        takes_s = max(self._takes_s.get(peer, best_s), waiting_s)
        return best_s / takes_s if takes_s > LAGS * best_s > 0.0 else 1.0

    def is_due(self, peer: PeerID, now_s: float) -> bool:
        """Whether it has had nothing for so long that it is worth a try: it may be new, or have recovered."""
        if peer not in self._tried_s:
            self._tried_s[peer] = now_s  # it has just come: its share has time to show
        return now_s >= self._tried_s[peer] + max(TRIES_APART_S, TRIES_APART * self._takes_s.get(peer, 0.0))
