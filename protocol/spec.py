"""The run spec: everything that all peers of one run must agree on before the first microbatch. Pure.

TOML -> `RunSpec` (frozen, checked), nothing reads a global or an environment variable later. Fields that a run file
leaves out and that should fit the model are filled in on the way (`toml/defaults.py`), so that a `RunSpec` has numbers
there; its own defaults are for code that names what it wants. Only `swarm.stages` may be "auto" in a `RunSpec` too,
since no peer chooses that number when the run file is read: each plan says it. The run's identifier is the hash of the
owner's key and of what cannot change in the spec, so two peers with the same run id and the same revision agree on
every field.

This file is long because every field of a run file is in it, with what it means.
"""

import math
from typing import Any, Final, Literal

import msgspec
from blake3 import blake3

from shoal.protocol.decoder import LLAMA, DecoderSpec, family_of
from shoal.protocol.errors import SpecError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import (
    CONTEXT_MAX,
    DIM_MAX,
    EXPERTS_MAX,
    FFN_DIM_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    LAYERS_MAX,
    MICROBATCHES_PER_STEP_MAX,
    PEERS_MAX,
    STAGES_MAX,
    STEPS_MAX,
    VOCABULARY_MAX,
)
from shoal.protocol.names import is_name
from shoal.protocol.staleness import synchronous_steps
from shoal.protocol.toml.complaint import complaint
from shoal.protocol.wire_format import AUTO_ACTIVATIONS, AUTO_SUMS, WireFormat, tensor_bytes

TERM_HEARTBEATS_MIN = 4
"""A coordinator takes three to be sure that a stage has lost its state, and looks every half: in a shorter term it
would never be, nor its heirs."""
ADAPTER_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a decoder layer, by their Hugging Face names, which are the same in all families."""
ATTENTION_TARGETS: Final = ADAPTER_TARGETS[:4]
"""Those that a layer with experts has: its experts' matrices get no adapters."""
BaseFormat = Literal["fp32", "bf16", "int8", "nf4"]
AUTO_STAGES: Final = "auto"
"""What `swarm.stages` says where the coordinator is free to choose the number of stages."""
CONTINUED_MAX = 64
"""Revisions of a spec: it must fit into a record of the directory."""
BASE_CHARS_MAX = 120
"""Characters of the name of the model that a run begins with, and of its licence's."""
_LABEL_BYTES = 4
"""Each token's target travels with its activation, and whatever else goes with it, in words of so many bytes."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file. Checks raise ValueError; msgspec adds the path of the field."""


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_decay(schedule: str, decay_steps: int | None) -> None:
    _require(decay_steps is None or decay_steps > 0, f"decay_steps must be positive, is {decay_steps}")
    _require(
        decay_steps is None or schedule == "wsd", f'decay_steps means nothing with schedule "{schedule}": say "wsd"'
    )


