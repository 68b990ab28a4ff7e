"""Read-only views of the parts of a replica's core. Only `core.py` and `member.py` give them events."""

from typing import Protocol

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.flow import Window
from shoal.peer.replica.job import Job
from shoal.protocol.identity import PeerID


class GroupView(Protocol):
    """One member's view of its group; `GroupCore` documents it."""

    me: PeerID
    stage: int
    steps: int
    microbatches: int
    version: int

    @property
    def ready(self) -> bool: ...

    @property
    def group_peers(self) -> tuple[PeerID, ...]: ...

    @property
    def ready_members(self) -> tuple[PeerID, ...]: ...

    @property
    def full_members(self) -> tuple[PeerID, ...]: ...

    @property
    def is_learner(self) -> bool: ...

    @property
    def open_members(self) -> tuple[PeerID, ...]: ...

    @property
    def draining(self) -> tuple[PeerID, ...]: ...

    @property
    def holders(self) -> tuple[PeerID, ...]: ...

    @property
    def round_peers(self) -> tuple[PeerID, ...]: ...

    @property
    def leader(self) -> PeerID | None: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def standing(self) -> tuple[int, int]: ...

    @property
    def owes(self) -> bool: ...

    def has_place(self, peer: PeerID) -> bool: ...

    def is_gone(self, peer: PeerID) -> bool: ...

    def lacks(self, step: int, index: int) -> bool: ...

    def share_of(self, peer: PeerID) -> float: ...

    def are_past(self, step: int) -> bool: ...

    def most_are_past(self, version: int) -> bool: ...

    def voters(self, newcomer: PeerID) -> tuple[PeerID, ...]: ...

    def waits_for(self) -> str: ...


class PipelineView(Protocol):
    """The microbatches in flight at one replica; `Schedule` documents it."""

    stage: int
    version: int
    window: Window | None

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    def holds(self, microbatch: Microbatch) -> bool: ...

    def takes_from(self, source: PeerID) -> bool: ...

    def awaits(self, microbatch: Microbatch, source: PeerID) -> bool: ...

    def goes_on(self, job: Job) -> bool: ...

    def whereabouts(self, now_s: float) -> str: ...
