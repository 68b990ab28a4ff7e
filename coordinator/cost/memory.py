"""Counts the bytes that a replica holds for each parameter of its stage, term by term, at the peak.

The peak is during the reduction: the gradient sum in reduction and its result exist while the device runs a microbatch
of the next step, with that step's sum and weights. The optimizer's step takes less memory: it frees the sum first and
replaces the state layer by layer. `tests/bench/memory.py` checks the total against real peers (`MEASURED.md`), and
`tests/peer/pipeline/test_step_memory.py` checks single tensors.

With a GPU, the reduced gradient is in host memory. If the GPU's memory is too small, the optimizer's moments and the
*places* (sums that compensate staleness) are in host memory, too (`peer/pipeline/offload.py`)."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from shoal.protocol.layers import EMBED, HEAD, all_layer_keys
from shoal.protocol.spec import ModelSpec, RunSpec
from shoal.protocol.tensors import base_bytes, expert_elements, num_elements, state_elements, trunk_elements
from shoal.protocol.wire_format import TILE, is_in_few_bits, tensor_bytes

FP32 = 4.0
BF16 = 2.0
_MOMENTS = {"sgd": 1.0, "adamw": 2.0, "nadam": 2.0}
"""The number of the optimizer's fp32 moments for each parameter. Muon has one, outside the hidden matrices two."""
LOGITS_BYTES_MAX = 1 << 28
"""The most bytes of logits at once; equal to `CHUNK_BYTES` of `peer/model/head_loss.py`."""
STEP_TEMPORARIES = 28.0
"""Bytes that the optimizer's step of a layer needs for each parameter: new state, clipped gradient, update, divisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTerms:
    """The memory of a replica, in bytes for each parameter."""

    state: float
    weights: float
    """Bytes for weights of other versions: s_max copies, at least one (the previous version, to repeat microbatches bit
    for bit), but none if stages are recomputed and s_max > 0. `calibrated` compensation adds a copy if s_max >= 2."""
    narrow_weights: float
    """Bytes a parameter for the bfloat16 copies of the weights with which microbatches compute; 0 in fp32."""
    gradient: float
    """Bytes a parameter for the gradient of the running microbatch."""
    sums: float
    """Bytes a parameter for gradient sums: one for the step in reduction, and one for each of s_max steps ahead."""
    places: float
    """Bytes a parameter for sums, one for each gradient sum, of the weights at which its gradients were computed."""
    mean: float
    """Bytes a parameter for the reduced gradient, and for its quantized form if it may travel in few bits."""

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    @property
    def least_on_card(self) -> float:
        """Bytes in GPU memory for each parameter, if the GPU is too small for all: `mean`, `places` and the optimizer's
        moments are then in host memory (`peer/pipeline/offload.py`)."""
        return FP32 + self.weights + self.narrow_weights + self.gradient + self.sums


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """The frozen weights of a run that trains adapters."""

    layer_bytes: tuple[float, ...]
    """[L], the bytes of each layer; the first includes the embedding, the last the head."""
    parameters: float
    """The number of parameters of the whole model."""
    travels: bool = False
    """True if members download the base from other members; else each builds it from the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory that members of stages need, as terms for each layer, each trained parameter and each stage."""

    layer_held_bytes: tuple[float, ...]
    """[L], the bytes that a layer keeps of a microbatch from forward to backward."""
    resident_bytes_per_parameter: float
    """The bytes that a plan counts for each parameter that a member trains."""
    layer_job_bytes: tuple[float, ...] = ()
    """[L], the bytes that the running microbatch takes in each layer besides `layer_held_bytes`; empty: none."""
    workspace_bytes: float = 0.0
    """The bytes that a stage, however many layers it has, needs while one layer steps or runs backward."""
    base: FrozenBase | None = None
    """The frozen weights of a run that trains adapters; None: all weights train."""
    is_by_layer: bool = False
    """True if each stage, the last included, recomputes layer by layer, and holds the graph of one layer."""

    @property
    def layer_fixed_bytes(self) -> tuple[float, ...]:
        """[L], the bytes in each layer that do not depend on the number of trained parameters; empty: none."""
        if self.base is None or not self.layer_job_bytes:
            return self.base.layer_bytes if self.base is not None else self.layer_job_bytes
        return tuple(map(sum, zip(self.base.layer_bytes, self.layer_job_bytes, strict=True)))

    @classmethod
    def counted(cls, spec: RunSpec, *, experts_held: int) -> "StageMemory":
        """Return the memory that plans count: the least that must be in GPU memory. A peer with less free memory
        reports its free memory (`Claims.memory_bytes`), and gets fewer layers. With adapters, plans count all memory: a
        GPU that is too small could offload only activations, and plans do not know how much that slows its jobs."""
        if spec.adapter is not None:
            return cls.foreseen(spec, experts_held=experts_held)
        return cls.on_card(spec, experts_held=experts_held, is_full=True)

    @classmethod
    def foreseen(cls, spec: RunSpec, *, experts_held: int) -> "StageMemory":
        """Return all memory that real peers need, of GPU and host together (`tests/bench/memory.py`)."""
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
        """Return the GPU memory that real peers need, with the reduced gradient in host memory.
        Args: is_full: True: the GPU is too small for the rest, so the optimizer's moments and the `places` are in host
        memory, too, and jobs recompute layer by layer."""
        memory, terms = cls.foreseen(spec, experts_held=experts_held), resident_terms(spec)
        on_card = terms.least_on_card if is_full else terms.total - terms.mean
        job = job_bytes(spec, experts_held=experts_held, is_full=is_full)
        return replace(memory, resident_bytes_per_parameter=on_card, layer_job_bytes=job)

    def by_stage(self, sums: Callable[[tuple[float, ...]], tuple[float, ...]]) -> "StageMemory":
        """Return these terms with each stage's layers merged. Args: sums: turns values by layer into sums by stage."""
        held, job = sums(self.layer_held_bytes), sums(self.layer_job_bytes)
        base = self.base and replace(self.base, layer_bytes=sums(self.base.layer_bytes))
        return replace(self, layer_held_bytes=held, layer_job_bytes=job, base=base)