class ModelSpec(_Section, frozen=True):
    """A decoder: Llama's (RMSNorm, rotary positions, grouped-query attention, SwiGLU) but for what `decoder` says."""

    vocab_size: int = 256
    """Tokens; 256 is bytes."""
    dim: int = 128
    """Width D of the residual stream."""
    num_layers: int = 6
    """Decoder layers; embedding and head come on top."""
    num_heads: int = 4
    """Query heads H; divides dim. A run file that does not say it, or says "auto", gets heads of 64. So it is with the
    next two, the learning rate, the warm-up, and how a step is cut into microbatches: `toml/defaults.py` has the rules,
    and `shoal host` prints what was chosen."""
    num_kv_heads: int = 2
    """Key and value heads; divides num_heads."""
    ffn_dim: int = 352
    """Hidden width F of SwiGLU; of each expert's, where there are experts."""
    head_size: int | None = None
    """Width K of a head, even (rotary pairs). None: dim / num_heads."""
    context: int = 256
    """Tokens T a sample has."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Epsilon inside RMSNorm."""
    num_experts: int = 0
    """Experts E in every decoder layer, in place of its one SwiGLU; 0: a dense model."""
    experts_per_token: int = 2
    """K, of E, that each token is sent to."""
    router_aux_loss: float = 0.01
    """What the load-balancing loss of each layer weighs beside the loss; it is 1 where the load is even."""
    decoder: DecoderSpec = LLAMA
    """The switches that tell the decoder from Llama's: `protocol/decoder.py`. `shoal import` writes this."""
    tied: bool = False
    """The head's matrix is the embedding. Both ends of the pipeline hold it, and step it with the sum of both ends'
    gradients."""
    subspace: int = 0
    """Numbers k, fewer than `dim`, that each layer adds to a token of the residual stream. They are the coordinates of
    a vector in one subspace of the run's seed; beside it stands a vector that the token itself fixes. So k numbers a
    token travel between stages and not `dim`, and nothing is lost on the way. The price is in what the model learns
    (`peer/model/MEASURED.md`). 0: a layer adds to all of `dim`. `peer/model/subspace.py` has the source."""

    def __post_init__(self) -> None:
        for name, most in _MODEL_MAX.items():
            value = getattr(self, name)
            _require(value > 0, f"{name} must be positive, is {value}")
            _require(value <= most, f"{name} is at most {most:,}, and is {value}")
        _require(self.dim % self.num_heads == 0, f"num_heads {self.num_heads} does not divide dim {self.dim}")
        _require(self.head_dim > 0, f"head_size must be positive, is {self.head_dim}")
        _require(
            self.num_heads * self.head_dim <= FFN_DIM_MAX,
            f"num_heads x head_size is at most {FFN_DIM_MAX:,}, and is {self.num_heads * self.head_dim:,}",
        )
        _require(self.head_dim % 2 == 0, f"head size {self.head_dim} is odd")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}",
        )
        _require(1 < self.rope_theta < math.inf, f"rope_theta must be more than 1, is {self.rope_theta}")
        _require(0 < self.norm_eps < math.inf, f"norm_eps must be positive, is {self.norm_eps}")
        beyond = [layer for layer in self.decoder.full_layers if not 0 <= layer < self.num_layers]
        _require(not beyond, f"decoder.full_layers has {beyond[:1]}, and there are {self.num_layers} layers")
        self._check_experts()
        self._check_subspace()
        _ = self.family  # raises, if there is none

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            for name, default in _OF_EXPERTS.items():
                _require(
                    getattr(self, name) == default,
                    f"{name} means nothing in a dense model: num_experts is 0 or missing",
                )
            return
        _require(
            0 < self.num_experts <= EXPERTS_MAX, f"num_experts must be in [0, {EXPERTS_MAX}], is {self.num_experts}"
        )
        _require(
            0 < self.experts_per_token <= self.num_experts,
            f"experts_per_token must be in [1, num_experts {self.num_experts}], is {self.experts_per_token}",
        )
        _require(self.router_aux_loss >= 0, f"router_aux_loss must not be negative, is {self.router_aux_loss}")

    def _check_subspace(self) -> None:
        if self.subspace == 0:
            return
        _require(
            0 < self.subspace < self.dim,
            f"subspace must be in [1, {self.dim - 1}], less than dim, or 0 for none; it is {self.subspace}",
        )
        _require(
            not self.tied,
            "subspace means that the embedding has fewer numbers than the head, so they cannot be tied: "
            "leave subspace or tied out",
        )
        decoder = self.decoder
        leaving = {
            "norms": decoder.norms != "pre",
            "attention_bias": decoder.attention_bias == "all",
            "mlp_bias": decoder.mlp_bias,
            "scale_embedding": decoder.scale_embedding,
        }
        found = [name for name, leaves in leaving.items() if leaves]
        _require(
            not found,
            f"subspace is for layers that write products into the residual stream and nothing else, as Llama's and "
            f"Qwen's do: decoder.{found[0] if found else ''} writes more. Leave one of them out",
        )

    @property
    def whole(self) -> "ModelSpec":
        """The model without its subspace: what it computes, with matrices that write into all of `dim`."""
        return msgspec.structs.replace(self, subspace=0) if self.subspace else self

    @property
    def written_width(self) -> int:
        """Numbers a token that a layer adds to the residual stream, and that stages send each other."""
        return self.subspace or self.dim

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.dim // self.num_heads if self.head_size is None else self.head_size

    @property
    def family(self) -> str:
        """The family of models that this is one of, by its `model_type` in `transformers`."""
        own_size = None if self.head_size in (None, self.dim // self.num_heads) else self.head_size
        return family_of(self.decoder, head_size=own_size, experts=self.num_experts > 0)

    def window_of(self, layer_index: int) -> int:
        """Tokens that a token looks at in this decoder layer, itself among them; 0: all before it."""
        return 0 if layer_index in self.decoder.full_layers else self.decoder.window

    @property
    def experts_computed(self) -> int:
        """SwiGLUs of width F that a token passes in each decoder layer."""
        return self.experts_per_token if self.num_experts else 1

    @property
    def experts_held(self) -> int:
        """SwiGLUs of width F that each decoder layer has."""
        return self.num_experts or 1


_MODEL_MAX = {
    "vocab_size": VOCABULARY_MAX,
    "dim": DIM_MAX,
    "num_layers": LAYERS_MAX,
    "num_heads": DIM_MAX,
    "num_kv_heads": DIM_MAX,
    "ffn_dim": FFN_DIM_MAX,
    "context": CONTEXT_MAX,
}
_OF_EXPERTS = {"experts_per_token": 2, "router_aux_loss": 0.01}
"""Fields that a dense model leaves at their defaults, which are these."""


class SourceSpec(_Section, frozen=True):
    """One of several sources that a run reads. What it does not say itself is as in `DataSpec`."""

    source: str
    """What `data.source` would say."""
    weight: float = 1.0
    """Its share of the run's samples, beside the weights of the other sources."""
    format: Literal["text", "chat"] = "text"
    field: str = "text"
    subset: str = ""
    split: str = "train"
    tokens_max: int = 0

    def __post_init__(self) -> None:
        _require(bool(self.source) and bool(self.field), "source and field must not be empty")
        _require(0 < self.weight < math.inf, f"weight must be positive, is {self.weight}")
        _require(self.tokens_max >= 0, f"tokens_max must not be negative, is {self.tokens_max}")


class DataSpec(_Section, frozen=True):
    """Says what the run reads. Only stage-0 peers need it."""

    source: str = "python-library"
    """`python-library` (the sources of Python's standard library), the path of a file or folder (text, JSON, CSV,
    Parquet), or `hf:NAME`, a data set of the Hugging Face hub."""
    validation_fraction: float = 0.05
    """Share of the text that training never sees."""
    digest: str = ""
    """BLAKE3 of the prepared text, of several sources one for each with a + between, filled in by the host; a stage-0
    peer whose text differs is not used for stage 0."""
    field: str = "text"
    """Where the text is in a row of JSON, CSV, Parquet or a data set."""
    subset: str = ""
    """The subset, where a data set has several."""
    split: str = "train"
    """The split of a data set. Validation is taken from it too."""
    tokens_max: int = 0
    """Read no further once there are this many tokens; 0: read everything."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    tokenizer_digest: str = ""
    """BLAKE3 of that file, filled in by the host."""
    format: Literal["text", "chat"] = "text"
    """`chat`: each line, row or example has `messages` (a list of `role` and `content`) or `prompt` and `completion`.
    Only what the assistant says is learnt, and a sample is made of whole conversations. The chat template lies beside
    the tokenizer.json."""
    document_masks: bool | None = None
    """Whether attention ends, and positions begin anew, where a document does. None: if anything here is a chat."""
    sources: tuple[SourceSpec, ...] = ()
    """Several sources in the place of one; then nothing of the one is said."""

    def __post_init__(self) -> None:
        _require(bool(self.source), "source is empty")
        _require(len(self.sources) <= SOURCES_MAX, f"there are at most {SOURCES_MAX} sources, not {len(self.sources)}")
        for name in _OF_ONE_SOURCE if self.sources else ():
            default = next(field.default for field in msgspec.structs.fields(DataSpec) if field.name == name)
            _require(getattr(self, name) == default, f"{name} means nothing beside sources: say it there")
        _require(bool(self.field) and bool(self.tokenizer), "field and tokenizer must not be empty")
        _require(self.tokens_max >= 0, f"tokens_max must not be negative, is {self.tokens_max}")
        _require(0 < self.validation_fraction < 0.5, f"validation_fraction {self.validation_fraction} not in (0, 0.5)")

    @property
    def has_chats(self) -> bool:
        return "chat" in (self.format, *(one.format for one in self.sources))

    @property
    def masks_documents(self) -> bool:
        """Whether tokens look at their own document only."""
        return self.has_chats if self.document_masks is None else self.document_masks

    @property
    def leaves_out_targets(self) -> bool:
        """Whether some tokens are not learnt, so that microbatches may differ in how many are."""
        return self.has_chats or self.masks_documents

    @property
    def each(self) -> tuple["DataSpec", ...]:
        """The sources one by one, each as if it were the only one."""
        if not self.sources:
            return (self,)
        masks = self.masks_documents
        return tuple(
            msgspec.structs.replace(
                self,
                sources=(),
                document_masks=masks,
                **{name: getattr(one, name) for name in _OF_ONE_SOURCE},
            )
            for one in self.sources
        )

    def found_at(self, sources: tuple[str, ...]) -> "DataSpec":
        """The same data where its sources, as many as it has, are elsewhere."""
        if not self.sources:
            return msgspec.structs.replace(self, source=sources[0])
        moved = zip(self.sources, sources, strict=True)
        return msgspec.structs.replace(
            self, sources=tuple(msgspec.structs.replace(one, source=source) for one, source in moved)
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """What `digest` says of each source; empty: nothing yet."""
        return tuple(self.digest.split(BETWEEN_DIGESTS)) if self.digest else ()

    @property
    def named(self) -> str:
        """The source, or all of them, for people."""
        return ", ".join(one.source for one in self.sources) or self.source


SOURCES_MAX = 16
"""Sources of a run: its spec must fit into a record of the directory, with a digest of each."""
BETWEEN_DIGESTS = "+"
_OF_ONE_SOURCE = ("source", "format", "field", "subset", "split", "tokens_max")
"""What each of several sources says for itself."""
_DATA = DataSpec()
_LATER_OF_DATA = (
    *("field", "subset", "split", "tokens_max", "tokenizer", "tokenizer_digest"),
    *("format", "document_masks", "sources"),
)
"""Fields that the first specs did not have."""


class OptimizerSpec(_Section, frozen=True):
    """One of the optimizers of `shoal.kernels.optimizer`, with its schedule."""

    name: Literal["sgd", "adamw", "nadam", "muon"] = "nadam"
    """sgd is with momentum `beta1`; so is muon, whose embedding, head and norms take adamw's rule. In
    `tests/bench/staleness` muon at 8e-3 learns fastest and minds staleness least, so take it where the model is small
    or the cards are quick in fp64: its products are exact, and most cards are 64 times slower in that."""
    learning_rate: float = 4e-3
    """Peak learning rate. A run file that does not say it gets one that fits the model and the batch."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; applied to matrices, not to norms."""
    warmup_steps: int = 20
    """Linear warm-up from 0. A run file that does not say it gets one that fits `beta2` and the steps."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """The rate after the warm-up: `cosine` falls from the peak to the run's last step; `constant` stays at the peak;
    `wsd` (warm-up, stable, decay) stays there and falls in the last `decay_steps`. `shoal.peer.model.schedule` says
    what happens when a run is continued: whoever does not know yet how long a run will be takes `wsd` or `constant`."""
    decay_steps: int | None = None
    """The steps in which `wsd` falls. None: a fifth of the run's steps."""
    final_learning_rate_fraction: float = 0.1
    """Where the rate falls, it ends at this fraction of the peak at the run's last step."""
    clip_norm: float = 1.0
    """Gradient norm bound, per layer (so that nothing depends on where the model is cut); where there are experts, of
    each by itself and of the rest of its layer (so that nothing depends on where they are). 0: no clipping."""

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, f"learning_rate must be positive, is {self.learning_rate}")
        _require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must be in [0, 1)")
        _require(self.epsilon > 0, "epsilon must be positive")
        _require(self.weight_decay >= 0 and self.clip_norm >= 0, "weight_decay and clip_norm must not be negative")
        _require(self.warmup_steps >= 0, "warmup_steps must not be negative")
        _require(0 <= self.final_learning_rate_fraction <= 1, "final_learning_rate_fraction not in [0, 1]")
        _check_decay(self.schedule, self.decay_steps)


