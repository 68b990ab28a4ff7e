"""Decide how long a group keeps reduced gradients for an absent learner (a `learners` member). Pure.

A learner that comes back still has the layers that it had finished, at the version at which it went. With the reduced
gradients of the steps since then it need not fetch those layers again.
"""

from collections.abc import Collection
from typing import Final

from shoal.protocol.identity import PeerID

AWAY_S: Final = 600.0
"""A learner must be back within this time: weights loaded, and its layers at the group's version."""
STEPS_MAX: Final = 4
"""Number of steps of gradients that are kept, in float32; the same as for peers that prepare for another layout."""


class AbsentLight:
    """The absent learners that one member knows of."""

    def __init__(self) -> None:
        self._light: set[PeerID] = set()
        self._gone: dict[PeerID, tuple[int, float]] = {}
        """Learner -> (first step that it may lack, when it was missed)."""

    def wanted_from(self, ready: Collection[PeerID], whole: Collection[PeerID], *, version: int, now_s: float) -> int:
        """Return the first step that an absent or just returned learner may still ask for. Args: ready: the other
        members that take part, `whole` ones and learners; version: just reached."""
        learners = set(ready).difference(whole)
        for peer in self._light - learners:
            # The learner may have been a step behind, and it lacks the step that has just been made.
            self._gone[peer] = version - 2, now_s
        self._light = learners
        self._gone = {peer: at for peer, at in self._gone.items() if now_s < at[1] + AWAY_S and peer not in whole}
        wanted_from = min((step for step, _ in self._gone.values()), default=2**62)
        return max(wanted_from, version - STEPS_MAX)
