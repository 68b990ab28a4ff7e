"""Decide when to send again what may have been lost in a round that does not end. Pure."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.protocol.identity import PeerID

if TYPE_CHECKING:
    from shoal.peer.group.reduce import Reduction

PRESS_S = 5.0
"""A round without progress for this long has lost something, or its pieces wait behind activations."""
BELIEVED_S = 120.0
"""A member whose pieces have not left yet is believed for this long after the last piece from any member: it may
lie."""


@dataclass(slots=True)
class Pressing:
    """Retransmission state of one replica, one round after the other."""

    _looked_at: tuple["Reduction | None", int] = (None, 0)
    _moved_s: float = 0.0
    _again_s: dict[PeerID, float] = field(default_factory=dict)
    _pressed: tuple["Reduction | None", int] = (None, 0)

    def stands_still(self, reduction: "Reduction | None", now_s: float) -> bool:
        """True if nothing new has arrived for `PRESS_S`, though something is missing."""
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
        """True if our part should be sent to `peer` again. Args: took_s: time for a piece to leave."""
        if now_s < self._again_s.get(peer, self._moved_s) + max(PRESS_S, 2.0 * took_s):
            return False
        self._again_s[peer] = now_s
        return True

    def believes(self, now_s: float) -> bool:
        """True if we still wait for members that say that their pieces have not left yet."""
        return now_s < self._moved_s + BELIEVED_S

    def was_in_vain(self, reduction: "Reduction") -> bool:
        """True if nothing has arrived since the round was last found standing still."""
        return self._pressed == (reduction, reduction.num_taken)
