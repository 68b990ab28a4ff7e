"""Describes the demands of one training step on devices and network, for any layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.coordinator.cost.memory import BF16, FP32, StageMemory, decoder_parameters
from shoal.protocol.layers import EMBED, HEAD
from shoal.protocol.spec import ModelSpec, RunSpec
from shoal.protocol.staleness import Price, price_of
from shoal.protocol.tensors import (
    ADAPTED_BACKWARD_PER_FORWARD,
    BACKWARD_PER_FORWARD,
    basis_elements,
    expert_elements,
    num_elements,
    state_elements,
    tokens_seen,
    trunk_elements,
)
from shoal.protocol.wire_format import Formats, WireFormat, tensor_bytes

_MANY = 2**20
"""The size of a tensor from which bytes per element are computed: its last tile's padding is negligible."""
STATE_BYTES_PER_PARAMETER = 12.0
"""Bytes that a new holder downloads for each parameter: the parameter and two moments, each fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedExperts:
    number: int
    held: int
    """The number of experts of a layer that each member holds if its stage has enough members."""
    replicas: int
    """The least number of members that hold each expert; all members, if the stage has fewer."""
    parameters: tuple[float, ...]
    """[L], the parameters of one expert in each layer."""

    def beyond(self, members: int) -> int:
        """Return how many experts beyond `held` each of `members` members must hold to place all replicas."""
        return max(0, -(-self.number * min(self.replicas, members) // members) - self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedGradients:
    """The traffic of a stage's reduced gradients to peers outside the stage."""

    bytes_per_parameter: float = FP32
    """Bytes on the wire for each parameter, to a peer that follows a stage's steps without being a member."""
    tied_parameters: float = 0.0
    """The parameters of the matrix that the first and the last stage of a tied model share. In each commit every member
    of one stage gets the matrix's gradient from the other. 0: the model is not tied, or the matrix does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The demands of one step of a model with L layers; the first includes the embedding, the last the head."""

    layer_flop: tuple[float, ...]
    """[L], the FLOP of a microbatch's forward in each layer."""
    backward_per_forward: float
    """The FLOP of a backward divided by those of a forward: 2 (1 with adapters), and 1 more with recomputation. The
    last stage recomputes only if `memory.is_by_layer`."""
    layer_parameters: tuple[float, ...]
    """[L], the trained parameters of one replica. Of placed experts only those that one member holds count."""
    gradient_bytes_per_parameter: float
    """The bytes of a gradient on the wire in a reduction, one way, for each parameter."""
    memory: StageMemory
    """The memory that a stage's members need; in a run with adapters, the frozen weights included."""
    cut_bytes: float
    """Bytes on the wire for a microbatch between two stages, one way: the mean of its activation and its gradient. The
    labels count, too, in subspace models, which otherwise send only k numbers a token."""
    microbatches: int
    """M, the number of microbatches of a step."""
    tokens_per_microbatch: int
    s_max: int
    control: Price | None = None
    """The price of staleness, by which the pipeline's control limits what runs ahead; None: only `s_max` limits it."""
    reduced: ReducedGradients = ReducedGradients()
    experts: PlacedExperts | None = None
    """How experts are placed; None: each member holds all experts of its layers."""

    @property
    def layer_held_bytes(self) -> tuple[float, ...]:
        """[L], the bytes that a layer keeps of a microbatch from forward to backward."""
        return self.memory.layer_held_bytes

    @property
    def num_layers(self) -> int:
        return len(self.layer_flop)

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.tokens_per_microbatch

    @property
    def loss_per_forward(self) -> float:
        """The FLOP of a microbatch's forward, loss and backward in the last stage, divided by those of a forward."""
        if self.memory.is_by_layer:
            return 1.0 + self.backward_per_forward
        return 1.0 + min(self.backward_per_forward, _backward_per_forward(adapts=self.memory.base is not None))

    @property
    def layer_state_bytes(self) -> tuple[float, ...]:
        """[L], the bytes of a layer, frozen base included, that a new holder without any of it downloads."""
        state = (STATE_BYTES_PER_PARAMETER * parameters for parameters in self.layer_parameters)
        if self.memory.base is None:
            return tuple(state)
        return tuple(map(sum, zip(state, self.memory.base.layer_bytes, strict=True)))

    @property
    def state_bytes_per_parameter(self) -> float:
        """The bytes that travel for each trained parameter of a layer that moves, averaged over all layers."""
        if self.memory.base is None:
            return STATE_BYTES_PER_PARAMETER
        return sum(self.layer_state_bytes) / sum(self.layer_parameters)

    def synchronous(self) -> "Workload":
        """Return the workload of synchronous steps: no microbatch runs ahead of its step."""
        return replace(self, s_max=0, control=None)

    @property
    def needed_first(self) -> float:
        """The share of its state with which a newcomer can begin to compute, as a learner with only bfloat16 weights
        (`peer/membership/learner.py`); 1 if the run cannot have learners."""
        has_light_members = self.s_max > 0 and self.memory.base is None and self.experts is None
        if not has_light_members or self.reduced.tied_parameters:
            return 1.0
        return BF16 / STATE_BYTES_PER_PARAMETER

    def job_flop(self, first_layer: int, last_layer: int) -> float:
        is_last = last_layer == self.num_layers
        times = self.loss_per_forward if is_last else 1.0 + self.backward_per_forward
        return times * sum(self.layer_flop[first_layer:last_layer])

    @property
    def num_parameters(self) -> float:
        """The number of parameters of the whole model, frozen ones included. A tied matrix counts once."""
        placed = self.experts
        elsewhere = (placed.number - placed.held) * sum(placed.parameters) if placed is not None else 0.0
        base = self.memory.base.parameters if self.memory.base is not None else 0.0
        return sum(self.layer_parameters) - self.reduced.tied_parameters + elsewhere + base

    def resident_bytes(self, first_layer: int, last_layer: int, *, members: int) -> float:
        """Return the bytes that a replica of layers first_layer to last_layer - 1 needs, without its microbatches in
        flight. Args: members: the number of members of the stage."""
        parameters = sum(self.layer_parameters[first_layer:last_layer])
        if self.experts is not None:
            parameters += self.experts.beyond(members) * sum(self.experts.parameters[first_layer:last_layer])
        besides = sum(self.memory.layer_fixed_bytes[first_layer:last_layer]) + self.memory.workspace_bytes
        return self.memory.resident_bytes_per_parameter * parameters + besides

    @classmethod
    def of(cls, spec: RunSpec) -> "Workload":
        """Return the workload of a run with the narrowest formats that it allows."""
        training, model, takes = spec.training, spec.model, FormatBytes.of(spec)
        tokens = training.microbatch_size * model.context
        recompute = training.recomputes
        backward = _backward_per_forward(adapts=spec.adapter is not None)
        costs = list(layer_costs(model))
        if spec.recomputes_by_layer:
            # The last stage does not recompute its head; subtracting that here makes the stage's whole job exact.
            costs[-1] -= 2.0 * num_elements(model, HEAD)[0] / (2.0 + backward)
        return cls(
            layer_flop=tuple(flop * tokens for flop in costs),
            backward_per_forward=backward + (1.0 if recompute else 0.0),
            layer_parameters=_layer_parameters(spec),
            gradient_bytes_per_parameter=takes.sums[spec.wire.sums[-1]],
            reduced=ReducedGradients(
                bytes_per_parameter=BF16 if spec.wire.gradients == "bf16" else FP32,
                tied_parameters=float(sum(num_elements(spec.model, EMBED))) if spec.trains_tied else 0.0,
            ),
            memory=StageMemory.counted(spec, experts_held=experts_held(spec)),
            cut_bytes=takes.cuts[spec.wire.forward[-1]],
            microbatches=training.microbatches_per_step,
            tokens_per_microbatch=tokens,
            s_max=training.s_max,
            control=price_of(training.compensation, optimizer=spec.optimizer.name) if training.s_max else None,
            experts=_placed_experts(spec),
        )


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes of tensors on the wire with a plan of K stages."""

    cuts: tuple[float, ...]
    """[K - 1], the bytes of a microbatch from stage k to the next one, counted as `Workload.cut_bytes`."""
    sums: tuple[float, ...]
    """[K], the bytes on the wire, one way, for each parameter's gradient in the reduction of stage k."""

    @classmethod
    def same(cls, workload: Workload, num_stages: int) -> "WireBytes":
        return cls((workload.cut_bytes,) * (num_stages - 1), (workload.gradient_bytes_per_parameter,) * num_stages)


