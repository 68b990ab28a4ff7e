"""What another layout is expected to be worth, and what going there costs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.allocate.interface import FORECAST_ERROR, Chosen, MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured import MeasuredNetwork
from shoal.coordinator.allocate.objective import (
    AGREED_S,
    AHEAD_PART,
    FOLLOWED_PART,
    FROM_ONE_TIMES,
    Change,
    LayoutObjective,
    fetch_s,
    figures_variance,
    residual_s,
    trust_in,
)
from shoal.coordinator.cost.forecast_bias import ForecastBias
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import STATE_BYTES_PER_PARAMETER, Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, WireSpec
from shoal.protocol.topology import Topology, make_topology


def workload(gradients: str) -> Workload:
    return Workload.of(RunSpec(model=ModelSpec(), wire=WireSpec(gradients=gradients)))


@pytest.mark.parametrize(("gradients", "part"), [("fp32", 1 / 3), ("bf16", 1 / 6)])
def test_the_gradient_of_a_step_is_left_for_the_standstill_where_steps_are_long(gradients: str, part: float) -> None:
    assert workload(gradients).reduced.bytes_per_parameter / STATE_BYTES_PER_PARAMETER == pytest.approx(part)
    assert residual_s(workload(gradients), 60.0, step_s=1000.0) == pytest.approx(part * 60.0)


def test_what_travels_faster_than_a_step_is_followed_and_the_rest_comes_whole() -> None:
    gradients_s = 20.0
    half = residual_s(workload("fp32"), 60.0, step_s=0.5 * gradients_s / FOLLOWED_PART)
    assert half == pytest.approx(0.5 * gradients_s + 0.5 * 60.0)
    assert residual_s(workload("fp32"), 60.0, step_s=1e-3) == pytest.approx(60.0, rel=1e-3)


def test_nothing_is_left_of_nothing() -> None:
    assert residual_s(workload("fp32"), 0.0, step_s=1.0) == 0.0


def believed(gain: float, *, spread: float = 0.1, error: float = 0.0, variance: float = 0.0) -> float:
    return change(gain=gain, trust=trust_in(spread=spread, error=error, variance=variance)).believed


def test_a_gain_is_believed_less_the_more_forecasts_err_and_the_less_its_figures_are_known() -> None:
    assert believed(0.21) == pytest.approx(0.21)
    assert believed(0.21, error=0.1) == believed(0.21, variance=0.01) == pytest.approx(0.1)
    assert 0.0 < believed(0.21, error=0.3) < 0.02
    assert believed(0.21, error=0.1, spread=1.0) > 0.2, "the swarm is not the one for which the live layout was made"
    assert believed(-0.5, error=1.0) == -0.5, "a loss is a loss"


@given(
    gain=st.floats(allow_infinity=True, allow_nan=False) | st.sampled_from([-1.0, -1.0 - 1e-16, 0.0]),
    error=st.floats(0.0, 10.0),
    variance=st.floats(0.0, 10.0),
)
def test_every_gain_is_believed_by_its_sign_and_no_more_than_it_promises(
    gain: float, error: float, variance: float
) -> None:
    worth = believed(gain, error=error, variance=variance)
    assert worth >= -1.0
    assert 0.0 <= worth <= gain * (1.0 + 1e-9) if gain >= 0.0 else worth <= 0.0


def four(card_bytes_per_s: float) -> Topology:
    """Two devices in each of two towns; those of each town are behind one card."""
    away = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]], dtype=bool)
    return make_topology(
        np.where(away, 0.1, 0.001),
        np.where(away, 1e7, 1e8),
        up_bytes_per_s=card_bytes_per_s,
        down_bytes_per_s=card_bytes_per_s,
        card=[0, 0, 7, 7],
    )


def seconds(
    found: tuple[tuple[int, ...], ...],
    *,
    card_bytes_per_s: float = 1e9,
    held: tuple[tuple[int, ...], ...] = ((0,), (1, 2)),
    together: bool = False,
) -> float:
    """How long state travels, beside the second half of the layers over one line between the towns, from a layout whose
    first half is at device 0, the second at devices 1 and 2, or as `held` has it."""
    work = workload("fp32")
    half = len(work.layer_parameters) // 2
    bounds = (0, half, len(work.layer_parameters))
    before, after = Placement(stages=held, bounds=bounds), Placement(stages=found, bounds=bounds)
    took_s = fetch_s(four(card_bytes_per_s), work, before, after, together=together)
    return took_s * 1e7 / (STATE_BYTES_PER_PARAMETER * sum(work.layer_parameters[half:]))


def test_who_stays_fetches_nothing() -> None:
    assert seconds(((0,), (1, 2))) == 0.0


def test_state_comes_from_all_of_its_holders_from_each_what_its_path_carries() -> None:
    assert seconds(((0,), (1, 2, 3))) == pytest.approx(1e7 / (1e7 + 1e8))


def test_who_shares_a_card_shares_what_comes_over_it() -> None:
    alone, both = (seconds(found, card_bytes_per_s=1e5) for found in (((2,), (1,)), ((2, 3), (1,))))
    assert both == pytest.approx(2.0 * alone)


def test_who_lacks_the_same_brings_it_over_a_slow_line_once() -> None:
    def both(*, together: bool) -> float:
        return seconds(((0,), (1, 2, 3)), held=((0,), (1,)), together=together)

    assert both(together=False) == pytest.approx(1.0)
    assert both(together=True) == pytest.approx(1 / 3), "over the paths of the others, too"
    assert seconds(((0,), (1, 2)), held=((0,), (1,)), together=True) == pytest.approx(1 / 3)
    card = {"held": ((0,), (1,)), "card_bytes_per_s": 1e5}
    assert seconds(((0,), (1, 2, 3)), together=True, **card) == pytest.approx(FROM_ONE_TIMES * 1e7 / 1e5)
    assert seconds(((0,), (1, 2, 3)), together=False, **card) == pytest.approx(2e7 / 1e5)


def pair(*, state_s: float = 0.0, card_bytes_per_s: float = np.inf) -> Topology:
    """Two equal devices. Args: state_s: how long the state of two layers travels."""
    work = workload("fp32")
    state_bytes = STATE_BYTES_PER_PARAMETER * sum(work.layer_parameters[1:3])
    return make_topology(
        np.full((2, 2), 0.01),
        np.full((2, 2), state_bytes / state_s if state_s else 1e12),
        flop_per_s=work.microbatches * work.job_flop(1, 6) / 5.0,
        up_bytes_per_s=card_bytes_per_s,
        down_bytes_per_s=card_bytes_per_s,
        names=("p0", "p1"),
    )


BEFORE, AFTER = (Placement(stages=((0,), (1,)), bounds=bounds) for bounds in ((0, 1, 6), (0, 3, 6)))
"""1 and 5 layers, which is a step of 5 s, and 3 each."""


def swarm(variance: float = 0.0, **fields: object) -> SwarmSnapshot:
    """Two peers whose figures have this variance."""
    peers = tuple(
        MeasuredPeer(
            peer=PeerID(name),
            flop_per_s=1e9,
            upload_bytes_per_s=1e7,
            memory_bytes=1 << 34,
            has_data=True,
            speed_variance=variance,
        )
        for name in ("p0", "p1")
    )
    network = MeasuredNetwork(
        latency_s=np.full((2, 2), 0.01),
        bytes_per_s=np.full((2, 2), 1e7),
        is_certain=np.ones((2, 2), dtype=bool),
        rate_variance=np.full((2, 2), variance),
    )
    usual = {"layer_costs": (1.0,) * 6, "num_stages": None, "workload": workload("fp32"), "network": network}
    return SwarmSnapshot(peers=peers, **{**usual, **fields})  # type: ignore[arg-type]


def change_to(snapshot: SwarmSnapshot, topology: Topology, current: Placement, found: Placement) -> Change | None:
    assert snapshot.workload is not None
    return LayoutObjective(snapshot, topology, snapshot.workload, current).change_to(found)


def is_worth(
    *, forecast_error: float = FORECAST_ERROR, horizon_s: float = 600.0, state_s: float = 0.0, variance: float = 0.0
) -> bool:
    """Whether two equal devices with 1 and 5 layers should have 3 each. Args: state_s: as of `pair`."""
    snapshot = swarm(variance, forecast_error=forecast_error, horizon_s=horizon_s)
    change = change_to(snapshot, pair(state_s=state_s), BEFORE, AFTER)
    return change is not None and change.pays(horizon_s)


def test_a_division_pays_if_it_gains_more_than_its_standstill_within_the_time_that_a_layout_lasts() -> None:
    assert len(workload("fp32").layer_parameters) == 6
    assert is_worth()
    assert is_worth(horizon_s=40.0)
    assert not is_worth(horizon_s=10.0)
    assert is_worth(state_s=3.0, horizon_s=60.0)
    assert not is_worth(state_s=3.0, horizon_s=20.0)


def test_spares_and_lines_that_training_does_not_use_are_all_there_for_state_that_comes_ahead() -> None:
    """One device trains all layers and another comes; or both train, and cards are busy for all of a step."""
    work = workload("fp32")
    snapshot = swarm()
    alone = Placement(stages=((0,),), bounds=(0, 6))
    grown = change_to(snapshot, pair(state_s=3.0), alone, AFTER)
    assert grown is not None
    assert grown.precopy_s == pytest.approx(grown.stop_and_copy_s)
    busy = pair(state_s=3.0, card_bytes_per_s=work.microbatches * work.cut_bytes / 6.0)
    divided = change_to(snapshot, busy, BEFORE, AFTER)
    assert divided is not None
    assert divided.precopy_s == pytest.approx(divided.stop_and_copy_s / AHEAD_PART)


def change(**fields: float) -> Change:
    usual = {
        "gain": 0.21,
        "trust": 0.5,
        "drain_s": 4.0,
        "stop_and_copy_s": 20.0,
        "precopy_s": 100.0,
        "meanwhile": 0.99,
    }
    return Change(**{**usual, "meanwhile": 0.99, "residual_s": 5.0, **fields})


def test_a_change_costs_what_its_cheaper_way_costs() -> None:
    """100 s at a tenth less work and 5 s, or 20 s."""
    assert not change().stands_still()
    assert change().work_s(600.0) == pytest.approx(1.1 * (600.0 - 4.0 - 15.0))
    assert change(stop_and_copy_s=14.0).stands_still()
    assert change(stop_and_copy_s=14.0).work_s(600.0) == pytest.approx(1.1 * (600.0 - 4.0 - 14.0))
    assert change(loss=0.1).work_s(600.0) == pytest.approx(99.0 + 491.0), "only once it is the layout"
    assert change(loss=0.1, loss_before=0.1).work_s(600.0) == pytest.approx(change().work_s(600.0) / 1.1)


def test_of_two_changes_the_one_with_the_larger_gain_may_do_less_in_time() -> None:
    dear = change(gain=0.44, stop_and_copy_s=200.0, precopy_s=1000.0, residual_s=150.0)
    assert change().work_s(600.0) > dear.work_s(600.0)
    assert change().work_s(6000.0) < dear.work_s(6000.0)


def test_a_layout_whose_state_comes_after_the_horizon_is_not_chosen_for_its_second_holders() -> None:
    """Six homes with 288 MB of state on lines of 20 Mbit/s went from six stages to one "for -60 % more": their lines
    had room, so the run would train at its full rate until the horizon, and no stage would have a sole holder."""
    late = change(gain=-0.6, meanwhile=1.0, precopy_s=900.0, stop_and_copy_s=800.0, loss=0.0, loss_before=0.03)
    assert not late.pays(600.0)
    assert late.gain_needed(600.0) == math.inf
    soon = change(gain=0.0, meanwhile=1.0, precopy_s=10.0, drain_s=1.0, residual_s=0.0, loss=0.0, loss_before=0.03)
    assert soon.pays(600.0), "a second holder is worth a short wait"


def test_a_change_pays_from_the_gain_that_it_would_have_to_promise() -> None:
    for horizon_s in (60.0, 600.0):
        needed = change(gain=0.0).gain_needed(horizon_s)
        assert not change(gain=0.99 * needed).pays(horizon_s)
        assert change(gain=1.01 * needed).pays(horizon_s)
    assert change().gain_needed(600.0) < change(trust=0.1).gain_needed(600.0) < change(trust=0.0).gain_needed(600.0)
    assert change().gain_needed(2.0) == np.inf, "the drain alone takes longer"
    assert change(loss_before=1.0).gain_needed(600.0) == 0.0


def test_state_that_comes_more_slowly_than_foreseen_is_fetched_at_once() -> None:
    assert not change().stands_still(140.0)
    assert change().stands_still(160.0)
    assert change().stands_still(np.inf)


def test_a_small_gain_is_worth_fetching_ahead_for_where_lines_are_idle_and_not_where_they_bound_the_step() -> None:
    """A step of 5 s has two layers' state fetched in 3 s; what bounds it are devices, or cards in 6 s."""
    work = workload("fp32")
    snapshot = swarm(forecast_error=0.4)
    activations_bytes = work.microbatches * work.cut_bytes
    idle, bound = pair(state_s=3.0), pair(state_s=3.0, card_bytes_per_s=activations_bytes / 6.0)
    quick, slow = (change_to(snapshot, topology, BEFORE, AFTER) for topology in (idle, bound))
    assert quick is not None
    assert slow is not None
    assert quick.meanwhile == pytest.approx(1.0, abs=0.02)
    assert slow.meanwhile == pytest.approx(1.0 - AHEAD_PART, abs=0.02)
    assert not quick.stands_still()
    assert slow.stands_still()


