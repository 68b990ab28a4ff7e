"""What a peer process tells the process that started it: one JSON object a line on its standard output.

`shoal demo` reads these from its children. Every member of every stage group says by itself what a step was, so that
any of them may die, the coordinator included. Only the table of the whole swarm comes from the coordinator.
"""

import sys

import msgspec

from shoal.deploy.record.lines import StepLine, ValidationLine
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, SwarmStatus, ValidationReport


class _Report(msgspec.Struct, frozen=True, tag=True, tag_field="event", forbid_unknown_fields=True, kw_only=True):
    pass


class Ready(_Report, frozen=True):
    """The host is up; others may join."""

    peer: PeerID
    run: str
    invite: str


class Invites(_Report, frozen=True):
    """There is an invite that works without this process: it names other members, too."""

    peer: PeerID
    invite: str
    peers: int
    """How many it names."""


class Joined(_Report, frozen=True):
    """The process takes part."""

    peer: PeerID
    name: str
    invite: str
    """An invite with the process's own address, since the host's may be dead."""


class Obeys(_Report, frozen=True):
    """The process follows another plan."""

    term: int
    sequence: int
    coordinator: PeerID
    reason: str
    peers: int
    """How many peers the plan has, spares included."""
    stages: int = 0
    """How many stages the plan has; 0: not told."""
    era: int = 0
    restored: int = 0
    """The version with which the era began."""


class Committed(_Report, frozen=True):
    """A stage group in which the process is has committed a step, and its members agree."""

    report: CommitReport


class Validated(_Report, frozen=True):
    """The process led the validation of a version."""

    report: ValidationReport


class StepDone(_Report, frozen=True, kw_only=True):
    """A step that all stages have committed; from whoever coordinates (`coordinator.ledger.StepRecord`).

    For a parent whose children have no part in some stage; it knows the other steps from `Committed`.
    """

    step: int
    """The number of the step, from 0."""
    loss: float | None
    validation_loss: float | None = None
    """The loss of the newest validation, if there is one since the step before."""
    validation_step: int | None = None
    """The version that it validated."""
    tokens_per_s: float = 0.0
    staleness_mean: float
    duplicates: int
    given_up: int
    dissenting: int
    era: int
    term: int = 0
    peers: int = 0
    coordinator: PeerID = PeerID("")
    gradient_norm: float | None = None
    """2-norm of the whole model's reduced gradient before clipping; None: not every group has told its part."""
    learning_rate: float | None = None
    """The learning rate of the step; None: it is not known here."""


class Status(_Report, frozen=True):
    """The swarm's status: every second from the coordinator, more rarely from others, who ask it."""

    status: SwarmStatus


class LimitsNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the person at a peer's machine has set, as far as it bounds what the peer gives now."""

    paused: bool = False
    why: str = ""
    """The reason of the pause, for people."""
    caps: tuple[str, ...] = ()
    """The limits in words: `upload at most 5 Mbit/s`."""


class Contribution(_Report, frozen=True):
    """What a peer gives, by its own measurements. Rates and shares are over the last ten seconds, that of microbatches
    over the last minute."""

    peer: PeerID
    name: str
    stage: int | None
    synced: bool
    """Whether the peer holds its stage's state."""
    busy: float
    """Share of the time in which the device computed."""
    sending: float
    """Share of the time in which a frame was on its way out, to whomever."""
    waiting: int
    """Microbatches that stand here until the device has time."""
    flop_per_s: float
    microbatches_per_s: float
    flop_total: float
    microbatches_total: int
    """How many forwards the peer computed, a microbatch that came again included."""
    sent_bytes_total: float
    received_bytes_total: float
    """Bytes of frames: activations, gradients, parts of reductions, state."""
    links: tuple[tuple[PeerID, float, float], ...]
    """(peer, bytes/s sent, bytes/s received) of the busiest links."""
    memory_bytes: int
    """The resident memory of the process without its network daemon."""
    uptime_s: float
    limits: LimitsNow | None = None


class Recorded(_Report, frozen=True):
    """What the record of the run has grown by. A peer says it that keeps a record or shows the run."""

    steps: tuple[StepLine, ...] = ()
    """The steps in order, each once. Steps of a later era replace the earlier ones from there on."""
    validations: tuple[ValidationLine, ...] = ()


class Summary(_Report, frozen=True):
    """The run as a whole, at the end of the process."""

    lines: tuple[str, ...]
    """Lines for people."""


class Note(_Report, frozen=True):
    """A sentence for people: a plan, a hand-over, a peer lost."""

    text: str


class Phase(_Report, frozen=True):
    """What a peer does now that does not train yet. A phase without a part ends the one before."""

    name: str
    part: float | None = None
    """The part that is done, in [0, 1]."""
    left_s: float | None = None
    """Seconds until the phase is done, by its pace so far."""


class Left(_Report, frozen=True):
    """The process has drained; its snapshots are in `state_dir`."""

    peer: PeerID
    state_dir: str
    finished: bool
    """The run had reached its last step."""


Report = (
    Ready
    | Invites
    | Joined
    | Obeys
    | Committed
    | Validated
    | StepDone
    | Status
    | Contribution
    | Recorded
    | Summary
    | Note
    | Phase
    | Left
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def write_report(report: Report) -> None:
    """Write to standard output, at once. A parent that is gone is noticed elsewhere (it takes us with it)."""
    sys.stdout.write(_ENCODER.encode(report).decode() + "\n")
    sys.stdout.flush()


def read_report(line: bytes) -> Report | None:
    """Read one line. None: it is no report (a library printed something)."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
