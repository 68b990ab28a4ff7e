"""Which row of `shoal plan --compare` a live swarm reaches, from a file that a simulation wrote."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from shoal.deploy import cli
from shoal.deploy.simulate.reached import Reached, said_of_live

NETWORK = {
    "title": "Two pairs",
    "latency_ms": [[0, 1, 40, 40], [1, 0, 40, 40], [40, 40, 0, 1], [40, 40, 1, 0]],
    "bandwidth_gbps": [[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]],
    "workload": {
        "gradient_gigabytes_per_stage": 0.1,
        "activation_gigabytes_per_replica": 0.1,
        "num_layers": 4,
        "hidden_dim_of_model": 512,
        "sequence_length_tokens": 256,
        "global_batch_tokens": 4096,
    },
}
REACHED = Reached(
    live="live",
    planned="ours",
    from_s=300.0,
    tokens_per_s=900.0,
    planned_tokens_per_s=1000.0,
    work_by_s=600.0,
    work_share=0.8,
    first_step_s=3.0,
    standstill_s=0.0,
    num_plans=4,
    num_divisions=1,
)


def compared(folder: Path, *arguments: object, **changes: Any) -> Result:
    network, simulated = folder / "net.json", folder / "live.json"
    network.write_text(json.dumps(NETWORK))
    values: dict[str, Any] = {
        "scenario": "net",
        "title": "more than is read",
        "devices": ["a", "b", "c", "d"],
        "tokens_per_step": 4096,
        "reached": REACHED,
    }
    simulated.write_bytes(msgspec.json.encode(values | changes))
    words = ["plan", str(network), "--seconds", "0.05", *map(str, arguments)]
    return CliRunner().invoke(cli.app, words)


def test_a_live_swarm_is_put_between_two_rows() -> None:
    said = said_of_live(REACHED, {"ours": 1050.0, "ours, at once": 1000.0, "greedy": 700.0, "mod": 300.0})
    assert said == (
        "A live swarm reaches 900 tokens/s, as simulated from 300 s of virtual time on: above greedy (700) and below "
        "ours, at once (1,000). That is 0.90 of the simulated pace of ours."
    )
    assert ": below mod (1,000). That" in said_of_live(REACHED, {"mod": 1000.0})
    assert ": above mod (1). That" in said_of_live(REACHED, {"mod": 1.0})


def test_the_comparison_says_what_was_simulated_or_how_to(tmp_path: Path) -> None:
    simulated = compared(tmp_path, "--compare", "--simulated", tmp_path / "live.json")
    assert simulated.exit_code == 0, simulated.output
    assert "A live swarm reaches 900 tokens/s" in simulated.stdout
    without = compared(tmp_path, "--compare")
    assert without.exit_code == 0
    assert "--strategies ours,live --json live.json` plays one" in " ".join(without.stdout.split())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scenario": "other"}, "is of other, 4 devices and 4,096 tokens a step, and this is net"),
        ({"devices": ["a"]}, "is of net, 1 devices"),
        ({"reached": None}, "no live swarm is beside a planned one"),
        ({"scenario": 3}, "is no comparison that"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    result = compared(tmp_path, "--compare", "--simulated", tmp_path / "live.json", **changes)
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert why in result.stderr


def test_it_is_about_a_comparison(tmp_path: Path) -> None:
    assert "say --compare too" in compared(tmp_path, "--simulated", tmp_path / "live.json").stderr
    assert "cannot read" in compared(tmp_path, "--compare", "--simulated", tmp_path / "none").stderr
