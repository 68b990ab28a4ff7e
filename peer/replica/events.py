"""What a replica's core is told. Every event enters by `handle`, and is a frozen value.

`call` is the number of a call that waits for an answer; the core gives it by the command `Answer`. A call that the core
declines raises `Refused`, and one that no honest peer makes raises `RemoteError`, before the core has changed anything.
"""

from dataclasses import dataclass

from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time that `next_timer_s` named has come."""


# --- the supply of microbatches, at stage 0 ---


@dataclass(frozen=True, slots=True)
class Changed:
    """Room in the window, a new leader or a member that has become ready: a claim may be served or made now."""


@dataclass(frozen=True, slots=True)
class ClaimArrived:
    """A member asks us, as its leader, for up to `count` microbatches."""

    source: PeerID
    count: int
    call: int


@dataclass(frozen=True, slots=True)
class GrantArrived:
    """The leader has answered our claim with these (step, index), and with how far everybody is to run ahead."""

    leader: PeerID
    items: tuple[tuple[int, int], ...]
    steps_ahead: int
    gain: float


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The leader could not be reached, or declined our claim."""

    leader: PeerID


@dataclass(frozen=True, slots=True)
class LossReported:
    """Our own group misses these contributions to `step`: they died with a replica."""

    step: int
    indices: IndexSet


@dataclass(frozen=True, slots=True)
class RepairAsked:
    """The leader of a later stage's group misses these contributions to `step`."""

    source: PeerID
    step: int
    indices: bytes


@dataclass(frozen=True, slots=True)
class RepairArrived:
    """The leader hands us these (step, index): our part of what runs again."""

    source: PeerID
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RepairDeclined:
    """A member does not take its part of what runs again."""

    member: PeerID
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class WorkReturned:
    """A member pauses and will not make `microbatch`, which it may have `begun`."""

    source: PeerID
    microbatch: Microbatch
    begun: bool


@dataclass(frozen=True, slots=True)
class HaltAsked:
    """A peer that alone holds a stage leaves: no further step is to begin; `at_once`: nor what is left of those that
    have begun."""

    source: PeerID
    at_once: bool
    call: int


@dataclass(frozen=True, slots=True)
class Validated:
    """A validation microbatch of ours is through the pipeline."""

    microbatch: Microbatch
    loss: float


@dataclass(frozen=True, slots=True)
class ValidationArrived:
    """A member tells us, as its leader, the loss of validation microbatch `index` at version `step`."""

    source: PeerID
    step: int
    index: int
    loss: float


@dataclass(frozen=True, slots=True)
class MemberSaid:
    """A member has contributed `indices` of `step`, and has been granted `granted`. Both are bitmaps."""

    source: PeerID
    step: int
    indices: bytes
    granted: bytes


@dataclass(frozen=True, slots=True)
class Made:
    """We have contributed `microbatch`."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class MemberLost:
    """`peer` died or has begun anew: what it was granted dies with it."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class VersionReached:
    """We hold `version`, by a step or because we have fetched it."""

    version: int


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """`plan` is the newest in which our stage is as before."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class SupplyStopped:
    """We drain or pause: we claim no more and take no part in what runs again."""


@dataclass(frozen=True, slots=True)
class SupplyResumed:
    """We claim again."""


SupplyEvent = (
    TimerFired
    | Changed
    | ClaimArrived
    | GrantArrived
    | ClaimFailed
    | LossReported
    | RepairAsked
    | RepairArrived
    | RepairDeclined
    | WorkReturned
    | HaltAsked
    | Validated
    | ValidationArrived
    | MemberSaid
    | Made
    | MemberLost
    | VersionReached
    | PlanFollowed
    | SupplyStopped
    | SupplyResumed
)