@dataclass(frozen=True, slots=True)
class FormatBytes:
    """Bytes of tensors on the wire in each format that a run's plans may choose, the widest first."""

    cuts: Mapping[WireFormat, float]
    """{format of activations: `Workload.cut_bytes` in this format}."""
    sums: Mapping[WireFormat, float]
    """{format of gradient sums: `Workload.gradient_bytes_per_parameter` in this format}."""

    @classmethod
    def of(cls, spec: RunSpec) -> "FormatBytes":
        numel = spec.training.microbatch_size * spec.model.context * spec.model.written_width
        labels = spec.labels_bytes if spec.model.subspace else 0

        def cut_bytes(form: WireFormat) -> float:
            both_ways = tensor_bytes(form, numel) + tensor_bytes(spec.wire.backward_of(form), numel)
            return (both_ways + labels) / 2.0

        return cls(
            {form: cut_bytes(form) for form in spec.wire.forward},
            {form: tensor_bytes(form, _MANY) / _MANY for form in spec.wire.sums},
        )

    @property
    def are_choices(self) -> bool:
        return len(self.cuts) > 1 or len(self.sums) > 1

    def thinnest(self, num_stages: int) -> Formats:
        return Formats.same([*self.cuts][-1], [*self.sums][-1], num_stages)

    def under(self, formats: Formats) -> WireBytes:
        """Return the bytes on the wire with a plan that has `formats`."""
        return WireBytes(
            tuple(self.cuts[form] for form in formats.activations), tuple(self.sums[form] for form in formats.sums)
        )


