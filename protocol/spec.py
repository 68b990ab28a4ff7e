"""The run spec: everything on which all peers of a run agree before the first microbatch. Pure.

A TOML file becomes a `RunSpec` (frozen, checked); nothing reads a global or an environment variable later. If a run
file leaves out a field that should fit the model, `toml/defaults.py` chooses its value; the defaults here are for
code. `swarm.stages` and formats in `wire` may stay "auto": each plan then chooses them. The run id is the hash of the
owner's key and of the unchangeable fields, so peers with the same run id and revision agree on every field.

This file is long because it holds every field of a run file with its meaning.
"""

import math
from typing import Any, Final, Literal

import msgspec
from blake3 import blake3

from shoal.protocol.complaint import complaint
from shoal.protocol.decoder import (
    LLAMA,
    DecoderSpec,
    family_of,
    require,
    require_not_negative,
    require_positive,
)
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
from shoal.protocol.wire_format import AUTO_ACTIVATIONS, AUTO_SUMS, WireFormat, tensor_bytes

TERM_HEARTBEATS_MIN = 4
"""Least length of a coordinator's term in heartbeats. To be sure that a stage has lost its state, a coordinator needs
three heartbeats, and checks every half heartbeat."""
ADAPTER_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a decoder layer that can get adapters, by their Hugging Face names, the same in all families."""
ATTENTION_TARGETS: Final = ADAPTER_TARGETS[:4]
"""Matrices that can get adapters in a layer with experts: the experts' own matrices get none."""
BaseFormat = Literal["fp32", "bf16", "int8", "nf4"]
AUTO_STAGES: Final = "auto"
"""The value of `swarm.stages` that lets the coordinator choose the number of stages."""
CONTINUED_MAX = 64
"""Most continuations that a spec may list: the spec must fit into a directory record."""
BASE_CHARS_MAX = 120
"""Most characters of the base model's name, and of its licence's name."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file."""


def _check_decay(schedule: str, decay_steps: int | None) -> None:
    require(decay_steps is None or decay_steps > 0, f"decay_steps must be positive, is {decay_steps}")
    require(
        decay_steps is None or schedule == "wsd", f'decay_steps means nothing with schedule "{schedule}": say "wsd"'
    )


