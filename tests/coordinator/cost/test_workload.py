from dataclasses import replace
from typing import Literal

import msgspec
import pytest

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.workload import Workload
from shoal.peer.model.flop import stage_flop
from shoal.peer.model.layout import num_parameters
from shoal.peer.pipeline.wire import ActivationWire
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.spec import (
    AdapterSpec,
    BaseFormat,
    DataSpec,
    ModelSpec,
    RunSpec,
    SwarmSpec,
    TrainingSpec,
    WireSpec,
)


@pytest.mark.parametrize(
    ("wire", "cut_bytes_per_number", "gradient_bytes"),
    [
        (WireSpec(), 2.0, 4.0),
        (WireSpec(activations="fp32"), 4.0, 4.0),
        (WireSpec(gradients="bf16"), 2.0, 2.0),
        (WireSpec(gradients="auto"), 2.0, 4.25 / 8),
        (WireSpec(activations="int8"), 8.25 / 8, 4.0),
        (WireSpec(activations="hadamard4"), (4.25 + 6.25) / 2 / 8, 4.0),
        (WireSpec(activations="hadamard4", activation_gradients="hadamard4"), 4.25 / 8, 4.0),
    ],
)
def test_what_travels_is_as_wide_as_the_wire_says(
    wire: WireSpec, cut_bytes_per_number: float, gradient_bytes: float
) -> None:
    spec = msgspec.structs.replace(RunSpec(), wire=wire)
    workload = Workload.of(spec)
    numbers = spec.training.microbatch_size * spec.model.context * spec.model.dim
    assert workload.cut_bytes == cut_bytes_per_number * numbers
    assert workload.gradient_bytes_per_parameter == gradient_bytes


@pytest.mark.parametrize("wire", [WireSpec(), WireSpec(activations="hadamard4")])
@pytest.mark.parametrize("masks", [False, True])
def test_in_a_subspace_its_numbers_travel_and_the_labels_with_them(wire: WireSpec, *, masks: bool) -> None:
    """What a peer sends is what is foreseen, to the byte."""
    spec = RunSpec(model=ModelSpec(subspace=16), wire=wire, data=DataSpec(document_masks=masks))
    sends = ActivationWire(spec)
    travels = sends.activation_bytes + sends.targets_bytes + sends.gradient_bytes
    assert Workload.of(spec).cut_bytes == travels / 2
    whole = Workload.of(msgspec.structs.replace(spec, model=ModelSpec()))
    assert Workload.of(spec).cut_bytes < whole.cut_bytes / (2 if masks else 3)
    assert Workload.of(spec).num_parameters == num_parameters(spec.model) < whole.num_parameters


def test_a_tied_matrix_travels_between_the_ends_where_it_trains() -> None:
    spec = msgspec.structs.replace(RunSpec(), model=ModelSpec(tied=True))
    assert Workload.of(spec).reduced.tied_parameters == spec.model.vocab_size * spec.model.dim
    assert Workload.of(spec).num_parameters == num_parameters(spec.model)
    for other in (RunSpec(), msgspec.structs.replace(spec, adapter=AdapterSpec(kind="lora"))):
        assert Workload.of(other).reduced.tied_parameters == 0.0


def test_masked_documents_take_the_room_of_a_mask_in_each_layer() -> None:
    plain = msgspec.structs.replace(RunSpec(), training=TrainingSpec(compute="fp32"))
    masked = msgspec.structs.replace(plain, data=DataSpec(document_masks=True))
    held, more = (Workload.of(spec).layer_held_bytes for spec in (plain, masked))
    mask = 4 * plain.training.microbatch_size * plain.model.context**2
    assert [after - before for before, after in zip(held, more, strict=True)] == [mask] * len(held)


