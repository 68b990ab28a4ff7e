"""How many bytes a replica holds for each parameter of its stage, term by term, at the moment when that is most.

That moment is the reduction: the sum that is being reduced and what comes of it are there, and the device is busy with
a microbatch of the next step, whose sum and weights are there, too. The optimizer's step takes less: it lets the sum go
first, and makes the new state layer by layer, each in place of the old one. Checked against real peers by
`tests/bench/memory.py` (`MEASURED.md`), and tensor by tensor by `tests/peer/pipeline/test_step_memory.py`.

On a GPU the reduced gradient lies in the machine's memory, and where the card is full so do moments and places
(`peer/pipeline/offload.py`).
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from shoal.protocol.base_format import TILE, base_bytes
from shoal.protocol.layers import EMBED, HEAD, all_layer_keys
from shoal.protocol.spec import ModelSpec, RunSpec
from shoal.protocol.tensors import expert_elements, num_elements, state_elements, trunk_elements
from shoal.protocol.wire_format import is_in_few_bits, tensor_bytes

FP32 = 4.0
BF16 = 2.0
_MOMENTS = {"sgd": 1.0, "adamw": 2.0, "nadam": 2.0}
"""fp32 numbers beside the parameter. Muon's second moment is only of what is no hidden matrix."""
STEP_TEMPORARIES = 28.0
"""Bytes for each parameter of the one layer that steps: its new state beside the old one, the clipped gradient, the
change, and what it is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTerms:
    """Bytes a parameter."""

    state: float
    """The parameter and its moments."""
    weights: float
    """Weights of other steps: one set for each step ahead, or where none may be ahead the version before, for exact
    repair. None are kept with recomputation and steps ahead."""
    narrow_weights: float
    """bfloat16 copies of the sets that jobs compute with."""
    gradient: float
    """The microbatch that runs fills one of its own."""
    sums: float
    """Sums of gradients: one for the step that is being reduced, one for each step ahead."""
    places: float
    """The sums of the weights that gradients were taken at, one for each of `sums`, where the compensation asks."""
    mean: float
    """The reduced gradient, and in few bits as it has travelled. That of the step before is gone by then, unless a mate
    is behind."""

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    @property
    def least_on_card(self) -> float:
        """What is left on a card that is full, once the rest lies in the machine's memory (`peer/pipeline/offload.py`):
        moments, places and the mean are there."""
        return FP32 + self.weights + self.narrow_weights + self.gradient + self.sums


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """What adapters stand beside."""

    layer_bytes: tuple[float, ...]
    """[L], embedding and head with the first and the last."""
    parameters: float
    """The parameters of the whole model."""
    travels: bool = False
    """Whether members fetch it, from whoever has it; else each makes it from the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What stages take, whatever layers they have."""

    layer_held_bytes: tuple[float, ...]
    """[L], kept from a microbatch's forward to its backward."""
    resident_bytes_per_parameter: float
    """What a plan counts for a parameter that a member holds."""
    layer_job_bytes: tuple[float, ...] = ()
    """[L], what the one job that runs takes in each layer besides `layer_held_bytes`; empty: nothing."""
    workspace_bytes: float = 0.0
    """Bytes that a stage needs only while one of its layers steps or runs backward: the same for any number of
    layers."""
    base: FrozenBase | None = None
    """None: all weights train."""
    is_by_layer: bool = False
    """A stage, the last one too, runs one layer at a time again, and holds the graph of no more."""

    @property
    def layer_fixed_bytes(self) -> tuple[float, ...]:
        """[L], what a member takes in each layer whatever it trains there; empty: nothing."""
        if self.base is None or not self.layer_job_bytes:
            return self.base.layer_bytes if self.base is not None else self.layer_job_bytes
        return tuple(map(sum, zip(self.base.layer_bytes, self.layer_job_bytes, strict=True)))

    @classmethod
    def counted(cls, spec: RunSpec, *, experts_held: int) -> "StageMemory":
        """Return the memory that plans reckon with: what must lie on a card. A peer that has not even that, because it
        computes in the machine's memory or the rest finds no room there, says so and is given less
        (`Claims.memory_bytes`). With adapters it is all that a peer takes: of a full card only the activations would
        become less, and plans do not know how much longer its jobs take then."""
        if spec.adapter is not None:
            return cls.foreseen(spec, experts_held=experts_held)
        return cls.on_card(spec, experts_held=experts_held, is_full=True)

    @classmethod
    def foreseen(cls, spec: RunSpec, *, experts_held: int) -> "StageMemory":
        """What real peers take (`tests/bench/memory.py`)."""
        return cls(
            layer_held_bytes=held_bytes(spec),
            resident_bytes_per_parameter=resident_terms(spec).total,
            layer_job_bytes=job_bytes(spec, experts_held=experts_held),
            workspace_bytes=workspace_bytes(spec, experts_held=experts_held),
            base=frozen_base(spec),
            is_by_layer=spec.recomputes_by_layer,
        )

    @classmethod
    def on_card(cls, spec: RunSpec, *, experts_held: int, is_full: bool = False) -> "StageMemory":
        """What real peers take on a GPU, where the reduced gradient lies in the machine's memory.

        Args: is_full: of a card without room for all of it, whose moments and places then lie there, too, and whose
            jobs run one layer's forward at a time again.
        """
        memory, terms = cls.foreseen(spec, experts_held=experts_held), resident_terms(spec)
        on_card = terms.least_on_card if is_full else terms.total - terms.mean
        job = job_bytes(spec, experts_held=experts_held, is_full=is_full)
        return replace(memory, resident_bytes_per_parameter=on_card, layer_job_bytes=job)

    def by_stage(self, sums: Callable[[tuple[float, ...]], tuple[float, ...]]) -> "StageMemory":
        """Take each stage for one layer. Args: sums: over the layers of each stage."""
        held, job = sums(self.layer_held_bytes), sums(self.layer_job_bytes)
        base = self.base and replace(self.base, layer_bytes=sums(self.base.layer_bytes))
        return replace(self, layer_held_bytes=held, layer_job_bytes=job, base=base)


