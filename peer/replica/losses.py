"""Track work that was lost with dead replicas, and decide when to suspect a loss that nobody reported. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

from shoal.peer.pipeline.microbatch import Indices, bitmap_of
from shoal.peer.replica.commands import AskRepair, CommitCommand
from shoal.protocol.identity import PeerID

STALL_STEPS = 2.0
"""A loss is suspected after this many step times without a contribution; a needless repair costs only time."""
STALL_S_MIN = 5.0
STALL_S_FIRST = 60.0
STALL_S_DEATH = 1.5
"""Seconds from a member's death to the first repair request: its last contributions may be unreported. The time is
short because a request costs one call: stage 0 repeats no microbatch that is still on its way back."""
STALL_S_BEGINNING = 3.0
"""Seconds until the first repair request when a generation (the training since a restore point) begins, or we enter it.
The first microbatches have yet to pass all stages, and members report contributions up to a second late
(`../group/telling.py`)."""
STALL_S_PIPELINE = 10.0
"""Stage 0's group suspects a loss only after this many seconds without a contribution, or more: most microbatches that
it lacks are still in the pipeline. (This does not hold before the first step.)"""


@dataclass(kw_only=True, slots=True)
class Losses:
    """Decides which microbatches a group's leader asks stage 0 to run again.

    Known losses: the microbatches that a dead member had contributed or (at stage 0) had been granted. Suspected
    losses: all missing microbatches, if no contribution has arrived for several step times, since a frame may be lost
    unnoticed. A request for too many microbatches costs only time: a stage that already has a gradient computes it
    again and does not add it.
    """

    microbatches: int
    is_first: bool = False
    """Our stage is stage 0: most microbatches that it lacks are still in the pipeline, so it asks late for repairs."""
    begins_at: int = 0
    """The version at which this generation began (its restore point). Earlier grants do not count, so a leader of stage
    0 that was there from this version on knows of every loss."""
    _claims: dict[int, dict[PeerID, Indices]] = field(init=False, default_factory=dict)
    _lost: dict[int, Indices] = field(init=False, default_factory=dict)
    suspect_at_s: float = STALL_S_FIRST
    """When to ask for everything that is missing, unless a contribution arrives before.

    This is late until a first step has shown how long steps take, but finite, since a new leader may never see such a
    step. If work may be lost, the time is sooner, and later requests come at growing intervals: stage 0 declines to
    repeat a microbatch that is on its way back to it, but the peer that has this microbatch may be dead.
    """
    _patience_s: float = field(init=False, default=STALL_S_FIRST)
    _version_since_s: float = field(init=False, default=0.0)
    _grown_at_s: float = field(init=False, default=0.0)
    _may_lack: bool = field(init=False, default=False)
    """True if contributions may be lost unreported: a member died since the last step, or perhaps before we came."""
    _has_died: bool = field(init=False, default=False)
    _num_asked: int = field(init=False, default=0)
    _steps_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=8))
    """Latest step times. Their median counts, so that one stalled step does not delay the request in the next."""

    def claimed(self, peer: PeerID, step: int, indices: Indices) -> None:
        """Record these microbatches as granted to `peer`: it has reported them or, as the leader, we grant them now."""
        claims = self._claims.setdefault(step, {})
        claims[peer] = claims.get(peer, 0) | indices

    def mate_died(self) -> None:
        """Suspect unreported losses from now until the next step: a member died."""
        self._may_lack = self._has_died = True
        self._look_again()

    def died(self, peer: PeerID, step: int, contributed: Indices) -> None:
        """Record as lost the microbatches of `step` that a dead member had contributed or had been granted."""
        claimed = self._claims.get(step, {}).pop(peer, 0)
        self._lost[step] = self._lost.get(step, 0) | contributed | claimed

    def steps_claimed_by(self, peer: PeerID) -> set[int]:
        return {step for step, claims in self._claims.items() if peer in claims}

    def grown(self, now_s: float) -> None:
        """Record that a contribution has arrived, and wait anew before suspecting a loss."""
        self._grown_at_s, self.suspect_at_s = now_s, now_s + self._patience_s

    def stepped(self, version: int, *, by_a_step: bool, now_s: float) -> None:
        if by_a_step and self._version_since_s > 0:
            self._steps_s.append(now_s - self._version_since_s)
        self._version_since_s = self._grown_at_s = now_s
        # A loaded state: members may have died before we came, even at the beginning of a generation, but for stage 0.
        self._may_lack, self._num_asked = not by_a_step and (not self.is_first or version > self.begins_at), 0
        self._has_died = False
        self._look_again()
        for table in (self._claims, self._lost):
            for step in [s for s in table if s < version]:
                del table[step]

    def ask(self, version: int, lacks: Callable[[int, int], bool], *, now_s: float) -> list[CommitCommand]:
        """Return the due repair requests. Args: lacks: True if no member has contributed microbatch (step, index)."""
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
        self._patience_s = self._after_a_death_s() if self._may_lack else self.usual_s
        self.suspect_at_s = self._grown_at_s + self._patience_s

    @property
    def usual_s(self) -> float:
        """The seconds at one version after which something is wrong: two usual steps, or a constant if that is more."""
        if not self._steps_s:
            return STALL_S_FIRST
        least_s = STALL_S_PIPELINE if self.is_first else STALL_S_MIN
        return max(least_s, STALL_STEPS * median_low(self._steps_s))

    def _after_a_death_s(self) -> float:
        if not self.is_first and self._num_asked == 0:
            return STALL_S_DEATH if self._has_died else STALL_S_BEGINNING
        if not self._steps_s:
            return min(STALL_S_MIN * 2.0 ** (self._num_asked - (not self.is_first)), STALL_S_FIRST)
        # The limit: steps that take minutes may be slow because of just such losses.
        return self.usual_s if self.is_first else min(self.usual_s, STALL_S_FIRST)