class TrainingSpec(_Section, frozen=True):
    """Says what a step is."""

    steps: int = 400
    """Commits until the run is done."""
    microbatches_per_step: int = 8
    """M: microbatches whose mean gradient makes one step. A run file that does not say it gets a step that fits the
    model's size."""
    microbatch_size: int = 4
    """Samples a microbatch."""
    s_max: int = 1
    """Largest staleness a microbatch may be computed with; 0 is synchronous training."""
    synchronous_steps: int | None = None
    """The first steps are synchronous whatever `s_max` is, so many of them: staleness costs most by far while the loss
    falls fastest (`tests/bench/staleness`). None: twice as many as the optimizer warms up; 0 with muon."""
    compensation: Literal["none", "stash", "spectrain", "pipeoptim", "lookahead", "calibrated", "dc", "eager"] = "eager"
    """What is done about staleness: a strategy of `shoal.peer.pipeline.prediction`."""
    compute: Literal["auto", "bf16", "fp32"] = "auto"
    """What a forward and a backward multiply in. Parameters, moments, sums of gradients, norms, softmaxes and the loss
    are float32 in any case. "auto": each peer takes bf16 if its device is quicker in it; members may differ."""
    keep: Literal["stash", "layers", "recompute"] = "stash"
    """What a microbatch keeps between its forward and its backward. "stash": its activations and weights. "layers": its
    weights, and what each layer read; the backward runs one layer's forward at a time again, the last stage's too, so
    that the activations of one layer are in memory and not those of a stage (activation checkpointing: Chen et al.,
    2016, arXiv 1604.06174). "recompute": its input alone; the backward runs the forward again, with the weights that
    its step has by then."""
    validation_interval_steps: int = 20
    """0: never validate."""
    validation_microbatches: int = 4
    """Microbatches a validation is the mean of; always the same ones."""
    commit_deadline_s: float = 0.0
    """A group commits with a quorum after it has lacked microbatches for so long; 0: a group never gives one up."""
    commit_quorum: float = 1.0
    """Share of M that must be there at the deadline."""

    def __post_init__(self) -> None:
        for name in ("steps", "microbatches_per_step", "microbatch_size", "validation_microbatches"):
            _require(getattr(self, name) > 0, f"{name} must be positive, is {getattr(self, name)}")
        for name in ("microbatches_per_step", "validation_microbatches"):
            _require(getattr(self, name) <= MICROBATCHES_PER_STEP_MAX, f"{name} is at most {MICROBATCHES_PER_STEP_MAX}")
        _require(self.steps <= STEPS_MAX, f"steps is at most {STEPS_MAX:,}, and is {self.steps}")
        _require(0 <= self.s_max <= 8, f"s_max must be in [0, 8], is {self.s_max}")
        _require((self.synchronous_steps or 0) >= 0, f"synchronous_steps is negative: {self.synchronous_steps}")
        _require(self.validation_interval_steps >= 0, "validation_interval_steps must not be negative")
        _require(self.commit_deadline_s >= 0, "commit_deadline_s must not be negative")
        _require(0 < self.commit_quorum <= 1, "commit_quorum must be in (0, 1]")

    @property
    def recomputes(self) -> bool:
        """Whether a backward runs its forward again, to save memory or because the compensation wants newer weights."""
        return self.keep != "stash" or self.wants_newer_weights

    @property
    def wants_newer_weights(self) -> bool:
        """Whether the compensation wants a backward to take other weights than its forward had."""
        return self.compensation in ("none", "spectrain")


