"""What is believed of links that nobody has measured, or only once."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.allocate.measured import WIDE, MeasuredNetwork
from shoal.coordinator.allocate.measured_topology import rate_variance_of, topology_of
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec
from shoal.protocol.topology import Floats, Topology

MODEL = ModelSpec(vocab_size=50_304, dim=2048, num_layers=24, num_heads=16, num_kv_heads=16, ffn_dim=5461, context=2048)
SPEC = RunSpec(model=MODEL, training=TrainingSpec(microbatches_per_step=256, microbatch_size=1, keep="recompute"))


def test_of_equal_peers_and_unknown_links_no_stage_is_left_to_one_peer() -> None:
    """`shoal simulate spot-fleet` had 20 of 24 layers on two of 32 peers for good: its steps took 70 s, not 5."""
    nothing = np.full((32, 32), np.nan)
    workload = Workload.of(SPEC)
    snapshot = SwarmSnapshot(
        peers=peers_of(32),
        layer_costs=workload.layer_flop,
        num_stages=6,
        workload=workload,
        network=MeasuredNetwork(latency_s=nothing, bytes_per_s=nothing, is_certain=nothing > 0.0),
    )
    layout, _ = EvolutionaryAllocator().search(snapshot, None, seed=0)
    assert layout is not None
    per_layer = [len(stage.members) / (stage.last_layer - stage.first_layer) for stage in layout.stages]
    assert max(per_layer) <= 2.5 * min(per_layer)


def peers_of(num_peers: int, *, machines: tuple[str, ...] = ()) -> tuple[MeasuredPeer, ...]:
    return tuple(
        MeasuredPeer(
            peer=PeerID(f"peer-{index:02}"),
            flop_per_s=45e12,
            upload_bytes_per_s=1.0,
            memory_bytes=16 * 10**9,
            has_data=True,
            machine=machines[index] if machines else "",
        )
        for index in range(num_peers)
    )


def believed(
    latency_s: Floats,
    bytes_per_s: Floats,
    *,
    certain: bool = False,
    machines: tuple[str, ...] = (),
    card_bytes_per_s: float = 0.0,
) -> Topology:
    """What is believed of links of which some are not known (NaN)."""
    workload = Workload.of(SPEC)
    network = MeasuredNetwork(
        latency_s=latency_s, bytes_per_s=bytes_per_s, is_certain=np.full(bytes_per_s.shape, fill_value=certain)
    )
    return topology_of(
        SwarmSnapshot(
            peers=tuple(
                replace(peer, card_bytes_per_s=card_bytes_per_s) for peer in peers_of(len(latency_s), machines=machines)
            ),
            layer_costs=workload.layer_flop,
            num_stages=None,
            workload=workload,
            network=network,
        )
    )


def two_towns(num_peers: int, known: float, seed: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Half of the peers in each of two towns with lines of 1 GB/s, 100 MB/s between the towns. Returns: latencies and
    rates as they are, and as far as they were measured."""
    town = np.arange(num_peers) < num_peers // 2
    near = town[:, None] == town[None, :]
    latency, rate = np.where(near, 0.001, 0.04), np.where(near, 1e9, 1e8)
    measured = np.random.default_rng(seed).random((num_peers, num_peers)) < known
    return latency, rate, np.where(measured | measured.T, latency, np.nan), np.where(measured, rate, np.nan)


@pytest.mark.parametrize("seed", range(4))
def test_links_that_nobody_has_measured_are_like_those_beside_them(seed: int) -> None:
    latency, rate, known_latency, known_rate = two_towns(24, 0.3, seed)
    topology = believed(known_latency, known_rate)
    off = ~np.eye(24, dtype=np.bool_)
    assert np.quantile(np.abs(np.log(topology.latency_s[off] / latency[off])), 0.95) < np.log(2.0)
    assert np.quantile(np.abs(np.log(topology.bytes_per_s[off] / rate[off])), 0.95) < np.log(1.5)


