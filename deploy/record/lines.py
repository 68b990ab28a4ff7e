"""The record of a run: `<peer folder>/<run>/record.jsonl`, one JSON object a line.

| `kind` | one line for |
|---|---|
| `start` | a start of the peer that keeps the record |
| `step` | a step that every stage has committed |
| `validation` | a version of the model that was validated |
| `plan` | a plan that the peer obeys: who coordinates, why it changed, in how many stages |
| `peer` | a peer that came, went, or moved to another stage |
| `note` | a sentence for people |
| `end` | an end of the peer, with what the run had reached |

**Step.** `step` counts from 1: a line of step 17 says that seventeen steps are done, so the model is at version 17. A
validation's `step` is the version that was validated; version 0 is the model before the first step.

**Order.** Lines of steps come in order of (`era`, `step`), each once, across restarts. `era` says how often the run has
gone back to a snapshot. When that happens, steps are done again, with a higher era. The later one holds: lines of an
earlier era are void from the later era's first step on. `reading.read_record` applies this rule.

**Damage.** A line that does not decode was torn by a crash; readers pass over it. Later versions may add fields and
kinds, which readers pass over too.

**Time.** `time` is in seconds since 1970 on the clock of the peer that keeps the record; of a step it is when its last
stage committed it, as whoever saw that tells.
"""

import math
from typing import Final

import msgspec

from shoal.protocol.identity import PeerID

RECORD: Final = "record.jsonl"
"""The name of the file in a run's folder."""
_LOSS_MAX: Final = 80.0
"""Beyond it a perplexity says nothing: e^80 is 5e34."""


class _Line(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True, omit_defaults=True):
    time: float
    """Seconds since 1970."""


class StartLine(_Line, frozen=True, tag="start", kw_only=True):
    run: str
    name: str
    """The name of the run."""
    peer: PeerID
    """The peer that keeps the record."""
    peer_name: str
    steps: int
    """How many steps the whole run has."""
    tokens_per_step: int
    num_parameters: int
    num_layers: int
    optimizer: str
    version: str
    """The version of shoal."""
    fields: dict[str, str] = {}
    """Other facts of the run that a reader may want, by name, in words."""


class StepLine(_Line, frozen=True, tag="step", kw_only=True):
    step: int
    """How many steps are done, this one included."""
    era: int = 0
    loss: float | None = None
    """Mean over the step's microbatches with the weights before the step, in nats a token; None: nobody who is left
    knows it."""
    perplexity: float | None = None
    learning_rate: float
    gradient_norm: float | None = None
    """2-norm of the whole model's reduced gradient before clipping; None: a group has not told its part."""
    gradient_norms: tuple[float | None, ...] = ()
    """The same norm of each stage."""
    tokens: int
    """Tokens on which this step was trained (on which all steps were, for which the line stands)."""
    tokens_per_s: float | None = None
    """Tokens/s over the last `book.RATE_S`, standstills included; None: there is no step before this one."""
    foreseen_tokens_per_s: float | None = None
    """What the plan of that time foresaw; None: the peer did not hear of that plan while the step was made."""
    staleness: float
    """The staleness in steps, the mean over the stages."""
    peers: int
    """How many peers made the step: the members of all stages."""
    given_up: int = 0
    """Microbatches without which the step was made, summed over the stages."""
    duplicates: int = 0
    """Microbatches that were computed twice, summed over the stages."""
    dissenting: int = 0
    """How many members had another state than their group after the commit."""
    unheard: int = 0
    """How many groups have no report that anybody in the run still has."""
    steps: int = 1
    """How many steps the line stands for, up to `step`: more than one once an old part of a record was thinned."""


class ValidationLine(_Line, frozen=True, tag="validation", kw_only=True):
    step: int
    """The version that was validated."""
    era: int = 0
    loss: float
    perplexity: float | None = None
    microbatches: int


class PlanLine(_Line, frozen=True, tag="plan", kw_only=True):
    term: int
    sequence: int
    era: int = 0
    restored: int = 0
    """The version with which the era began."""
    coordinator: PeerID
    reason: str
    peers: int = 0
    """How many peers the plan has, spares included; 0: it is not known, as of a plan of which the peer only heard."""
    stages: int = 0


class PeerLine(_Line, frozen=True, tag="peer", kw_only=True):
    peer: PeerID
    name: str
    device: str = ""
    change: str
    """`joined`, `moved`, `left`."""
    stage: int | None = None
    """The stage at which the peer works from now on; None: it is a spare, or gone."""


class NoteLine(_Line, frozen=True, tag="note", kw_only=True):
    text: str


class EndLine(_Line, frozen=True, tag="end", kw_only=True):
    step: int
    """Steps done."""
    finished: bool
    """Whether the run has reached its last step."""
    lost: int = 0
    """Steps that have no line though they were done while this peer was up or away: nobody who is left knew them."""


Line = StartLine | StepLine | ValidationLine | PlanLine | PeerLine | NoteLine | EndLine

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    """Encode a line, with its newline."""
    return _ENCODER.encode(line) + b"\n"


def decode_line(data: bytes) -> Line | None:
    """Decode a line. None: it was torn, or is of a kind that this version does not know."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def perplexity(loss: float | None) -> float | None:
    """e^loss, for a loss in nats a token; None: there is none, or it is not finite."""
    return math.exp(min(loss, _LOSS_MAX)) if loss is not None and math.isfinite(loss) else None
