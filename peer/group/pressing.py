"""When to send again what may have been lost in a round that does not end. Pure."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.protocol.identity import PeerID

if TYPE_CHECKING:
    from shoal.peer.group.reduce import Reduction

PRESS_S = 5.0
"""A round in which nothing has moved for this long has lost something, or its pieces wait behind activations."""
BELIEVED_S = 120.0
"""A mate that says that its pieces have yet to leave is believed for so many seconds after the last piece that came,
from whomever, and no longer, since it may lie."""


@dataclass(slots=True)
class Pressing:
    """Of one replica, one round after the other."""

    _looked_at: tuple["Reduction | None", int] = (None, 0)
    _moved_s: float = 0.0
    _again_s: dict[PeerID, float] = field(default_factory=dict)
    """When we last sent our part again, by target."""
    _pressed: tuple["Reduction | None", int] = (None, 0)

    def stands_still(self, reduction: "Reduction | None", now_s: float) -> bool:
        """Whether nothing new has come for `PRESS_S`, though something is missing."""
        now = reduction, reduction.num_taken if reduction is not None else 0
        if now != self._looked_at:
            if now[0] is not self._looked_at[0]:
                self._again_s = {}
            self._looked_at, self._moved_s = now, now_s
        if reduction is None or reduction.is_complete or now_s < self._moved_s + PRESS_S:
            return False
        self._pressed = now
        return True

    def is_due(self, peer: PeerID, now_s: float, *, took_s: float) -> bool:
        """Whether to send it our part again; large gradients on slow links take minutes, and all of it again would take
        as many more. Args: took_s: what a piece to it takes to leave."""
        if now_s < self._again_s.get(peer, self._moved_s) + max(PRESS_S, 2.0 * took_s):
            return False
        self._again_s[peer] = now_s
        return True

    def believes(self, now_s: float) -> bool:
        """Whether to wait for those who say that their pieces have yet to leave."""
        return now_s < self._moved_s + BELIEVED_S

    def was_in_vain(self, reduction: "Reduction") -> bool:
        """We have pressed, and nothing has come since."""
        return self._pressed == (reduction, reduction.num_taken)