class SwarmSpec(_Section, frozen=True):
    """Says how the peers are organised."""

    stages: int | Literal["auto"] = AUTO_STAGES
    """Pipeline stages K. "auto": as many as the coordinator finds best for the peers that are there, and another number
    when that is better. A number: so many as soon as there are so many peers, and never more."""
    min_peers: int = 1
    """Peers that must be there before the first plan, and before the run goes back with fewer stages because too few
    peers are left for those that it had. They may be fewer than the stages: where the model fits, the host begins
    alone."""
    heartbeat_s: float = 1.0
    """How often a peer reports to the coordinator."""
    term_s: float = 60.0
    """How long one peer is coordinator before the role moves on."""
    snapshot_interval_steps: int = 50
    """Steps between snapshots; 0: by time alone."""
    snapshot_interval_s: float = 300.0
    """Seconds between snapshots, beside those by steps: the most that is lost when all peers are cut off power at once.
    0: by steps alone."""
    open: bool = False
    """Anyone may come, without an invite's key. Newcomers then are let in a few at a time, and on probation."""
    expert_slots: int = 0
    """Experts that a member of a stage holds, each of all of the stage's layers; more where `expert_replicas` takes
    more. 0: every member holds whole layers, with all of their experts."""
    expert_replicas: int = 2
    """Members that hold each expert at least, as far as its stage has so many: while fewer than that die at a time,
    nothing is lost. 1: `expert_slots` is kept wherever they are enough for one copy of each."""
    trust: Literal["invites", "members"] = "invites"
    """"invites": all members that came by one invite together have at most half as many votes as the run has electors
    by other invites. "members": every vote counts the same, whatever invite a member came by."""

    def __post_init__(self) -> None:
        _require(
            self.stages == AUTO_STAGES or 0 < self.stages <= STAGES_MAX,
            f'stages must be "{AUTO_STAGES}" or in [1, {STAGES_MAX}], is {self.stages}',
        )
        _require(self.min_peers > 0, f"min_peers must be positive, is {self.min_peers}")
        for name, most in (("min_peers", PEERS_MAX), ("expert_slots", EXPERTS_MAX), ("expert_replicas", PEERS_MAX)):
            value = getattr(self, name)
            _require(value <= most, f"{name} is at most {most}, and is {value}")
        _require(self.heartbeat_s > 0, "heartbeat_s must be positive")
        _require(
            self.term_s >= TERM_HEARTBEATS_MIN * self.heartbeat_s,
            f"term_s must be at least {TERM_HEARTBEATS_MIN} heartbeats, is {self.term_s / self.heartbeat_s:.3g}",
        )
        _require(self.snapshot_interval_steps >= 0, "snapshot_interval_steps must not be negative")
        _require(self.snapshot_interval_s >= 0, "snapshot_interval_s must not be negative")
        _require(self.expert_slots >= 0, "expert_slots must not be negative")
        _require(self.expert_replicas > 0, f"expert_replicas must be positive, is {self.expert_replicas}")

    @property
    def stages_max(self) -> int | None:
        """The most stages that the run may have; None: as many as suit it."""
        return None if self.stages == AUTO_STAGES else self.stages

    def stages_for(self, num_peers: int) -> int | None:
        """How many stages a layout of so many peers is to have; None: the best number, which is at most one a peer."""
        stages = self.stages_max
        return stages if stages is not None and stages <= num_peers else None


