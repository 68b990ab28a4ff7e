"""Real peers, and an invite whose only address dies: who was there finds back, and `shoal` says whom to ask."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process


def events(command: Any, kind: str) -> list[dict[str, Any]]:
    whole, _, _ = command.output.rpartition("\n")
    found = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return [event for event in found if event["event"] == kind]


def members(command: Any) -> set[str]:
    """Of the swarm that a peer is in, by its newest status."""
    told = events(command, "Status")
    return {peer["peer"] for peer in told[-1]["status"]["peers"]} if told else set()


def known(folder: Path) -> set[str]:
    return {
        peer["peer"] for path in folder.glob("*/known_peers.json") for peer in json.loads(path.read_text())["peers"]
    }


def test_a_restart_finds_the_run_though_the_host_is_gone(world: Any) -> None:
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json")
    host = world.shoal("host", world.spec(10_000), "--state-dir", world.folder / "host", *common)
    world.until(lambda: events(host, "Ready"))
    invite = events(host, "Ready")[0]["invite"]
    join = ("join", invite, "--data", world.text, *common, "--state-dir")
    first, second = (world.shoal(*join, world.folder / name) for name in ("first", "second"))
    world.until(lambda: events(first, "Joined") and events(second, "Joined"))
    alice, bob = (events(command, "Joined")[0]["peer"] for command in (first, second))
    world.until(lambda: alice in known(world.folder / "second"))

    shown = world.shoal("invite", "--json", "--state-dir", world.folder / "second")
    assert shown.wait(60) == 0, shown.errors
    assert json.loads(shown.output)["peers"] == 3

    leaving = world.shoal("leave", "--now", "--json", "--state-dir", world.folder / "second")
    assert leaving.wait(90) == 0, leaving.errors
    assert json.loads(leaving.output) == [{"folder": str(world.folder / "second"), "left": True}]
    assert second.wait(1) == 0
    assert events(second, "Left")[0]["finished"] is False

    host.process.send_signal(signal.SIGKILL)
    host.wait(10)
    again = world.shoal(*join, world.folder / "second")
    world.until(lambda: events(again, "Joined"))
    assert events(again, "Joined")[0]["peer"] == bob

    hosting = world.shoal("host", world.folder / "run.toml", "--state-dir", world.folder / "host", *common)
    world.until(lambda: events(hosting, "Ready"))
    world.until(lambda: {alice, bob} <= members(hosting), timeout_s=120)
    hosting.process.send_signal(signal.SIGKILL)
    hosting.wait(10)

    stranger = world.shoal(*join, world.folder / "third")
    assert stranger.wait(120) == 2
    assert "nothing listens on 127.0.0.1 port" in stranger.errors
    assert "shoal invite" in stranger.errors
