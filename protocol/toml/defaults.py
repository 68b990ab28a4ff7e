"""Default values for a run spec, by rules that follow the model's size. Pure.

`fill_in` puts a number into each field that a run file leaves out or sets to "auto", before the file becomes a
`RunSpec`. So peers agree on numbers and never on a rule. `advice.py` compares a spec with the same rules. No rule
chooses `swarm.stages`: with "auto", the swarm's coordinator chooses the number of stages.

| field | rule | source |
|---|---|---|
| num_heads | heads of size 64; of size 128 if the width is 2,048 or more | Llama, GPT-3 table 2.1 (2005.14165) |
| num_kv_heads | all heads, at most 8 | grouped-query attention (2305.13245), as Llama 3 |
| ffn_dim | 8/3 of the width, rounded up | SwiGLU (2002.05202, section 2), Llama (2302.13971) |
| tokens a step | 0.58 (20 N)^0.571 | Step Law (2503.04715), at 20 tokens a parameter (2203.15556) |
| microbatches | at least 4 a stage | GPipe (1811.06965): with so many the pipeline bubble is small |
| learning_rate | 0.3118 C^-0.125, less for small steps | DeepSeek LLM (2401.02954, equation 1) |
| warmup_steps | 2 / (1 - beta2), 1 % of a long run | untuned warm-up (1910.04209, section 5) |

N is the number of parameters in the decoder layers that a token passes, C the FLOP of the run. The tokens of a step are
those for a run of 20 N tokens, however long the run is: a step must be worth its all-reduce over slow links.
`tests/bench/rates.py` trains models of several sizes by these rules; `protocol/MEASURED.md` has the results, and says
what is extrapolated.
"""

import copy
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from shoal.protocol.limits import DIM_MAX, MICROBATCHES_PER_STEP_MAX, STREAM_CREDIT_BYTES
from shoal.protocol.spec import ModelSpec, RunSpec

AUTO: Final = "auto"
"""The value of a field that means the same as leaving the field out."""

TOKENS_PER_PARAMETER: Final = 20.0
"""Compute-optimal training tokens for each parameter: Chinchilla (2203.15556), table 3, rounded."""
MICROBATCHES_PER_STAGE: Final = 4
_TUNING: Final = 1 / 15
"""Learning rate for tuning all weights / for training from scratch: Llama 2 7B has 2e-5 and 3e-4 (2307.09288)."""
_ADAPTING: Final = 10 / 15
"""Learning rate for adapters / for training from scratch: ten times `_TUNING`. So a model trained with 3e-4 gets 2e-4,
as QLoRA 7B has (2305.14314, table 9)."""
_SHORT: Final = 2.5
"""Largest factor by which the learning rate rises because a run is short: reached at 1/1,500 of 20 N tokens."""
STAGES_FED: Final = 3
"""Number of stages that a step's microbatches are to keep busy if a run leaves the number of stages open. A swarm with
more stages still works: at two microbatches a stage, six stages are busy."""
_SAID_MAX: Final = 2**40
"""Largest number that the rules read in a run file. The decoder refuses larger ones in every field."""


Model = ModelSpec | SimpleNamespace
"""A model; while its fields are incomplete, a namespace with the numbers that the rules need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledField:
    """One field that a rule filled in."""

    field: str
    """The path of the field in the run spec, such as `optimizer.learning_rate`."""
    value: int | float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a model, as scaling laws count it."""

    parameters: float
    """N: the parameters of the decoder layers, of experts only those that a token passes."""
    flop_per_token: float
    """M: FLOP of the decoder layers' forward and backward, with attention to the whole context (2401.02954, eq. 2)."""

    @property
    def tokens(self) -> float:
        """The compute-optimal number of training tokens for a model of this size."""
        return TOKENS_PER_PARAMETER * self.parameters


