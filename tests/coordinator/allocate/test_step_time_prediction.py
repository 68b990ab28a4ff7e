"""In which formats tensors are to travel where the run leaves it to its plans."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured import MeasuredNetwork
from shoal.coordinator.allocate.measured_topology import choose_formats, predict_step_time
from shoal.coordinator.cost import format_choice
from shoal.coordinator.cost.format_choice import KEPT, SPARED
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.workload import FormatBytes, WireBytes, Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Stage
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec, WireSpec
from shoal.protocol.topology import Topology
from shoal.protocol.wire_format import AUTO_SUMS, Formats

MODEL = ModelSpec(vocab_size=50_304, dim=2048, num_layers=4, num_heads=16, num_kv_heads=16, ffn_dim=5461, context=2048)
SPEC = RunSpec(
    model=MODEL,
    training=TrainingSpec(microbatches_per_step=64, microbatch_size=1, keep="recompute"),
    wire=WireSpec(activations="int8", gradients="auto"),
)
AUTO = msgspec.structs.replace(SPEC, wire=WireSpec(activations="auto", gradients="auto"))
NAMES = [PeerID(f"peer-{index}") for index in range(4)]
REPLICAS = (Stage(0, 4, tuple(Member(name, 1.0, 1.0) for name in NAMES)),)
LONE = tuple(Stage(index, index + 1, (Member(name, 1.0, 1.0),)) for index, name in enumerate(NAMES))
PAIRS = tuple(
    Stage(2 * k, 2 * k + 2, tuple(Member(name, 1.0, 1.0) for name in NAMES[2 * k : 2 * k + 2])) for k in (0, 1)
)
TAKES, AUTO_TAKES = FormatBytes.of(SPEC), FormatBytes.of(AUTO)


def swarm(bytes_per_s: float, cards: Mapping[int, float] | None = None) -> SwarmSnapshot:
    """Four peers that are alike, with links that have all been measured.

    Args: cards: bytes/s of some peers' cards, by their position, where they are slower.
    """
    rates = [(cards or {}).get(index, bytes_per_s) for index in range(4)]
    between = np.minimum.outer(rates, rates)
    return SwarmSnapshot(
        peers=tuple(
            MeasuredPeer(
                peer=name,
                flop_per_s=45e12,
                upload_bytes_per_s=rate,
                memory_bytes=64 * 10**9,
                has_data=True,
                card_bytes_per_s=rate,
            )
            for name, rate in zip(NAMES, rates, strict=True)
        ),
        layer_costs=Workload.of(SPEC).layer_flop,
        num_stages=None,
        workload=Workload.of(SPEC),
        network=MeasuredNetwork(latency_s=np.full((4, 4), 0.02), bytes_per_s=between, is_certain=between > 0.0),
    )


def chosen(bytes_per_s: float, stages: tuple[Stage, ...], *, kept: str | None = None) -> set[str]:
    """The formats of sums."""
    was = None if kept is None else Formats.same("int8", kept, len(stages))  # type: ignore[arg-type]
    return {*choose_formats(swarm(bytes_per_s), stages, TAKES, kept=was).sums}


def rate(seen: SwarmSnapshot, stages: tuple[Stage, ...], formats: Formats) -> float:
    """Tokens/s."""
    foreseen = predict_step_time(seen, stages, AUTO_TAKES.under(formats))
    assert foreseen is not None
    return foreseen.tokens_per_s


def test_slow_lines_get_few_bits_and_quick_ones_more() -> None:
    assert [chosen(rate, REPLICAS) for rate in (2.5e6, 2.5e7, 1.25e10)] == [{"hadamard4"}, {"hadamard4"}, {"int8"}]


def test_where_nobody_reduces_nothing_is_made_thin() -> None:
    assert chosen(2.5e6, LONE) == {"int8"}


def test_where_nobody_can_say_all_are_the_formats_that_layouts_are_searched_with() -> None:
    unheard = tuple(Stage(k, k + 1, (Member(PeerID(f"unheard-{k}"), 1.0, 1.0),)) for k in range(4))
    assert choose_formats(swarm(1.25e10), unheard, AUTO_TAKES) == Formats.same("int8", "hadamard4", 4)


def test_activations_are_made_thin_where_a_step_waits_for_them_and_before_sums_are() -> None:
    assert choose_formats(swarm(2.5e6), LONE, AUTO_TAKES) == Formats.same("int8", "int8", 4)
    assert choose_formats(swarm(1.25e10), LONE, AUTO_TAKES) == Formats.same("bf16", "int8", 4)
    assert choose_formats(swarm(2.5e6), REPLICAS, AUTO_TAKES) == Formats((), ("hadamard4",)), "one stage sends none"
    assert choose_formats(swarm(2.5e6), PAIRS, AUTO_TAKES) == Formats.same("int8", "hadamard4", 2)


@pytest.mark.parametrize("slow", range(4))
def test_only_the_cuts_on_a_slow_line_are_thinned(slow: int) -> None:
    """One of four lone peers has a slow line: what crosses it has 8 bits, and the cuts between others are whole."""
    formats = choose_formats(swarm(1.25e10, {slow: 2e7}), LONE, AUTO_TAKES)
    assert formats.activations == tuple("int8" if slow in (k, k + 1) else "bf16" for k in range(3))
    assert set(formats.sums) == {"int8"}, "nobody reduces"


@pytest.mark.parametrize("slow", [0, 1])
def test_only_the_reduction_that_binds_is_thinned(slow: int) -> None:
    """One of two stages has a slow member, so that its reduction is what everybody waits for."""
    formats = choose_formats(swarm(1.25e10, {2 * slow: 2.5e7}), PAIRS, AUTO_TAKES)
    assert formats.sums == tuple("hadamard4" if k == slow else "int8" for k in (0, 1))


def test_all_that_is_wider_is_judged_together() -> None:
    """Each of three slow cuts alone could be whole for less than is spared, all of them together could not."""
    for each in np.geomspace(2e7, 1.25e10, 60):
        seen = swarm(each)
        formats = choose_formats(seen, LONE, AUTO_TAKES)
        thin = rate(seen, LONE, AUTO_TAKES.thinnest(4))
        assert rate(seen, LONE, formats) >= SPARED * thin
        # Greedy in order: no cut that is thin could have been whole beside those before it that are.
        whole = formats.activations
        for cut in (k for k in range(3) if whole[k] == "int8"):
            wider = Formats((*whole[:cut], "bf16", *["int8"] * (2 - cut)), formats.sums)  # type: ignore[arg-type]
            assert rate(seen, LONE, wider) < SPARED * thin


def test_a_little_more_or_less_on_a_line_does_not_change_the_format() -> None:
    """Between the two bounds it is what it was."""
    rates = np.geomspace(2.5e6, 1.25e10, 200)
    fresh, thin, wide = ([chosen(rate, REPLICAS, kept=kept) for rate in rates] for kept in (None, *AUTO_SUMS[::-1]))
    assert fresh == thin
    between = [rate for rate, a, b in zip(rates, thin, wide, strict=True) if a != b]
    assert between
    in_int8 = TAKES.under(Formats((), ("int8",)))
    for rate in between:
        seen = swarm(rate)
        # type: ignore[union-attr]
        ratio = predict_step_time(seen, REPLICAS, in_int8).tokens_per_s / predict_step_time(seen, REPLICAS).tokens_per_s
        assert ratio == pytest.approx((KEPT + SPARED) / 2, abs=(SPARED - KEPT) / 2 + 0.01)


def test_a_cut_stays_whole_where_another_would_not_become_so() -> None:
    """What a live layout has is judged by the lower bound, cut by cut."""
    seen = next(
        seen
        for seen in map(swarm, np.geomspace(2e7, 1.25e10, 400))
        if KEPT * rate(seen, LONE, AUTO_TAKES.thinnest(4))
        < rate(seen, LONE, Formats.same("bf16", "int8", 4))
        < SPARED * rate(seen, LONE, AUTO_TAKES.thinnest(4))
    )
    assert choose_formats(seen, LONE, AUTO_TAKES) != Formats.same("bf16", "int8", 4)
    whole = Formats.same("bf16", "int8", 4)
    assert choose_formats(seen, LONE, AUTO_TAKES, kept=whole) == whole
    one = Formats(("int8", "int8", "bf16"), ("int8",) * 4)
    assert choose_formats(seen, LONE, AUTO_TAKES, kept=one).activations[2] == "bf16"
    assert choose_formats(seen, LONE, AUTO_TAKES, kept=one) != whole
    other_stages = Formats.same("bf16", "int8", 2)
    assert choose_formats(seen, LONE, AUTO_TAKES, kept=other_stages) == choose_formats(seen, LONE, AUTO_TAKES)


def test_the_same_figures_give_the_same_formats_and_those_are_kept() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        cards = {index: float(10 ** random.uniform(6.5, 9.5)) for index in range(4)}
        for stages in (LONE, PAIRS):
            formats = choose_formats(swarm(1e10, cards), stages, AUTO_TAKES)
            assert choose_formats(swarm(1e10, cards), stages, AUTO_TAKES) == formats
            assert choose_formats(swarm(1e10, cards), stages, AUTO_TAKES, kept=formats) == formats


def test_a_wide_format_is_not_taken_because_the_control_is_foreseen_to_hold_less_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As foreseen for eight stages of `mixed-cards`. Played, the wide ones took 7.8 s a step and the thin ones 6.5."""

    class EightStages:
        def __init__(self, topology: Topology, workload: Workload) -> None: ...

        def cost(self, placement: Placement, wire: WireBytes) -> Cost:
            step_s, foreseen_s = (6.84, 7.83) if wire == TAKES.under(TAKES.thinnest(1)) else (7.29, 7.44)
            parts = {"step_s": step_s, "foreseen_s": foreseen_s, "tokens_per_s": 1.0 / foreseen_s}
            return Cost(seconds=step_s, parts=parts)

    monkeypatch.setattr(format_choice, "ThroughputObjective", EightStages)
    assert choose_formats(swarm(1.25e10), REPLICAS, TAKES) == Formats((), ("hadamard4",))


