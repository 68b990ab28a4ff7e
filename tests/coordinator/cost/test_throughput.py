"""The throughput objective on swarms small enough to be reckoned by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.pipeline import STEP_FLOP_PER_PARAMETER, fill
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective, split
from shoal.coordinator.cost.workload import ReducedGradients, Workload
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.staleness import Price
from shoal.protocol.topology import Topology, make_topology

FLOP, PARAMETERS, CUT = 1e12, 1e6, 1e6


def workload(*, s_max: int = 1, microbatches: int = 100, layers: int = 4, parameters: float = PARAMETERS) -> Workload:
    return Workload(
        layer_flop=(FLOP,) * layers,
        backward_per_forward=2.0,
        layer_parameters=(parameters,) * layers,
        gradient_bytes_per_parameter=4.0,
        memory=StageMemory(layer_held_bytes=(1e6,) * layers, resident_bytes_per_parameter=20.0),
        cut_bytes=CUT,
        microbatches=microbatches,
        tokens_per_microbatch=1000,
        s_max=s_max,
    )


def lan(n: int, *, latency_s: float = 0.0, rate: float = 1e12, **devices: object) -> Topology:
    return make_topology(np.full((n, n), latency_s), np.full((n, n), rate), **({"flop_per_s": 1e13} | devices))


def cost(topology: Topology, work: Workload, *stages: tuple[int, ...]) -> Cost:
    bounds = tuple(round(work.num_layers * k / len(stages)) for k in range(len(stages) + 1))
    return ThroughputObjective(topology, work).cost(Placement(stages=stages, bounds=bounds))


def test_a_lone_device_computes_all_of_the_time() -> None:
    alone = make_topology([[0.0]], [[0.0]], flop_per_s=1e13)
    jobs_s = 100 * 3 * 4 * FLOP / 1e13
    step_s = STEP_FLOP_PER_PARAMETER * 4 * PARAMETERS / 1e13
    assert cost(alone, workload(s_max=0), (0,)).seconds == pytest.approx(jobs_s + step_s)


def test_the_last_stage_runs_nothing_again() -> None:
    """Its loss and backward are one job: what the forward kept is there. So it may have a third more layers."""
    again = replace(workload(microbatches=1000, layers=7), backward_per_forward=3.0)
    cut = {
        bounds: ThroughputObjective(lan(2), again).cost(Placement(stages=((0,), (1,)), bounds=bounds)).parts["flow_s"]
        for bounds in ((0, 3, 7), (0, 4, 7))
    }
    assert cut[0, 3, 7] == pytest.approx(1000 * 12 * FLOP / 1e13)
    assert cut[0, 4, 7] == pytest.approx(1000 * 16 * FLOP / 1e13)


def test_synchronous_training_adds_fill_drain_and_reduction() -> None:
    found = cost(lan(2, latency_s=0.5), workload(s_max=0), (0,), (1,))
    job_s, hop_s = 3 * 2 * FLOP / 1e13, 2 * (0.5 + CUT / 1e12)
    step_s = STEP_FLOP_PER_PARAMETER * 2 * PARAMETERS / 1e13
    credited = max(100 * job_s, 100 * CUT * (1.0 + CUT / 1e12) / (STREAM_CREDIT_BYTES // CUT * CUT))
    assert found.seconds == pytest.approx(credited - job_s + 2 * job_s + hop_s + step_s)


def test_staleness_hides_what_the_flush_exposes() -> None:
    swarm = lan(4, latency_s=0.2, up_bytes_per_s=1e7, down_bytes_per_s=1e7)
    flush, overlapped = (cost(swarm, workload(s_max=s), (0, 1), (2, 3)) for s in (0, 1))
    assert flush.seconds > overlapped.seconds >= overlapped.parts["flow_s"]
    assert flush.parts["stale"] == 0.0
    assert overlapped.parts["stale"] > 0.0


def test_unequal_devices_get_unequal_shares() -> None:
    swarm = lan(3, flop_per_s=[1e13, 3e13, 2e13])
    placement = Placement(stages=((0, 1), (2,)), bounds=(0, 2, 4))
    found = split(swarm, workload(), placement)
    assert found.shares[0] == pytest.approx((0.25, 0.75), rel=1e-6)
    assert found.shares[1] == (1.0,)
    assert found.parts[0] == pytest.approx((0.5, 0.5))


def test_a_card_carries_activations_and_the_reduction() -> None:
    """Two members of one stage, its neighbours fast: each has half of 100 activations out, as many gradients in over
    the other direction, and sends S bytes of the reduction."""
    rate = 1e6
    swarm = lan(3, flop_per_s=1e15, up_bytes_per_s=[rate, rate, math.inf], down_bytes_per_s=[rate, rate, math.inf])
    found = cost(swarm, workload(), (0, 1), (2,))
    reduced = 4.0 * 2 * PARAMETERS
    assert found.parts["stage_s"] == pytest.approx((100 * CUT / 2 + reduced) / rate)
    assert found.parts["reduce_s"] == pytest.approx(reduced / rate)


def test_devices_behind_one_card_share_it_and_do_not_use_it_among_themselves() -> None:
    rate = 1e6
    up = {"up_bytes_per_s": rate, "down_bytes_per_s": rate, "flop_per_s": 1e15}
    apart = cost(lan(4, **up), workload(), (0, 1), (2, 3))
    shared = cost(lan(4, card=[0, 0, 2, 3], **up), workload(), (0, 1), (2, 3))
    inside = cost(lan(4, card=[0, 1, 0, 1], **up), workload(), (0, 1), (2, 3))
    assert shared.parts["stage_s"] == pytest.approx(100 * CUT / rate)
    reduced = 4.0 * 2 * PARAMETERS
    assert apart.parts["stage_s"] == pytest.approx((100 * CUT / 2 + reduced) / rate)
    # Half of what each sends stays behind the card, but both reductions pass it.
    assert inside.parts["stage_s"] == pytest.approx((2 * 100 * CUT / 4 + 2 * reduced) / rate)


def test_the_slower_direction_counts() -> None:
    rate = np.full((2, 2), 1e9)
    rate[1, 0] = 1e5
    slow = make_topology(np.zeros((2, 2)), rate, flop_per_s=1e15)
    assert cost(slow, workload(), (0,), (1,)).parts["stage_s"] == pytest.approx(100 * CUT / 1e5)


def test_credit_bounds_a_long_fat_path() -> None:
    work = workload()
    long = cost(lan(2, latency_s=1.0, flop_per_s=1e16), work, (0,), (1,))
    frames = STREAM_CREDIT_BYTES // CUT
    assert long.parts["stage_s"] == pytest.approx(100 * (2.0 + CUT / 1e12) / frames)


def test_the_reduction_waits_for_its_slowest_path() -> None:
    rate = np.full((3, 3), 1e9)
    rate[0, 1] = rate[1, 0] = 1e6
    swarm = make_topology(np.zeros((3, 3)), rate, flop_per_s=1e15)
    found = cost(swarm, workload(layers=1), (0, 1, 2))
    fast = cost(swarm, workload(layers=1), (0, 2))
    assert found.parts["reduce_s"] > 20 * fast.parts["reduce_s"]


def test_a_tied_matrix_goes_from_each_end_to_the_other() -> None:
    swarm = lan(4, up_bytes_per_s=1e7, down_bytes_per_s=1e7)
    tied = replace(workload(s_max=0), reduced=ReducedGradients(tied_parameters=5e6))
    for stages in (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))):
        apart, beside = (cost(swarm, work, *stages) for work in (workload(s_max=0), tied))
        assert beside.parts["commit_s"] == pytest.approx(apart.parts["commit_s"] + 2e7 / 1e7, rel=0.01)
    assert cost(swarm, tied, (0, 1, 2, 3)) == cost(swarm, workload(s_max=0), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("topology", "stages", "why"),
    [
        (lan(2), ((0,), ()), "stage 1 has no member"),
        (lan(2, may_feed=[0.0, 1.0]), ((0,), (1,)), "text"),
        (lan(2, memory_bytes=[1e9, 2e7]), ((0,), (1,)), "stage 1 does not fit"),
    ],
)
def test_what_cannot_be_is_impossible(topology: Topology, stages: tuple[tuple[int, ...], ...], why: str) -> None:
    found = cost(topology, workload(), *stages)
    assert math.isinf(found.seconds)
    assert why in found.why


def test_stages_without_a_path_between_them_are_impossible() -> None:
    rate = np.full((3, 3), 1e9)
    rate[0, 1] = rate[1, 0] = 0.0
    cut_off = make_topology(np.zeros((3, 3)), rate, flop_per_s=1e13)
    assert "has no path to its group peers" in cost(cut_off, workload(), (0,), (1,)).why


def test_flow_goes_around_slow_paths() -> None:
    even = np.array([1.0, 1.0])
    whole, _ = fill(even, even, np.full((2, 2), 9.0))
    assert whole == pytest.approx(np.full((2, 2), 0.5))
    around, _ = fill(even, even, np.array([[0.1, 9.0], [9.0, 0.1]]))
    assert around.sum() == pytest.approx(2.0, rel=0.02)
    assert (around <= np.array([[0.1, 9.0], [9.0, 0.1]])).all()


def test_staleness_is_the_mean_of_all_stages_and_never_more_than_is_admitted() -> None:
    """The first stage's microbatches are on their way for long, the last one's end where they begin."""
    swarm, placement = lan(2, latency_s=1.0), Placement(stages=((0,), (1,)), bounds=(0, 2, 4))
    found = ThroughputObjective(swarm, workload()).cost(placement)
    job_s, hop_s = 3 * 2 * FLOP / 1e13, 2 * (1.0 + CUT / 1e12)
    step_s = STEP_FLOP_PER_PARAMETER * 2 * PARAMETERS / 1e13
    trips_s = (2 * job_s + hop_s, job_s)
    assert found.parts["stale"] == pytest.approx(sum(trip_s + step_s for trip_s in trips_s) / 2 / found.parts["step_s"])
    few = ThroughputObjective(swarm, workload(microbatches=1)).cost(placement)
    assert few.parts["stale"] <= 1.0


def test_what_is_foreseen_is_with_the_control_and_a_plan_without() -> None:
    swarm, priced = lan(4, up_bytes_per_s=5e6, down_bytes_per_s=5e6), Price(0.77, 9, unseen=Price(1.4, 1))
    free, controlled = (cost(swarm, replace(workload(), control=price), (0, 1), (2, 3)) for price in (None, priced))
    assert controlled.seconds == free.seconds
    assert free.parts["tokens_per_s"] == pytest.approx(100_000 / free.parts["step_s"])
    assert free.parts["step_s"] == controlled.parts["step_s"] != controlled.parts["foreseen_s"]
    assert controlled.parts["tokens_per_s"] == pytest.approx(100_000 / controlled.parts["foreseen_s"])
