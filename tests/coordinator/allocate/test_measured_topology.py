"""What a first plan takes for granted where nothing has been measured yet."""

import numpy as np

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.measured import MeasuredNetwork
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec

MODEL = ModelSpec(vocab_size=50_304, dim=2048, num_layers=24, num_heads=16, num_kv_heads=16, ffn_dim=5461, context=2048)
SPEC = RunSpec(model=MODEL, training=TrainingSpec(microbatches_per_step=256, microbatch_size=1, keep="recompute"))


def test_of_equal_peers_and_unknown_links_no_stage_is_left_to_one_peer() -> None:
    """`shoal simulate spot-fleet` had 20 of 24 layers on two of 32 peers for good: its steps took 70 s, not 5."""
    nothing = np.full((32, 32), np.nan)
    workload = Workload.of(SPEC)
    peers = tuple(
        MeasuredPeer(
            peer=PeerID(f"peer-{index:02}"),
            flop_per_s=45e12,
            upload_bytes_per_s=1.0,
            memory_bytes=16 * 10**9,
            has_data=True,
        )
        for index in range(32)
    )
    snapshot = Snapshot(
        peers=peers,
        layer_costs=workload.layer_flop,
        num_stages=6,
        workload=workload,
        network=MeasuredNetwork(latency_s=nothing, bytes_per_s=nothing, is_certain=nothing > 0.0),
    )
    layout, _ = EvolutionaryAllocator().search(snapshot, None, seed=0)
    assert layout is not None
    per_layer = [len(stage.members) / (stage.last_layer - stage.first_layer) for stage in layout.stages]
    assert max(per_layer) <= 2.5 * min(per_layer)