def _placed_experts(spec: RunSpec) -> PlacedExperts | None:
    model, swarm = spec.model, spec.swarm
    if not swarm.expert_slots:
        return None
    return PlacedExperts(
        number=model.num_experts,
        held=experts_held(spec),
        replicas=swarm.expert_replicas,
        parameters=(float(expert_elements(model)),) * model.num_layers,
    )


def experts_held(spec: RunSpec) -> int:
    """Return how many experts of each layer a member holds if its stage has enough members; 1 in a dense model."""
    slots = spec.swarm.expert_slots
    return min(spec.model.experts_held, slots) if slots else spec.model.experts_held


def _backward_per_forward(*, adapts: bool) -> float:
    return ADAPTED_BACKWARD_PER_FORWARD if adapts else BACKWARD_PER_FORWARD


def _layer_parameters(spec: RunSpec) -> tuple[float, ...]:
    """Return [L], the trained parameters of each layer; of placed experts only those that one member holds."""
    model = spec.model
    if spec.adapter is not None:  # embedding and head have no adapters
        return tuple(float(state_elements(spec, f"layers.{index}")) for index in range(model.num_layers))
    counts = [decoder_parameters(model, experts_held=experts_held(spec))] * model.num_layers
    counts[0] += float(sum(num_elements(model, EMBED)))
    counts[-1] += float(sum(num_elements(model, HEAD)))
    return tuple(counts)


def layer_costs(model: ModelSpec, *, with_experts: bool = True) -> tuple[float, ...]:
    """Return the FLOP of a token's forward in each decoder layer; the first includes the embedding, the last the head.
    Only matrix products count. Causal attention sees (context + 1) / 2 tokens on average, or a window. The embedding is
    a gather, and counts as the D values that it moves. For a subspace model, products with its basis count, too.
    Args: with_experts: include the experts that a token is sent to; False if they are placed separately."""
    width, in_experts = model.num_heads * model.head_dim, basis_elements(model)
    if with_experts:
        in_experts += model.experts_computed * expert_elements(model)
    costs = [
        2.0 * (trunk_elements(model, index)[0] + in_experts + 2 * width * tokens_seen(model, index))
        for index in range(model.num_layers)
    ]
    costs[0] += float(model.dim) + 2.0 * model.dim * model.subspace
    costs[-1] += 2.0 * num_elements(model, HEAD)[0]
    return tuple(costs)
