"""Commands of a replica's core to its driver. A command names tensors, but carries none."""

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
    """Answer the open call with the number `call`."""

    call: int
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class AnnouncePresence:
    """Send our changed presence (place and state) to the adjacent stages and the group."""


@dataclass(frozen=True, slots=True)
class Count:
    """Add a microbatch's gradient to its step's sum. If `counted.held_out` is True and there is room, keep the gradient
    apart from the sum instead. Then pass `counted` back to the core as an event, with `held_out` set to what was done;
    if the step is over, pass nothing."""

    counted: GradientCounted
    retried: bool


# --- microbatches ---


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send the output of the forward of `microbatch` to `target`; `retried`: the microbatch may have run before."""

    microbatch: Microbatch
    target: PeerID
    retried: bool = False


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the gradient of `microbatch` to `target`; for a validation microbatch, its loss.

    `waited_s`: time that the microbatch stood in queues of this and all later stages, forward and backward. `commit_s`:
    duration of a commit in the slowest of these stages.
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
    """Free the tensors that are kept for the microbatch: no peer will ask for these any more."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class RejectMicrobatch:
    """Tell `target` that we will not compute the microbatch, so that `target` sends it elsewhere. If `target` is None,
    tell stage 0's leader, which granted the microbatch. `begun`: the microbatch may have run already."""

    microbatch: Microbatch
    target: PeerID | None
    begun: bool


ScheduleCommand = Job | SendActivation | SendGradient | Contributed | Finished | Forget | RejectMicrobatch


# --- the supply of microbatches, at stage 0 ---


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Ask `leader` for up to `count` microbatches (a claim). At most one claim is open at a time."""

    leader: PeerID
    count: int


@dataclass(frozen=True, slots=True)
class DropClaim:
    """Drop our open request for microbatches: an answer would no longer be useful."""


@dataclass(frozen=True, slots=True)
class Make:
    """Run `microbatch` through the pipeline; `retried`: the microbatch may have run before."""

    microbatch: Microbatch
    retried: bool


@dataclass(frozen=True, slots=True)
class MemberGranted:
    """Tell the group's core that `microbatch` was granted to `peer`, so that it runs again if `peer` dies."""

    peer: PeerID
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class HandOut:
    """Ask `member` to run these microbatches of one step again."""

    member: PeerID
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class TellValidation:
    """Tell `leader` the loss of one validation microbatch."""

    leader: PeerID
    result: ValidationResult


@dataclass(frozen=True, slots=True)
class ReportValidation:
    """Report the validation of a version to the coordinator: the losses of all its microbatches are here."""

    report: ValidationReport


QueueCommand = (
    Answer | SendClaim | DropClaim | Make | MemberGranted | RunAhead | HandOut | TellValidation | ReportValidation
)

# --- commits ---


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to all other members, or only to member `to`. `can_wait`: only the leader must get it at once; it
    may reach the others seconds later. `can_rest` (only with `can_wait`): it may reach the leader later, too
    (`telling.py`)."""

    message: Progress | RoundStart | Digest
    can_wait: bool = False
    can_rest: bool = False
    to: PeerID | None = None


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this round; it replaces older rounds of the same step."""

    round: RoundStart


@dataclass(frozen=True, slots=True)
class Report:
    """Report the group's agreed commit to the coordinator."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class Witness:
    """Show our group's commit to observers in this process; another member reports it to the coordinator."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Fetch the reduced gradient of `step` from `mate`, which has made that step: we missed the end of the round."""

    mate: PeerID
    step: int


@dataclass(frozen=True, slots=True)
class AskRepair:
    """Ask stage 0 to run microbatches of `step` again (`indices`: a bitmap): a replica died with its contributions."""

    step: int
    indices: bytes


@dataclass(frozen=True, slots=True)
class Resync:
    """Fetch the group's state at `version` from `mate`, because our own state differs."""

    mate: PeerID
    version: int


@dataclass(frozen=True, slots=True)
class ForgetMember:
    """Drop unsent messages to `peer` and give up fetches from it, since it died, left the group, or has restarted."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class Accuse:
    """Report `peer`, which restarts again and again and is barred from the group."""

    peer: PeerID


CommitCommand = Tell | Reduce | Report | Witness | CatchUp | AskRepair | Resync | ForgetMember | Accuse

Command = ScheduleCommand | QueueCommand | CommitCommand | AnnouncePresence | Count
