"""What a replica's core asks for. Commands name tensors, and never carry them."""

from dataclasses import dataclass

import msgspec

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.events import MemberGranted
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
class RunAhead:
    """The leader's choice: how many steps ahead of the version to run, and with how much in flight. -1: it has none."""

    steps_ahead: int
    gain: float


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


CommitCommand = Tell | Reduce | Report | Witness | CatchUp | AskRepair | Resync | ForgetMember
