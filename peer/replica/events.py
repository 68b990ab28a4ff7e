"""Events of a replica's core: frozen values, each passed to `handle`.

`call` is the number of a remote call that waits for an answer; the core answers the call by the command `Answer`. The
core declines a call by raising `Refused`, or `RemoteError` if no honest peer makes it; neither changes the core.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.job import Job
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, PresenceUpdate, Progress, RoundStart
from shoal.protocol.plan import Plan


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time returned by `next_timer_s` has come."""


@dataclass(frozen=True, slots=True)
class Contributed:
    """Our stage or expert has run the backward of `microbatch`. `retried`: another member may have done so, too."""

    microbatch: Microbatch
    staleness_steps: int
    retried: bool = False
    loss: float = 0.0


# --- the life of a member ---


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """`plan` is newer than the plan that we follow, and leaves us our group and the group its layers. `former`: peers
    that recent plans name in the group, but this plan does not. `upstream`: present and recent holders of the stage
    before ours."""

    plan: Plan
    former: frozenset[PeerID] = frozenset()
    upstream: frozenset[PeerID] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A peer reports its presence: its place in the plan, and whether it is ready (takes part in rounds) and open
    (accepts microbatches) there."""

    peer: PeerID
    presence: PresenceUpdate


@dataclass(frozen=True, slots=True)
class PeerDied:
    """A plan has dropped `peer`, which had not announced that it leaves. `is_barred`: the plan still has `peer`, but we
    refuse its gradients, and ignore `peer` for as long as we have this place."""

    peer: PeerID
    is_barred: bool = False


@dataclass(frozen=True, slots=True)
class PeerReborn:
    """`peer` has begun anew in its stage, without state; `incarnation` is the number of this start. The members of its
    group may already know of this from its Progress message."""

    peer: PeerID
    incarnation: int


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """We hold the group's state or, if `learner`, only its weights. `remembers`: if a microbatch of the last step is
    run again, we get exactly the same gradient."""

    remembers: bool
    learner: bool = False


@dataclass(frozen=True, slots=True)
class Lagging:
    """`lags` True: our weights have become too old, so microbatches without a forward go back to their senders. `lags`
    False: our weights are new enough again."""

    lags: bool


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """We accept no new work, and leave when our present work is finished and committed."""


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """A plan has given us our place back before we had drained."""


@dataclass(frozen=True, slots=True)
class Drained:
    """No peer needs us in this place any more."""


LifeEvent = PlanFollowed | PeerSaid | PeerDied | PeerReborn | JoinedGroup | Lagging | DrainBegun | DrainEnded | Drained


# --- microbatches ---


@dataclass(frozen=True, slots=True)
class Arrived:
    """An activation arrived from `source`; or, at stage 0 with source None, the leader granted us the microbatch."""

    microbatch: Microbatch
    source: PeerID | None
    retried: bool = False
    """The microbatch may have run before, here or elsewhere."""
    incarnation: int = 0
    """The incarnation (number of the start) in which `source` sent the activation."""


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """The next stage has returned the microbatch, with its gradient or, after validation, its `loss`. `waited_s`: the
    microbatch's time in queues of later stages. `commit_s`: the longest commit time of a later stage."""

    microbatch: Microbatch
    source: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDone:
    """The job has ended. `loss`: its result, if the job computes a loss."""

    job: Job
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class JobParked:
    """The job waits for other peers (holders of experts), so the device is free for other jobs. The rest of the job
    runs between the jobs that the core chooses, and still ends with a `JobDone`."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobDropped:
    """A parked job ends without a result, since its microbatch has been handed back."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The running job has ended without a result, because the device ran out of memory."""

    job: Job


@dataclass(frozen=True, slots=True)
class StepReady:
    """The group has the whole reduced gradient of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class VersionSet:
    """A state of `version` was loaded from elsewhere; our own optimizer step did not make it."""

    version: int


@dataclass(frozen=True, slots=True)
class TrafficPlanned:
    """A plan's traffic. `shares`: replica of the next stage -> its share of the traffic, first the replica with which
    we begin; None: as before. `upstream`: the senders of activations that we accept: replicas of the stage before,
    draining ones included."""

    shares: Mapping[PeerID, float] | None
    upstream: frozenset[PeerID]


@dataclass(frozen=True, slots=True)
class PeerReady:
    """`peer`, of the next stage, accepts microbatches. If `is_open` is False, it accepts no new ones, but will still
    return the gradients of those that it has."""

    peer: PeerID
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` will not return the gradients that it owes us: it died, left the plan or no longer accepts microbatches.
    `successor`: its incarnation after a restart; activations that this incarnation has sent us are not lost."""

    peer: PeerID
    successor: int | None = None


