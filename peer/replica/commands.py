"""What a replica's core asks for. Commands name tensors, and never carry them."""

from dataclasses import dataclass

import msgspec

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ValidationReport, ValidationResult


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
class NoteGranted:
    """Whoever leads the group must know that `peer` makes `microbatch`: the peer's own word may die with it."""

    peer: PeerID
    microbatch: Microbatch


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
    Answer | SendClaim | DropClaim | Make | NoteGranted | RunAhead | HandOut | TellValidation | ReportValidation
)
