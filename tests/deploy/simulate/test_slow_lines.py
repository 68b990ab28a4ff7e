"""A swarm on lines where pieces of a reduction wait for minutes behind activations: nothing is sent that is on its way.

Eight peers hold two stages; activations and sums of one step take each line some five minutes.
"""

import numpy as np
import pytest

from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.modelled import ModelledRun, RunLimits, chunk_bytes_on, run_modelled
from shoal.peer.group.pieces import Pieces
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec, WireSpec
from shoal.protocol.topology import make_topology

UP_BYTES_PER_S = 2.5e5
STEPS = 3


@pytest.fixture
def sent_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose whole gradient somebody was sent."""
    steps: list[int] = []
    send_mean = Pieces.send_mean

    def noted(self: Pieces, target: object, stage: int, step: int, mean_N: object, pieces: object = ()) -> None:
        steps.append(step)
        send_mean(self, target, stage, step, mean_N, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(Pieces, "send_mean", noted)
    return steps


@pytest.mark.sim
def test_who_waits_for_pieces_is_not_sent_the_whole_gradient_beside_them(sent_whole: list[int]) -> None:
    spec = RunSpec(
        model=ModelSpec(
            vocab_size=32_000, dim=1024, num_layers=2, num_heads=8, num_kv_heads=8, ffn_dim=2816, context=1024
        ),
        training=TrainingSpec(
            steps=100_000, microbatches_per_step=32, microbatch_size=4, keep="recompute", s_max=1, synchronous_steps=0
        ),
        optimizer=OptimizerSpec(warmup_steps=0),
        swarm=SwarmSpec(stages=2, min_peers=8, term_s=60.0),
        wire=WireSpec(activations="int8", gradients="hadamard4"),
    )
    between = 1.0 - np.eye(8)
    workload = Workload.of(spec)
    topology = make_topology(
        0.02 * between,
        1e8 * between,
        flop_per_s=2e13,
        memory_bytes=4.0 * workload.resident_bytes(0, workload.num_layers, members=1),
        up_bytes_per_s=UP_BYTES_PER_S,
    )
    result = run_modelled(ModelledRun(topology=topology, spec=spec, limits=RunLimits(steps=STEPS, seconds=5_000.0)))
    assert result.failures == ()
    assert len(result.steps) >= STEPS
    assert (result.given_up, result.duplicates) == (0, 0)
    assert sent_whole == []


@pytest.mark.parametrize(("up_bytes_per_s", "chunk_bytes"), [(2.5e6, 1 << 20), (1e7, 4_000_000), (1e9, 8 << 20)])
def test_pieces_are_as_small_as_the_slowest_uplink_asks_for(up_bytes_per_s: float, chunk_bytes: int) -> None:
    topology = make_topology(
        np.full((2, 2), 0.01), np.full((2, 2), 1e9), up_bytes_per_s=np.array([1e9, up_bytes_per_s]), flop_per_s=1e12
    )
    assert chunk_bytes_on(topology) == chunk_bytes
