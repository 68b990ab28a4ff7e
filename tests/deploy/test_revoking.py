"""Real peers: what an invite lets its holder do, and that a revoked one lets nobody do anything any more."""

import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.deploy.control.control_socket import ask
from shoal.deploy.node.renewal import FILE_NAME
from shoal.protocol.errors import LocalError

pytestmark = pytest.mark.process


SOON_RENEWED = """
from shoal.deploy.node import renewal
renewal._LOOK_S = 1.0
"""


def commits(command: Any) -> int:
    return int(command.output.count('{"event":"Committed"'))


def exclude(folder: Path, peer: str, answers: list[dict[str, Any]]) -> bool:
    """Whether the host has done so: not before the coordinator tells it of `peer`."""
    with suppress(LocalError):
        answers.append(ask(folder, "exclude", peer=peer))
    return bool(answers)


def test_what_an_invite_lets_its_holder_do_ends_with_it_and_stays_ended_when_the_host_starts_again(world: Any) -> None:
    """A revoked member is out in two heartbeats. An invite to look on shows the run and lets nobody train."""
    spec = world.spec(100_000)
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.1", "--state-dir")
    hosting = ("host", spec, *common, world.folder / "host")
    host = world.shoal(*hosting)
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    folder = world.folder / "host"
    world.until(lambda: (folder / "control.sock").exists())
    other = ask(folder, "invite-new", seats=1)
    stays = world.shoal("join", invite, *common, world.folder / "stays", first=SOON_RENEWED)
    goes = world.shoal("join", other["invite"], *common, world.folder / "goes")
    # Two train, and the planner says which two: the third may be a spare until one of them goes.
    world.until(lambda: commits(host) >= 2 and all('"event":"Obeys"' in joined.output for joined in (stays, goes)))
    world.until(lambda: ask(folder, "invite-list")["invites"][1]["name"] == other["name"])

    began_s = time.monotonic()
    ask(folder, "invite-revoke", name=other["name"])
    assert goes.wait(30) == 2
    assert time.monotonic() - began_s < 10.0, "a whole process has ended by then"
    assert "excluded from the run" in goes.errors
    had = commits(stays)
    world.until(lambda: commits(stays) >= had + 3)

    stays_folder = world.folder / "stays"
    anothers = ask(stays_folder, "invite")["invite"]
    back = world.shoal("join", anothers, *common, world.folder / "goes")
    assert back.wait(60) == 2
    assert "does not let this machine in: you are excluded from this run" in back.errors, "by whatever invite"

    over = ask(folder, "invite-new", lasts_s=1.0)
    world.until(lambda: time.time() > over["expires_s"] + 1.0)
    late = world.shoal("status", over["invite"], "--json")
    assert late.wait(60) != 0
    assert f"the invite {over['name']} has expired: ask the host for a fresh one" in late.errors

    # The invite of a week is not over, and this member need not care when it is.
    world.until(lambda: list((world.folder / "stays").glob(f"*/{FILE_NAME}")))

    looks = ask(folder, "invite-new", observe=True)
    status = world.shoal("status", looks["invite"], "--json")
    assert status.wait(60) == 0
    assert json.loads(status.output)["name"] == "small"
    looks_on = world.shoal("join", looks["invite"], *common, world.folder / "looks-on")
    assert looks_on.wait(60) == 2
    assert "only lets you watch" in looks_on.errors
    ask(folder, "invite-revoke", name=looks["name"])
    status = world.shoal("status", looks["invite"], "--json")
    assert status.wait(60) != 0
    assert "you are excluded from this run" in status.errors

    for command in (host, stays):
        command.process.send_signal(signal.SIGINT)
    assert (host.wait(60), stays.wait(60)) == (0, 0)
    again = world.shoal(*hosting)
    again.line('{"event":"Ready"')
    back = world.shoal("join", other["invite"], *common, world.folder / "goes")
    assert back.wait(60) == 2
    assert "does not let this machine in: you are excluded from this run" in back.errors
    world.until((folder / "control.sock").exists)
    ask(folder, "readmit", who=other["name"])
    back = world.shoal("join", other["invite"], *common, world.folder / "goes")
    back.line('{"event":"Joined"')


def test_an_excluded_member_comes_back_once_with_a_fresh_key_and_no_third_time(world: Any) -> None:
    """Its seat stays taken; the second exclusion of members of one invite excludes the invite."""
    spec = world.spec(100_000)
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.1", "--state-dir")
    folder = world.folder / "host"
    host = world.shoal("host", spec, *common, folder)
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    world.until((folder / "control.sock").exists)
    other = ask(folder, "invite-new", seats=3)
    world.shoal("join", invite, *common, world.folder / "stays")
    for life in (1, 2):
        fresh = ("join", other["invite"], *common, world.folder / f"bad-{life}")
        bad = world.shoal(*fresh)
        peer = json.loads(bad.line('{"event":"Joined"'))["peer"]
        answers: list[dict[str, Any]] = []
        world.until(lambda peer=peer, answers=answers: exclude(folder, peer, answers))
        assert answers[-1]["invite"] == ("" if life == 1 else other["name"])
        bad.process.kill()  # it may not have heard that it is out
        bad.wait(30)
        bad = world.shoal(*fresh)
        assert bad.wait(60) == 2
        assert "does not let this machine in: you are excluded from this run" in bad.errors
    status = world.shoal("status", invite)
    assert status.wait(60) == 0
    said = " ".join(status.output.split())
    assert "careful: excluded by the owner: " in said, said
    assert peer[-8:] in said, said
    assert f"careful: excluded because two of its members are: the invite {other['name']}" in said, said
    bad = world.shoal("join", other["invite"], *common, world.folder / "bad-3")
    assert bad.wait(60) == 2
    assert "you are excluded from this run" in bad.errors
    ask(folder, "readmit", who=other["name"])
    bad = world.shoal("join", other["invite"], *common, world.folder / "bad-3")
    bad.line('{"event":"Joined"')
