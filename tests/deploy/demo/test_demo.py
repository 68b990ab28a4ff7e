"""Real peers on loopback, through the command line; `../dashboard/test_live_peers.py` has a volunteer that joins."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_a_small_demo_trains_reports_and_leaves_nothing(world: Any) -> None:
    report = world.folder / "report.jsonl"
    demo = world.shoal("demo", "--spec", world.spec(30), "--peers", 2, "--stages", 2, "--json", report)
    assert demo.wait(200) == 0, demo.output + world.logs()

    steps, faults, summary = world.report()
    assert [line["step"] for line in steps] == list(range(30))
    assert faults == []
    assert summary["chaos"] is None
    assert summary["finished"]
    assert (summary["steps"], summary["peers"]) == (30, 2)
    assert summary["loss_last"] < summary["loss_first"] - 0.5
    assert summary["val_loss"] < summary["loss_first"]
    assert summary["tokens_per_s"] > 0
    assert summary["coordinator_terms"] >= 1
    assert (Path(summary["snapshot"]) / "manifest.json").is_file()
    assert summary["sample"].startswith("def ")
    assert "step 30/30" in demo.output
    assert "shoal join shoal1" in demo.output
    assert not world.ours()


def test_a_demo_without_text_says_why(world: Any) -> None:
    demo = world.shoal("demo", "--data", world.folder / "none", "--peers", 2, "--stages", 2)
    assert demo.wait(100) == 2, demo.output
    assert demo.errors == f"shoal: there is no file or folder {world.folder}/none to train on\n"
    assert not world.ours()


def test_a_killed_demo_takes_its_peers_along(world: Any) -> None:
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2)
    demo.line("step ")
    demo.process.kill()
    demo.process.wait()
    world.until(lambda: not world.ours(), timeout_s=30)
