"""Six real processes over libp2p equal one process, the same loss step by step; and the demo tells of it and ends."""

from pathlib import Path
from typing import Any

import pytest
from single_process import train

from shoal.peer.data.corpus import load_corpus
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
validation_interval_steps = 5
[swarm]
stages = 3
min_peers = 6
heartbeat_s = 0.5
term_s = 5.0
snapshot_interval_steps = 5
[wire]
activations = "fp32"
"""


@pytest.mark.process
@pytest.mark.timeout(240)
def test_three_stages_of_two_real_peers_equal_one_process_and_leave_nothing(world: Any) -> None:
    """One swarm for all of it: what a demo says, and that nothing of it is left, holds for any."""
    world.text.write_text(
        "".join(f"the {i % 7}th fish of shoal {i % 13} swims {i * i % 31} miles\n" for i in range(3000))
    )
    spec_file, report = world.folder / "run.toml", world.folder / "report.jsonl"
    spec_file.write_text(SPEC.format(text=world.text))
    demo = world.shoal("demo", "--spec", spec_file, "--json", report)
    assert demo.wait(200) == 0, demo.output + world.logs()

    steps, faults, summary = world.report()
    assert sorted(line["step"] for line in steps) == list(range(STEPS))
    losses = [line["loss"] for line in sorted(steps, key=lambda line: line["step"])]
    spec = load_spec(spec_file)
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    assert single[-1] < single[0] - 0.3, "the yardstick itself does not learn"
    assert max(abs(a - b) for a, b in zip(losses, single, strict=True)) < 1e-4

    assert faults == []
    assert summary["chaos"] is None
    assert summary["finished"]
    assert (summary["steps"], summary["peers"], summary["duplicates"], summary["given_up"]) == (STEPS, 6, 0, 0)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["val_loss"] < summary["loss_first"] - 0.3
    assert summary["tokens_per_s"] > 0
    assert summary["coordinator_terms"] >= 1
    assert (Path(summary["snapshot"]) / "manifest.json").is_file()
    assert summary["sample"].startswith("def ")
    assert "step 20/20" in demo.output
    assert "shoal join shoal1" in demo.output
    assert not world.ours()
