"""Real peers: what an invite lets its holder do, and that a revoked one lets nobody do anything any more."""

import json
import signal
import time
from typing import Any

import pytest

from shoal.deploy.control.control_socket import ask

pytestmark = pytest.mark.process


def commits(command: Any) -> int:
    return int(command.output.count('{"event":"Committed"'))


def test_a_revoked_invite_is_out_in_two_heartbeats_and_stays_out_when_all_start_again(world: Any) -> None:
    spec = world.spec(100_000)
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.2", "--state-dir")
    hosting = ("host", spec, *common, world.folder / "host")
    host = world.shoal(*hosting)
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    folder = world.folder / "host"
    world.until(lambda: (folder / "control.sock").exists())
    other = ask(folder, "invite-new", seats=1)
    stays = world.shoal("join", invite, *common, world.folder / "stays")
    goes = world.shoal("join", other["invite"], *common, world.folder / "goes")
    world.until(lambda: commits(stays) >= 2 and '"event":"Obeys"' in goes.output)
    world.until(lambda: ask(folder, "invite-list")["invites"][1]["name"] == other["name"])

    began_s = time.monotonic()
    ask(folder, "invite-revoke", name=other["name"])
    assert goes.wait(30) == 2
    assert time.monotonic() - began_s < 10.0, "a whole process has ended by then"
    assert "excluded from the run" in goes.errors
    had = commits(stays)
    world.until(lambda: commits(stays) >= had + 3)

    for command in (host, stays):
        command.process.send_signal(signal.SIGINT)
    assert (host.wait(60), stays.wait(60)) == (0, 0)
    again = world.shoal(*hosting), world.shoal("join", invite, *common, world.folder / "stays")
    world.until(lambda: all(commits(command) for command in again))
    back = world.shoal("join", other["invite"], *common, world.folder / "goes")
    assert back.wait(60) == 2
    assert "does not let this machine in: you are excluded from this run" in back.errors


def test_an_invite_to_look_on_shows_the_run_and_lets_nobody_train(world: Any) -> None:
    spec = world.spec(100_000)
    spec.write_text(spec.read_text().replace("stages = 2", "stages = 1").replace("min_peers = 2", "min_peers = 1"))
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.2", "--state-dir")
    host = world.shoal("host", spec, *common, world.folder / "host")
    world.until(lambda: commits(host) >= 1)
    looks = ask(world.folder / "host", "invite-new", observe=True)
    status = world.shoal("status", looks["invite"], "--json")
    assert status.wait(60) == 0
    assert json.loads(status.output)["name"] == "small"
    joins = world.shoal("join", looks["invite"], *common, world.folder / "guest")
    assert joins.wait(60) == 2
    assert "only lets you look on" in joins.errors
    ask(world.folder / "host", "invite-revoke", name=looks["name"])
    status = world.shoal("status", looks["invite"], "--json")
    assert status.wait(60) != 0
    assert "you are excluded from this run" in status.errors