def size_of(model: Model) -> Size:
    head_dim = model.dim / model.num_heads if model.head_size is None else model.head_size
    q_dim, kv_dim, both = model.num_heads * head_dim, model.num_kv_heads * head_dim, model.dim + model.written_width
    mixing = both * q_dim + 2.0 * model.dim * kv_dim
    parameters = model.num_layers * (mixing + (model.dim + both) * model.ffn_dim * model.experts_computed)
    attention = 12.0 * model.num_layers * q_dim * model.context
    return Size(parameters=parameters, flop_per_token=6.0 * parameters + attention)


def heads_of(dim: int) -> int:
    """Return the number of query heads. Their size is even, divides `dim`, and is as near to 64 as possible (in a wide
    model to 128)."""
    wanted = 128 if dim >= 2048 else 64
    sizes = [size for size in range(2, dim + 1, 2) if dim % size == 0] or [dim]
    return dim // min(sizes, key=lambda size: (abs(math.log(size / wanted)), size))


def kv_heads_of(num_heads: int) -> int:
    """Return the number of key and value heads: the largest divisor of `num_heads` up to 8."""
    return max(number for number in range(1, min(num_heads, 8) + 1) if num_heads % number == 0)


def ffn_dim_of(dim: int) -> int:
    """Return the hidden width at which SwiGLU's three matrices have about 8 D² elements, as those of a plain MLP."""
    multiple = 32 if dim < 1024 else 256  # rounding to 256 would turn the 341 of a width of 128 into 512
    return multiple * math.ceil(8 * dim / 3 / multiple)


def batch_tokens_of(size: Size) -> float:
    """Return the number of tokens of a step by Step Law, at the compute-optimal number of training tokens."""
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
    """Return the peak learning rate, to two digits.

    With fewer tokens a step than `batch_tokens_of`, the rate falls with the square root of their ratio (2205.10287,
    section 4; 2405.14578). With more tokens it does not rise: there the law's own optimum is flat. The law covers runs
    of 1e17 FLOP and more; a shorter run gets at most `_SHORT` times the rate of a run of 20 N tokens.

    Args:
        steps: the steps of the whole run.
        optimizer: its name in the run spec. Muon and NAdam take AdamW's rate (2502.16982); for SGD no law is known.
        tunes: True if the run begins with trained weights.
        adapts: True if the run trains adapters beside trained weights.
    """
    if optimizer == "sgd":
        return 4e-3  # no law is known to us for SGD on language models
    rate = 0.3118 * (size.flop_per_token * size.tokens) ** -0.125
    rate *= min(_SHORT, (size.tokens / (tokens_per_step * steps)) ** 0.125)
    rate *= min(1.0, math.sqrt(tokens_per_step / batch_tokens_of(size)))
    rate *= _ADAPTING if adapts else _TUNING if tunes else 1.0
    return float(f"{rate:.1e}")


def warmup_steps_of(steps: int, *, beta2: float) -> int:
    """Return the number of warm-up steps: 2 / (1 - beta2) or 1 % of the run, whichever is more; but at most 2,000 steps
    and a tenth of the run. With a `beta2` of 0.95, all runs of 400 to 4,000 steps get 40."""
    wanted = max(2.0 / (1.0 - beta2), 0.01 * steps)
    return round(min(wanted, 2000, 0.1 * steps))  # DeepSeek LLM, Step Law and Llama use 2,000 steps