def test_of_placed_experts_a_member_holds_and_reduces_what_its_slots_do() -> None:
    model = ModelSpec(num_experts=8, experts_per_token=2)
    whole, placed, roomy = (
        Workload.of(RunSpec(model=model, swarm=SwarmSpec(expert_slots=slots))) for slots in (0, 3, 9)
    )
    expert = 3 * model.dim * model.ffn_dim
    assert roomy.layer_parameters == whole.layer_parameters
    for all_of_them, some in zip(whole.layer_parameters, placed.layer_parameters, strict=True):
        assert all_of_them - some == 5 * expert
    assert placed.layer_flop == whole.layer_flop


@pytest.mark.parametrize(("members", "held"), [(1, 8), (2, 8), (3, 6), (4, 4), (5, 4), (6, 3), (9, 3)])
def test_where_a_stage_has_few_members_each_needs_room_for_more_experts(members: int, held: int) -> None:
    model = ModelSpec(num_experts=8, experts_per_token=2)
    whole, placed = (Workload.of(RunSpec(model=model, swarm=SwarmSpec(expert_slots=slots))) for slots in (0, 3))
    missing = (8 - held) * 3 * model.dim * model.ffn_dim * 2
    bytes_of_all, bytes_of_some = (w.resident_bytes(1, 3, members=members) for w in (whole, placed))
    workspace_bytes = whole.memory.workspace_bytes - placed.memory.workspace_bytes
    of_experts = whole.memory.resident_bytes_per_parameter * missing
    assert bytes_of_all - bytes_of_some == pytest.approx(of_experts + workspace_bytes)
    assert placed.num_parameters == whole.num_parameters == sum(whole.layer_parameters)


LLAMA_8B = ModelSpec(
    dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256, context=1024
)


def adapted(base: BaseFormat, *, keep: Literal["stash", "layers", "recompute"] = "stash") -> Workload:
    adapter = AdapterSpec(kind="lora", rank=16, base=base)
    return Workload.of(RunSpec(model=LLAMA_8B, adapter=adapter, training=TrainingSpec(keep=keep, microbatch_size=1)))


def test_of_adapters_only_a_and_b_are_reduced_and_stepped() -> None:
    full, lora = Workload.of(RunSpec(model=LLAMA_8B, training=TrainingSpec(microbatch_size=1))), adapted("nf4")
    assert sum(lora.layer_parameters) == 32 * 16 * (4 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336) - 8192)
    assert lora.num_parameters == sum(full.layer_parameters) + sum(lora.layer_parameters)
    assert lora.layer_flop == full.layer_flop
    assert lora.cut_bytes == full.cut_bytes


@pytest.mark.parametrize(("base", "gigabytes"), [("bf16", 16.1), ("int8", 8.3), ("nf4", 4.8)])
def test_a_stage_holds_its_part_of_the_base(base: BaseFormat, gigabytes: float) -> None:
    lora = adapted(base)
    assert lora.memory.base is not None
    assert sum(lora.memory.base.layer_bytes) / 1e9 == pytest.approx(gigabytes, abs=0.05)
    whole, half = (lora.resident_bytes(first, 32, members=1) for first in (0, 16))
    assert gigabytes * 1e9 < whole < (gigabytes + 12) * 1e9
    assert half < whole - sum(lora.memory.base.layer_bytes[:16])
    moved = sum(lora.layer_state_bytes)
    assert moved == pytest.approx(sum(lora.memory.base.layer_bytes) + 12 * sum(lora.layer_parameters))
    assert lora.state_bytes_per_parameter * sum(lora.layer_parameters) == pytest.approx(moved)


