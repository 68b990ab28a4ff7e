"""Commands of a replica's core to its driver. They name tensors, and never carry them."""

from dataclasses import dataclass

import msgspec

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.events import Contributed, GradientCounted, RunAhead
from shoal.peer.replica.job import Job
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import (
    CommitReport,
    Digest,
    Progress,
    RoundStart,
    ValidationReport,
    ValidationResult,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the call of that number."""

    call: int
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class AnnouncePresence:
    """Tell our neighbours and the group our new presence."""


@dataclass(frozen=True, slots=True)
class Count:
    """Add a microbatch's gradient to the sum of its step, or hold it out if there is room. `counted` is the event of
    that, with `held_out` changed if it came out otherwise; there is none if the step is over."""

    counted: GradientCounted
    retried: bool


# --- microbatches ---


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send the output of the forward of `microbatch` to `target`; `retried`: it may have run before."""

    microbatch: Microbatch
    target: PeerID
    retried: bool = False


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the gradient of `microbatch` to `target`; of a validation microbatch, its loss.

    `waited_s`: time that the microbatch stood in queues here and in all later stages, forward and backward.
    `commit_s`: duration of a commit in the slowest of these stages.
    """

    microbatch: Microbatch
    target: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Stage 0: the microbatch has passed through the whole pipeline."""

    microbatch: Microbatch
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Forget:
    """Free what is kept for the microbatch: no peer will ask for it any more."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class RejectMicrobatch:
    """The microbatch will not be computed here: its sender (target None: stage 0's leader) sends it elsewhere."""

    microbatch: Microbatch
    target: PeerID | None
    begun: bool


ScheduleCommand = Job | SendActivation | SendGradient | Contributed | Finished | Forget | RejectMicrobatch


# --- the supply of microbatches, at stage 0 ---


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Ask `leader` for up to `count` microbatches. There is at most one claim under way."""

    leader: PeerID
    count: int


@dataclass(frozen=True, slots=True)
class DropClaim:
    """Drop the claim that is under way: its answer is no longer of use."""


@dataclass(frozen=True, slots=True)
class Make:
    """Run `microbatch` through the pipeline; `retried`: it may have run before."""

    microbatch: Microbatch
    retried: bool


@dataclass(frozen=True, slots=True)
class MemberGranted:
    """The queue has granted `microbatch` to `peer`, which may die before it says so. For the group's losses."""

    peer: PeerID
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class HandOut:
    """Ask `member` to run these again, all of one step."""

    member: PeerID
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class TellValidation:
    """Tell `leader` the loss of one validation microbatch."""

    leader: PeerID
    result: ValidationResult


@dataclass(frozen=True, slots=True)
class ReportValidation:
    """All validation microbatches of a version are back."""

    report: ValidationReport


QueueCommand = (
    Answer | SendClaim | DropClaim | Make | MemberGranted | RunAhead | HandOut | TellValidation | ReportValidation
)

# --- commits ---


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to every other member, or only `to` one. `can_wait`: at once to the leader only, to the others
    before long. `can_rest`, with `can_wait`: before long to the leader, too."""

    message: Progress | RoundStart | Digest
    can_wait: bool = False
    can_rest: bool = False
    to: PeerID | None = None


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this round; an older attempt at the same step is void."""

    round: RoundStart


@dataclass(frozen=True, slots=True)
class Report:
    """Report the group's agreed commit to the coordinator."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class Witness:
    """Note the group's agreed commit, which another member reports. Local observers see it."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Fetch the reduced gradient of `step` from `mate`, which is ahead. We took no part in the round that led there."""

    mate: PeerID
    step: int


@dataclass(frozen=True, slots=True)
class AskRepair:
    """Contributions to `step` were lost with a replica: stage 0 must run these microbatches (a bitmap) again."""

    step: int
    indices: bytes


@dataclass(frozen=True, slots=True)
class Resync:
    """Our state at `version` is not the group's: fetch it from `mate`."""

    mate: PeerID
    version: int


@dataclass(frozen=True, slots=True)
class ForgetMember:
    """Drop what waits to be sent to `peer`, which has no use for it. `died`: also what it still owes us."""

    peer: PeerID
    died: bool = False


@dataclass(frozen=True, slots=True)
class Accuse:
    """`peer` restarts without end, and is barred from the group: report it."""

    peer: PeerID


CommitCommand = Tell | Reduce | Report | Witness | CatchUp | AskRepair | Resync | ForgetMember | Accuse

Command = ScheduleCommand | QueueCommand | CommitCommand | AnnouncePresence | Count