def test_a_layout_that_is_faster_than_foreseen_is_left_for_a_smaller_gain() -> None:
    topology = pair()
    usual = change_to(swarm(), topology, BEFORE, AFTER)
    assert usual is not None
    foreseen = ThroughputObjective(topology, workload("fp32")).cost(BEFORE).parts["tokens_per_s"]
    slower, faster = (
        change_to(swarm(seen_tokens_per_s=part * foreseen), topology, BEFORE, AFTER) for part in (0.5, 1.2)
    )
    assert slower is not None
    assert faster is not None
    assert slower.gain == pytest.approx(usual.gain)
    assert 1.0 + faster.gain == pytest.approx((1.0 + usual.gain) / 1.2)


def test_a_gain_is_believed_by_what_is_known_of_what_bounds_the_layout_and_by_how_the_swarm_has_changed() -> None:
    """The two devices compute for most of a step."""
    topology = pair()
    known, unknown = (change_to(swarm(variance), topology, BEFORE, AFTER) for variance in (0.0, 0.5))
    throughput = ThroughputObjective(topology, workload("fp32"))
    bound = throughput.cost(AFTER).bound
    assert bound is not None
    assert bound[0] == "compute"
    assert figures_variance(swarm(0.5), topology, AFTER, bound) == pytest.approx(0.5)
    assert known is not None
    assert unknown is not None
    assert 0.0 < unknown.believed < 0.05 * known.believed
    foreseen = throughput.cost(BEFORE).parts["tokens_per_s"]
    for promised in (0.2 * foreseen, 5.0 * foreseen):
        changed = change_to(swarm(0.5, chosen=Chosen(promised, 0)), topology, BEFORE, AFTER)
        assert changed is not None
        assert changed.believed > known.believed
    assert change_to(swarm(0.5, chosen=Chosen(foreseen, 0)), topology, BEFORE, AFTER) == unknown
    grown = change_to(swarm(0.5, chosen=Chosen(0.0, 1)), topology, BEFORE, AFTER)
    assert grown is not None
    assert grown.believed > 1.5 * unknown.believed
    for shrunk_from in (2, 9):
        assert change_to(swarm(0.5, chosen=Chosen(0.0, shrunk_from)), topology, BEFORE, AFTER) == unknown


