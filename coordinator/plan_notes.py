"""Keeps the reasons of the last plans and of refusals, for people. Pure."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_ID_CHARS_MAX
from shoal.protocol.messages import PlanNote
from shoal.protocol.plan import Plan

NOTES_MAX = 16
REASON_CHARS_MAX = 160
TOLD_S = 600.0
"""A refusal is shown for this long; after that the same refusal is news again."""
KEPT_MAX = 64


class PlanNotes:
    """The plans that this peer has obeyed, and those that earlier coordinators reported."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, PlanNote]] = deque(maxlen=NOTES_MAX)

    def obey(self, plan: Plan, now_s: float) -> None:
        reason = plan.reason[:REASON_CHARS_MAX]
        self._notes.append((now_s, PlanNote(plan.term, plan.sequence, 0.0, plan.coordinator, reason)))

    def judge(self, outcome: str) -> None:
        """Set the outcome of the live plan."""
        if self._notes:
            at_s, note = self._notes[-1]
            self._notes[-1] = at_s, msgspec.structs.replace(note, outcome=outcome[:REASON_CHARS_MAX])

    def inherit(self, notes: Iterable[PlanNote], now_s: float) -> None:
        """Prepend another coordinator's notes that are older than our first one. For plans that both know, take its
        outcome, and its age if that is greater."""
        told = {
            (note.term, note.sequence): (now_s - max(0.0, note.seconds_ago), _cut(note))
            for note in notes
            if math.isfinite(note.seconds_ago)
        }
        own = {(note.term, note.sequence): (at_s, note) for at_s, note in self._notes}
        for name in own.keys() & told.keys():
            (at_s, note), (told_s, theirs) = own[name], told[name]
            own[name] = min(at_s, told_s), msgspec.structs.replace(note, outcome=theirs.outcome or note.outcome)
        missed = [each for name, each in told.items() if not own or name < min(own)]
        self._notes = deque([*missed, *own.values()], maxlen=NOTES_MAX)

    def tell(self, now_s: float) -> tuple[PlanNote, ...]:
        return tuple(msgspec.structs.replace(note, seconds_ago=now_s - at_s) for at_s, note in self._notes)


def _cut(note: PlanNote) -> PlanNote:
    """Cut a received note to our limits."""
    coordinator = PeerID(note.coordinator[:PEER_ID_CHARS_MAX])
    reason, outcome = note.reason[:REASON_CHARS_MAX], note.outcome[:REASON_CHARS_MAX]
    return msgspec.structs.replace(note, coordinator=coordinator, reason=reason, outcome=outcome)


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
