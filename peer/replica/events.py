"""Events of a replica's core. Every event enters by `handle`, and is a frozen value.

`call` is the number of a call that waits for an answer; the core gives it by the command `Answer`. The core declines a
call by `Refused`, and answers one that no honest peer makes by `RemoteError`, before it has changed anything.
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
    """The time that `next_timer_s` named has come."""


@dataclass(frozen=True, slots=True)
class Contributed:
    """The backward of `microbatch` is done, of a stage or an expert; `retried`: another member may have its
    gradient."""

    microbatch: Microbatch
    staleness_steps: int
    retried: bool = False
    loss: float = 0.0


# --- the life of a member ---


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """`plan` is the newest in which our group and its layers are as before. `former`: peers in the group by recent
    plans, but not by this one. `upstream`: present and recent holders of the stage before ours."""

    plan: Plan
    former: frozenset[PeerID] = frozenset()
    upstream: frozenset[PeerID] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A peer reports its presence: where it is, and in which state."""

    peer: PeerID
    presence: PresenceUpdate


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The plan has dropped `peer`, which had not announced that it leaves. `is_barred`: no plan has dropped it, but its
    gradients are useless to us, and we ignore it for as long as we have this place."""

    peer: PeerID
    is_barred: bool = False


@dataclass(frozen=True, slots=True)
class PeerReborn:
    """`peer` has begun anew in its stage, as `incarnation`. Group members may know it already from its Progress."""

    peer: PeerID
    incarnation: int


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """We hold the group's state, or if `learner` its weights. `remembers`: we can repair the previous step exactly."""

    remembers: bool
    learner: bool = False


@dataclass(frozen=True, slots=True)
class Lagging:
    """We are light, and our weights are too old for every microbatch: those without a forward go back to their sender.
    Or, with `lags` False, they are not any more."""

    lags: bool


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """We take nothing new, and leave when our work is finished and committed."""


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """A plan has given our place back before we had drained."""


@dataclass(frozen=True, slots=True)
class Drained:
    """No peer needs anything of us here any more."""


LifeEvent = PlanFollowed | PeerSaid | PeerDied | PeerReborn | JoinedGroup | Lagging | DrainBegun | DrainEnded | Drained


# --- microbatches ---


@dataclass(frozen=True, slots=True)
class Arrived:
    """An activation came in from `source`; or, at stage 0 with source None, the leader granted us the microbatch."""

    microbatch: Microbatch
    source: PeerID | None
    retried: bool = False
    """It may have run before, here or elsewhere."""
    incarnation: int = 0
    """The incarnation in which `source` sent it."""


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """The next stage is done with the microbatch. A validation microbatch comes back with its `loss`."""

    microbatch: Microbatch
    source: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDone:
    """The job has ended. `loss`: only of a job that computes one."""

    job: Job
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class JobParked:
    """The job waits for other peers; the device is free for other jobs. The rest of the job runs beside the jobs that
    the core chooses, and ends with a `JobDone` all the same."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobDropped:
    """A parked job ends without a result, since its microbatch has been handed back."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The device has no memory for the running job, which has no result."""

    job: Job


@dataclass(frozen=True, slots=True)
class StepReady:
    """The group has the whole reduced gradient of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class VersionSet:
    """A state of `version` was loaded; no step of ours made it."""

    version: int


@dataclass(frozen=True, slots=True)
class TrafficPlanned:
    """The plan's traffic shares of the next stage's replicas, in plan order (None: as before), and the senders of
    activations that we accept: replicas of the stage before, draining ones included."""

    shares: Mapping[PeerID, float] | None
    upstream: frozenset[PeerID]


@dataclass(frozen=True, slots=True)
class PeerReady:
    """`peer`, of the next stage, takes traffic; or, not `is_open`, takes no new traffic, and will answer what it
    owes."""

    peer: PeerID
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` died, left the plan, or takes no traffic and will not answer what it owes. If it has begun anew as
    `successor`, what that incarnation has already sent is not lost."""

    peer: PeerID
    successor: int | None = None


@dataclass(frozen=True, slots=True)
class HandedBack:
    """`peer`, of the next stage, pauses or lags and will not compute the microbatch."""

    microbatch: Microbatch
    peer: PeerID


@dataclass(frozen=True, slots=True)
class RunAhead:
    """The leader's choice: how many steps to run ahead of the version, and with how much in flight. -1: it has none."""

    steps_ahead: int
    gain: float


@dataclass(frozen=True, slots=True)
class Paused:
    """We pause: no forward begins any more, and what has none yet goes back to its sender. Backwards go on as gradients
    come, unless `at_once`: then everything goes back but the running job."""

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
    """The leader has answered our claim with these (step, index), and says how far all members are to run ahead."""

    leader: PeerID
    items: tuple[tuple[int, int], ...]
    steps_ahead: int
    gain: float


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The leader could not be reached, or declined our claim."""

    leader: PeerID


@dataclass(frozen=True, slots=True)
class RepairAsked:
    """The leader of a later stage's group lacks these contributions to `step`."""

    source: PeerID
    step: int
    indices: bytes


@dataclass(frozen=True, slots=True)
class RepairArrived:
    """The leader hands us repairs: these (step, index) run again."""

    source: PeerID
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RepairDeclined:
    """A member does not take its part of the repairs."""

    member: PeerID
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class WorkReturned:
    """A member pauses or lags and will not compute `microbatch`, which it may have `begun`."""

    source: PeerID
    microbatch: Microbatch
    begun: bool


@dataclass(frozen=True, slots=True)
class HaltAsked:
    """The last holder of a stage leaves: no further step is to begin. `at_once`: none is finished either."""

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
    """Our gradient of `microbatch` is in the sum of its step, or held `held_out` from it because it ran again.
    `more_follows`: more microbatches of the step are here, so no round can begin with this one."""

    microbatch: Microbatch
    loss: float
    staleness_steps: int
    held_out: bool = False
    more_follows: bool = False


@dataclass(frozen=True, slots=True)
class ProgressArrived:
    """A member says what it has contributed to a step."""

    source: PeerID
    message: Progress


@dataclass(frozen=True, slots=True)
class RoundArrived:
    """A leader opens a round."""

    source: PeerID
    message: RoundStart


@dataclass(frozen=True, slots=True)
class DigestArrived:
    """A member has stepped to a version, and tells the digest of its state."""

    source: PeerID
    message: Digest


@dataclass(frozen=True, slots=True)
class Stepped:
    """We hold `version`, by a step or by fetching it; `digest`: of our state, None while we hold weights alone.

    `by`: the round that gave the gradient of our step; it may be void by now, if a member died after its part.
    `gradient_norm`: of that gradient, for the ledger; None: we have fetched the state."""

    version: int
    digest: str | None
    by: RoundStart | None = None
    gradient_norm: float | None = None
    remembers: bool = False
    """We can repair exactly what others recompute of the previous step."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """Nothing has moved for seconds: repeat what a member may have forgotten when it counted a peer lost."""


CommitEvent = (
    TimerFired | MemberSilent | GradientCounted | ProgressArrived | RoundArrived | DigestArrived | Stepped | StoodStill
)

Event = LifeEvent | ScheduleEvent | QueueEvent | CommitEvent | Contributed