def test_another_number_of_stages_gains_what_the_live_one_has_disappointed() -> None:
    """One device alone would take 6 s a step, two that share it 5 s by the figures; 25 s are seen."""
    work = workload("fp32")
    rates = work.microbatches * work.job_flop(0, 6) / np.array([6.0, 24.0])
    unequal = make_topology(np.full((2, 2), 0.01), np.full((2, 2), 1e12), flop_per_s=rates, names=("p0", "p1"))
    alone, both = (Placement(stages=s, bounds=b) for s, b in ((((0,),), (0, 6)), (((0,), (1,)), (0, 5, 6))))

    def gain(*seen: tuple[int, float, int]) -> float:
        change = change_to(swarm(forecast_bias=ForecastBias(seen)), unequal, both, alone)
        return change.gain if change is not None and change.pays(600.0) else 0.0

    assert gain() == gain((1, -1.6, 64)) == 0.0
    assert gain((2, -1.6, 64)) > 0.05
    assert gain((1, -1.6, 64), (2, -1.6, 64)) == 0.0


def test_nothing_is_divided_for_a_gain_that_forecasts_cannot_tell_from_none() -> None:
    assert not is_worth(forecast_error=3.0)
    assert not is_worth(variance=3.0, state_s=3.0)


def test_a_move_pays_if_its_gain_makes_up_for_the_time_in_which_only_those_work_who_stay() -> None:
    """A fast device takes the place of a slow one in a stage of two; until it has the state one is alone."""
    work = workload("fp32")
    speeds = work.microbatches * work.job_flop(0, 6) / np.array([50.0, 500.0, 10.0])
    rates = np.full((3, 3), STATE_BYTES_PER_PARAMETER * sum(work.layer_parameters) / 30.0)
    topology = make_topology(np.full((3, 3), 0.01), rates, flop_per_s=speeds, names=("p0", "p1", "p2"))
    two = swarm()
    three = MeasuredPeer(peer=PeerID("p2"), flop_per_s=1e9, upload_bytes_per_s=1e7, memory_bytes=1 << 34, has_data=True)
    snapshot = SwarmSnapshot(peers=(*two.peers, three), layer_costs=two.layer_costs, num_stages=None, workload=work)
    current, found = (Placement(stages=(stage,), bounds=(0, 6)) for stage in ((0, 1), (0, 2)))
    change = change_to(snapshot, topology, current, found)
    assert change is not None
    assert change.stop_and_copy_s == np.inf
    assert change.meanwhile < 1.0
    assert [change.pays(horizon_s) for horizon_s in (1.0, 1e4)] == [False, True]


