"""What a replica's core is told. Every event enters by `handle`, and is a frozen value.

`call` is the number of a call that waits for an answer; the core gives it by the command `Answer`. A call that the core
declines raises `Refused`, and one that no honest peer makes raises `RemoteError`, before the core has changed anything.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.peer.pipeline.microbatch import Indices, Microbatch
from shoal.peer.replica.job import Job
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, Hello, Progress, RoundStart
from shoal.protocol.plan import Member, Plan
from shoal.protocol.wire_format import WireFormat


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time that `next_timer_s` named has come."""


@dataclass(frozen=True, slots=True)
class Contributed:
    """The backward of `microbatch` is done, of a stage or of an expert; `again`: a mate may have its gradient, too."""

    microbatch: Microbatch
    staleness_steps: int
    again: bool = False
    loss: float = 0.0


# --- the life of a member ---


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """`plan` is the newest in which our group and its layers are as before.

    `former`: who else had a place in the group by the plans of late. `upstream`: who holds, or held of late, the stage
    before ours.
    """

    plan: Plan
    former: frozenset[PeerID] = frozenset()
    upstream: frozenset[PeerID] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A peer says where it is and how."""

    peer: PeerID
    hello: Hello


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The plan has dropped `peer`, and it had not said that it would go. `is_barred`: the plan has not, but what `peer`
    sends is of no use to us, and is not for as long as we have this place."""

    peer: PeerID
    is_barred: bool = False


@dataclass(frozen=True, slots=True)
class PeerReborn:
    """`peer` has begun anew in its stage, as `incarnation`. Its mates may have heard so from its Progress before."""

    peer: PeerID
    incarnation: int


@dataclass(frozen=True, slots=True)
class Joined:
    """We hold the group's state, or of a `light` member its weights. `remembers`: what others run again of the step
    before can be repaired here exactly."""

    remembers: bool
    light: bool = False


@dataclass(frozen=True, slots=True)
class Lagging:
    """We are light and, or no longer, so far behind our mates that no microbatch of theirs can run with our weights:
    what has no forward yet goes back to whoever sent it."""

    lags: bool


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """We take nothing new, and leave when what is here is finished and committed."""


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """A plan has given us our place back before we had drained."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing of ours is needed here any more."""


LifeEvent = PlanFollowed | PeerSaid | PeerDied | PeerReborn | Joined | Lagging | DrainBegun | DrainEnded | Drained


@dataclass(frozen=True, slots=True)
class MemberLost:
    """`peer` of our group died or has begun anew: what it held dies with it. `is_barred`: as in `PeerDied`."""

    peer: PeerID
    is_barred: bool = False


@dataclass(frozen=True, slots=True)
class MemberGranted:
    """The supply has granted `microbatch` to `peer`, whose own word may die with it. A command to whoever keeps the
    group's losses."""

    peer: PeerID
    microbatch: Microbatch


# --- microbatches ---


@dataclass(frozen=True, slots=True)
class Arrived:
    """An activation came in from `source`, or (stage 0, source None) the leader granted us the microbatch."""

    microbatch: Microbatch
    source: PeerID | None
    again: bool = False
    """It may have run before, here or elsewhere."""
    incarnation: int = 0
    """The incarnation of `source` that has sent it."""


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """The next stage is done with the microbatch. Of one that validates its `loss` is known."""

    microbatch: Microbatch
    source: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDone:
    """`loss`: of a job that computes one."""

    job: Job
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class JobParked:
    """The job waits for other peers, and leaves the device to whatever else there is meanwhile. What it still needs of
    the device it gets beside the jobs of the core's choice; in the end there is a `JobDone` all the same."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobDropped:
    """A parked job does not go on, since its microbatch has been handed back: nothing comes of it."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The device has no memory for the job that runs, and nothing has come of it."""

    job: Job


@dataclass(frozen=True, slots=True)
class StepReady:
    """The group has the whole reduced gradient of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class VersionSet:
    """State was loaded at `version`, by no step of ours."""

    version: int


@dataclass(frozen=True, slots=True)
class TrafficPlanned:
    """The plan's shares of the replicas of the next stage, in plan order, and whose activations we take."""

    shares: Mapping[PeerID, float]
    upstream: frozenset[PeerID]


@dataclass(frozen=True, slots=True)
class UpstreamSet:
    """Whose activations we take: replicas of the stage before, those that drain among them."""

    upstream: frozenset[PeerID]


@dataclass(frozen=True, slots=True)
class PeerReady:
    """`peer`, of the next stage, takes traffic."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """`peer`, of the next stage, takes no new traffic, and will answer what it owes."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` died, left the plan, or no longer takes traffic and will not answer what it owes. If it has begun anew as
    `successor`, what that incarnation has already sent is not lost."""

    peer: PeerID
    successor: int | None = None


@dataclass(frozen=True, slots=True)
class HandedBack:
    """`peer`, of the next stage, pauses or lags and will not make the microbatch."""

    microbatch: Microbatch
    peer: PeerID


@dataclass(frozen=True, slots=True)
class RunAhead:
    """The leader's choice: how many steps ahead of the version to run, and with how much in flight. -1: it has none."""

    steps_ahead: int
    gain: float