_SWARM = SwarmSpec()


class WireSpec(_Section, frozen=True):
    """Says how tensors travel. "int8" and "hadamard6" to "hadamard3" are those of `kernels/codec`."""

    activations: WireFormat | Literal["auto"] = "bf16"
    """Activations, from one stage to the next. State always travels in fp32. "auto": each plan says for each cut
    whether bf16 or 8 bits a number (`Plan.formats`), which is 8 bits where a step waits for its activations."""
    activation_gradients: WireFormat | None = None
    """Their gradients, on the way back. None: as the activations, but in 6 bits at least, as gradients mind it more."""
    gradients: WireFormat | Literal["auto"] = "fp32"
    """Parameter gradients in a reduction: each member's sum on its way to whoever adds, and the mean on its way back.
    They are added in fp32 in any case. "auto": each plan says for each stage whether 8 bits a number or 4
    (`Plan.formats`), which is 4 where a step waits for its reduction."""

    @property
    def sums(self) -> tuple[WireFormat, ...]:
        """The formats in which a reduction may travel, the widest first. Of several the plan takes one a stage."""
        return AUTO_SUMS if self.gradients == "auto" else (self.gradients,)

    @property
    def forward(self) -> tuple[WireFormat, ...]:
        """The formats in which activations may travel, the widest first. Of several the plan takes one a cut."""
        return AUTO_ACTIVATIONS if self.activations == "auto" else (self.activations,)

    def backward_of(self, activations: WireFormat) -> WireFormat:
        """How the gradients of activations travel that go forth in this format."""
        if self.activation_gradients is not None:
            return self.activation_gradients
        return "hadamard6" if activations in ("hadamard5", "hadamard4", "hadamard3") else activations

    @property
    def tokens(self) -> Literal["fp32", "bf16"]:
        """How tokens travel to experts that are placed, and back: row by row."""
        return "fp32" if self.activations == "fp32" else "bf16"


