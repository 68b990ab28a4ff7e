"""Real peers: whoever came by a revoked invite is out at once and stays out; the others train on."""

import json
import time
from typing import Any

import pytest

from shoal.deploy.control_socket import ask

pytestmark = pytest.mark.process


def commits(command: Any) -> int:
    return int(command.output.count('{"event":"Committed"'))


def test_a_revoked_invite_is_out_in_two_heartbeats_and_stays_out(world: Any) -> None:
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

    back = world.shoal("join", other["invite"], *common, world.folder / "goes")
    assert back.wait(60) == 2
    assert "does not let this machine in: you are excluded from this run" in back.errors