def test_beside_experts_the_attention_trains_and_each_member_holds_all_of_its_layers() -> None:
    """Qwen3-30B-A3B's shapes: 30.5 billion parameters, of which a token meets 3.3."""
    shapes = {"dim": 2048, "num_layers": 48, "num_heads": 32, "num_kv_heads": 4, "head_size": 128, "ffn_dim": 768}
    experts = {"num_experts": 128, "experts_per_token": 8, "vocab_size": 151_936, "context": 2048}
    model = msgspec.convert(shapes | experts, ModelSpec)
    training, adapter = TrainingSpec(microbatch_size=1, compute="bf16"), AdapterSpec(kind="lora", base="nf4")
    lora = Workload.of(RunSpec(model=model, adapter=adapter, training=training))
    assert sum(lora.layer_parameters) == 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert lora.memory.base is not None
    assert lora.memory.base.parameters == pytest.approx(30.5e9, rel=0.01)
    assert sum(lora.memory.base.layer_bytes) == pytest.approx(16.6e9, rel=0.02)
    dense_bytes = 2 * 128 * 2048 * 768
    assert dense_bytes < lora.memory.workspace_bytes < dense_bytes + 1e9


def test_a_backward_beside_a_base_is_one_product_and_not_two() -> None:
    assert (adapted("bf16").backward_per_forward, adapted("bf16").loss_per_forward) == (1.0, 2.0)
    again = adapted("bf16", keep="recompute")
    assert (again.backward_per_forward, again.loss_per_forward) == (2.0, 2.0)


def test_layer_by_layer_the_last_stage_runs_again_too_but_for_its_head() -> None:
    layers = adapted("bf16", keep="layers")
    assert (layers.backward_per_forward, layers.loss_per_forward) == (2.0, 3.0)
    training = TrainingSpec(keep="layers", microbatch_size=1)
    spec = RunSpec(model=LLAMA_8B, adapter=AdapterSpec(kind="lora"), training=training)
    job = stage_flop(spec, stage_layer_keys(LLAMA_8B, 20, 32)).loss
    assert layers.job_flop(20, 32) == pytest.approx(job, rel=1e-6)
    kept, again = (adapted("nf4", keep=keep).resident_bytes(0, 32, members=1) for keep in ("layers", "recompute"))
    assert kept < 10e9
    assert again > kept + 6e9


def test_a_full_card_recomputes_by_layer_and_one_with_room_by_stage() -> None:
    def bytes_of(keep: Literal["layers", "recompute"], *, is_full: bool) -> float:
        training = TrainingSpec(keep=keep, microbatch_size=1)
        spec = RunSpec(model=LLAMA_8B, adapter=AdapterSpec(kind="lora", rank=16, base="nf4"), training=training)
        memory = StageMemory.on_card(spec, experts_held=0, is_full=is_full)
        return replace(Workload.of(spec), memory=memory).resident_bytes(0, 32, members=1)

    assert bytes_of("layers", is_full=False) < 10e9
    assert bytes_of("recompute", is_full=False) > bytes_of("layers", is_full=False) + 6e9
    assert bytes_of("recompute", is_full=True) < 10.2e9


def test_stages_taken_for_layers_keep_their_base() -> None:
    memory = adapted("nf4").memory.by_stage(lambda values: (sum(values[:10]), sum(values[10:])))
    assert memory.base is not None
    assert len(memory.base.layer_bytes) == len(memory.layer_fixed_bytes) == 2
    assert sum(memory.base.layer_bytes) == pytest.approx(4.79e9, rel=0.01)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (RunSpec(), 1 / 6),
        (RunSpec(training=TrainingSpec(s_max=0)), 1.0),
        (RunSpec(adapter=AdapterSpec(kind="lora", rank=8)), 1.0),
        (RunSpec(model=ModelSpec(tied=True)), 1.0),
        (RunSpec(model=ModelSpec(num_experts=4, experts_per_token=2), swarm=SwarmSpec(expert_slots=2)), 1.0),
    ],
    ids=["as by default", "synchronous", "adapters", "tied", "placed experts"],
)
def test_a_newcomer_computes_with_a_sixth_of_its_state_where_there_are_light_members(
    spec: RunSpec, part: float
) -> None:
    assert Workload.of(spec).needed_first == pytest.approx(part)