def resident_terms(spec: RunSpec) -> ResidentTerms:
    """The terms of a run. Where each peer chooses what it multiplies in, those of the one that takes more."""
    training = spec.training
    s_max, recompute = training.s_max, training.recomputes and not spec.recomputes_by_layer
    state = FP32 * (1.0 + _moments(spec))
    sets = max(1, s_max) if not (recompute and s_max) else 0
    asks = training.compensation in ("eager", "dc") and s_max > 0
    weights = FP32 * (sets + (1 if training.compensation == "calibrated" and s_max >= 2 else 0))

    as_it_travelled = max(tensor_bytes(form, TILE) / TILE if is_in_few_bits(form) else 0.0 for form in spec.wire.sums)

    def terms(*, narrow: bool) -> ResidentTerms:
        return ResidentTerms(
            state=state,
            weights=weights,
            narrow_weights=BF16 * (1 + sets) if narrow else 0.0,
            gradient=BF16 if narrow else FP32,
            sums=FP32 * (s_max + 1),
            places=FP32 * (s_max + 1) if asks else 0.0,
            mean=FP32 + as_it_travelled,
        )

    if training.compute == "auto":
        return max(terms(narrow=False), terms(narrow=True), key=lambda of: of.total)
    return terms(narrow=training.compute == "bf16")


def _moments(spec: RunSpec) -> float:
    """Numbers for each parameter; of Muon's the model's mean."""
    if spec.optimizer.name != "muon":
        return _MOMENTS[spec.optimizer.name]
    ends = float(sum(num_elements(spec.model, EMBED)) + num_elements(spec.model, HEAD)[0])
    hidden = spec.model.num_layers * decoder_parameters(spec.model, experts_held=spec.model.experts_held)
    return 1.0 + ends / (ends + hidden)


def decoder_parameters(model: ModelSpec, *, experts_held: int) -> float:
    """Count the parameters of one decoder layer with so many experts."""
    return float(sum(trunk_elements(model, 0)) + experts_held * expert_elements(model))


def held_bytes(spec: RunSpec) -> tuple[float, ...]:
    """[L], what autograd keeps of a microbatch from its forward to its backward; with recomputation only a stage's
    input, counted as one width a layer, or what each layer read."""
    model, tokens = spec.model, spec.training.microbatch_size * spec.model.context
    if spec.training.recomputes:
        return (FP32 * tokens * model.dim,) * model.num_layers
    return (tokens * _graph_bytes(spec),) * model.num_layers