def microbatches_of(
    tokens: float, model: Model, stages: int | None, *, number: int | None = None, samples: int | None = None
) -> tuple[int, int]:
    """Cut a step of about `tokens` into microbatches that keep all stages busy.

    Args:
        model: its activations for one microbatch must fit into a stream's credit (the bytes that a stream may send
            ahead). They are one vector for each token, or with experts one for each expert that a token passes.
        stages: the number of stages of the run; None: not fixed.
        number: the number of microbatches a step, if the run file gives it.
        samples: the number of samples a microbatch, if the run file gives it.
    Returns: (microbatches a step, samples a microbatch).
    """
    if stages is None:
        stages = min(STAGES_FED, model.num_layers)
    all_samples = max(1, round(tokens / model.context))
    least = max(8, MICROBATCHES_PER_STAGE * stages)
    if samples is None:
        fits = max(1, STREAM_CREDIT_BYTES // (4 * model.written_width * model.context * model.experts_computed))
        samples = min(fits, max(1, round(all_samples / (number or least))))
    if number is None:
        number = min(MICROBATCHES_PER_STEP_MAX, max(round(all_samples / samples), 2 * stages))
    return number, samples


def fill_in(tables: Mapping[str, Any], base: RunSpec) -> tuple[dict[str, Any], tuple[FilledField, ...]]:
    """Return the tables of a run file with a number in each field that the file leaves to a rule.

    Values of a wrong type and impossible values stay: the decoder of the tables reports them.

    Args:
        tables: the tables of the run file as decoded from TOML.
        base: gives the fields that `tables` leaves out and for which no rule exists.
    Returns: the tables, and the filled-in fields in the order of the rules above.
    """
    filling = _Filling(tables, base)
    dim, context, num_layers = (filling.number(f"model.{name}") for name in ("dim", "context", "num_layers"))
    heads = filling.choose("model.num_heads", heads_of(dim), "heads of 64, or of 128 in a wide model")
    kv_heads = filling.choose("model.num_kv_heads", kv_heads_of(heads), "as many as there are heads, at most 8")
    ffn_dim = filling.choose("model.ffn_dim", ffn_dim_of(dim), f"8/3 of dim {dim}, rounded up")
    model = SimpleNamespace(
        dim=dim,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=filling.said("model.head_size"),
        ffn_dim=ffn_dim,
        context=context,
        experts_computed=filling.number("model.experts_per_token") if filling.said("model.num_experts") else 1,
        written_width=min(dim, filling.number("model.subspace", least=0) or dim),
    )
    size = size_of(model)
    batch = batch_tokens_of(size)
    number, samples = microbatches_of(
        batch,
        model,
        filling.said("swarm.stages"),
        number=filling.said("training.microbatches_per_step"),
        samples=filling.said("training.microbatch_size"),
    )
    told = f"{number} x {samples} samples are {number * samples * context:,} tokens a step"
    law = f"{told}; Step Law takes {batch:,.0f} for {millions(size.parameters)} parameters"
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
    """Describe the fields that rules filled in, a line for each reason; empty if no rule filled in a field."""
    if not choices:
        return ()
    lines = [
        f"the run file leaves these to shoal ({millions(size_of(spec.model).parameters)} parameters in the layers):"
    ]
    told: set[str] = set()
    for choice in choices:
        if choice.why not in told:
            lines.append(f"  {choice.field} = {choice.value:g}: {choice.why}")
        else:
            lines[-1] = lines[-1].replace(":", f", {choice.field} = {choice.value:g}:", 1)
        told.add(choice.why)
    return tuple(lines)


class _Filling:
    def __init__(self, tables: Mapping[str, Any], base: RunSpec) -> None:
        self.tables: dict[str, Any] = copy.deepcopy(dict(tables))
        self.choices: list[FilledField] = []
        self._base = base

    def table(self, section: str) -> dict[str, Any]:
        found = self.tables.get(section, {})
        return found if isinstance(found, dict) else {}

    def said(self, path: str, *, least: int = 1, most: int = _SAID_MAX) -> int | None:
        """Return the number that the file gives; None if the file leaves it to a rule or has an impossible value."""
        value = self._value(path)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return value if fits else None

    def number(self, path: str, *, least: int = 1) -> int:
        value = self.said(path, least=least, most=DIM_MAX if path == "model.dim" else _SAID_MAX)
        return int(self._usual(path)) if value is None else value

    def share(self, path: str) -> float:
        value = self._value(path)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        return float(value if fits else self._usual(path))

    def text(self, path: str) -> str:
        value = self._value(path)
        return value if isinstance(value, str) else str(self._usual(path))

    def _value(self, path: str) -> Any:
        section, _, name = path.partition(".")
        return self.table(section).get(name)

    def _usual(self, path: str) -> Any:
        return operator.attrgetter(path)(self._base)

    def choose(self, path: str, value: Any, why: str) -> Any:
        """Return the value that the file gives; if it gives none, fill in `value` and return that."""
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


def millions(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f}"