class InitialSpec(_Section, frozen=True):
    """The weights that the run begins with, where they are not made from its seed. `shoal import` writes this."""

    source: str = ""
    """Folder on the host's machine; everybody else asks the host."""
    digests: tuple[str, ...] = ()
    """BLAKE3 (32 hex digits) of each layer's parameters, embedding first; empty: weights come from the seed. Where
    there is an `adapter`, of the layer's bytes as `adapter.base` stores them."""
    name: str = ""
    """What the model with these weights is called, as far as its folder says: `owner/name` of a hub."""
    licence: str = ""
    """Its licence, as the model's card says it: `apache-2.0`."""

    def __post_init__(self) -> None:
        _require(bool(self.source) == bool(self.digests), "source and digests come together")
        for name in ("name", "licence"):
            value = getattr(self, name)
            _require(len(value) <= BASE_CHARS_MAX and value.isprintable(), f"{name} is no name: {value[:40]!r}")


class AdapterSpec(_Section, frozen=True):
    """What is trained beside weights that stay as they are. `[adapter]` in a run file; without it all weights train.

    Of the model, the *base*, each matrix W that is a target becomes W' = W + (alpha / rank) B A, and only A and B have
    gradients and moments. With "dora" each row of W' is scaled to the norm of the row of W plus an element of a vector
    m, the change of DoRA's magnitude vector, which is trained, too. The base is what the run would begin with:
    `initial`, or the seed. Sources: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv
    2106.09685; Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, arXiv 2402.09353, equation 5.
    """

    kind: Literal["lora", "dora"]
    rank: int = 16
    """Rows of A, columns of B."""
    alpha: float = 32.0
    """What B A weighs is alpha / rank."""
    targets: tuple[str, ...] = ADAPTER_TARGETS
    """The matrices of each decoder layer that get an adapter; all by default. Experts and routers never do: in a model
    with experts those of the attention are meant."""
    base: BaseFormat = "bf16"
    """How the base is stored and sent. "int8" has blocks of 64 with a scale each; "nf4" has 4 bits a number in the
    matrices of the decoder layers, and "int8" in embedding and head. Norms and biases are bf16 at least."""

    def __post_init__(self) -> None:
        _require(self.rank > 0, f"rank must be positive, is {self.rank}")
        _require(0 < self.alpha < math.inf, f"alpha must be positive, is {self.alpha}")
        _require(bool(self.targets), "targets is empty: name the matrices that get an adapter, or leave the line out")
        unknown = [name for name in self.targets if name not in ADAPTER_TARGETS]
        _require(not unknown, f"targets has {unknown[:1]}: a decoder layer has {', '.join(ADAPTER_TARGETS)}")
        _require(len(set(self.targets)) == len(self.targets), "targets names a matrix twice")

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank

    def targets_in(self, model: ModelSpec) -> tuple[str, ...]:
        """Those of `targets` that get an adapter in this model."""
        return tuple(name for name in self.targets if not model.num_experts or name in ATTENTION_TARGETS)


