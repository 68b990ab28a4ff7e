"""Real peers on loopback, through the command line: a demo, a volunteer that joins it, Ctrl-C."""

import re
import signal
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


def test_a_volunteer_joins_is_seen_and_leaves_and_ctrl_c_ends_the_demo(world: Any) -> None:
    report = world.folder / "report.jsonl"
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2, "--json", report)
    invite = demo.line("shoal join ").split()[2]
    demo.line("step ")

    volunteer = world.shoal("join", invite, "--name", "volunteer", "--data", world.text, "--listen", "127.0.0.1:0")

    def version() -> int:
        status = world.status()
        peers = status["peers"] if status else []
        return max((p["version"] for p in peers if p["name"] == "volunteer" and p["synced"]), default=0)

    world.until(version)
    before = version()
    world.until(lambda: version() > before)  # it takes part in the commits of its stage
    its_terms = re.compile(r"^step .* term \d+, coordinator volunteer$", re.MULTILINE)
    world.until(lambda: its_terms.search(volunteer.output))
    volunteer.process.send_signal(signal.SIGINT)
    assert volunteer.wait(60) == 0, world.logs()
    assert "leaving" in volunteer.output

    def goes_on_without() -> bool:
        status = world.status()
        return status is not None and len([p for p in status["peers"] if p["stage"] is not None]) == 2

    world.until(goes_on_without)
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, demo.output + world.logs()
    assert not world.ours()
    steps, _, _ = world.report()
    assert [line["step"] for line in steps] == list(range(len(steps))), "steps went with a coordinator from outside"
    assert len(steps) > before
    assert all(line["loss"] is not None for line in steps)


def test_a_killed_demo_takes_its_peers_along(world: Any) -> None:
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2)
    demo.line("step ")
    demo.process.kill()
    demo.process.wait()
    world.until(lambda: not world.ours(), timeout_s=30)