def resident_terms(spec: RunSpec) -> ResidentTerms:
    """Return the memory terms of a run; if each peer chooses its compute format, those with the larger total."""
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
    if spec.optimizer.name != "muon":
        return _MOMENTS[spec.optimizer.name]
    ends = float(sum(num_elements(spec.model, EMBED)) + num_elements(spec.model, HEAD)[0])
    hidden = spec.model.num_layers * decoder_parameters(spec.model, experts_held=spec.model.experts_held)
    return 1.0 + ends / (ends + hidden)


def decoder_parameters(model: ModelSpec, *, experts_held: int) -> float:
    """Count the parameters of one decoder layer with `experts_held` experts."""
    return float(sum(trunk_elements(model, 0)) + experts_held * expert_elements(model))


def held_bytes(spec: RunSpec) -> tuple[float, ...]:
    """Return [L], the bytes that autograd keeps of a microbatch from forward to backward. With recomputation this is
    the input of each layer; a run that keeps only the stage's input is counted in the same way."""
    model, tokens = spec.model, spec.training.microbatch_size * spec.model.context
    if spec.training.recomputes:
        return (FP32 * tokens * model.dim,) * model.num_layers
    return (tokens * _graph_bytes(spec),) * model.num_layers


def job_bytes(spec: RunSpec, *, experts_held: int, is_full: bool = False) -> tuple[float, ...]:
    """Return [L], the bytes that the running microbatch takes in each layer besides `held_bytes`. If whole stages are
    recomputed, each layer takes its graph or, on a GPU that is too small (`is_full`), only its input: there one layer's
    graph at a time is enough (`workspace_bytes`). The first layer adds what the optimizer's step of the embedding needs
    beyond a layer's step. The last layer adds the same for the head, or the head's gradient and logits if those are
    more. With adapters, both add their dense copies instead, the last also the logits."""
    model, tokens = spec.model, spec.training.microbatch_size * spec.model.context
    is_whole = spec.training.recomputes and not spec.recomputes_by_layer
    of_layer = FP32 * tokens * model.dim if is_full else tokens * _graph_bytes(spec)
    job = [of_layer if is_whole else 0.0] * model.num_layers
    logits = min(FP32 * tokens * model.vocab_size, float(LOGITS_BYTES_MAX))
    embed, head = (float(num_elements(model, key)[0]) for key in (EMBED, HEAD))
    if spec.adapter is not None:
        # Embedding and head have no gradient and no step; they become dense for their products.
        job[-1] += _dense_bytes(spec, head, HEAD) + logits
        job[0] += _dense_bytes(spec, embed, EMBED)
        return tuple(job)
    largest = decoder_parameters(model, experts_held=experts_held)
    step_of_embed, step_of_head = (STEP_TEMPORARIES * max(0.0, end - largest) for end in (embed, head))
    job[0] += step_of_embed
    job[-1] += max(step_of_head, FP32 * head + logits)
    return tuple(job)