@dataclass(frozen=True, slots=True)
class Paused:
    """We pause: no forward begins any more, and what has none yet goes back to whoever sent it. Backwards go on as
    gradients come, unless `at_once`: then everything goes back but the job that runs."""

    at_once: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """Our pause is over."""


ScheduleEvent = (
    Arrived
    | GradientArrived
    | JobDone
    | JobParked
    | JobDropped
    | JobFailed
    | StepReady
    | VersionSet
    | TrafficPlanned
    | UpstreamSet
    | PeerReady
    | PeerClosed
    | PeerLost
    | HandedBack
    | RunAhead
    | Paused
    | Resumed
    | Lagging
)


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
    indices: Indices


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
    """A member pauses or lags and will not make `microbatch`, which it may have `begun`."""

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
class VersionReached:
    """We hold `version`, by a step or because we have fetched it."""

    version: int


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

# --- commits ---


@dataclass(frozen=True, slots=True)
class GroupPlanned:
    """Plan `sequence` gives the group these members, in rank order. `former`: who else had a place in it by the plans
    of late, and may still drain. `ends_at`: as in `Plan`; `sums`: as `Plan.sums_of`. `begins_at`: the version with
    which the era begins.
    """

    members: tuple[Member, ...]
    sequence: int
    former: Collection[PeerID] = ()
    ends_at: int = 0
    begins_at: int = 0
    sums: WireFormat | None = None


@dataclass(frozen=True, slots=True)
class ReadySet:
    """We take part, with the group's state or, as a `light` member, with its weights alone; or do no longer."""

    ready: bool
    light: bool = False


@dataclass(frozen=True, slots=True)
class OpenSet:
    """We take traffic, or do no longer."""

    is_open: bool


@dataclass(frozen=True, slots=True)
class MemberState:
    """A mate says whether it holds the state and takes part, and whether it takes traffic.

    `drains`: it is on its way out, and may have left the group before we came into it. `has_moved`: the plan has a
    place for it elsewhere. `light`: it takes part, and holds weights alone.
    """

    peer: PeerID
    ready: bool
    is_open: bool
    incarnation: int
    drains: bool = False
    has_moved: bool = False
    light: bool = False


@dataclass(frozen=True, slots=True)
class MemberElsewhere:
    """A peer says that it is not of our group, any more or not yet."""

    peer: PeerID
    incarnation: int


@dataclass(frozen=True, slots=True)
class MemberSilent:
    """A peer cannot be reached."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class WorkGranted:
    """Stage 0: microbatch (step, index) has been granted to us; `again`: it runs again, which whoever leads now may not
    know."""

    step: int
    index: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class GradientCounted:
    """Our gradient of `microbatch` is in the sum of its step, or kept `apart` from it because it ran again.

    `more_follows`: more microbatches of the step are here, so no round can begin with this one.
    """

    microbatch: Microbatch
    loss: float
    staleness_steps: int
    apart: bool = False
    more_follows: bool = False


@dataclass(frozen=True, slots=True)
class ProgressArrived:
    """A mate says what it has contributed to a step."""

    source: PeerID
    message: Progress


@dataclass(frozen=True, slots=True)
class RoundArrived:
    """A leader opens a round."""

    source: PeerID
    message: RoundStart


@dataclass(frozen=True, slots=True)
class DigestArrived:
    """A mate has stepped to a version, and its state has that digest."""

    source: PeerID
    message: Digest


@dataclass(frozen=True, slots=True)
class Stepped:
    """We hold `version`, by a step or by fetching it; `digest` is our state's, None while we hold weights alone.

    `by`: whose result we have stepped with, which we may have given up meanwhile, when a member died that had done its
    part. `gradient_norm`: of the step's gradient, for the ledger; None: we have fetched the state.
    """

    version: int
    digest: str | None
    by: RoundStart | None = None
    gradient_norm: float | None = None
    remembers: bool = False
    """What others run again of the step before can be repaired here exactly."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """Nothing has moved for seconds: say again what somebody may have forgotten with a mate that it counted lost."""


CommitEvent = (
    TimerFired
    | GroupPlanned
    | ReadySet
    | OpenSet
    | MemberState
    | MemberElsewhere
    | MemberLost
    | MemberSilent
    | MemberGranted
    | WorkGranted
    | GradientCounted
    | ProgressArrived
    | RoundArrived
    | DigestArrived
    | Stepped
    | StoodStill
)

Event = LifeEvent | ScheduleEvent | SupplyEvent | CommitEvent | Contributed
