"""Defines the record of a run: `<peer folder>/<run>/record.jsonl`, one JSON object a line.

| `kind` | one line for |
|---|---|
| `start` | a start of the peer that keeps the record |
| `step` | a step that every stage has committed |
| `validation` | a version of the model that was validated |
| `plan` | a plan that the peer obeys: coordinator, reason, number of stages |
| `peer` | a peer that came, went, or moved to another stage |
| `note` | a sentence for people |
| `end` | an end of the peer, with the step that the run had reached |

**Step.** `step` counts from 1: after the line of step 17, seventeen steps are done and the model is at version 17. A
validation's `step` is the version that was validated; version 0 is the model before the first step.

**Order.** Lines of steps are ordered by (`era`, `step`), each once, across restarts. `era` (the training generation)
counts how often the run has restarted from a snapshot or with other stages. If the run went back, steps are repeated
with a higher era: lines of an earlier era are void from the later era's first step on (`reading.read_record`).

**Damage.** A line that does not decode was torn by a crash; readers skip it. Later versions may add fields and kinds,
which readers skip too.

**Time.** `time` is in seconds since 1970 on the clock of the peer that keeps the record. A step's time is when the last
of its groups committed it, as members report.
"""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from shoal.protocol.identity import PeerID

RECORD: Final = "record.jsonl"


class _Line(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True, omit_defaults=True):
    time: float
    """Seconds since 1970."""


class StartLine(_Line, frozen=True, tag="start", kw_only=True):
    run: str
    name: str
    peer: PeerID
    """The peer that keeps the record."""
    peer_name: str
    steps: int
    tokens_per_step: int
    num_parameters: int
    num_layers: int
    optimizer: str
    version: str
    fields: dict[str, str] = {}
    """Further facts of the run: name -> text."""


class StepLine(_Line, frozen=True, tag="step", kw_only=True):
    step: int
    """The number of steps that are done, this one included."""
    era: int = 0
    loss: float | None = None
    """The mean loss of the microbatches, in nats a token, with the weights before the step; None: unknown."""
    perplexity: float | None = None
    learning_rate: float | None
    """The step's learning rate; None: this peer lacks the run's spec, and so writes no record."""
    gradient_norm: float | None = None
    """The 2-norm of the whole model's reduced gradient before clipping; None: a group has not reported its part."""
    gradient_norms: tuple[float | None, ...] = ()
    """The 2-norm of the gradient of each stage, by stage; None: unknown."""
    tokens: int
    """The tokens of this step, or of all the steps that the line stands for."""
    tokens_per_s: float | None = None
    """Tokens/s over the last 30 s (`book.RATE_S`), standstills included; None: first step since the peer's start."""
    foreseen_tokens_per_s: float | None = None
    """The tokens/s that the coordinator predicted for the plan of this step; None: this peer has not heard of it."""
    staleness: float
    """The staleness of the gradients in steps, averaged over the stages."""
    peers: int
    """The number of peers in the groups of all stages."""
    given_up: int = 0
    """Microbatches that groups left out of the step's gradient, summed over the groups."""
    duplicates: int = 0
    """Microbatches computed twice, summed over the groups."""
    dissenting: int = 0
    """How many members, over all groups, had other weights after the step than the rest of their group."""
    unheard: int = 0
    """The number of groups that committed the step, but of which no remaining peer has a report."""
    steps: int = 1
    """The number of steps that this line covers, up to `step`: 1, or more in an old part with merged lines."""


class ValidationLine(_Line, frozen=True, tag="validation", kw_only=True):
    step: int
    era: int = 0
    loss: float
    perplexity: float | None = None
    microbatches: int


class PlanLine(_Line, frozen=True, tag="plan", kw_only=True):
    term: int
    sequence: int
    era: int = 0
    restored: int = 0
    """The model version from which training began in the plan's era (training generation)."""
    coordinator: PeerID
    reason: str
    peers: int = 0
    """The number of peers in the plan, standbys included; 0: unknown, as this peer had no copy of the plan itself."""
    stages: int = 0


class PeerLine(_Line, frozen=True, tag="peer", kw_only=True):
    peer: PeerID
    name: str
    device: str = ""
    change: str
    """`joined`, `moved`, `left`."""
    stage: int | None = None
    """The stage to which the peer belongs from now on; None: it stands by, or has left."""


class NoteLine(_Line, frozen=True, tag="note", kw_only=True):
    text: str


class EndLine(_Line, frozen=True, tag="end", kw_only=True):
    step: int
    finished: bool
    lost: int = 0
    """The number of steps that have no line, because no remaining peer knew them."""


Line = StartLine | StepLine | ValidationLine | PlanLine | PeerLine | NoteLine | EndLine

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    return _ENCODER.encode(line) + b"\n"


def decode_line(data: bytes) -> Line | None:
    """Decode a line of a record; return None if it is torn or of an unknown kind."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


point_of = attrgetter("time", "step", "loss", "tokens_per_s", "staleness", "learning_rate", "gradient_norm")
"""Takes a step line. Returns a tuple of the fields that the plots show, ordered like `COLUMNS` in `charts.js`."""


def perplexity(loss: float | None) -> float | None:
    """Return e^loss for a loss in nats per token, at most e^80; None if `loss` is None or not finite."""
    return math.exp(min(loss, 80.0)) if loss is not None and math.isfinite(loss) else None


def merged(steps: Sequence[StepLine]) -> StepLine:
    """Merge consecutive step lines of one era: counts are added, other figures averaged over all steps."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [(value, line.steps) for value, line in zip(values, steps, strict=True) if value is not None]
        return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None

    loss = mean(line.loss for line in steps)
    return msgspec.structs.replace(
        steps[-1],
        steps=sum(line.steps for line in steps),
        loss=loss,
        perplexity=perplexity(loss),
        gradient_norm=mean(line.gradient_norm for line in steps),
        gradient_norms=(),
        tokens=sum(line.tokens for line in steps),
        tokens_per_s=mean(line.tokens_per_s for line in steps),
        staleness=mean(line.staleness for line in steps) or 0.0,
        given_up=sum(line.given_up for line in steps),
        duplicates=sum(line.duplicates for line in steps),
        dissenting=sum(line.dissenting for line in steps),
        unheard=sum(line.unheard for line in steps),
    )