def workspace_bytes(spec: RunSpec, *, experts_held: int) -> float:
    """Return the bytes that a stage needs only while one decoder layer steps or runs backward."""
    graph_bytes = spec.training.microbatch_size * spec.model.context * _graph_bytes(spec)
    if spec.adapter is not None:
        step = STEP_TEMPORARIES * state_elements(spec, "layers.0")
        # One matrix at a time is dense; in a mixture those of all experts are.
        dense = _dense_bytes(spec, float(spec.model.experts_held * spec.model.dim * spec.model.ffn_dim), "layers.0")
        return max(step, graph_bytes + dense)
    step = STEP_TEMPORARIES * decoder_parameters(spec.model, experts_held=experts_held)
    return max(step, graph_bytes)


def frozen_base(spec: RunSpec) -> FrozenBase | None:
    """Return the frozen base of a run with adapters; None: all weights train."""
    if spec.adapter is None:
        return None
    keys = all_layer_keys(spec.model)
    embed, *layers, head = (float(base_bytes(spec.model, spec.adapter.base, key)) for key in keys)
    layers[0] += embed
    layers[-1] += head
    parameters = float(sum(sum(num_elements(spec.model, key)) for key in keys))
    return FrozenBase(layer_bytes=tuple(layers), parameters=parameters, travels=bool(spec.initial.digests))


def _dense_bytes(spec: RunSpec, numel: float, key: str) -> float:
    """Return the bytes of the dense copy that a product with a frozen matrix needs. The embedding usually needs only
    some rows, which count as 0."""
    assert spec.adapter is not None
    base = spec.adapter.base
    if base in ("int8", "nf4"):
        is_rows = key == EMBED and spec.model.dim % TILE == 0
        return 0.0 if is_rows else (BF16 if spec.training.compute == "bf16" else FP32) * numel
    is_stored_so = (base == "bf16") == (spec.training.compute == "bf16") and spec.training.compute != "auto"
    return 0.0 if is_stored_so or key == EMBED else FP32 * numel


def _graph_bytes(spec: RunSpec) -> float:
    """Return the bytes of autograd's graph for one token in one layer: residuals and norms in fp32, the rest in the
    compute format."""
    model = spec.model
    of = BF16 if spec.training.compute == "bf16" else FP32
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Numbers a token: inputs and outputs of both halves of the layer, queries, keys, values and attention outputs.
    widths = 2.0 * model.dim + 2.0 * heads + 2.0 * kv + 4.0 * model.ffn_dim * model.experts_computed
    if model.num_experts:  # an input and an output row for each token and expert
        widths += 2.0 * model.dim * model.experts_per_token
    if model.decoder.norms != "pre":
        widths += 2.0 * model.dim
    if model.decoder.qk_norm != "none":
        widths += heads + kv
    if model.decoder.attention_softcap:  # scores, capped scores and weights of all pairs of tokens
        widths += 3.0 * model.num_heads * model.context
    if spec.data.masks_documents:  # the mask, which some attention kernels copy
        widths += model.context
    return FP32 * 4.0 * model.dim + of * widths