def test_a_latency_is_at_most_the_shortest_measured_path() -> None:
    """In `two-universities` two neighbours whose machines were measured once counted as 67 ms apart, as if far away."""
    latency = np.full((5, 5), np.nan)
    latency[0, 2] = latency[2, 0] = 0.0005
    latency[:, 4] = latency[4, :] = 0.045
    topology = believed(latency, np.full((5, 5), np.nan), machines=("a", "a", "b", "b", "far"))
    assert topology.latency_s[1, 3] < 0.001


def test_a_probe_that_met_a_busy_line_does_not_make_a_link_slow_until_others_agree() -> None:
    latency, rate, *_ = two_towns(12, 1.0, 0)
    busy = rate.copy()
    busy[0, 1] = 1e6
    assert believed(latency, busy).bytes_per_s[0, 1] > 0.5e9
    assert believed(latency, busy, certain=True).bytes_per_s[0, 1] == 1e6


def test_peers_of_one_machine_share_a_card_if_they_are_near_each_other() -> None:
    latency = np.full((4, 4), 0.0001)
    latency[3, :] = latency[:, 3] = 0.02
    rate = np.full((4, 4), 1e8)
    rate[0, 1] = 1e10
    machines = ("box", "box", "other", "box")
    topology = believed(latency, rate, certain=True, machines=machines)
    assert topology.card.tolist() == [0, 0, 2, 3], "the last says that it is in the box, and is 20 ms away"
    assert topology.up_bytes_per_s.tolist() == [1e8] * 4, "what stays in the box does not cross the card"
    assert topology.bytes_per_s[0, 1] == 1e10


def test_a_slow_line_is_slow_towards_everybody() -> None:
    nothing = np.full((6, 6), np.nan)
    rate = nothing.copy()
    rate[0, 1:3] = 2e6
    rate[1:, 0] = rate[1, 2:] = rate[2, 3:] = 5e7
    topology = believed(np.where(np.isnan(rate) & np.isnan(rate.T), np.nan, 0.01), rate)
    assert topology.bytes_per_s[0, 1:].tolist() == [2e6] * 5
    assert topology.bytes_per_s[3, 4] == 5e7


def test_the_links_of_a_peer_whose_others_are_slow_are_slow_however_much_its_card_carries() -> None:
    latency_s, bytes_per_s = np.full((12, 12), 0.001), np.full((12, 12), 1e8)
    np.fill_diagonal(bytes_per_s, np.nan)
    bytes_per_s[0] = 1e7
    bytes_per_s[0, 6:] = np.nan
    found = believed(latency_s, bytes_per_s, card_bytes_per_s=1e9)
    assert found.bytes_per_s[0, 6:] == pytest.approx(1e7, rel=0.01)
    assert found.bytes_per_s[1:, 0] == pytest.approx(1e8)


def test_a_peer_of_whose_links_outwards_little_is_known_is_as_slow_as_those_towards_it() -> None:
    latency_s, bytes_per_s = np.full((12, 12), 0.001), np.full((12, 12), 1e8)
    np.fill_diagonal(bytes_per_s, np.nan)
    bytes_per_s[1:, 0] = 1e7
    bytes_per_s[0] = np.nan
    found = believed(latency_s, bytes_per_s, card_bytes_per_s=1e9)
    assert found.bytes_per_s[0, 1:] == pytest.approx(1e7, rel=0.05)
    assert found.bytes_per_s[1, 2:] == pytest.approx(1e8)


def test_a_rate_that_is_an_estimate_is_as_uncertain_as_can_be() -> None:
    rates = np.full((3, 3), 1e6)
    rates[0, 2] = np.nan
    rates[2, 0] = 9e5
    certain = np.ones((3, 3), dtype=np.bool_)
    certain[0, 2] = certain[2, 0] = False
    network = MeasuredNetwork(
        latency_s=np.full((3, 3), 0.02), bytes_per_s=rates, is_certain=certain, rate_variance=np.full((3, 3), 0.01)
    )
    snapshot = SwarmSnapshot(peers=peers_of(3), layer_costs=(1.0,), num_stages=None, network=network)
    found = rate_variance_of(snapshot, topology_of(snapshot))
    assert found[0, 1] == found[1, 2] == 0.01
    assert found[0, 2] == WIDE, "nobody has measured it"
    assert found[2, 0] == WIDE, "the far end may have been busy, and the estimate is higher"
