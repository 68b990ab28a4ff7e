"""In which formats tensors are to travel where the run leaves it to its plans."""

import msgspec
import numpy as np
import pytest

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.allocate.prospect import KEPT, SPARED, choose_formats, foresee
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.measured import MeasuredNetwork
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Stage
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec, WireSpec
from shoal.protocol.wire_format import AUTO_SUMS, Formats

MODEL = ModelSpec(vocab_size=50_304, dim=2048, num_layers=4, num_heads=16, num_kv_heads=16, ffn_dim=5461, context=2048)
SPEC = RunSpec(
    model=MODEL,
    training=TrainingSpec(microbatches_per_step=64, microbatch_size=1, keep="recompute"),
    wire=WireSpec(activations="int8", gradients="auto"),
)
NAMES = [PeerID(f"peer-{index}") for index in range(4)]
REPLICAS = (Stage(0, 4, tuple(Member(name, 1.0, 1.0) for name in NAMES)),)
LONE = tuple(Stage(index, index + 1, (Member(name, 1.0, 1.0),)) for index, name in enumerate(NAMES))


def swarm(bytes_per_s: float) -> Snapshot:
    """Four peers that are alike, with links that have all been measured."""
    workload = Workload.of(SPEC)
    rates = np.full((4, 4), bytes_per_s)
    return Snapshot(
        peers=tuple(
            MeasuredPeer(
                peer=name,
                flop_per_s=45e12,
                upload_bytes_per_s=bytes_per_s,
                memory_bytes=64 * 10**9,
                has_data=True,
                card_bytes_per_s=bytes_per_s,
            )
            for name in NAMES
        ),
        layer_costs=workload.layer_flop,
        num_stages=None,
        workload=workload,
        network=MeasuredNetwork(latency_s=np.full((4, 4), 0.02), bytes_per_s=rates, is_certain=rates > 0.0),
    )


WORKLOADS = {formats: Workload.of(SPEC, formats) for formats in SPEC.wire.formats}


def chosen(bytes_per_s: float, stages: tuple[Stage, ...], *, kept: str | None = None) -> str:
    """The format of sums."""
    was = None if kept is None else Formats("int8", kept)  # type: ignore[arg-type]
    return choose_formats(swarm(bytes_per_s), stages, WORKLOADS, kept=was).sums


def test_slow_lines_get_few_bits_and_quick_ones_more() -> None:
    assert [chosen(rate, REPLICAS) for rate in (2.5e6, 2.5e7, 1.25e10)] == ["hadamard4", "hadamard4", "int8"]


def test_where_nobody_reduces_nothing_is_made_thin() -> None:
    assert chosen(2.5e6, LONE) == "int8"


def test_where_nobody_can_say_it_is_the_format_that_layouts_are_searched_with() -> None:
    assert chosen(1.25e10, (Stage(0, 4, (Member(PeerID("unheard"), 1.0, 1.0),)),)) == "hadamard4"


def test_activations_are_made_thin_where_a_step_waits_for_them_and_before_sums_are() -> None:
    spec = msgspec.structs.replace(SPEC, wire=WireSpec(activations="auto", gradients="auto"))
    assert spec.wire.formats == (
        ("bf16", "int8"),
        ("int8", "int8"),
        ("bf16", "hadamard4"),
        ("int8", "hadamard4"),
    )
    workloads = {formats: Workload.of(spec, formats) for formats in spec.wire.formats}
    assert choose_formats(swarm(2.5e6), LONE, workloads) == ("int8", "int8")
    assert choose_formats(swarm(1.25e10), LONE, workloads) == ("bf16", "int8")
    assert choose_formats(swarm(2.5e6), REPLICAS, workloads) == ("bf16", "hadamard4"), "one stage sends none"
    two = tuple(
        Stage(2 * k, 2 * k + 2, tuple(Member(name, 1.0, 1.0) for name in NAMES[2 * k : 2 * k + 2])) for k in (0, 1)
    )
    assert choose_formats(swarm(2.5e6), two, workloads) == ("int8", "hadamard4")


def test_a_little_more_or_less_on_a_line_does_not_change_the_format() -> None:
    """Between the two bounds it is what it was."""
    rates = np.geomspace(2.5e6, 1.25e10, 200)
    fresh, thin, wide = ([chosen(rate, REPLICAS, kept=kept) for rate in rates] for kept in (None, *AUTO_SUMS[::-1]))
    assert fresh == thin
    between = [rate for rate, a, b in zip(rates, thin, wide, strict=True) if a != b]
    assert between
    in_int8 = WORKLOADS[Formats("int8", "int8")]
    for rate in between:
        seen = swarm(rate)
        ratio = foresee(seen, REPLICAS, in_int8).tokens_per_s / foresee(seen, REPLICAS).tokens_per_s  # type: ignore[union-attr]
        assert ratio == pytest.approx((KEPT + SPARED) / 2, abs=(SPARED - KEPT) / 2 + 0.01)


def test_plans_are_foreseen_in_the_format_that_they_say() -> None:
    seen = swarm(2.5e6)
    int8, hadamard4 = (foresee(seen, REPLICAS, workload) for workload in WORKLOADS.values())
    assert int8 is not None
    assert hadamard4 is not None
    assert int8.bound == "reduction"
    assert hadamard4.tokens_per_s == pytest.approx(int8.tokens_per_s * 8.25 / 4.25, rel=0.1)
    named = msgspec.structs.replace(SPEC, wire=WireSpec(activations="int8", gradients="hadamard4"))
    assert Workload.of(named) == Workload.of(SPEC), "the search counts with the thinnest"
    auto = msgspec.structs.replace(SPEC, wire=WireSpec(activations="auto", gradients="auto"))
    assert Workload.of(named) == Workload.of(auto)
