"""Six real processes over libp2p equal one process: the same loss, step by step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.peer.data.corpus import load_corpus
from shoal.peer.single_process import train
from shoal.protocol.toml.spec_file import load_spec

STEPS = 20
SPEC = """
name = "equality"
[model]
dim = 32
num_layers = 3
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
context = 32
[data]
source = "{text}"
[optimizer]
name = "adamw"
learning_rate = 3e-3
warmup_steps = 2
[training]
steps = 20
microbatches_per_step = 6
microbatch_size = 2
s_max = 0
compute = "fp32"
[swarm]
stages = 3
min_peers = 6
heartbeat_s = 0.5
term_s = 5.0
[wire]
activations = "fp32"
"""


@pytest.mark.process
@pytest.mark.timeout(240)
def test_three_stages_of_two_real_peers_equal_one_process(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {i % 7}th fish of shoal {i % 13} swims {i * i % 31} miles\n" for i in range(3000)))
    spec_file = tmp_path / "run.toml"
    spec_file.write_text(SPEC.format(text=text))
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "shoal.deploy.cli", "demo", "--spec", str(spec_file), "--json", str(report)]
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(
        command,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = [json.loads(line) for line in report.read_text().splitlines()]
    losses = [line["loss"] for line in sorted(lines, key=lambda line: line["step"])]

    spec = load_spec(spec_file)
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    assert max(abs(a - b) for a, b in zip(losses, single, strict=True)) < 1e-4
    assert summary["finished"]
    assert (summary["steps"], summary["duplicates"], summary["given_up"]) == (STEPS, 0, 0)
    left = [process for process in psutil.process_iter(["name"]) if process.pid not in before]
    assert [
        process for process in left if process.info["name"] in ("p2pd", "python") and is_of(process, tmp_path)
    ] == []


def is_of(process: psutil.Process, folder: Path) -> bool:
    """False, too, of one that ends as we look: other tests' do."""
    try:
        return str(folder) in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