class ContinuedSpec(_Section, frozen=True):
    """One time that the run was continued: where, and what was said until then. `shoal continue` writes this; the
    learning rate of every step, before and after, follows from it."""

    at: int
    """The step that the run went on with."""
    steps: int
    """`training.steps` until then."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """`optimizer.schedule` until then."""
    decay_steps: int | None = None
    """`optimizer.decay_steps` until then."""

    def __post_init__(self) -> None:
        _require(0 <= self.at <= self.steps, f"at must be in [0, steps {self.steps}], is {self.at}")
        _check_decay(self.schedule, self.decay_steps)


class RunSpec(_Section, frozen=True):
    """The whole agreement.

    What may change when a run is continued is `training.steps`, `optimizer.schedule`, `optimizer.decay_steps` and
    `swarm.min_peers`; each change is another revision of the same run.
    """

    name: str = "shoal"
    """The run's name for people."""
    seed: int = 0
    """Decides initial weights and the order of the data."""
    model: ModelSpec = msgspec.field(default_factory=ModelSpec)
    data: DataSpec = msgspec.field(default_factory=DataSpec)
    optimizer: OptimizerSpec = msgspec.field(default_factory=OptimizerSpec)
    training: TrainingSpec = msgspec.field(default_factory=TrainingSpec)
    swarm: SwarmSpec = msgspec.field(default_factory=SwarmSpec)
    wire: WireSpec = msgspec.field(default_factory=WireSpec)
    initial: InitialSpec = msgspec.field(default_factory=InitialSpec)
    adapter: AdapterSpec | None = None
    """None: all weights train."""
    continued: tuple[ContinuedSpec, ...] = ()
    """Each time that the run was continued, the first one first."""

    def __post_init__(self) -> None:
        _require(0 < len(self.name) <= 64, "name must have 1 to 64 characters")
        _require(is_name(self.name), f"name has a control character or a line break: {self.name!r}")
        _require(0 <= self.seed < 2**63, "seed must be in [0, 2^63)")
        _require(
            (self.swarm.stages_max or 1) <= self.model.num_layers,
            f"swarm.stages {self.swarm.stages} is more than model.num_layers {self.model.num_layers}: "
            "a stage has one layer at least",
        )
        _require(
            self.optimizer.warmup_steps <= self.training.steps,
            f"optimizer.warmup_steps {self.optimizer.warmup_steps} is more than training.steps {self.training.steps}",
        )
        _require(len(self.continued) <= CONTINUED_MAX, f"a run can be continued {CONTINUED_MAX} times at most")
        begins = [part.at for part in self.continued]
        _require(begins == sorted(begins), "continued must be in the order of its steps")
        _require(
            not begins or begins[-1] <= self.training.steps,
            f"the run was continued at step {max(begins, default=0)}, after training.steps {self.training.steps}",
        )
        _require(
            len(self.initial.digests) in (0, self.model.num_layers + 2),
            f"initial.digests has {len(self.initial.digests)} entries for {self.model.num_layers + 2} layers",
        )
        _require(
            not self.swarm.expert_slots or self.model.num_experts > 0,
            "swarm.expert_slots means nothing in a dense model: model.num_experts is 0 or missing",
        )
        if self.adapter is not None:
            _check_adapter(self.adapter, self.model)
            _require(
                not self.swarm.expert_slots,
                "swarm.expert_slots places experts that train, and beside [adapter] they stay as they are, with each "
                "member of a stage: leave it out",
            )
        if self.model.subspace:
            _check_subspace_run(self)
        tokens = self.training.microbatch_size * self.model.context
        frame_bytes = tensor_bytes(self.wire.forward[0], tokens * self.model.written_width) + self.labels_bytes
        if self.swarm.expert_slots:
            # All of a microbatch's tokens may go to one holder, and back with their gradients.
            rows = 2 * tokens * self.model.experts_per_token
            frame_bytes = max(frame_bytes, tensor_bytes(self.wire.tokens, rows * self.model.dim))
        _require(
            frame_bytes <= FRAME_PAYLOAD_BYTES_MAX,
            f"training.microbatch_size {self.training.microbatch_size} makes activations of {frame_bytes >> 20} MiB, "
            f"more than the {FRAME_PAYLOAD_BYTES_MAX >> 20} MiB that fit into a frame",
        )

    @property
    def labels_bytes(self) -> int:
        """Bytes that go along with a microbatch's activation (`peer/pipeline/wire.py`): a word for each target; a
        weight, where some are not learnt; in a subspace model the tokens that do not follow from the targets."""
        tokens, leaves_out = self.training.microbatch_size * self.model.context, self.data.leaves_out_targets
        of_subspace = (tokens if leaves_out else self.training.microbatch_size) if self.model.subspace else 0
        return _LABEL_BYTES * (tokens + leaves_out + of_subspace)

    @property
    def trains_tied(self) -> bool:
        """Embedding and head are one matrix that trains."""
        return self.model.tied and self.adapter is None

    @property
    def recomputes_by_layer(self) -> bool:
        """Whether a backward runs the forward of one layer at a time again, from what that layer read, with the weights
        of the forward. (Where experts are placed a stage runs again as a whole.)"""
        training = self.training
        return training.keep == "layers" and not training.wants_newer_weights and not self.swarm.expert_slots

    @property
    def tokens_per_step(self) -> int:
        return self.training.microbatches_per_step * self.training.microbatch_size * self.model.context

    @property
    def revision(self) -> int:
        """How often the run has been continued. Of two specs of one run the one with the higher revision holds."""
        return len(self.continued)

    @property
    def synchronous_steps(self) -> int:
        """Steps from the start in which nothing is stale."""
        steps = self.training.synchronous_steps
        optimizer = self.optimizer
        return synchronous_steps(optimizer.name, warmup_steps=optimizer.warmup_steps) if steps is None else steps


def _check_adapter(adapter: AdapterSpec, model: ModelSpec) -> None:
    _require(
        bool(adapter.targets_in(model)),
        f"adapter.targets: in a model with experts {adapter.targets[0]} is of the experts, which get none: name "
        f"one of {', '.join(ATTENTION_TARGETS)}, or leave the line out",
    )
    _require(
        adapter.rank <= model.dim,
        f"adapter.rank {adapter.rank} is more than model.dim {model.dim}: it would be larger than what it adapts",
    )


