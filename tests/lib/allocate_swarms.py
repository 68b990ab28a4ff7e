"""Random swarms and workloads for tests of the throughput planner."""

import numpy as np

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology, make_topology


def workload(*, layers: int = 6, microbatches: int = 12, s_max: int = 1, cut_bytes: float = 4e6) -> Workload:
    flop = [2e11] * layers
    flop[-1] *= 1.7
    return Workload(
        layer_flop=tuple(flop),
        backward_per_forward=2.0,
        layer_parameters=tuple([2e7] * (layers - 1) + [3e7]),
        gradient_bytes_per_parameter=4.0,
        memory=StageMemory(
            layer_held_bytes=(3e7,) * layers,
            resident_bytes_per_parameter=20.0,
            layer_job_bytes=(2e7,) * layers,
            workspace_bytes=1e8,
        ),
        cut_bytes=cut_bytes,
        microbatches=microbatches,
        tokens_per_microbatch=2048,
        s_max=s_max,
    )


def swarm(
    seed: int, n: int, *, cards: bool = True, text: float = 0.7, memory_gb: tuple[float, float] = (6.0, 24.0)
) -> Topology:
    """Places up to 150 ms apart, paths of 5 to 1,000 MB/s, speeds 1 to 20, asymmetric cards, some of them shared."""
    rng = np.random.default_rng(seed)
    place = rng.integers(0, 3, n)
    apart_s = rng.uniform(0.001, 0.15, (3, 3))
    rate = rng.choice([5e6, 3e7, 1e8, 1e9], (3, 3))
    feeds = rng.random(n) < text
    feeds[0] = True
    card = np.where(rng.random(n) < 0.3, 0, np.arange(n))
    return make_topology(
        apart_s[place[:, None], place[None, :]] * rng.uniform(0.9, 1.1, (n, n)),
        rate[place[:, None], place[None, :]] * rng.uniform(0.5, 1.0, (n, n)),
        flop_per_s=rng.uniform(2e12, 4e13, n),
        memory_bytes=rng.uniform(*memory_gb, n) * 1e9,
        up_bytes_per_s=rng.uniform(2e6, 2e8, n)[card] if cards else np.inf,
        down_bytes_per_s=rng.uniform(1e7, 4e8, n)[card] if cards else np.inf,
        card=card if cards else None,
        may_feed=feeds.astype(float),
    )


def random_placement(topology: Topology, layers: int, num_stages: int, seed: int) -> Placement:
    """Everybody somewhere or nowhere, nobody without the text in stage 0, no stage empty."""
    rng = np.random.default_rng(seed)
    n = topology.num_devices
    stage = rng.integers(-1, num_stages, n)
    stage[(stage == 0) & ~topology.may_feed] = -1
    for k in range(num_stages):
        stage[k] = k
    bounds = np.sort(rng.choice(np.arange(1, layers), num_stages - 1, replace=False))
    return Placement(
        stages=tuple(tuple(int(d) for d in np.flatnonzero(stage == k)) for k in range(num_stages)),
        bounds=(0, *(int(bound) for bound in bounds), layers),
    )
