"""What a peer holds in memory against what the coordinator foresees: models of 20, 100 and 200 million parameters.

    memory.py                                   # one peer alone with each model, in fp32 and in bf16
    memory.py --sizes 20 --optimizers adamw --compute fp32

Each line is one real peer, started as `shoal host` starts it, which holds the whole model and trains a few steps.
`program` is what a peer takes whose model has next to no parameters, and that has coordinated: Python, torch and its
libraries' buffers, hivemind, the text, and numba, which has searched for a layout. `foreseen` adds to that what
`StageMemory.foreseen` says of the stage; `measured` is the most that the process had resident (VmHWM) once it was ready
to take part, its network daemon left out. The goal is a ratio of 0.9 to 1.1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.workload import Workload
from shoal.peer.model.layout import num_parameters
from shoal.protocol.toml.spec_file import load_spec

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
min_peers = 1
heartbeat_s = 0.5
term_s = 3600.0
snapshot_interval_steps = {snapshot_steps}
snapshot_interval_s = 0
"""
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one peer, in bytes."""

    parameters: int
    ready: int
    """Resident before the peer had weights."""
    stage: float
    """What the coordinator thinks that the stage needs."""
    measured: int


def measure(
    folder: Path, size: int, *, optimizer: str, compute: str, keep: str, steps: int, snapshots: bool
) -> Figures:
    """One peer alone with a model of `size` million parameters, until it has trained `steps` steps."""
    model = "\n".join(f"{name} = {value}" for name, value in SIZES[size].items())
    spec_file = folder / "run.toml"
    spec_file.write_text(
        SPEC.format(
            model=model, optimizer=optimizer, compute=compute, keep=keep, steps=steps, snapshot_steps=2 * snapshots
        )
    )
    spec = load_spec(spec_file)
    argv = [sys.executable, "-m", "shoal.deploy.cli", "host", str(spec_file), "--state-dir", str(folder / "peer")]
    argv += ["--listen", "127.0.0.1:0", "--threads", "2", "--device", "cpu", "--reports"]
    environment = os.environ | {"XDG_CONFIG_HOME": os.devnull, "XDG_STATE_HOME": str(folder / "state")}
    ready = most = 0
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in _lines(process):
            if line.get("event") == "Ready":
                ready = _status_bytes(process.pid, "VmRSS")
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the most so far is what it has now
            if line.get("event") == "Committed":
                most = max(most, _status_bytes(process.pid, "VmHWM"))
    memory = StageMemory.foreseen(spec, experts_held=spec.model.experts_held)
    workload = replace(Workload.of(spec), memory=memory)
    stage = workload.resident_bytes(0, workload.num_layers, members=1) + sum(workload.layer_held_bytes)
    return Figures(parameters=num_parameters(spec.model), ready=ready, stage=stage, measured=most)


def _lines(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for text in process.stdout:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict):
            yield line


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 100, 200], choices=list(SIZES))
    parser.add_argument("--optimizers", nargs="+", default=["nadam"])
    parser.add_argument("--compute", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--keep", nargs="+", default=["stash"], choices=["stash", "recompute"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--snapshots", action="store_true", help="write one every other step")
    arguments = parser.parse_args()
    how = {"steps": arguments.steps, "snapshots": arguments.snapshots}
    program = _measured(0, optimizer="nadam", compute="fp32", keep="stash", **how | {"steps": 60}).measured
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