def job_bytes(spec: RunSpec, *, experts_held: int, is_full: bool = False) -> tuple[float, ...]:
    """[L], what the one job that runs takes besides, and the step of a layer that is larger than others.

    With recomputation that is a graph of the whole stage, or of one layer (`workspace_bytes`), as also on a card that
    `is_full`: then the job has what each layer reads, besides. At the end it is the
    head's gradient and some of its logits, or what its step needs, whichever is more; at the beginning what the
    embedding's step needs.
    """
    model, tokens = spec.model, spec.training.microbatch_size * spec.model.context
    is_whole = spec.training.recomputes and not spec.recomputes_by_layer
    of_layer = FP32 * tokens * model.dim if is_full else tokens * _graph_bytes(spec)
    job = [of_layer if is_whole else 0.0] * model.num_layers
    embed, head = (float(num_elements(model, key)[0]) for key in (EMBED, HEAD))
    if spec.adapter is not None:
        # No gradient and no step of the two ends; the head is made dense for its products, if it is stored otherwise.
        logits = min(FP32 * tokens * model.vocab_size, float(LOGITS_BYTES_MAX))
        job[-1] += _dense_bytes(spec, head, HEAD) + logits
        job[0] += _dense_bytes(spec, embed, EMBED)
        return tuple(job)
    largest = decoder_parameters(model, experts_held=experts_held)
    step_of_embed, step_of_head = (STEP_TEMPORARIES * max(0.0, end - largest) for end in (embed, head))
    logits = min(FP32 * tokens * model.vocab_size, float(LOGITS_BYTES_MAX))
    job[0] += step_of_embed
    job[-1] += max(step_of_head, FP32 * head + logits)
    return tuple(job)


LOGITS_BYTES_MAX = 1 << 28
"""`peer/model/head_loss.py`, `CHUNK_BYTES`."""


def workspace_bytes(spec: RunSpec, *, experts_held: int) -> float:
    """Count the bytes that a stage needs only while one decoder layer steps or runs backward, whichever needs more."""
    tokens = spec.training.microbatch_size * spec.model.context
    if spec.adapter is not None:
        step = STEP_TEMPORARIES * state_elements(spec, "layers.0")
        # One matrix at a time, of all experts where there are any.
        dense = _dense_bytes(spec, float(spec.model.experts_held * spec.model.dim * spec.model.ffn_dim), "layers.0")
        return max(step, tokens * _graph_bytes(spec) + dense)
    step = STEP_TEMPORARIES * decoder_parameters(spec.model, experts_held=experts_held)
    return max(step, tokens * _graph_bytes(spec))


def frozen_base(spec: RunSpec) -> FrozenBase | None:
    """None: all weights train."""
    if spec.adapter is None:
        return None
    keys = all_layer_keys(spec.model)
    embed, *layers, head = (float(base_bytes(spec.model, spec.adapter.base, key)) for key in keys)
    layers[0] += embed
    layers[-1] += head
    parameters = float(sum(sum(num_elements(spec.model, key)) for key in keys))
    return FrozenBase(layer_bytes=tuple(layers), parameters=parameters, travels=bool(spec.initial.digests))


def _dense_bytes(spec: RunSpec, numel: float, key: str) -> float:
    """What a matrix of a layer of the base takes while a product needs it dense: in what is multiplied in. Of the
    embedding only rows are made dense."""
    assert spec.adapter is not None
    base = spec.adapter.base
    if base in ("int8", "nf4"):
        is_rows = key == EMBED and spec.model.dim % TILE == 0
        return 0.0 if is_rows else (BF16 if spec.training.compute == "bf16" else FP32) * numel
    is_stored_so = (base == "bf16") == (spec.training.compute == "bf16") and spec.training.compute != "auto"
    return 0.0 if is_stored_so or key == EMBED else FP32 * numel


def _graph_bytes(spec: RunSpec) -> float:
    """A token's, in one decoder layer: residuals and what norms make of them in fp32, the rest in what is multiplied in
    (fp32 where peers choose, which is more)."""
    model = spec.model
    of = BF16 if spec.training.compute == "bf16" else FP32
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # A width each: what the two halves read and give, queries and what comes of them.
    widths = 2.0 * model.dim + 2.0 * heads + 2.0 * kv + 4.0 * model.ffn_dim * model.experts_computed
    if model.num_experts:  # a row in and a row out for each token and expert
        widths += 2.0 * model.dim * model.experts_per_token
    if model.decoder.norms != "pre":
        widths += 2.0 * model.dim
    if model.decoder.qk_norm != "none":
        widths += heads + kv
    if model.decoder.attention_softcap:  # scores, bent ones and shares of all pairs of tokens
        widths += 3.0 * model.num_heads * model.context
    if spec.data.masks_documents:  # the mask, of which some devices' attention keeps a copy of its own
        widths += model.context
    return FP32 * 4.0 * model.dim + of * widths
