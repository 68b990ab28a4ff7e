"""Which format reductions are to have where the run leaves it to its plans."""

import msgspec
import numpy as np
import pytest

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.allocate.prospect import KEPT, SPARED, choose_sums, foresee
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.measured import MeasuredNetwork
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Stage
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec, WireSpec
from shoal.protocol.wire_format import AUTO_SUMS

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


def test_slow_lines_get_few_bits_and_quick_ones_more() -> None:
    chosen = [choose_sums(swarm(rate), REPLICAS, AUTO_SUMS) for rate in (2.5e6, 2.5e7, 1.25e10)]
    assert chosen == ["hadamard4", "hadamard4", "int8"]


def test_where_nobody_reduces_nothing_is_made_thin() -> None:
    assert choose_sums(swarm(2.5e6), LONE, AUTO_SUMS) == "int8"


def test_where_nobody_can_say_it_is_the_format_that_layouts_are_searched_with() -> None:
    stages = (Stage(0, 4, (Member(PeerID("unheard"), 1.0, 1.0),)),)
    assert choose_sums(swarm(1.25e10), stages, AUTO_SUMS) == "hadamard4"


def test_a_little_more_or_less_on_a_line_does_not_change_the_format() -> None:
    """Between the two bounds it is what it was."""
    rates = np.geomspace(2.5e6, 1.25e10, 200)
    fresh, thin, wide = (
        [choose_sums(swarm(rate), REPLICAS, AUTO_SUMS, kept=kept) for rate in rates]
        for kept in (None, *AUTO_SUMS[::-1])
    )
    assert fresh == thin
    between = [rate for rate, a, b in zip(rates, thin, wide, strict=True) if a != b]
    assert between
    for rate in between:
        seen = swarm(rate)
        ratio = foresee(seen, REPLICAS, "int8").tokens_per_s / foresee(seen, REPLICAS).tokens_per_s  # type: ignore[union-attr]
        assert ratio == pytest.approx((KEPT + SPARED) / 2, abs=(SPARED - KEPT) / 2 + 0.01)


def test_plans_are_foreseen_in_the_format_that_they_say() -> None:
    seen = swarm(2.5e6)
    int8, hadamard4 = (foresee(seen, REPLICAS, form) for form in AUTO_SUMS)
    assert int8 is not None
    assert hadamard4 is not None
    assert int8.bound == "reduction"
    assert hadamard4.tokens_per_s == pytest.approx(int8.tokens_per_s * 8.25 / 4.25, rel=0.1)
    named = msgspec.structs.replace(SPEC, wire=WireSpec(activations="int8", gradients="hadamard4"))
    assert Workload.of(named) == Workload.of(SPEC), "the search counts with the thinnest"
