"""For how long a group keeps reduced gradients for a light member that has gone, in case it comes back.

What it has of the state it has at the version of its end. Each step that the others make meanwhile is to it as much as
the steps that it made: with their reduced gradients its layers are of use, and come again without. Pure.
"""

from collections.abc import Collection
from typing import Final

from shoal.protocol.identity import PeerID

AWAY_S: Final = 600.0
"""It must be back within that time, with weights to compute with, and its layers at the group's version."""
STEPS_MAX: Final = 4
"""Of so many steps at most gradients are kept for it, in float32, as for those who get ready for another layout."""
_NEVER: Final = 2**62


class AbsentLight:
    """As one member sees it."""

    def __init__(self) -> None:
        self._light: set[PeerID] = set()
        self._gone: dict[PeerID, tuple[int, float]] = {}
        """Who has gone -> the first step that it may lack, and when it was missed."""

    def wanted_from(self, ready: Collection[PeerID], whole: Collection[PeerID], *, version: int, now_s: float) -> int:
        """The first step whose reduced gradient somebody may ask for who has gone, or has come back of late.

        Args:
            ready: the mates that take part, of which these hold the state as a `whole`.
            version: the group's, which it has just come to.
        """
        light = set(ready).difference(whole)
        for peer in self._light - light:
            # It may have been a step behind, and the one that has just been made it has not.
            self._gone[peer] = version - 2, now_s
        self._light = light
        self._gone = {peer: at for peer, at in self._gone.items() if now_s < at[1] + AWAY_S and peer not in whole}
        wanted_from = min((step for step, _ in self._gone.values()), default=_NEVER)
        return max(wanted_from, version - STEPS_MAX)
