"""Chooses what a run spec takes where its author says nothing, by rules that follow the model's size. Pure.

`fill_in` puts numbers in the place of fields that a run file leaves out, or sets to "auto", before it becomes a
`RunSpec`. So a `RunSpec` has numbers there: peers agree on what was chosen, and never on a rule. `advice.py` compares
what a spec says with the same rules. No rule chooses `swarm.stages`: "auto" leaves it to the swarm's coordinator.

| field | rule | source |
|---|---|---|
| num_heads | heads of 64, from a width of 2,048 on of 128 | Llama, GPT-3 table 2.1 (2005.14165) |
| num_kv_heads | all heads, at most 8 | grouped-query attention (2305.13245), as Llama 3 |
| ffn_dim | 8/3 of the width, rounded up | SwiGLU (2002.05202, section 2), Llama (2302.13971) |
| tokens a step | 0.58 (20 N)^0.571 | Step Law (2503.04715), at 20 tokens a parameter (2203.15556) |
| microbatches | at least 4 a stage | GPipe (1811.06965): the bubble hardly shows from there on |
| learning_rate | 0.3118 C^-0.125, less for small steps | DeepSeek LLM (2401.02954, equation 1) |
| warmup_steps | 2 / (1 - beta2), 1 % of a long run | untuned warm-up (1910.04209, section 5) |

N are the parameters of the decoder layers that a token passes, C the FLOP of the whole run. A step is as large as suits
a run of 20 N tokens, however long the run itself is: it should be worth its reduction over slow links.
`tests/bench/rates.py` trains models of several sizes by these rules; MEASURED.md says what came of it, and what is
extrapolated.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shoal.protocol.limits import DIM_MAX, MICROBATCHES_PER_STEP_MAX, STREAM_CREDIT_BYTES
from shoal.protocol.spec import RunSpec

AUTO: Final = "auto"
"""A run file that has this value says as much as one without the field."""

TOKENS_PER_PARAMETER: Final = 20.0
"""2203.15556 (Chinchilla), table 3, rounded."""
_WIDE: Final = 2048
"""Models of this width and more have heads of 128."""
_KV_HEADS_MAX: Final = 8
_NARROW: Final = 1024
"""Below this width `ffn_dim` is a multiple of 32, so that a model of 128 is not made half as wide again by rounding."""
MICROBATCHES_PER_STAGE: Final = 4
_MICROBATCHES_MIN: Final = 8
_WARMUP_SHARE: Final = 0.01
_WARMUP_STEPS_MAX: Final = 2000
"""DeepSeek LLM, Step Law and Llama all warm up for so many."""
_WARMUP_SHARE_MAX: Final = 0.1
_TUNING: Final = 1 / 15
"""Weights that are good already take this share of the rate from scratch: Llama 2 of 7 B has 3e-4, and 2e-5 to be tuned
(2307.09288, sections 2.2 and 3.1)."""
_ADAPTING: Final = 10 / 15
"""Adapters take ten times the rate at which all weights are tuned: QLoRA has 2e-4 for 7 B (2305.14314, table 9)."""
_SHORT: Final = 2.5
"""A run with a 1,500th of 20 N tokens takes this multiple of the rate."""
STAGES_FED: Final = 3
"""A step of a run whose number of stages is free is cut into microbatches for so many. The swarm may come to have more:
two microbatches a stage still keep six of them busy."""
_SAID_MAX: Final = 2**40
"""What a rule reckons with. Nothing in a spec may be as large, which whoever decodes the tables says."""
_SGD_RATE: Final = 4e-3
"""No law is known to us for the rate of SGD on language models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledField:
    """One field that a rule has filled in."""

    field: str
    """`optimizer.learning_rate`."""
    value: int | float
    why: str
    """The reason, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a model, as the laws count it."""

    parameters: float
    """N: of the decoder layers, of experts those that a token passes."""
    flop_per_token: float
    """M: forward and backward of the decoder layers, attention as if it looked at the whole context (2401.02954,
    equation 2)."""

    @property
    def tokens(self) -> float:
        """The tokens from which a model of this size learns most for its arithmetic."""
        return TOKENS_PER_PARAMETER * self.parameters


def model_size(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_dim: int,
    context: int,
    experts: int = 1,
    head_size: int | None = None,
    written_width: int | None = None,
) -> Size:
    """Args:
    experts: that a token passes in each layer; 1 in a dense model.
    head_size: None: dim / num_heads.
    written_width: `ModelSpec.written_width`; None: dim.
    """
    head_dim = dim / num_heads if head_size is None else head_size
    q_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
    both = dim + (dim if written_width is None else written_width)
    parameters = num_layers * (both * q_dim + 2.0 * dim * kv_dim + (dim + both) * ffn_dim * experts)
    return Size(parameters=parameters, flop_per_token=6.0 * parameters + 12.0 * num_layers * q_dim * context)


def size_of(spec: RunSpec) -> Size:
    model = spec.model
    return model_size(
        dim=model.dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        ffn_dim=model.ffn_dim,
        context=model.context,
        experts=model.experts_computed,
        head_size=model.head_size,
        written_width=model.written_width,
    )


