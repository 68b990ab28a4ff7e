"""What a replica's core asks for. Commands name tensors, and never carry them."""

from dataclasses import dataclass

import msgspec

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.events import Contributed, GradientCounted, MemberGranted, RunAhead
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
class SayHello:
    """What we say of ourselves has changed: tell our neighbours and mates."""


@dataclass(frozen=True, slots=True)
class Count:
    """Add the gradient of a microbatch to the sum of its step, or keep it apart if there is room, and report what has
    come of it: `counted`, as it is or with the other `apart`."""

    counted: GradientCounted
    again: bool


# --- microbatches ---


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send what the forward of `microbatch` has given to `target`; `again`: it may have run before."""

    microbatch: Microbatch
    target: PeerID
    again: bool = False


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the gradient of `microbatch` to `target`, or its loss if it validates.

    `waited_s`: how long the microbatch stood in queues here and in all later stages, forth and back. `commit_s`: how
    long commits take, in that of these stages where they take longest.
    """

    microbatch: Microbatch
    target: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Stage 0: the microbatch is through the whole pipeline."""

    microbatch: Microbatch
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Forget:
    """Free what is kept for the microbatch: nobody will ask any more."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class HandBack:
    """The microbatch will not be made here: whoever sent it sends it elsewhere. At stage 0 (target None) the leader
    sees to it."""

    microbatch: Microbatch
    target: PeerID | None
    begun: bool
    """It may have run, here or elsewhere."""


ScheduleCommand = Job | SendActivation | SendGradient | Contributed | Finished | Forget | HandBack


# --- the supply of microbatches, at stage 0 ---


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Ask `leader` for up to `count` microbatches. One claim at most is under way."""

    leader: PeerID
    count: int


@dataclass(frozen=True, slots=True)
class DropClaim:
    """Nobody waits any more for the answer to the claim that is under way."""


@dataclass(frozen=True, slots=True)
class Make:
    """Run `microbatch` through the pipeline; `again`: it may have run before."""

    microbatch: Microbatch
    again: bool


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


SupplyCommand = (
    Answer | SendClaim | DropClaim | Make | MemberGranted | RunAhead | HandOut | TellValidation | ReportValidation
)

# --- commits ---


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to every other member, or only `to` one; if it `can_wait`, to the leader at once and to the others
    before long; if it `can_rest` too, to the leader before long as well."""

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
    """The group has committed and agrees, and we report it."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class Witness:
    """The group has committed and agrees, and another member reports it. For whoever watches over our shoulder."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class CatchUp:
    """`mate` is at a later version, and we have taken no part in the round that led there: fetch the reduced gradient
    of `step` from it."""

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
    """What waits to be sent to `peer` is of no use to it any more. It `died`: nor is what it still owes us."""

    peer: PeerID
    died: bool = False


@dataclass(frozen=True, slots=True)
class Accuse:
    """`peer` restarts without end: refuse it as a member, and report it."""

    peer: PeerID


CommitCommand = Tell | Reduce | Report | Witness | CatchUp | AskRepair | Resync | ForgetMember | Accuse

Command = ScheduleCommand | SupplyCommand | CommitCommand | SayHello | Count
