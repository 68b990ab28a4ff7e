"""What other systems were measured to take on five networks, and what the simulator says: seconds an iteration.

`published.json` has networks and figures. One thing is calibrated, and on case 1 ("Ours w scheduler") alone: what a
microbatch costs a stage. Everything else is the network file, the size of an activation and of a gradient, and the
habits of each system as `baselines/blocking.py` has them: DT-FM's runtime ("Ours") `sends`, Megatron `exchanges`.
`--ours` runs our asynchronous strategy on the same devices, in the eight cities and in the data centre.

Case 2 was a cluster whose links nobody shaped; its file has 1.25 Gbit/s for every pair. `2c` is the same machines with
one card of 10 Gbit/s each, shared by the four GPUs of a box, and no other limit.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from baselines.blocking import Blocking, Lockstep

from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.workload import layer_costs
from shoal.deploy.simulate.modelled import ModelledRun, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec, WireSpec
from shoal.protocol.topology import Topology, make_topology

STAGES, REPLICAS, LAYERS = 8, 8, 24
BATCHES = (1024, 2048, 4096)
PLAYED_MAX = 1024
DATA: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())
MODEL = ModelSpec(
    vocab_size=8,  # the log's FLOP an iteration are those of the layers alone
    dim=2048,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=16,
    ffn_dim=6086,  # 0.65 GB of fp32 gradient a stage, as the networks' constants have it
    context=2048,
)
ACTIVATION_BYTES = 2 * MODEL.dim * MODEL.context
STAGE_FLOP = 4.0 * MODEL.context * sum(layer_costs(MODEL)[3:6])
"""Forward, forward again and backward."""
INSIDE_BYTES_PER_S = 100e9 / 8
BOX_BYTES_PER_S = 10e9 / 8
MEMORY_BYTES = 1e12
"""It was enough; what fits is not the question here."""

Column = tuple[str, str, str, Blocking]
"""Case, the log's column, layout, habit."""
COLUMNS: tuple[Column, ...] = (
    ("1", "Ours w scheduler", "mod", "sends"),
    ("2", "Ours w scheduler", "boxes", "sends"),
    ("2", "Ours wo Scheduler", "random", "sends"),
    ("2", "Megatron-P8", "given", "exchanges"),
    ("2c", "Ours w scheduler", "boxes", "sends"),
    ("2c", "Ours wo Scheduler", "random", "sends"),
    ("2c", "Megatron-P8", "given", "exchanges"),
    *(
        (case, column, layout, habit)
        for case in ("3", "4", "5")
        for column, layout, habit in (
            ("Ours w scheduler", "mod", "sends"),
            ("Ours wo Scheduler", "random", "sends"),
            ("Megatron-P8 (Default)", "given", "exchanges"),
            ("Megatron-P8 (wo Scheduler)", "random", "exchanges"),
        )
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1024,2048,4096", help="comma-separated, of these")
    parser.add_argument("--full", action="store_true", help="larger batches are played through, not extrapolated")
    parser.add_argument("--cases", default="1,2,2c,3,4,5")
    parser.add_argument("--seed", type=int, default=0, help="of random placements")
    parser.add_argument("--ours", action="store_true", help="our strategy in eight cities and in one data centre")
    arguments = parser.parse_args()
    stage_s = calibrated_s()
    print(f"a microbatch costs a stage {1e3 * stage_s:.1f} ms, {STAGE_FLOP / stage_s / 1e12:.1f} TFLOP/s a device")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if arguments.ours:
        for case, batch in itertools.product(("5", "1"), batches):
            print_ours(case, batch, stage_s)
        return
    ratios: dict[str, list[float]] = {}
    for column in (column for column in COLUMNS if column[0] in arguments.cases.split(",")):
        case, name, *_ = column
        seconds = Simulated(column, stage_s, seed=arguments.seed, plays_all=arguments.full)
        for batch in batches:
            published_s = DATA["cases"][case[0]]["seconds"][name][BATCHES.index(batch)]
            ratio = seconds.of(batch) / published_s
            print(f"case {case:2}  B{batch}  {name:27} {seconds.of(batch):7.2f} s / {published_s:7.2f} s = {ratio:.2f}",
                  flush=True)  # fmt: skip
            ratios.setdefault(case, []).append(ratio)
    for case, values in ratios.items():
        print(f"case {case:2}  simulated / published: median {statistics.median(values):.2f}, {min(values):.2f} to "
              f"{max(values):.2f}")  # fmt: skip


def calibrated_s() -> float:
    """What each further microbatch of a pipeline has cost in case 1, less its two messages inside the machine."""
    few_s, _, many_s = DATA["cases"]["1"]["seconds"]["Ours w scheduler"]
    more = (BATCHES[2] - BATCHES[0]) / REPLICAS
    return float((many_s - few_s) / more - 2 * ACTIVATION_BYTES / INSIDE_BYTES_PER_S)


class Simulated:
    """Seconds an iteration of one column. A synchronous pipeline takes a fill, a drain and a reduction once, and the
    same time for every further microbatch; so what is larger than `PLAYED_MAX` follows from that and half of it, unless
    `plays_all`. Played through at 2,048, three columns differ from that by 0.3, 0.7 and 2.1 %.
    """

    def __init__(self, column: Column, stage_s: float, *, seed: int, plays_all: bool) -> None:
        self._case, _, layout, self._habit = column
        self._pipelines = pipelines_of(layout, seed)
        self._stage_s = stage_s
        self._plays_all = plays_all
        self._played: dict[int, float] = {}

    def of(self, batch: int) -> float:
        if batch > PLAYED_MAX and not self._plays_all:
            half_s, whole_s = self.of(PLAYED_MAX // 2), self.of(PLAYED_MAX)
            return whole_s + (whole_s - half_s) * (batch - PLAYED_MAX) / (PLAYED_MAX / 2)
        if batch not in self._played:
            self._played[batch] = self._play(batch)
        return self._played[batch]

    def _play(self, batch: int) -> float:
        """The second of two steps."""
        topology = topology_of(self._case, self._stage_s)
        placement = placement_of(self._pipelines)
        lockstep = Lockstep.of(self._habit, placement)
        result = run_modelled(
            ModelledRun(
                topology=topology,
                spec=spec_of(batch, s_max=0, gradients="fp32", steps=2),
                stages=placement,
                make_swarm=dataclasses.replace(lockstep, pipelines=self._pipelines).swarm(),
            )
        )
        first, second = (step.committed_at_s for step in result.steps)
        return second - first


def print_ours(case: str, batch: int, stage_s: float) -> None:
    """Asynchronous, s_max 1, two bytes a number on every wire."""
    result = run_modelled(
        ModelledRun(
            topology=topology_of(case, stage_s),
            spec=spec_of(batch, s_max=1, gradients="bf16", steps=6),
            stages=placement_of(pipelines_of("given", 0)),
        )
    )
    print(f"case {case:2}  B{batch}  ours: {step_seconds(result):.2f} s a step, compute alone "
          f"{batch / REPLICAS * stage_s:.2f} s", flush=True)  # fmt: skip


def step_seconds(result: SimResult) -> float:
    """Without the first steps, in which windows grow, and the last, which has no next one to overlap with."""
    at_s = [step.committed_at_s for step in result.steps]
    return statistics.mean(np.diff(at_s[2:-1]))


def topology_of(case: str, stage_s: float) -> Topology:
    data = DATA["cases"][case[0]]
    region = np.repeat(np.arange(len(data["regions"])), list(data["regions"].values()))
    square = np.ix_(region, region)
    rate = np.array(data["gbit_per_s"])[square] * 1e9 / 8
    cards: dict[str, Any] = {}
    if case == "2c":
        rate = np.where(rate > BOX_BYTES_PER_S, rate, np.inf).clip(max=INSIDE_BYTES_PER_S)
        cards = {
            "card": np.where(np.arange(len(region)) < 32, np.arange(len(region)) // 4 * 4, np.arange(len(region))),
            "up_bytes_per_s": BOX_BYTES_PER_S,
            "down_bytes_per_s": BOX_BYTES_PER_S,
        }
    return make_topology(
        np.array(data["latency_ms"])[square] / 1e3,
        rate,
        flop_per_s=STAGE_FLOP / stage_s,
        memory_bytes=MEMORY_BYTES,
        **cards,
    )


def spec_of(batch: int, *, s_max: int, gradients: str, steps: int) -> RunSpec:
    return RunSpec(
        name="published",
        model=MODEL,
        training=TrainingSpec(
            steps=steps, microbatches_per_step=batch, microbatch_size=1, s_max=s_max, keep="recompute"
        ),
        optimizer=OptimizerSpec(warmup_steps=0),
        swarm=SwarmSpec(stages=STAGES, min_peers=STAGES * REPLICAS, heartbeat_s=5.0, term_s=600.0),
        wire=WireSpec(gradients=gradients),  # type: ignore[arg-type]
    )


def pipelines_of(layout: str, seed: int) -> tuple[tuple[int, ...], ...]:
    """Devices of each pipeline, from first stage to last."""
    devices = np.arange(STAGES * REPLICAS)
    match layout:
        case "mod":
            stages = devices.reshape(REPLICAS, STAGES).T
        case "given":
            stages = devices.reshape(STAGES, REPLICAS)
        case "boxes":  # case 2 has 8 boxes of 4 GPUs, then single ones
            stages = np.concatenate([devices[:32].reshape(8, 4).T, devices[32:].reshape(4, 8)])
        case _:
            stages = np.random.default_rng(seed).permutation(devices).reshape(STAGES, REPLICAS)
    return tuple(tuple(int(device) for device in pipeline) for pipeline in stages.T)


def placement_of(pipelines: tuple[tuple[int, ...], ...]) -> Placement:
    stages = tuple(tuple(sorted(stage)) for stage in zip(*pipelines, strict=True))
    return Placement(stages=stages, bounds=tuple(range(0, LAYERS + 1, LAYERS // STAGES)))


if __name__ == "__main__":
    main()