@dataclass(frozen=True, slots=True)
class HandedBack:
    """`peer`, of the next stage, will not compute the microbatch, because `peer` pauses or its weights lag."""

    microbatch: Microbatch
    peer: PeerID


@dataclass(frozen=True, slots=True)
class RunAhead:
    """The leader's choice for stage 0. `steps_ahead`: microbatches of how many later steps may begin; -1: not chosen
    yet. `gain`: they begin only while fewer are in flight than `gain` times what the pipeline holds without queues."""

    steps_ahead: int
    gain: float


@dataclass(frozen=True, slots=True)
class Paused:
    """We pause: no forward begins any more, and microbatches without a forward go back to their senders. Backwards go
    on as gradients arrive. `at_once`: all microbatches but the running one go back, and no backward begins."""

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
    | PeerReady
    | PeerLost
    | HandedBack
    | RunAhead
    | Paused
    | Resumed
    | Lagging
)


# --- the supply of microbatches, at stage 0 ---


@dataclass(frozen=True, slots=True)
class ClaimArrived:
    """A member asks us, as its leader, for up to `count` microbatches."""

    source: PeerID
    count: int
    call: int


@dataclass(frozen=True, slots=True)
class GrantArrived:
    """The leader has answered our claim with the microbatches `items`, (step, index), and with its choice of how far
    all members run ahead (see `RunAhead`)."""

    leader: PeerID
    items: tuple[tuple[int, int], ...]
    steps_ahead: int
    gain: float


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The leader could not be reached, or declined our request for microbatches."""

    leader: PeerID


@dataclass(frozen=True, slots=True)
class RepairAsked:
    """The group led by `source` lacks these contributions to `step` (`indices`: a bitmap)."""

    source: PeerID
    step: int
    indices: bytes


@dataclass(frozen=True, slots=True)
class RepairArrived:
    """The leader asks us to run the microbatches `items`, (step, index), again."""

    source: PeerID
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RepairDeclined:
    """`member` declines to run these microbatches again."""

    member: PeerID
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class WorkReturned:
    """A member that pauses or lags hands back `microbatch`. `begun`: the microbatch may have run in part."""

    source: PeerID
    microbatch: Microbatch
    begun: bool


@dataclass(frozen=True, slots=True)
class HaltAsked:
    """`source`, the last holder of a stage, leaves, and asks that no step begins. `at_once`: the open step is to be
    given up, too."""

    source: PeerID
    at_once: bool
    call: int


@dataclass(frozen=True, slots=True)
class ValidationArrived:
    """A member tells us, as its leader, the loss of validation microbatch `index` at version `step`."""

    source: PeerID
    step: int
    index: int
    loss: float


QueueEvent = (
    TimerFired
    | ClaimArrived
    | GrantArrived
    | ClaimFailed
    | RepairAsked
    | RepairArrived
    | RepairDeclined
    | WorkReturned
    | HaltAsked
    | ValidationArrived
)

# --- commits ---


@dataclass(frozen=True, slots=True)
class MemberSilent:
    """A peer cannot be reached."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class GradientCounted:
    """Our gradient of `microbatch` is in the sum of its step; or, if `held_out`, kept apart from the sum: another
    member may count it, too. `more_follows`: more microbatches of the step are here, so no round can begin yet."""

    microbatch: Microbatch
    loss: float
    staleness_steps: int
    held_out: bool = False
    more_follows: bool = False


@dataclass(frozen=True, slots=True)
class ProgressArrived:
    """A member reports which microbatches of a step it has contributed."""

    source: PeerID
    message: Progress


@dataclass(frozen=True, slots=True)
class RoundArrived:
    """A leader opens a round."""

    source: PeerID
    message: RoundStart


@dataclass(frozen=True, slots=True)
class DigestArrived:
    """A member has stepped to a version, and sends the digest of its state."""

    source: PeerID
    message: Digest


@dataclass(frozen=True, slots=True)
class Stepped:
    """We hold `version`, which we have made or fetched. `digest`: that of our state; None while we hold weights alone.

    `by`: the round that gave our step's gradient; the leader may have opened a later one of this step, if a member died
    after sending its part. `gradient_norm`: norm of that gradient, for the coordinator; None: we fetched the state."""

    version: int
    digest: str | None
    by: RoundStart | None = None
    gradient_norm: float | None = None
    remembers: bool = False
    """If a microbatch of the previous step is run again, we get exactly the same gradient."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The run has stood still for some seconds: repeat messages that a member may have dropped when a peer was lost."""


CommitEvent = (
    TimerFired | MemberSilent | GradientCounted | ProgressArrived | RoundArrived | DigestArrived | Stepped | StoodStill
)

Event = LifeEvent | ScheduleEvent | QueueEvent | CommitEvent | Contributed