def _check_subspace_run(spec: RunSpec) -> None:
    _require(
        not spec.initial.digests,
        "model.subspace is for a model that begins with its seed: the matrices of one that is there already write into "
        "all of its width. Leave model.subspace out",
    )
    _require(
        spec.adapter is None,
        "model.subspace is for a run that trains all weights, and beside [adapter] they stay as they are: leave one of "
        "the two out",
    )
    _require(
        not spec.swarm.expert_slots,
        "model.subspace keeps the experts of a layer together with it: leave swarm.expert_slots out",
    )


_CHANGING = {
    "training": ("steps",),
    "optimizer": ("schedule", "decay_steps"),
    "swarm": ("min_peers",),
}
"""What may change when a run is continued, by table."""

_REPLACED = {
    "predict": 'say compensation = "pipeoptim" for what predict = true was, "stash" for false',
    "tied": "say tied = true in [model] for what it was in [initial]",
}
"""Fields that former specs had."""


def encode_spec(spec: RunSpec) -> bytes:
    """Canonical bytes: equal specs give equal bytes."""
    return msgspec.msgpack.encode(_tables(spec))


def _tables(spec: RunSpec) -> dict[str, Any]:
    """Leave out what the first specs did not have, where it says nothing: their bytes stay what they were."""
    tables: dict[str, Any] = msgspec.to_builtins(spec)
    if not spec.model.num_experts:
        for name in ("num_experts", *_OF_EXPERTS):
            del tables["model"][name]
    if spec.model.head_size is None:
        del tables["model"]["head_size"]
    if spec.model.decoder == LLAMA:
        del tables["model"]["decoder"]
    if not spec.model.tied:
        del tables["model"]["tied"]
    if not spec.model.subspace:
        del tables["model"]["subspace"]
    if not spec.swarm.expert_slots:
        for name in ("expert_slots", "expert_replicas"):
            del tables["swarm"][name]
    for name in _LATER_OF_DATA:
        if getattr(spec.data, name) == getattr(_DATA, name):
            del tables["data"][name]
    if spec.training.synchronous_steps is None:
        del tables["training"]["synchronous_steps"]
    if spec.optimizer.schedule == "cosine":
        del tables["optimizer"]["schedule"]
    if spec.optimizer.decay_steps is None:
        del tables["optimizer"]["decay_steps"]
    if not spec.continued:
        del tables["continued"]
    if spec.swarm.snapshot_interval_s == _SWARM.snapshot_interval_s:
        del tables["swarm"]["snapshot_interval_s"]
    if not spec.swarm.open:
        del tables["swarm"]["open"]
    if spec.swarm.trust == _SWARM.trust:
        del tables["swarm"]["trust"]
    if not spec.initial.digests:
        del tables["initial"]
    else:
        for name in ("name", "licence"):
            if not getattr(spec.initial, name):
                del tables["initial"][name]
    if spec.adapter is None:
        del tables["adapter"]
    if spec.training.compute == "auto":
        del tables["training"]["compute"]
    if spec.wire.activation_gradients is None:
        del tables["wire"]["activation_gradients"]
    return tables


def decode_spec(data: bytes) -> RunSpec:
    """Raises: SpecError."""
    try:
        return msgspec.msgpack.decode(data, type=RunSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"the run's spec cannot be read: {spec_complaint(error)}") from error


def spec_complaint(error: Exception) -> str:
    """Say in one line what is wrong with a spec, and what replaces a field that earlier versions had."""
    instead = [advice for name, advice in _REPLACED.items() if f"unknown field `{name}`" in str(error)]
    return "; ".join([complaint(error, RunSpec), *instead])


def run_id(spec: RunSpec, owner: PeerID) -> str:
    """16 hex digits that name the run: the same for all revisions of a spec, and for no other spec or owner."""
    return blake3(unchanging_bytes(spec) + owner.encode()).hexdigest(length=8)


def unchanging_bytes(spec: RunSpec) -> bytes:
    """Canonical bytes of what stays the same when a run is continued."""
    tables = _tables(spec)
    tables.pop("continued", None)
    for table, fields in _CHANGING.items():
        for name in fields:
            tables[table].pop(name, None)
    return msgspec.msgpack.encode(tables)


def continued_spec(spec: RunSpec, wanted: RunSpec, *, at: int) -> RunSpec:
    """The next revision of a run: `spec` until step `at`, from there on what `wanted` says of that which may change.

    Returns: `spec` itself if nothing changes.
    Raises: ValueError: the run cannot be continued so.
    """
    changes = {
        table: {name: getattr(getattr(wanted, table), name) for name in fields} for table, fields in _CHANGING.items()
    }
    tables = {table: msgspec.structs.replace(getattr(spec, table), **fields) for table, fields in changes.items()}
    if all(getattr(spec, table) == changed for table, changed in tables.items()):
        return spec
    until_now = ContinuedSpec(
        at=at,
        steps=spec.training.steps,
        schedule=spec.optimizer.schedule,
        decay_steps=spec.optimizer.decay_steps,
    )
    return msgspec.structs.replace(spec, **tables, continued=(*spec.continued, until_now))