def test_a_choice_that_takes_too_long_leaves_the_rest_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = swarm(1.25e10, {3: 2e7})
    assert choose_formats(seen, LONE, AUTO_TAKES).activations == ("bf16", "bf16", "int8")
    monkeypatch.setattr(format_choice, "TRIES_MAX", 2)  # all the thinnest, and all the widest
    assert choose_formats(seen, LONE, AUTO_TAKES) == AUTO_TAKES.thinnest(4)


def test_formats_that_are_all_the_thinnest_are_those_of_the_workload() -> None:
    seen = swarm(2.5e7)
    for stages in (REPLICAS, LONE, PAIRS):
        thinnest = AUTO_TAKES.under(AUTO_TAKES.thinnest(len(stages)))
        assert thinnest == WireBytes.same(Workload.of(AUTO), len(stages))
        assert predict_step_time(seen, stages, thinnest) == predict_step_time(seen, stages)


def test_a_run_that_says_its_formats_leaves_nothing_to_choose() -> None:
    said = FormatBytes.of(msgspec.structs.replace(SPEC, wire=WireSpec(activations="int8", gradients="int8")))
    assert (said.are_choices, TAKES.are_choices, AUTO_TAKES.are_choices) == (False, True, True)
    assert choose_formats(swarm(1.25e10), LONE, said) == Formats.same("int8", "int8", 4)


