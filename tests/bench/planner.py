"""How fast and how good the throughput planner is, on one core.

    python tests/bench/planner.py                 # CPU seconds and peak memory at 64, 1,000 and 10,000 devices
    python tests/bench/planner.py --exhaustive 50 # gap to the best of all placements, small random cases
    python tests/bench/planner.py --rates         # evaluations a second: plain, compiled whole, compiled incremental

Each size runs in a process of its own, so that peak memory is its own.
"""

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from shoal.coordinator.allocate.evolution import evolve
from shoal.coordinator.allocate.planner import default_work, plan
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec
from shoal.protocol.topology import Topology, make_topology

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import allocate_swarms as swarms

STAGES = {64: 8, 1_000: 16, 10_000: 24}


def workload(microbatches: int) -> Workload:
    """1.3 G parameters in 24 layers, 2,048 tokens a microbatch."""
    model = ModelSpec(
        vocab_size=50304, dim=2048, num_layers=24, num_heads=16, num_kv_heads=16, ffn_dim=5461, context=2048
    )
    training = TrainingSpec(microbatches_per_step=microbatches, microbatch_size=1, keep="recompute")
    return Workload.of(RunSpec(model=model, training=training))


def world(num_devices: int, seed: int) -> Topology:
    """Forty cities on a sphere, single precision: latency by distance, 0.3 to 2 Gbit/s between cities and 10 within,
    speeds 8 to 120 TFLOP/s, cards of 12 to 48 GB, lines of 0.1 to 1 Gbit/s up."""
    rng = np.random.default_rng(seed)
    at = rng.normal(size=(40, 3))
    at /= np.linalg.norm(at, axis=1, keepdims=True)
    arc = np.arccos(np.clip(at @ at.T, -1.0, 1.0))
    latency = (0.002 + 0.06 * arc).astype(np.float32)
    rate = rng.uniform(0.3e9, 2e9, (40, 40)).astype(np.float32) / 8
    np.fill_diagonal(rate, 10e9 / 8)
    city = rng.integers(0, 40, num_devices)
    square = np.ix_(city, city)
    return make_topology(
        latency[square],
        rate[square],
        flop_per_s=rng.choice([8e12, 20e12, 45e12, 120e12], num_devices),
        memory_bytes=rng.choice([12e9, 24e9, 48e9], num_devices),
        up_bytes_per_s=rng.choice([1.2e7, 4e7, 1.2e8], num_devices),
        down_bytes_per_s=1.2e8,
        may_feed=(rng.random(num_devices) < 0.5).astype(float),
    )


def one_size(num_devices: int) -> dict[str, float]:
    asked, work = workload(min(16 * num_devices, 4096)), default_work(num_devices)
    begin_s = time.process_time()
    topology = world(num_devices, seed=1)
    made_s = time.process_time() - begin_s
    plan(topology.take(range(12)), asked, num_stages=2, work=100_000)  # compiles, or loads what has been compiled
    if topology.latency_s.dtype == np.float32:
        small = make_topology(np.ones((4, 4), np.float32), np.full((4, 4), 1e9, np.float32))
        plan(small, asked, num_stages=2, work=100_000)
    begin_s = time.process_time()
    found, cost = plan(topology, asked, num_stages=STAGES[num_devices], seed=0, work=work)
    planned_s = time.process_time() - begin_s
    lost = found.stages[1][0]
    again = [d for d in range(num_devices) if d != lost]
    begin_s = time.process_time()
    if num_devices <= 1_000:
        plan(topology.take(again), asked, num_stages=STAGES[num_devices], seed=1, work=work)
    searched_s = time.process_time() - begin_s
    bound = 4.0 * sum(asked.layer_flop) * asked.microbatches / float(topology.flop_per_s.sum())
    return {
        "devices": num_devices,
        "topology_s": made_s,
        "plan_s": planned_s,
        "replan_s": searched_s,
        "step_s": cost.seconds,
        "all_devices_computing_s": bound,
        "left_out": len(found.spares(num_devices)),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def exhaustive(cases: int) -> None:
    """Up to 7 devices on up to 3 stages of 5 layers, every assignment with every cut."""
    gaps = []
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        n, stages, layers = int(rng.integers(3, 8)), int(rng.integers(1, 4)), 5
        topology = swarms.swarm(seed, n, cards=seed % 2 > 0)
        asked = swarms.workload(layers=layers, microbatches=int(rng.integers(4, 64)), s_max=seed % 3 % 2)
        evaluator = ThroughputEvaluator(topology, asked, stages)
        cuts = [(0, *cut, layers) for cut in itertools.combinations(range(1, layers), stages - 1)]
        best = math.inf
        for labels in itertools.product(range(-1, stages), repeat=n):
            if len(set(labels) - {-1}) == stages and all(k != 0 or topology.may_feed[d] for d, k in enumerate(labels)):
                assignment = np.array(labels, dtype=np.int64)
                best = min(best, *(evaluator.evaluate(assignment, cut) for cut in cuts))
        found = evolve(evaluator, seed=0, work=20_000_000).cost
        gaps.append(found / best - 1.0)
        if gaps[-1] > 1e-9:
            print(f"seed {seed}: {n} devices, {stages} stages, found {found:.4g}, best {best:.4g}", flush=True)
    print(
        f"{cases} cases: {sum(gap < 1e-9 for gap in gaps)} exact, mean gap {np.mean(gaps):.4%}, worst {max(gaps):.2%}"
    )


def rates() -> None:
    topology, asked = world(64, seed=1), workload(1024)
    # Before anything is compiled, which the objective would then use.
    objective, feeds = ThroughputObjective(topology, asked), np.flatnonzero(topology.may_feed)[:8].tolist()
    rest = [device for device in range(64) if device not in feeds]
    stages = (tuple(feeds), *(tuple(rest[k::7]) for k in range(7)))
    bounds = tuple(round(bound) for bound in np.linspace(0, asked.num_layers, 9))
    begin_s = time.process_time()
    for _ in range(100):
        assert objective.cost(Placement(stages=stages, bounds=bounds)).parts, "it is possible"
    plain_s = (time.process_time() - begin_s) / 100
    evaluator = ThroughputEvaluator(topology, asked, 8)
    assignment = evaluator.random(0)
    evaluator.improve(assignment, seed=0, work=1, heat=0.0)  # compiles
    placement = evaluator.placement_of(assignment)
    begin_s = time.process_time()
    for _ in range(10_000):
        evaluator.evaluate(assignment, placement.bounds)
    whole_s = (time.process_time() - begin_s) / 10_000
    begin_s = time.process_time()
    work = evaluator.improve(assignment, seed=0, work=50_000_000, heat=1.0).work
    unit_s = (time.process_time() - begin_s) / work
    print(f"64 devices: plain {plain_s * 1e3:.2f} ms, compiled {whole_s * 1e6:.1f} us, {1e-6 / unit_s:.0f} M units/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exhaustive", type=int, metavar="CASES")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--size", type=int, choices=list(STAGES))
    options = parser.parse_args()
    if options.exhaustive:
        exhaustive(options.exhaustive)
    elif options.rates:
        rates()
    elif options.size:
        print(json.dumps(one_size(options.size)))
    else:
        for size in STAGES:
            out = subprocess.run([sys.executable, __file__, "--size", str(size)], check=True, capture_output=True)
            print(", ".join(f"{name} {value:.4g}" for name, value in json.loads(out.stdout).items()))


if __name__ == "__main__":
    main()