def heads_of(dim: int) -> int:
    """Query heads whose size is even, divides `dim`, and is as near to 64 as that allows (128 for wide models)."""
    wanted = 128 if dim >= _WIDE else 64
    sizes = [size for size in range(2, dim + 1, 2) if dim % size == 0] or [dim]
    return dim // min(sizes, key=lambda size: (abs(math.log(size / wanted)), size))


def kv_heads_of(num_heads: int) -> int:
    """Key and value heads: the most that divide `num_heads`, at most 8."""
    return max(number for number in range(1, min(num_heads, _KV_HEADS_MAX) + 1) if num_heads % number == 0)


def ffn_dim_of(dim: int) -> int:
    """Hidden width of SwiGLU, whose three matrices are then as large as two of 4 D² are."""
    multiple = 32 if dim < _NARROW else 256
    return multiple * math.ceil(8 * dim / 3 / multiple)


def batch_tokens_of(size: Size) -> float:
    """Tokens a step."""
    return float(0.58 * size.tokens**0.571)


def learning_rate_of(
    size: Size,
    *,
    tokens_per_step: float,
    steps: int,
    optimizer: str = "nadam",
    tunes: bool = False,
    adapts: bool = False,
) -> float:
    """The peak of the schedule, to two digits.

    Steps smaller than `batch_tokens_of` take less, by the square root (2205.10287, section 4; 2405.14578); larger ones
    do not take more, where the law's own optimum is flat. The law is of runs of 1e17 FLOP and more; a shorter run takes
    at most `_SHORT` times what one of 20 N tokens does.

    Args:
        steps: of the whole run.
        optimizer: its name in the run spec. Muon's is AdamW's (2502.16982), and so is NAdam's; none is known for SGD.
        tunes: the run begins with weights that are good already.
        adapts: it trains adapters beside such weights.
    """
    if optimizer == "sgd":
        return _SGD_RATE
    rate = 0.3118 * (size.flop_per_token * size.tokens) ** -0.125
    rate *= min(_SHORT, (size.tokens / (tokens_per_step * steps)) ** 0.125)
    rate *= min(1.0, math.sqrt(tokens_per_step / batch_tokens_of(size)))
    return _two_digits(rate * (_ADAPTING if adapts else _TUNING if tunes else 1.0))


def warmup_steps_of(steps: int, *, beta2: float) -> int:
    """Steps until the rate's peak: the memory of Adam's second moment twice over, 1 % of a long run, and at most a
    tenth of a short one. The same for all runs of 400 to 4,000 steps with a `beta2` of 0.95."""
    wanted = max(2.0 / (1.0 - beta2), _WARMUP_SHARE * steps)
    return round(min(wanted, _WARMUP_STEPS_MAX, _WARMUP_SHARE_MAX * steps))


def stages_fed(stages: int | None, *, num_layers: int) -> int:
    """How many stages a step's microbatches are to keep busy. Args: stages: of the run; None: their number is free."""
    return min(STAGES_FED, num_layers) if stages is None else stages


