"""Remembers, for people, which plans members have refused, and why. Pure."""

from collections import OrderedDict

from shoal.coordinator.plan_notes import REASON_CHARS_MAX
from shoal.protocol.identity import PeerID

TOLD_S = 600.0
"""A refusal is shown for this long; after that the same refusal is news again."""
KEPT_MAX = 64


class Refusals:
    """The refusals that this peer has made or heard."""

    def __init__(self) -> None:
        self._noted: OrderedDict[tuple[PeerID, str], tuple[float, str]] = OrderedDict()

    def note(self, voter: PeerID, name: str, sequence: int, reason: str, now_s: float) -> str:
        """Record that `voter` has refused the plan of this sequence. Returns: the sentence; empty: it is no news."""
        reason = "".join(filter(str.isprintable, reason))[:REASON_CHARS_MAX]
        at_s, _ = self._noted.get((voter, reason), (-TOLD_S, ""))
        if now_s < at_s + TOLD_S:
            return ""
        sentence = f"{name} refused plan {sequence}: {reason}"
        self._noted[voter, reason] = now_s, sentence
        self._noted.move_to_end((voter, reason))
        if len(self._noted) > KEPT_MAX:
            self._noted.popitem(last=False)
        return sentence

    def tell(self, now_s: float) -> tuple[str, ...]:
        """The sentences of the last minutes, at most three for a status, newest last."""
        return tuple(text for at_s, text in self._noted.values() if now_s < at_s + TOLD_S)[-3:]
