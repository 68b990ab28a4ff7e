"""What the swarm costs: two stages in two processes, one thread each, against one process with two threads.

The same model (about 20 million parameters), text, batch and optimizer on the same cores, one after the other in one
run. `ratio` is the swarm's tokens/s over the single process's; the goal is 0.75. Run it on a machine that does nothing
else: both sides want all of two cores.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.peer.model.layout import num_parameters
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import load_spec

SPEC = """
name = "overhead"
[model]
dim = 384
num_layers = 12
num_heads = 6
num_kv_heads = 6
ffn_dim = 1024
context = 256
[optimizer]
name = "adamw"
learning_rate = 1e-3
warmup_steps = 2
[training]
steps = {steps}
microbatches_per_step = 8
microbatch_size = 2
s_max = 1
validation_interval_steps = 0
[swarm]
stages = 2
min_peers = 2
heartbeat_s = 0.25
term_s = 3600.0
snapshot_interval_steps = 0
"""
WARM_UP_STEPS = 2
WINDOW_STEPS = 3
"""Rates are measured over as many steps: commits reach the report with a heartbeat, a quarter of a second apart."""


def swarm_tokens_per_s(spec_file: Path, spec: RunSpec, folder: Path) -> float:
    report = folder / "report.jsonl"
    command = [sys.executable, "-m", "shoal.deploy.cli", "demo", "--peers", "2", "--stages", "2"]
    command += ["--spec", str(spec_file), "--json", str(report)]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in report.read_text().splitlines()][:-1]
    times = {line["step"]: line["seconds"] for line in lines}
    return _median_rate([times[step] for step in sorted(times)][WARM_UP_STEPS:], spec)


def single_tokens_per_s(spec: RunSpec) -> float:
    torch.set_num_threads(2)
    corpus = load_corpus(spec.data, context=spec.model.context)
    seconds = [step.seconds for step in train(spec, corpus, steps=spec.training.steps)]
    return _median_rate(list(itertools.accumulate(seconds))[WARM_UP_STEPS:], spec)


def _median_rate(times_s: list[float], spec: RunSpec) -> float:
    """Of the times at which steps ended."""
    spans = [late - early for early, late in zip(times_s, times_s[WINDOW_STEPS:], strict=False)]
    return WINDOW_STEPS * spec.tokens_per_step / statistics.median(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-overhead-") as name:
        folder = Path(name)
        spec_file = folder / "run.toml"
        spec_file.write_text(SPEC.format(steps=arguments.steps))
        spec = load_spec(spec_file)
        swarm = swarm_tokens_per_s(spec_file, spec, folder)
    single = single_tokens_per_s(spec)
    figures = {
        "parameters": num_parameters(spec.model),
        "steps": arguments.steps,
        "swarm_tokens_per_s": round(swarm, 1),
        "single_tokens_per_s": round(single, 1),
        "ratio": round(swarm / single, 3),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures) + "\n")
    print(f"{figures['parameters'] / 1e6:.1f} M parameters, {arguments.steps} steps of {spec.tokens_per_step} tokens")
    print(f"two processes, one thread each  {swarm:8.0f} tokens/s")
    print(f"one process, two threads        {single:8.0f} tokens/s")
    print(f"ratio                           {figures['ratio']:8.3f}  (goal 0.75)")


if __name__ == "__main__":
    main()
