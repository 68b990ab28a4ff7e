"""How fast the simulator is: one step of 64 devices in eight cities' shape, and a thousand peers under a real trace.

Both are runs of the real drivers on modelled devices. CPU seconds are of this process, so that what else the machine
does counts little; the same arguments give the same trace hash.

    simulate.py step --microbatches 4096
    simulate.py hour --peers 1000 --seconds 3600 --churn

The trace (AWS p3 spot instances, `aws_p3_bamboo.csv`) is of 32 nodes at most. By default it runs side by side as often
as a thousand peers take, each copy over peers of its own and beginning at another time (`deploy/simulate/traces.py`):
somebody dies every seven seconds. With --copies 1, 32 of the peers live through the trace and the others stay. Without
--churn nobody comes or goes.
"""

import argparse
import json
import math
import resource
import time
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.traces import load_trace, replay
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology, make_topology

LAYERS = 24
REGIONS = 8
FAR_S, NEAR_S = 0.08, 0.001
FAR_BYTES_PER_S, NEAR_BYTES_PER_S = 1e8, 1.25e9


def spec_of(options: argparse.Namespace) -> RunSpec:
    return msgspec.convert(
        {
            "model": {
                "dim": options.dim,
                "num_layers": LAYERS,
                "num_heads": options.dim // 128,
                "num_kv_heads": options.dim // 128,
                "ffn_dim": options.dim * 43 // 16,
                "context": 2048,
            },
            "optimizer": {"warmup_steps": 0},
            "training": {
                "steps": options.steps,
                "microbatches_per_step": options.microbatches,
                "microbatch_size": options.microbatch_size,
                "s_max": 1,
            },
            "swarm": {
                "stages": options.stages,
                "min_peers": options.stages,
                "heartbeat_s": options.heartbeat_s,
                "term_s": options.term_s,
            },
            "wire": {"gradients": "bf16"},
        },
        RunSpec,
    )


def cities(num_devices: int) -> Topology:
    region = np.arange(num_devices) % REGIONS
    near = region[:, None] == region[None, :]
    return make_topology(
        np.where(near, NEAR_S, FAR_S), np.where(near, NEAR_BYTES_PER_S, FAR_BYTES_PER_S), memory_bytes=24e9
    )


def one_step(options: argparse.Namespace) -> ModelledRun:
    stages = options.stages
    layout = Placement(
        stages=tuple(tuple(range(stage, options.peers, stages)) for stage in range(stages)),
        bounds=tuple(LAYERS * stage // stages for stage in range(stages + 1)),
    )
    return ModelledRun(topology=cities(options.peers), spec=spec_of(options), stages=layout, seed=options.seed)


def an_hour(options: argparse.Namespace) -> ModelledRun:
    churn: tuple[Churn, ...] = ()
    if options.churn:
        trace = Path(str(files("shoal.deploy.simulate") / "scenarios" / "aws_p3_bamboo.csv"))
        churn = replay(load_trace(trace), num_devices=options.peers, seconds=options.seconds, copies_max=options.copies)
    return ModelledRun(
        topology=cities(options.peers),
        spec=spec_of(options),
        stages=GreedyAllocator(),
        seed=options.seed,
        churn=churn,
        limits=RunLimits(seconds=options.seconds),
        chunk_bytes=options.chunk_mib << 20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "hour"), nargs="?", default="step")
    parser.add_argument("--peers", type=int)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--microbatch-size", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--heartbeat-s", type=float)
    parser.add_argument("--term-s", type=float)
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--dim", type=int, default=2048, help="of the model: a layer has 12 dim² parameters")
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--copies", type=int, help="of the trace, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    usual = {
        "step": {"peers": 64, "stages": 8, "microbatches": 512, "microbatch_size": 1, "steps": 4},
        "hour": {"peers": 1000, "stages": 24, "microbatches": 512, "microbatch_size": 16, "steps": 10_000},
    }[options.what] | {"heartbeat_s": 1.0 if options.what == "step" else 10.0, "term_s": 1800.0}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    begun_s = time.process_time()
    result = run_modelled(one_step(options) if options.what == "step" else an_hour(options))
    cpu_s = time.process_time() - begun_s
    num_steps = len(result.steps)
    print(
        json.dumps(
            {
                "what": options.what,
                "peers": options.peers,
                "microbatches": options.microbatches,
                "simulated_s": round(result.ending.at_s, 1),
                "steps": num_steps,
                "step_s": None if math.isnan(result.step_s) else round(result.step_s, 2),
                "plans": sum(event.change == "plan" for event in result.events),
                "left": sum(event.change == "left" for event in result.events),
                "cpu_s": round(cpu_s, 1),
                "cpu_s_per_step": round(cpu_s / num_steps, 2) if num_steps else None,
                "events": result.ending.num_events,
                "events_per_cpu_s": round(result.ending.num_events / cpu_s),
                "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "failures": result.failures[:3],
                "trace_hash": result.trace_hash,
            }
        )
    )


if __name__ == "__main__":
    main()
