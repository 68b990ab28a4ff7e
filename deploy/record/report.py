"""Defines the reports of a peer process to its parent: one JSON object a line on its standard output.

`shoal demo` reads them from its children. Every member of a stage's group reports each step (`Committed`), so the
parent hears of a step even if others die. The swarm's status and whole steps (`StepDone`) come from the coordinator.
"""

import sys
from collections.abc import Callable

import msgspec

from shoal.deploy.record.lines import StepLine, ValidationLine
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, SwarmStatus, ValidationReport


class _Report(msgspec.Struct, frozen=True, tag=True, tag_field="event", forbid_unknown_fields=True, kw_only=True):
    pass


class Ready(_Report, frozen=True):
    """The host is up; other peers can join."""

    peer: PeerID
    run: str
    invite: str


class Invites(_Report, frozen=True):
    """A new invite. It names other members of the run, too, so it works even after this process has ended."""

    peer: PeerID
    invite: str
    peers: int
    """The number of peers that the invite names."""


class Joined(_Report, frozen=True):
    """The process takes part in the run."""

    peer: PeerID
    name: str
    invite: str
    """An invite that leads to this process, so that others can join even if the host is dead."""


class Obeys(_Report, frozen=True):
    """The process follows a new plan."""

    term: int
    sequence: int
    coordinator: PeerID
    reason: str
    peers: int
    """The number of peers in the plan, standbys included."""
    stages: int = 0
    """The number of stages in the plan; 0: unknown."""
    era: int = 0
    restored: int = 0
    """The model version from which training began in the plan's era (training generation)."""


class Committed(_Report, frozen=True):
    """A group of which this process is a member has committed a step (`report`)."""

    report: CommitReport


class Validated(_Report, frozen=True):
    report: ValidationReport


class StepDone(_Report, frozen=True, kw_only=True):
    """A step that all stages have committed, reported by the coordinator (`coordinator.ledger.StepRecord`).

    A parent process needs this report only if some stage has no child of the parent; else `Committed` tells the step.
    """

    step: int
    """The number of the step, counted from 0."""
    loss: float | None
    validation_loss: float | None = None
    """The loss of the newest validation; None: the model was not validated since the previous step."""
    validation_step: int | None = None
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
    """The 2-norm of the whole model's reduced gradient before clipping; None: some group has not reported its part."""
    learning_rate: float | None = None


class Status(_Report, frozen=True):
    """The swarm's status. The coordinator reports it every second; other peers ask the coordinator more rarely."""

    status: SwarmStatus


class LimitsNow(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the peer's contribution that are in force now."""

    paused: bool = False
    why: str = ""
    caps: tuple[str, ...] = ()
    """The limits in words: `upload at most 5 Mbit/s`."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's contribution, measured by itself. `busy`, `sending` and `flop_per_s` are over the last ten seconds."""

    peer: PeerID
    name: str
    busy: float
    """The share of time in which the device computed, in [0, 1]."""
    sending: float
    """The share of time in which at least one frame to another peer was being sent, in [0, 1]."""
    flop_per_s: float
    flop_total: float
    microbatches_total: int
    """The number of forwards that this peer has computed; a microbatch that was tried again counts each time."""
    sent_bytes_total: float
    received_bytes_total: float
    """Bytes of all frames received since the start: activations, gradients, parts of all-reduces, state."""
    memory_bytes: int
    """The resident memory of this process in bytes; its network daemon is another process and does not count."""
    uptime_s: float
    limits: LimitsNow | None = None


class Contribution(Given, frozen=True, tag=True, tag_field="event", forbid_unknown_fields=True, kw_only=True):
    stage: int | None
    synced: bool
    waiting: int
    """Microbatches that wait in the queue of the device."""
    microbatches_per_s: float
    """Microbatches/s over the last minute."""
    links: tuple[tuple[PeerID, float, float], ...]
    """The busiest links over ten seconds, each as (other peer, bytes/s sent, bytes/s received)."""


class Recorded(_Report, frozen=True):
    """New lines of the run's record, from a peer that keeps a record or shows the page."""

    steps: tuple[StepLine, ...] = ()
    """Steps in order, each once. The first step of a new era (training generation) voids earlier lines from it on."""
    validations: tuple[ValidationLine, ...] = ()


class Summary(_Report, frozen=True):
    """A summary of the run, at the end of the process."""

    lines: tuple[str, ...]


class Note(_Report, frozen=True):
    """A sentence for people: a new plan, a leadership transfer, a lost peer."""

    text: str


class Phase(_Report, frozen=True):
    """A peer's activity before it trains, such as fetching its state. A phase without `part` ends the one before."""

    name: str
    part: float | None = None
    """The part of the phase that is over, in [0, 1]; None: unknown, or the phase has nothing to count."""
    left_s: float | None = None
    """Estimated seconds until the phase is done."""


class Left(_Report, frozen=True):
    """The process has drained; its snapshots are in `state_dir`."""

    peer: PeerID
    state_dir: str
    finished: bool


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


class Reporter:
    """Passes each report of a peer process to its listeners: a parent process or a person, the page, the record."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Report], None]] = []
        self.polls: Callable[[], bool] = lambda: False
        """Returns True if a listener needs the swarm's status even if this peer is not the coordinator."""

    def say(self, report: Report) -> None:
        for hear in self.listeners:
            hear(report)

    def note(self, text: str) -> None:
        self.say(Note(text=text))


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def write_report(report: Report) -> None:
    """Write `report` to standard output and flush. The parent's death needs no handling here: it ends this process."""
    sys.stdout.write(_ENCODER.encode(report).decode() + "\n")
    sys.stdout.flush()


def read_report(line: bytes) -> Report | None:
    """Decode a line of a peer's output; return None if it is no report (a library printed something)."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
