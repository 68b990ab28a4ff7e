"""What died with replicas, and when to suspect that something did. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

from shoal.peer.pipeline.microbatch import Indices, bitmap_of
from shoal.peer.replica.commands import AskRepair, CommitCommand
from shoal.protocol.identity import PeerID

STALL_STEPS = 2.0
"""Without a single contribution. Asking in vain costs the others' time and nothing else."""
STALL_S_MIN = 5.0
STALL_S_FIRST = 60.0
STALL_S_DEATH = 1.5
"""After a mate has died, for the first time: what it had contributed it may not have told any more. This costs a call,
since stage 0 does not run again what is not back there yet."""
STALL_S_BEGINNING = 3.0
"""The same where an era begins, or where we begin in it. The first microbatches have yet to come through all stages,
and mates tell of what they contribute up to a second later (`telling.py`)."""
STALL_S_PIPELINE = 10.0
"""Of stage 0, which would run all that is on its way again."""
_STEPS_REMEMBERED = 8
"""A step is what the median of so many was: one that stalled must not make us patient with the next."""


@dataclass(kw_only=True, slots=True)
class Losses:
    """What a group's lead asks stage 0 to run again.

    Known losses: what a dead mate had contributed, or (at stage 0) had been granted. Suspected: when no contribution
    has come for several times what a step takes, all that is missing, since a frame may have died on the way and nobody
    was told. Asking too much costs time only: who has a gradient already computes and adds nothing.
    """

    microbatches: int
    is_first: bool = False
    """Of stage 0: what it lacks is mostly on its way, and it would run all of that again."""
    begins_at: int = 0
    """The version with which the era begins. Stage 0's lead grants all of that step itself, and knows what died."""
    _claims: dict[int, dict[PeerID, Indices]] = field(init=False, default_factory=dict)
    _lost: dict[int, Indices] = field(init=False, default_factory=dict)
    suspect_at_s: float = STALL_S_FIRST
    """When to ask for all that is missing, should nothing come until then.

    Before a step has shown how long it takes, late: but a leader that has just begun must not wait for ever. Sooner,
    and then ever later, if something may be lacking. Asking once is not enough: stage 0 does not run again what is on
    its way back, and the dead may have sent it.
    """
    _patience_s: float = field(init=False, default=STALL_S_FIRST)
    _version_since_s: float = field(init=False, default=0.0)
    _grown_at_s: float = field(init=False, default=0.0)
    _may_lack: bool = field(init=False, default=False)
    """Something has died since the last step, or may have before we came, of which nobody has told us."""
    _has_died: bool = field(init=False, default=False)
    """A mate has died since the last step."""
    _num_asked: int = field(init=False, default=0)
    """In vain, since then."""
    _steps_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_STEPS_REMEMBERED))

    def claimed(self, peer: PeerID, step: int, indices: Indices) -> None:
        """By its own word, or because we have granted it: the word may not come any more."""
        claims = self._claims.setdefault(step, {})
        claims[peer] = claims.get(peer, 0) | indices

    def mate_died(self) -> None:
        """Whatever we know of it."""
        self._may_lack = self._has_died = True
        self._look_again()

    def died(self, peer: PeerID, step: int, contributed: Indices) -> None:
        """What we know of it."""
        claimed = self._claims.get(step, {}).pop(peer, 0)
        self._lost[step] = self._lost.get(step, 0) | contributed | claimed

    def steps_claimed_by(self, peer: PeerID) -> set[int]:
        return {step for step, claims in self._claims.items() if peer in claims}

    def grown(self, now_s: float) -> None:
        """A contribution has come."""
        self._grown_at_s, self.suspect_at_s = now_s, now_s + self._patience_s

    def stepped(self, version: int, *, by_a_step: bool, now_s: float) -> None:
        if by_a_step and self._version_since_s > 0:
            self._steps_s.append(now_s - self._version_since_s)
        self._version_since_s = self._grown_at_s = now_s
        # At the beginning of an era, too, another stage's lead may be one that has just been restarted.
        self._may_lack, self._num_asked = not by_a_step and (not self.is_first or version > self.begins_at), 0
        self._has_died = False
        self._look_again()
        for table in (self._claims, self._lost):
            for step in [s for s in table if s < version]:
                del table[step]

    def ask(self, version: int, lacks: Callable[[int, int], bool], *, now_s: float) -> list[CommitCommand]:
        """`lacks(step, index)`: nobody in the group has contributed it."""
        if now_s >= self.suspect_at_s:
            self._grown_at_s = now_s
            self._num_asked += 1
            self._look_again()
            self._lost[version] = (1 << self.microbatches) - 1
        commands: list[CommitCommand] = []
        for step, lost in sorted(self._lost.items()):
            wanted = sum(1 << index for index in range(self.microbatches) if lost >> index & 1 and lacks(step, index))
            if wanted:
                commands.append(AskRepair(step, bitmap_of(wanted)))
        self._lost.clear()
        return commands

    def _look_again(self) -> None:
        """Work out anew how long nothing may come."""
        self._patience_s = self._after_a_death_s() if self._may_lack else self._usual_s()
        self.suspect_at_s = self._grown_at_s + self._patience_s

    def _usual_s(self) -> float:
        if not self._steps_s:
            return STALL_S_FIRST
        least_s = STALL_S_PIPELINE if self.is_first else STALL_S_MIN
        return max(least_s, STALL_STEPS * median_low(self._steps_s))

    def _after_a_death_s(self) -> float:
        if not self.is_first and self._num_asked == 0:
            return STALL_S_DEATH if self._has_died else STALL_S_BEGINNING
        if not self._steps_s:
            return min(STALL_S_MIN * 2.0 ** (self._num_asked - (not self.is_first)), STALL_S_FIRST)
        # Steps that take minutes may do so because of just such losses.
        return self._usual_s() if self.is_first else min(self._usual_s(), STALL_S_FIRST)