class ModelSpec(_Section, frozen=True):
    """The model: Llama's decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU), changed by `decoder`."""

    vocab_size: int = 256
    """Number of different tokens; 256 if the tokens are bytes."""
    dim: int = 128
    """Width D of the residual stream."""
    num_layers: int = 6
    """Number of decoder layers, without embedding and head."""
    num_heads: int = 4
    """Number of query heads H; divides `dim`. A run file without it, or with "auto", gets heads of width 64, or 128 in
    a wide model. Such rules also choose `num_kv_heads`, `ffn_dim`, the learning rate, the warm-up and the microbatches
    of a step; `shoal host` prints the choices."""
    num_kv_heads: int = 2
    """Number of key and value heads; divides `num_heads`."""
    ffn_dim: int = 352
    """Hidden width F of SwiGLU, or of each expert."""
    head_size: int | None = None
    """Width K of a head, even (rotary pairs). None: dim / num_heads."""
    context: int = 256
    """Tokens T of a sample."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    num_experts: int = 0
    """Experts E in every decoder layer in place of its SwiGLU; 0: a dense model."""
    experts_per_token: int = 2
    """Number K of experts to which a layer sends each token."""
    router_aux_loss: float = 0.01
    """Weight of each layer's load-balancing loss, which is 1 if the load is even."""
    decoder: DecoderSpec = LLAMA
    """Differences from Llama's decoder (`protocol/decoder.py`). `shoal import` writes this table."""
    tied: bool = False
    """True: the head's matrix is the embedding; both pipeline ends hold it and apply the sum of their gradients."""
    subspace: int = 0
    """Size k of a subspace, less than `dim`; 0: none. Each layer adds to a token only k coordinates in a subspace drawn
    from the run's seed; the rest of the residual stream is a fixed vector for each token. So stages exchange k numbers
    per token instead of `dim`, without loss. Such a model learns less (`peer/model/MEASURED.md`);
    `peer/model/subspace.py` has the source."""

    def __post_init__(self) -> None:
        require_positive(self, vocab_size=VOCABULARY_MAX, dim=DIM_MAX, num_layers=LAYERS_MAX, num_heads=DIM_MAX)
        require_positive(self, num_kv_heads=DIM_MAX, ffn_dim=FFN_DIM_MAX, context=CONTEXT_MAX, norm_eps=math.inf)
        require(self.dim % self.num_heads == 0, f"num_heads {self.num_heads} does not divide dim {self.dim}")
        require(self.head_dim > 0, f"head_size must be positive, is {self.head_dim}")
        require(
            self.num_heads * self.head_dim <= FFN_DIM_MAX,
            f"num_heads x head_size is at most {FFN_DIM_MAX:,}, and is {self.num_heads * self.head_dim:,}",
        )
        require(self.head_dim % 2 == 0, f"head size {self.head_dim} is odd")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}",
        )
        require(1 < self.rope_theta < math.inf, f"rope_theta must be more than 1, is {self.rope_theta}")
        beyond = [layer for layer in self.decoder.full_layers if not 0 <= layer < self.num_layers]
        require(not beyond, f"decoder.full_layers has {beyond[:1]}, and there are {self.num_layers} layers")
        self._check_experts()
        self._check_subspace()
        _ = self.family  # raises if no family fits

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            for name, default in _OF_EXPERTS.items():
                require(
                    getattr(self, name) == default,
                    f"{name} means nothing in a dense model: num_experts is 0 or missing",
                )
            return
        require(
            0 < self.num_experts <= EXPERTS_MAX, f"num_experts must be in [0, {EXPERTS_MAX}], is {self.num_experts}"
        )
        require(
            0 < self.experts_per_token <= self.num_experts,
            f"experts_per_token must be in [1, num_experts {self.num_experts}], is {self.experts_per_token}",
        )
        require_not_negative(self, "router_aux_loss")

    def _check_subspace(self) -> None:
        if self.subspace == 0:
            return
        require(
            0 < self.subspace < self.dim,
            f"subspace must be in [1, {self.dim - 1}], less than dim, or 0 for none; it is {self.subspace}",
        )
        require(
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
        require(
            not found,
            f"subspace is for layers that add only matrix products to the residual stream, as Llama's and Qwen's do: "
            f"decoder.{found[0] if found else ''} adds more. Leave one of them out",
        )

    @property
    def whole(self) -> "ModelSpec":
        """Spec of a model without a subspace that computes the same function: its matrices write into all of `dim`."""
        return msgspec.structs.replace(self, subspace=0) if self.subspace else self

    @property
    def written_width(self) -> int:
        """Number of values per token that a layer adds to the residual stream; stages exchange as many."""
        return self.subspace or self.dim

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads if self.head_size is None else self.head_size

    @property
    def family(self) -> str:
        """The model's family, by its `model_type` in `transformers`."""
        own_size = None if self.head_size in (None, self.dim // self.num_heads) else self.head_size
        return family_of(self.decoder, head_size=own_size, experts=self.num_experts > 0)

    def window_of(self, layer_index: int) -> int:
        """Return a decoder layer's attention window in tokens, including the token itself; 0: full causal attention."""
        return 0 if layer_index in self.decoder.full_layers else self.decoder.window

    @property
    def experts_computed(self) -> int:
        """Number of SwiGLUs of width F that a token passes through in each decoder layer."""
        return self.experts_per_token if self.num_experts else 1

    @property
    def experts_held(self) -> int:
        """Number of SwiGLUs of width F in each decoder layer."""
        return self.num_experts or 1


_OF_EXPERTS = {"experts_per_token": 2, "router_aux_loss": 0.01}
"""Fields that only a model with experts may set, with their defaults."""


class SourceSpec(_Section, frozen=True):
    """One of several data sources. Its fields mean the same as in `DataSpec`."""

    source: str
    weight: float = 1.0
    """This source's share of the run's samples, relative to the other sources' weights."""
    format: Literal["text", "chat"] = "text"
    field: str = "text"
    subset: str = ""
    split: str = "train"
    tokens_max: int = 0

    def __post_init__(self) -> None:
        require(bool(self.source) and bool(self.field), "source and field must not be empty")
        require_positive(self, weight=math.inf)
        require_not_negative(self, "tokens_max")


class DataSpec(_Section, frozen=True):
    """The training data. Only peers of stage 0 need it."""

    source: str = "python-library"
    """`python-library` (the sources of Python's standard library), the path of a file or folder (text, JSON, CSV,
    Parquet), or `hf:NAME`, a data set of the Hugging Face hub."""
    validation_fraction: float = 0.05
    """Share of the text that is kept for validation and not trained on, in (0, 0.5)."""
    digest: str = ""
    """BLAKE3 of the prepared text, filled in by the host; of several sources, their digests joined by +. Peers of stage
    0 must have this text."""
    field: str = "text"
    """Name of the text field in a row of JSON, CSV, Parquet or a data set."""
    subset: str = ""
    """Name of the subset, for a data set that has several."""
    split: str = "train"
    """The split of a data set from which the texts for training and for validation come."""
    tokens_max: int = 0
    """Read at most this many tokens; 0: read everything."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    tokenizer_digest: str = ""
    """BLAKE3 of the tokenizer.json, filled in by the host."""
    format: Literal["text", "chat"] = "text"
    """`chat`: each line, row or example has `messages` (a list of `role` and `content`) or `prompt` and `completion`.
    Training learns only the assistant's text, and a sample consists of whole conversations. The chat template lies
    beside the tokenizer.json."""
    document_masks: bool | None = None
    """True: attention and positions restart at document boundaries. None: only if the format of a source is `chat`."""
    sources: tuple[SourceSpec, ...] = ()
    """Several sources; `source` and the other fields of a single source are then left out."""

    def __post_init__(self) -> None:
        require(bool(self.source), "source is empty")
        require(len(self.sources) <= SOURCES_MAX, f"there are at most {SOURCES_MAX} sources, not {len(self.sources)}")
        for name in _OF_ONE_SOURCE if self.sources else ():
            default = next(field.default for field in msgspec.structs.fields(DataSpec) if field.name == name)
            require(getattr(self, name) == default, f"{name} means nothing beside sources: say it there")
        require(bool(self.field) and bool(self.tokenizer), "field and tokenizer must not be empty")
        require_not_negative(self, "tokens_max")
        require(0 < self.validation_fraction < 0.5, f"validation_fraction {self.validation_fraction} not in (0, 0.5)")

    @property
    def has_chats(self) -> bool:
        return "chat" in (self.format, *(one.format for one in self.sources))

    @property
    def masks_documents(self) -> bool:
        """True if tokens attend only to tokens of their own document."""
        return self.has_chats if self.document_masks is None else self.document_masks

    @property
    def leaves_out_targets(self) -> bool:
        """True if training leaves out some targets, so that microbatches differ in their number of targets."""
        return self.has_chats or self.masks_documents

    @property
    def each(self) -> tuple["DataSpec", ...]:
        """One `DataSpec` for each data source, with this source alone."""
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
        """Return this spec with other paths or names of its sources. Args: sources: one for each source, in order."""
        if not self.sources:
            return msgspec.structs.replace(self, source=sources[0])
        moved = zip(self.sources, sources, strict=True)
        return msgspec.structs.replace(
            self, sources=tuple(msgspec.structs.replace(one, source=source) for one, source in moved)
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """BLAKE3 of each source's prepared text; an empty tuple: the digests are not known yet."""
        return tuple(self.digest.split(BETWEEN_DIGESTS)) if self.digest else ()

    @property
    def named(self) -> str:
        """The sources' names, for people."""
        return ", ".join(one.source for one in self.sources) or self.source


SOURCES_MAX = 16
"""Most data sources of a run: its spec, with a digest of each source, must fit into a directory record."""
BETWEEN_DIGESTS = "+"
_OF_ONE_SOURCE = ("source", "format", "field", "subset", "split", "tokens_max")
"""Fields of `DataSpec` that, with several sources, stand in each `SourceSpec` instead."""


class OptimizerSpec(_Section, frozen=True):
    """The optimizer (`shoal.kernels.optimizer`) and its schedule."""

    name: Literal["sgd", "adamw", "nadam", "muon"] = "nadam"
    """`sgd` and `muon` use momentum `beta1`; `muon` updates embedding, head and norms by `adamw`'s rule. In
    `tests/bench/staleness` `muon` at 8e-3 learns fastest and suffers least from staleness. It computes exact products,
    in fp64, in which most GPUs are 64 times slower: choose it for small models or GPUs that are fast in fp64."""
    learning_rate: float = 4e-3
    """Peak learning rate. A run file without it gets a rate that fits the model and the batch."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, not of norms."""
    warmup_steps: int = 20
    """Steps of linear warm-up from 0. A run file without it gets a number that fits `beta2` and the run's steps."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """The learning rate after the warm-up: `cosine` falls from the peak to the run's last step; `constant` stays at the
    peak; `wsd` (warm-up, stable, decay) stays at the peak and falls in the last `decay_steps`. Take `wsd` or `constant`
    if the run's length is not known yet: `shoal.peer.model.schedule` explains what happens when a run is continued."""
    decay_steps: int | None = None
    """Number of the run's last steps in which the learning rate of `wsd` falls. None: a fifth of the run's steps."""
    final_learning_rate_fraction: float = 0.1
    """Last learning rate of a falling schedule, as a fraction of the peak."""
    clip_norm: float = 1.0
    """Bound on the gradient norm of each layer; with experts, of each expert and of the rest of a layer. 0: none."""

    def __post_init__(self) -> None:
        require_positive(self, learning_rate=math.inf, epsilon=math.inf)
        require_not_negative(self, "weight_decay", "clip_norm", "warmup_steps")
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must be in [0, 1)")
        require(0 <= self.final_learning_rate_fraction <= 1, "final_learning_rate_fraction not in [0, 1]")
        _check_decay(self.schedule, self.decay_steps)


class TrainingSpec(_Section, frozen=True):
    """How the run trains: its steps, their microbatches, staleness and validation."""

    steps: int = 400
    """Optimizer steps of the run."""
    microbatches_per_step: int = 8
    """M: microbatches in a step, which uses their mean gradient. If a run file leaves it out, a rule chooses it."""
    microbatch_size: int = 4
    """Samples in a microbatch."""
    s_max: int = 1
    """Largest staleness of a microbatch, in steps; with 0 training is synchronous."""
    synchronous_steps: int | None = None
    """Number of first steps that are synchronous whatever `s_max` is: staleness costs most while the loss falls fastest
    (`tests/bench/staleness`). None: twice the optimizer's warm-up; 0 with `muon`."""
    compensation: Literal["none", "stash", "spectrain", "pipeoptim", "lookahead", "calibrated", "dc", "eager"] = "eager"
    """How staleness is compensated: a strategy of `shoal.peer.pipeline.prediction`."""
    compute: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the matrix products in forward and backward; everything else (parameters, moments, gradient
    sums, norms, softmaxes, loss) is float32. "auto": bf16 on devices that are faster in it; members may differ."""
    keep: Literal["stash", "layers", "recompute"] = "stash"
    """State that a stage keeps between a microbatch's forward and backward. "stash": activations and weights. "layers":
    weights and each layer's input; the backward recomputes layer by layer, so that memory holds one layer's
    activations, not a stage's (activation checkpointing: Chen et al., 2016, arXiv 1604.06174). "recompute": the stage's
    input alone; the backward repeats the stage's forward with the newest weights."""
    validation_interval_steps: int = 20
    """Steps between validations; 0: never validate."""
    validation_microbatches: int = 4
    """Microbatches of a validation; every validation uses the same ones."""
    commit_deadline_s: float = 0.0
    """Seconds that a group waits for missing microbatches before it commits a step without them; 0: no limit."""
    commit_quorum: float = 1.0
    """Least share of a step's M microbatches with which a group commits after `commit_deadline_s`."""

    def __post_init__(self) -> None:
        require_positive(self, steps=STEPS_MAX, microbatches_per_step=MICROBATCHES_PER_STEP_MAX)
        require_positive(self, microbatch_size=math.inf, validation_microbatches=MICROBATCHES_PER_STEP_MAX)
        require_not_negative(self, "synchronous_steps", "validation_interval_steps", "commit_deadline_s")
        require(0 <= self.s_max <= 8, f"s_max must be in [0, 8], is {self.s_max}")
        require(0 < self.commit_quorum <= 1, "commit_quorum must be in (0, 1]")

    @property
    def recomputes(self) -> bool:
        """True if a backward repeats the forward, to save memory or because the compensation wants newer weights."""
        return self.keep != "stash" or self.wants_newer_weights

    @property
    def wants_newer_weights(self) -> bool:
        """True if the compensation runs a microbatch's backward with newer weights than the forward had."""
        return self.compensation in ("none", "spectrain")


class SwarmSpec(_Section, frozen=True):
    """How the peers are organised."""

    stages: int | Literal["auto"] = AUTO_STAGES
    """Number K of pipeline stages. "auto": the best number for the present peers; each plan may change it. A number:
    exactly this many once there are enough peers, and never more."""
    min_peers: int = 1
    """Peers that must be present before the first plan, and before a restart with fewer stages after a loss of too many
    peers. This may be less than the number of stages: if the model fits, the host begins alone."""
    heartbeat_s: float = 1.0
    """Seconds between a peer's heartbeats to the coordinator."""
    term_s: float = 60.0
    """Seconds for which one peer is the coordinator (a leadership term)."""
    snapshot_interval_steps: int = 50
    """Steps between snapshots; 0: snapshots by time alone."""
    snapshot_interval_s: float = 300.0
    """Seconds after which a snapshot is due anyway, so that a power cut costs little more. 0: by steps alone."""
    open: bool = False
    """True: anyone may join without an invite's key. Newcomers are then admitted a few at a time, and on probation."""
    expert_slots: int = 0
    """Number of experts that each member of a stage holds, in all of the stage's layers; more if `expert_replicas`
    requires more. 0: experts are not placed: every member holds whole layers with all of their experts."""
    expert_replicas: int = 2
    """Least number of members that hold each expert, if its stage has that many: nothing is lost while fewer than these
    die at a time. With 1, members hold no more than `expert_slots` if that is enough for one copy of each expert."""
    trust: Literal["invites", "members"] = "invites"
    """"invites": with three invites or more, the votes of one invite's members together weigh at most half as much as
    those of all other members. "members": every vote counts the same."""

    def __post_init__(self) -> None:
        require(
            self.stages == AUTO_STAGES or 0 < self.stages <= STAGES_MAX,
            f'stages must be "{AUTO_STAGES}" or in [1, {STAGES_MAX}], is {self.stages}',
        )
        require_positive(self, min_peers=PEERS_MAX, expert_replicas=PEERS_MAX, heartbeat_s=math.inf)
        require_not_negative(self, "snapshot_interval_steps", "snapshot_interval_s")
        require(
            0 <= self.expert_slots <= EXPERTS_MAX,
            f"expert_slots must be in [0, {EXPERTS_MAX:,}], is {self.expert_slots}",
        )
        require(
            self.term_s >= TERM_HEARTBEATS_MIN * self.heartbeat_s,
            f"term_s must be at least {TERM_HEARTBEATS_MIN} heartbeats, is {self.term_s / self.heartbeat_s:.3g}",
        )

    @property
    def stages_max(self) -> int | None:
        """Largest number of stages that a plan may have; None: "auto", any number."""
        return None if self.stages == AUTO_STAGES else self.stages

    def stages_for(self, num_peers: int) -> int | None:
        """Return the spec's number of stages. None: it is "auto" or above `num_peers`, and the coordinator chooses."""
        stages = self.stages_max
        return stages if stages is not None and stages <= num_peers else None


class WireSpec(_Section, frozen=True):
    """Formats in which tensors travel. `kernels/codec` defines "int8" and "hadamard6" to "hadamard3"."""

    activations: WireFormat | Literal["auto"] = "bf16"
    """Format of activations between stages; state always travels in fp32. "auto": for each cut between stages, each
    plan chooses 8 bits per number if steps wait for these activations, else bf16 (`Plan.formats`)."""
    activation_gradients: WireFormat | None = None
    """Format of the activations' gradients. None: as the activations, at least 6 bits: they tolerate less rounding."""
    gradients: WireFormat | Literal["auto"] = "fp32"
    """Format of parameter gradients in a reduction: of the members' sums and of the mean; they are added in fp32.
    "auto": for each stage, each plan chooses 4 bits per number if steps wait for its reduction, else 8."""

    @property
    def sums(self) -> tuple[WireFormat, ...]:
        """Allowed formats of reductions, widest first. A plan chooses one for each stage."""
        return AUTO_SUMS if self.gradients == "auto" else (self.gradients,)

    @property
    def forward(self) -> tuple[WireFormat, ...]:
        """Allowed formats of activations, widest first. A plan chooses one for each cut between stages."""
        return AUTO_ACTIVATIONS if self.activations == "auto" else (self.activations,)

    def backward_of(self, activations: WireFormat) -> WireFormat:
        """Return the wire format of activation gradients, if activations have the wire format `activations`."""
        if self.activation_gradients is not None:
            return self.activation_gradients
        return "hadamard6" if activations in ("hadamard5", "hadamard4", "hadamard3") else activations

    @property
    def tokens(self) -> Literal["fp32", "bf16"]:
        """Wire format of the token rows that travel to placed experts and back."""
        return "fp32" if self.activations == "fp32" else "bf16"


class InitialSpec(_Section, frozen=True):
    """Initial weights that are not made from the seed. `shoal import` writes this table."""

    source: str = ""
    """Folder with the weights on the host's machine; other peers fetch them from the host."""
    digests: tuple[str, ...] = ()
    """BLAKE3 (32 hex digits) of each layer's parameters, embedding first; with an `adapter`, of the bytes as
    `adapter.base` stores them. Empty: weights come from the seed."""
    name: str = ""
    """The model's name, if its folder gives it: `owner/name` of a hub."""
    licence: str = ""
    """The model's licence, from its model card, such as `apache-2.0`."""

    def __post_init__(self) -> None:
        require(bool(self.source) == bool(self.digests), "source and digests come together")
        for name in ("name", "licence"):
            value = getattr(self, name)
            require(len(value) <= BASE_CHARS_MAX and value.isprintable(), f"{name} is no name: {value[:40]!r}")


class AdapterSpec(_Section, frozen=True):
    """Adapters that train beside frozen weights. `[adapter]` in a run file; without it all weights train.

    In the frozen model, the *base*, each target matrix W becomes W' = W + (alpha / rank) B A, and only A and B have
    gradients and moments. With "dora" each row of W' is scaled to the norm of W's row plus an element of a trained
    vector m, the change of DoRA's magnitude vector. The base has the run's first weights: those of `initial`, or those
    made from the seed.
    Sources: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv 2106.09685; Liu et al., "DoRA:
    Weight-Decomposed Low-Rank Adaptation", 2024, arXiv 2402.09353, equation 5.
    """

    kind: Literal["lora", "dora"]
    rank: int = 16
    """Number of rows of A and of columns of B."""
    alpha: float = 32.0
    """B A is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ADAPTER_TARGETS
    """Target matrices of each decoder layer; default all. In a model with experts only attention matrices count."""
    base: BaseFormat = "bf16"
    """Format in which the base is stored and sent. "int8": one scale per block of 64 numbers. "nf4": 4 bits per number
    in the decoder layers' matrices, "int8" in embedding and head. Norms and biases are in bf16 at least."""

    def __post_init__(self) -> None:
        require_positive(self, rank=math.inf, alpha=math.inf)
        require(bool(self.targets), "targets is empty: name the matrices that get an adapter, or leave the line out")
        unknown = [name for name in self.targets if name not in ADAPTER_TARGETS]
        require(not unknown, f"targets has {unknown[:1]}: a decoder layer has {', '.join(ADAPTER_TARGETS)}")
        require(len(set(self.targets)) == len(self.targets), "targets names a matrix twice")

    @property
    def scale(self) -> float:
        """The factor alpha / rank of B A."""
        return self.alpha / self.rank

    def targets_in(self, model: ModelSpec) -> tuple[str, ...]:
        """Return the `targets` that get an adapter in this model."""
        return tuple(name for name in self.targets if not model.num_experts or name in ATTENTION_TARGETS)


class ContinuedSpec(_Section, frozen=True):
    """One continuation of the run: its first step, and the settings of the steps before that. `shoal continue` writes
    this table; the learning rates of all steps follow from these tables."""

    at: int
    """The first step of the continuation."""
    steps: int
    """The value of `training.steps` before the continuation."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        require(0 <= self.at <= self.steps, f"at must be in [0, steps {self.steps}], is {self.at}")
        _check_decay(self.schedule, self.decay_steps)


class RunSpec(_Section, frozen=True):
    """The whole run spec.

    A continued run may change `training.steps`, `optimizer.schedule`, `optimizer.decay_steps` and `swarm.min_peers`;
    each change is another revision of the same run.
    """

    name: str = "shoal"
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    model: ModelSpec = msgspec.field(default_factory=ModelSpec)
    data: DataSpec = msgspec.field(default_factory=DataSpec)
    optimizer: OptimizerSpec = msgspec.field(default_factory=OptimizerSpec)
    training: TrainingSpec = msgspec.field(default_factory=TrainingSpec)
    swarm: SwarmSpec = msgspec.field(default_factory=SwarmSpec)
    wire: WireSpec = msgspec.field(default_factory=WireSpec)
    initial: InitialSpec = msgspec.field(default_factory=InitialSpec)
    adapter: AdapterSpec | None = None
    """The adapters that train; None: all weights train."""
    continued: tuple[ContinuedSpec, ...] = ()
    """The run's continuations, oldest first."""

    def __post_init__(self) -> None:
        require(0 < len(self.name) <= 64, "name must have 1 to 64 characters")
        require(is_name(self.name), f"name has a control character or a line break: {self.name!r}")
        require(0 <= self.seed < 2**63, "seed must be in [0, 2^63)")
        require(
            (self.swarm.stages_max or 1) <= self.model.num_layers,
            f"swarm.stages {self.swarm.stages} is more than model.num_layers {self.model.num_layers}: "
            "a stage has one layer at least",
        )
        require(
            self.optimizer.warmup_steps <= self.training.steps,
            f"optimizer.warmup_steps {self.optimizer.warmup_steps} is more than training.steps {self.training.steps}",
        )
        require(len(self.continued) <= CONTINUED_MAX, f"a run can be continued {CONTINUED_MAX} times at most")
        begins = [part.at for part in self.continued]
        require(begins == sorted(begins), "continued must be in the order of its steps")
        require(
            not begins or begins[-1] <= self.training.steps,
            f"the run was continued at step {max(begins, default=0)}, after training.steps {self.training.steps}",
        )
        require(
            len(self.initial.digests) in (0, self.model.num_layers + 2),
            f"initial.digests has {len(self.initial.digests)} entries for {self.model.num_layers + 2} layers",
        )
        require(
            not self.swarm.expert_slots or self.model.num_experts > 0,
            "swarm.expert_slots means nothing in a dense model: model.num_experts is 0 or missing",
        )
        if self.adapter is not None:
            _check_adapter(self.adapter, self.model)
            require(
                not self.swarm.expert_slots,
                "swarm.expert_slots is for experts that train, and [adapter] freezes them: leave one of the two out",
            )
        if self.model.subspace:
            _check_subspace_run(self)
        tokens = self.training.microbatch_size * self.model.context
        frame_bytes = tensor_bytes(self.wire.forward[0], tokens * self.model.written_width) + self.labels_bytes
        if self.swarm.expert_slots:
            # All tokens of a microbatch may go to one holder, which returns as many, in a backward two rows for each.
            rows = 2 * tokens * self.model.experts_per_token
            frame_bytes = max(frame_bytes, tensor_bytes(self.wire.tokens, rows * self.model.dim))
        require(
            frame_bytes <= FRAME_PAYLOAD_BYTES_MAX,
            f"training.microbatch_size {self.training.microbatch_size} makes activations of {frame_bytes >> 20} MiB, "
            f"more than the {FRAME_PAYLOAD_BYTES_MAX >> 20} MiB that fit into a frame",
        )

    @property
    def labels_bytes(self) -> int:
        """Bytes of the four-byte numbers that travel with a microbatch's activation (`peer/pipeline/wire.py`): the
        targets, the microbatch's weight if training leaves some out, and in a subspace model the tokens that the
        targets do not show."""
        tokens, leaves_out = self.training.microbatch_size * self.model.context, self.data.leaves_out_targets
        of_subspace = (tokens if leaves_out else self.training.microbatch_size) if self.model.subspace else 0
        return 4 * (tokens + leaves_out + of_subspace)

    @property
    def trains_tied(self) -> bool:
        """True if embedding and head are one matrix that trains."""
        return self.model.tied and self.adapter is None

    @property
    def recomputes_by_layer(self) -> bool:
        """True if a backward recomputes layer by layer; with placed experts it recomputes the whole stage instead."""
        training = self.training
        return training.keep == "layers" and not training.wants_newer_weights and not self.swarm.expert_slots

    @property
    def tokens_per_step(self) -> int:
        return self.training.microbatches_per_step * self.training.microbatch_size * self.model.context

    @property
    def revision(self) -> int:
        """Number of continuations. If a peer knows two specs of one run, the spec with the higher revision applies."""
        return len(self.continued)

    @property
    def synchronous_steps(self) -> int:
        """Number of synchronous steps with which the run starts."""
        steps = self.training.synchronous_steps
        optimizer = self.optimizer
        return synchronous_steps(optimizer.name, warmup_steps=optimizer.warmup_steps) if steps is None else steps


def _check_adapter(adapter: AdapterSpec, model: ModelSpec) -> None:
    require(
        bool(adapter.targets_in(model)),
        f"adapter.targets: in a model with experts {adapter.targets[0]} belongs to the experts, which get "
        f"no adapters: name one of {', '.join(ATTENTION_TARGETS)}, or leave the line out",
    )
    require(
        adapter.rank <= model.dim,
        f"adapter.rank {adapter.rank} is more than model.dim {model.dim}: it would be larger than what it adapts",
    )


def _check_subspace_run(spec: RunSpec) -> None:
    require(
        not spec.initial.digests,
        "model.subspace is for a model that begins from its seed, since the matrices of an existing model write into "
        "its whole width: leave model.subspace out",
    )
    require(
        spec.adapter is None,
        "model.subspace is for a run that trains all weights, and [adapter] freezes them: leave one of the two out",
    )
    require(
        not spec.swarm.expert_slots,
        "model.subspace keeps the experts of a layer together with it: leave swarm.expert_slots out",
    )


_CHANGING = {
    "training": ("steps",),
    "optimizer": ("schedule", "decay_steps"),
    "swarm": ("min_peers",),
}

_LATER = {
    "model": ("head_size", "decoder", "tied", "subspace"),
    "data": (
        *("field", "subset", "split", "tokens_max", "tokenizer", "tokenizer_digest"),
        *("format", "document_masks", "sources"),
    ),
    "training": ("synchronous_steps", "compute"),
    "optimizer": ("schedule", "decay_steps"),
    "swarm": ("snapshot_interval_s", "open", "trust"),
    "wire": ("activation_gradients",),
    "initial": ("name", "licence"),
}
"""Section -> fields that the encoded bytes leave out if they have their defaults, since the first specs lacked them."""
_DEFAULTS = RunSpec()

_REPLACED = {
    "predict": 'say compensation = "pipeoptim" instead of predict = true, "stash" instead of false',
    "tied": "say tied = true in [model] instead of [initial]",
}


def encode_spec(spec: RunSpec) -> bytes:
    """Encode a spec: equal specs give equal bytes."""
    return msgspec.msgpack.encode(_tables(spec))


def _tables(spec: RunSpec) -> dict[str, Any]:
    """Return a spec's tables as dicts, without unused tables and without `_LATER` fields that have their defaults."""
    tables: dict[str, Any] = msgspec.to_builtins(spec)
    for table, fields in _LATER.items():
        for name in fields:
            if getattr(getattr(spec, table), name) == getattr(getattr(_DEFAULTS, table), name):
                del tables[table][name]
    if not spec.model.num_experts:
        for name in ("num_experts", *_OF_EXPERTS):
            del tables["model"][name]
    if not spec.swarm.expert_slots:
        for name in ("expert_slots", "expert_replicas"):
            del tables["swarm"][name]
    unused = {"initial": not spec.initial.digests, "continued": not spec.continued, "adapter": spec.adapter is None}
    return {name: table for name, table in tables.items() if not unused.get(name)}


def decode_spec(data: bytes) -> RunSpec:
    """Decode what `encode_spec` has encoded. Raises: SpecError: the bytes are no valid spec."""
    try:
        return msgspec.msgpack.decode(data, type=RunSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"the run's spec cannot be read: {spec_complaint(error)}") from error


def spec_complaint(error: Exception) -> str:
    """Return one line about the error in a spec. For a removed field it also names the replacement."""
    instead = [advice for name, advice in _REPLACED.items() if f"unknown field `{name}`" in str(error)]
    return "; ".join([complaint(error, RunSpec), *instead])


def run_id(spec: RunSpec, owner: PeerID) -> str:
    """Return the run's id, 16 hex digits. A spec's revisions share one id; another spec or owner has another id."""
    return blake3(unchanging_bytes(spec) + owner.encode()).hexdigest(length=8)


def unchanging_bytes(spec: RunSpec) -> bytes:
    """Encode the fields that a continuation cannot change: equal fields give equal bytes."""
    tables = _tables(spec)
    tables.pop("continued", None)
    for table, fields in _CHANGING.items():
        for name in fields:
            tables[table].pop(name, None)
    return msgspec.msgpack.encode(tables)


def continued_spec(spec: RunSpec, wanted: RunSpec, *, at: int) -> RunSpec:
    """Return the next revision of `spec`. From step `at` on, the changeable fields have the values in `wanted`.

    Returns: the revision; `spec` itself if `wanted` changes nothing.
    Raises: ValueError: the run cannot be continued in this way.
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
