"""Real peers, and an invite whose only address dies: who was there finds back, the host too."""

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


def known(folder: Path) -> dict[str, list[str]]:
    """Whom the peer in `folder` has met, and where."""
    files = [json.loads(path.read_text()) for path in folder.glob("*/known_peers.json")]
    return {peer["peer"]: peer["addresses"] for file in files for peer in file["peers"]}


def test_both_find_back_though_the_invites_address_is_dead(world: Any) -> None:
    spec = world.spec(100)
    spec.write_text(spec.read_text().replace("min_peers = 2", "min_peers = 9"))  # nobody trains: it would take the CPU
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--state-dir")
    host_folder, alice_folder = world.folder / "host", world.folder / "alice"

    host = world.shoal("host", spec, *common, host_folder)
    world.until(lambda: events(host, "Ready"))
    invite, host_id = (events(host, "Ready")[0][field] for field in ("invite", "peer"))
    join = ("join", invite, "--data", world.text, *common, alice_folder)
    alice = world.shoal(*join)
    world.until(lambda: events(alice, "Joined"))
    alice_id = events(alice, "Joined")[0]["peer"]
    world.until(lambda: alice_id in known(host_folder) and host_id in known(alice_folder))
    at_first = known(alice_folder)[host_id]

    host.process.send_signal(signal.SIGKILL)
    host.wait(10)
    elsewhere = ("--listen", f"127.0.0.1:{world.free_port()}", "--threads", "1", "--json", "--state-dir")
    again = world.shoal("host", spec, *elsewhere, host_folder)
    world.until(lambda: events(again, "Joined"))
    world.until(lambda: known(alice_folder)[host_id] != at_first)  # the host, which has no invite, has found her

    shown = world.shoal("invite", "--json", "--state-dir", alice_folder)
    assert shown.wait(60) == 0, shown.errors
    assert json.loads(shown.output)["peers"] == 2
    leaving = world.shoal("leave", "--now", "--json", "--state-dir", alice_folder)
    assert leaving.wait(90) == 0, leaving.errors
    assert json.loads(leaving.output) == [{"name": "volunteer", "folder": str(alice_folder), "left": True}]
    assert alice.wait(1) == 0
    assert events(alice, "Left")[0]["finished"] is False

    back = world.shoal(*join)  # with the first invite, at whose address nobody is any more
    world.until(lambda: events(back, "Joined"))
    assert events(back, "Joined")[0]["peer"] == alice_id