def test_a_move_that_keeps_the_boundaries_costs_what_the_others_of_a_stage_repeat() -> None:
    """One of two members leaves a stage: half of its half of a step runs again."""
    work = workload("fp32")
    speeds = work.microbatches * work.job_flop(0, 6) / np.full(3, 40.0)
    topology = make_topology(np.full((3, 3), 0.01), np.full((3, 3), 1e12), flop_per_s=speeds, names=("p0", "p1", "p2"))
    two = swarm()
    three = MeasuredPeer(peer=PeerID("p2"), flop_per_s=1e9, upload_bytes_per_s=1e7, memory_bytes=1 << 34, has_data=True)
    snapshot = SwarmSnapshot(peers=(*two.peers, three), layer_costs=two.layer_costs, num_stages=None, workload=work)
    current, found, grown = (Placement(stages=(stage,), bounds=(0, 6)) for stage in ((0, 1), (0, 2), (0, 1, 2)))
    moved, joined = (change_to(snapshot, topology, current, placement) for placement in (found, grown))
    assert moved is not None
    assert joined is not None
    step_s = ThroughputObjective(topology, work).cost(current).parts["foreseen_s"]
    assert moved.drain_s == pytest.approx(AGREED_S + step_s / 4.0)
    assert joined.drain_s == AGREED_S