def test_plans_are_foreseen_in_the_formats_that_they_say() -> None:
    seen = swarm(2.5e6)
    int8, hadamard4 = (predict_step_time(seen, REPLICAS, TAKES.under(Formats((), (form,)))) for form in AUTO_SUMS)
    assert int8 is not None
    assert hadamard4 is not None
    assert int8.bound == "reduction"
    assert hadamard4.tokens_per_s == pytest.approx(int8.tokens_per_s * 8.25 / 4.25, rel=0.1)
    named = msgspec.structs.replace(SPEC, wire=WireSpec(activations="int8", gradients="hadamard4"))
    assert Workload.of(named) == Workload.of(SPEC), "the search counts with the thinnest"
    assert Workload.of(named) == Workload.of(AUTO)


def test_one_uniform_format_is_foreseen_as_a_run_that_says_it() -> None:
    whole = msgspec.structs.replace(SPEC, wire=WireSpec(activations="bf16", gradients="int8"))
    for stages in (LONE, PAIRS):
        seen = swarm(2.5e7)
        formats = AUTO_TAKES.under(Formats.same("bf16", "int8", len(stages)))
        of_run = predict_step_time(replace(seen, workload=Workload.of(whole)), stages)
        assert of_run is not None
        by_plan = predict_step_time(seen, stages, formats)
        assert by_plan is not None
        assert by_plan.tokens_per_s == pytest.approx(of_run.tokens_per_s, rel=1e-3)
        assert (by_plan.bound, by_plan.stage) == (of_run.bound, of_run.stage)