def microbatches_of(
    tokens: float,
    *,
    context: int,
    stages: int,
    dim: int,
    experts: int = 1,
    number: int | None = None,
    samples: int | None = None,
) -> tuple[int, int]:
    """Cut a step of about `tokens` into microbatches.

    Args:
        dim: numbers a token of an activation, which must not be more than a stream takes at once.
        experts: that each token is sent to, so many times its activation.
        number: of microbatches, if its author has said it.
        samples: of one microbatch, likewise.
    Returns: (microbatches a step, samples of each).
    """
    all_samples = max(1, round(tokens / context))
    least = max(_MICROBATCHES_MIN, MICROBATCHES_PER_STAGE * stages)
    if samples is None:
        fits = max(1, STREAM_CREDIT_BYTES // (4 * dim * context * experts))
        samples = min(fits, max(1, round(all_samples / (number or least))))
    if number is None:
        number = min(MICROBATCHES_PER_STEP_MAX, max(round(all_samples / samples), 2 * stages))
    return number, samples


def fill_in(tables: Mapping[str, Any], base: RunSpec) -> tuple[dict[str, Any], tuple[FilledField, ...]]:
    """The tables of a run file with a number in the place of each field that it leaves to a rule.

    What is of a wrong type or impossible is left as it is: whoever decodes the tables says what is wrong with them.

    Args:
        tables: as TOML has them.
        base: what the fields are that no rule is about, where `tables` does not say.
    Returns: the tables, and what was chosen, in an order to be read in.
    """
    filling = _Filling(tables, base)
    dim, context, num_layers = (filling.number(f"model.{name}") for name in ("dim", "context", "num_layers"))
    heads = filling.choose("model.num_heads", heads_of(dim), "heads of 64, or of 128 in a wide model")
    kv_heads = filling.choose("model.num_kv_heads", kv_heads_of(heads), "as many as there are heads, at most 8")
    ffn_dim = filling.choose("model.ffn_dim", ffn_dim_of(dim), f"8/3 of dim {dim}, rounded up")
    has_experts = filling.number("model.num_experts", least=0) > 0
    experts = filling.number("model.experts_per_token") if has_experts else 1
    written = min(dim, filling.number("model.subspace", least=0) or dim)
    size = model_size(
        dim=dim,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        context=context,
        experts=experts,
        head_size=filling.said("model.head_size"),
        written_width=written,
    )
    batch = batch_tokens_of(size)
    number, samples = microbatches_of(
        batch,
        context=context,
        stages=stages_fed(filling.said("swarm.stages"), num_layers=num_layers),
        dim=written,
        experts=experts,
        number=filling.said("training.microbatches_per_step"),
        samples=filling.said("training.microbatch_size"),
    )
    told = f"{number} x {samples} samples are {thousands(number * samples * context)} tokens a step"
    law = f"{told}; Step Law takes {thousands(batch)} for {millions(size.parameters)} parameters"
    number = filling.choose("training.microbatches_per_step", number, law)
    samples = filling.choose("training.microbatch_size", samples, law)
    optimizer = filling.text("optimizer.name")
    tunes, adapts = bool(filling.table("initial").get("digests")), bool(filling.table("adapter"))
    steps, tokens = filling.number("training.steps"), number * samples * context
    rate = learning_rate_of(
        size, tokens_per_step=float(tokens), steps=steps, optimizer=optimizer, tunes=tunes, adapts=adapts
    )
    why = _why_rate(size, tokens * steps, optimizer=optimizer, tunes=tunes, adapts=adapts)
    filling.choose("optimizer.learning_rate", rate, why)
    warmup = warmup_steps_of(steps, beta2=filling.share("optimizer.beta2"))
    filling.choose("optimizer.warmup_steps", warmup, "2 / (1 - beta2) steps, 1 % of a long run, 10 % of a short one")
    return filling.tables, tuple(filling.choices)


def in_words(choices: tuple[FilledField, ...], spec: RunSpec) -> tuple[str, ...]:
    """Say what was chosen and why, a line each; empty: the author has said everything."""
    if not choices:
        return ()
    lines = [f"the run file leaves these to shoal ({millions(size_of(spec).parameters)} parameters in the layers):"]
    told: set[str] = set()
    for choice in choices:
        if choice.why not in told:
            lines.append(f"  {choice.field} = {_number(choice.value)}: {choice.why}")
        else:
            lines[-1] = lines[-1].replace(":", f", {choice.field} = {_number(choice.value)}:", 1)
        told.add(choice.why)
    return tuple(lines)


class _Filling:
    """The tables of a run file while they are filled in."""

    def __init__(self, tables: Mapping[str, Any], base: RunSpec) -> None:
        self.tables: dict[str, Any] = copy.deepcopy(dict(tables))
        self.choices: list[FilledField] = []
        self._base = base

    def table(self, section: str) -> dict[str, Any]:
        """Give the table of this name; it is empty if there is none, or if what is there is no table."""
        found = self.tables.get(section, {})
        return found if isinstance(found, dict) else {}

    def said(self, path: str) -> int | None:
        """Give the positive number that the file says; None: the file leaves it to a rule, or says what cannot be."""
        section, _, name = path.partition(".")
        value = self.table(section).get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _SAID_MAX else None

    def number(self, path: str, *, least: int = 1) -> int:
        section, _, name = path.partition(".")
        value = self.table(section).get(name)
        most = DIM_MAX if path == "model.dim" else _SAID_MAX
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return int(value if fits else getattr(getattr(self._base, section), name))  # type: ignore[arg-type]

    def share(self, path: str) -> float:
        section, _, name = path.partition(".")
        value = self.table(section).get(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        return float(value if fits else getattr(getattr(self._base, section), name))  # type: ignore[arg-type]

    def text(self, path: str) -> str:
        section, _, name = path.partition(".")
        value = self.table(section).get(name)
        return value if isinstance(value, str) else str(getattr(getattr(self._base, section), name))

    def choose(self, path: str, value: Any, why: str) -> Any:
        """Returns: what the file says, or `value`, which is then put there."""
        section, _, name = path.partition(".")
        table = self.tables.setdefault(section, {})
        if not isinstance(table, dict) or (name in table and table[name] != AUTO):
            return self.said(path) or value
        table[name] = value
        self.choices.append(FilledField(field=path, value=value, why=why))
        return value


def _why_rate(size: Size, tokens: float, *, optimizer: str, tunes: bool, adapts: bool) -> str:
    if optimizer == "sgd":
        return "no rule is known for sgd: try some"
    law = f"DeepSeek LLM's law for {millions(size.parameters)} parameters and {millions(tokens)} tokens, in such steps"
    if adapts:
        return f"two thirds of {law}, as only adapters are trained: ten times the rate at which all weights are tuned"
    return f"a fifteenth of {law}, as it begins with weights that are good already" if tunes else law


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def _number(value: float) -> str:
    return f"{value:g}"


def thousands(value: float) -> str:
    return f"{value:,.0f}"


def millions(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f}"
