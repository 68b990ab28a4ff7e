"""What a peer holds in memory against what the coordinator foresees: models of 20, 100 and 200 million parameters.

    memory.py                                   # one peer alone with each model, in fp32 and in bf16
    memory.py --sizes 20 --optimizers adamw --compute fp32
    memory.py --sizes 200 --members 2 --upload 100     # two, whose reductions take longer than a microbatch

Each line is one real peer, started as `shoal host` starts it, which holds the whole model and trains a few steps; with
`--members` it is the largest of so many that train together. A peer alone reduces within a moment: at 200 million
parameters no microbatch of the next step ends meanwhile, and the sums of that step are not there yet. What is foreseen
counts them, since over the internet a reduction lasts longer than a microbatch; `--upload` makes it last.
`program` is what a peer takes whose model has next to no parameters, and that has coordinated: Python, torch and its
libraries' buffers, hivemind, the text, and numba, which has searched for a layout. `foreseen` adds to that what
`StageMemory.foreseen` says of the stage; `measured` is the most that the process had resident (VmHWM) once it was ready
to take part, its network daemon left out. The goal is a ratio of 0.9 to 1.1.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.workload import Workload
from shoal.peer.model.layout import num_parameters
from shoal.protocol.toml.spec_file import load_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from peer_processes import start_peer

SIZES = {
    0: {"dim": 64, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "ffn_dim": 128},
    20: {"dim": 384, "num_layers": 12, "num_heads": 6, "num_kv_heads": 6, "ffn_dim": 1024},
    100: {"dim": 768, "num_layers": 14, "num_heads": 12, "num_kv_heads": 12, "ffn_dim": 2048},
    200: {"dim": 1024, "num_layers": 16, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 2816},
}
"""By millions of parameters. The smallest shows what the program takes without any."""
SPEC = """
name = "memory"
[model]
{model}
context = 128
[optimizer]
name = "{optimizer}"
learning_rate = 1e-3
warmup_steps = 2
[training]
steps = {steps}
microbatches_per_step = 4
microbatch_size = 1
s_max = 1
synchronous_steps = 2
validation_interval_steps = 0
compute = "{compute}"
keep = "{keep}"
[swarm]
stages = 1
min_peers = {members}
heartbeat_s = 0.5
term_s = 3600.0
snapshot_interval_steps = {snapshot_steps}
snapshot_interval_s = 0
"""
OPTIONS = ("--device", "cpu", "--limit", "nice=0")
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one peer, in bytes."""

    parameters: int
    stage: float
    """What the coordinator thinks that the stage needs."""
    measured: int


def measure(
    folder: Path,
    size: int,
    *,
    optimizer: str,
    compute: str,
    keep: str,
    steps: int,
    snapshots: bool,
    members: int,
    upload: float,
) -> Figures:
    """So many peers with the whole of a model of `size` million parameters each, until they have trained `steps`
    steps. What is measured is of the one that takes most. Args: upload: of each, in Mbit/s; 0: what there is."""
    model = "\n".join(f"{name} = {value}" for name, value in SIZES[size].items())
    spec_file = folder / "run.toml"
    snapshot_steps = 2 * snapshots
    how = {"optimizer": optimizer, "compute": compute, "keep": keep, "steps": steps, "snapshot_steps": snapshot_steps}
    spec_file.write_text(SPEC.format(model=model, members=members, **how))
    spec = load_spec(spec_file)
    words = (*OPTIONS, "--limit", f"upload_mbit_s={upload}")
    host = start_peer(folder, "host", "host", str(spec_file), *words)
    peers = [host]
    most = 0
    try:
        while not peers[-1].has_ended:
            for peer in peers:
                events = {event["event"]: event for event in peer.fresh()}
                if events.keys() & {"Ready", "Joined"}:
                    # The most so far becomes what the process has now, before it has weights.
                    Path(f"/proc/{peer.popen.pid}/clear_refs").write_text("5")
                if "Committed" in events:
                    most = max(most, _resident_bytes(peer.popen.pid))
                if "Ready" in events:
                    names = [f"member-{number}" for number in range(1, members)]
                    peers += [start_peer(folder, name, "join", events["Ready"]["invite"], *words) for name in names]
            time.sleep(0.02)
    finally:
        for peer in peers:
            peer.kill()
    memory = StageMemory.foreseen(spec, experts_held=spec.model.experts_held)
    workload = replace(Workload.of(spec), memory=memory)
    stage = workload.resident_bytes(0, workload.num_layers, members=members) + sum(workload.layer_held_bytes)
    return Figures(parameters=num_parameters(spec.model), stage=stage, measured=most)


def _resident_bytes(pid: int) -> int:
    """The most that a process has had resident; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 100, 200], choices=list(SIZES))
    parser.add_argument("--optimizers", nargs="+", default=["nadam"])
    parser.add_argument("--compute", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--keep", nargs="+", default=["stash"], choices=["stash", "recompute"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--snapshots", action="store_true", help="write one every other step")
    parser.add_argument("--members", type=int, default=1, help="peers that hold the model, each the whole of it")
    parser.add_argument("--upload", type=float, default=0.0, help="of each of them, Mbit/s (0: what there is)")
    arguments = parser.parse_args()
    how = {"steps": arguments.steps, "snapshots": arguments.snapshots, "members": arguments.members}
    how["upload"] = arguments.upload
    program = _measured(
        0, optimizer="nadam", compute="fp32", keep="stash", **how | {"steps": 60, "members": 1}
    ).measured
    print(f"program: {program / MB:.0f} MB")
    print("parameters  optimizer  compute  keep       foreseen MB  measured MB  ratio  bytes a parameter")
    ratios = []
    for size in arguments.sizes:
        for optimizer in arguments.optimizers:
            for compute in arguments.compute:
                for keep in arguments.keep:
                    found = _measured(size, optimizer=optimizer, compute=compute, keep=keep, **how)
                    foreseen = program + found.stage
                    ratios.append(foreseen / found.measured)
                    beyond = (found.measured - program) / found.parameters
                    print(
                        f"{found.parameters / MB:8.1f} M  {optimizer:9}  {compute:7}  {keep:9} {foreseen / MB:12.0f}"
                        f"  {found.measured / MB:11.0f}  {ratios[-1]:5.2f}"
                        f"  {found.stage / found.parameters:.1f} foreseen, {beyond:.1f} measured",
                        flush=True,
                    )
    print(f"foreseen / measured: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


def _measured(size: int, **how: Any) -> Figures:
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as name:
        return measure(Path(name), size, **how)


if __name__ == "__main__":
    main()
