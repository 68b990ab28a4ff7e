"""Real peers, and what their user does to them on the machine on which they run."""

import json
import signal
import time
from typing import Any

import pytest

from shoal.deploy.commands.options import EXIT_INTERRUPTED
from shoal.protocol.invite import parse_invite, split_address

pytestmark = pytest.mark.process

ONLY_OTHERS_GET_THERE = "203.0.113.9"
"""Of a network that documents use: nobody has it."""
SHORT_INVITE = """
from shoal.deploy.control import invite_book
invite_book.DEFAULT_LASTS_S = 1
"""
SLOW_TEXT = """
import time
from shoal.deploy.session import session
session.find_corpus = lambda *arguments, **more: time.sleep(120)
"""


def events(command: Any, kind: str) -> list[dict[str, Any]]:
    whole, _, _ = command.output.rpartition("\n")
    found = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return [event for event in found if event["event"] == kind]


def test_commands_reach_a_host_whose_announced_address_leads_nowhere_and_whose_invite_is_over(world: Any) -> None:
    """Behind a router that does not send back what comes from within."""
    spec, port = world.spec(100_000), world.free_port()
    alone = spec.read_text().replace("stages = 2", "stages = 1").replace("min_peers = 2", "min_peers = 1")
    spec.write_text(alone)
    announce = ("--announce", f"{ONLY_OTHERS_GET_THERE}:{port}")
    host = world.shoal("host", spec, "--listen", f":{port}", *announce, "--threads", 1, "--json", first=SHORT_INVITE)
    world.until(lambda: events(host, "Status"))
    invite = parse_invite(events(host, "Ready")[0]["invite"])
    told = invite.addresses
    assert [split_address(address)[0] for address in told] == [f"/ip4/{ONLY_OTHERS_GET_THERE}/tcp/{port}"]
    assert invite.key is not None
    ends_s = invite.key.delegation.expires_s
    world.until(lambda: time.time() > ends_s + 1.0)
    status = world.shoal("status", "--json")
    assert status.wait(60) == 0, status.errors
    assert json.loads(status.output)["run"] == events(host, "Ready")[0]["run"]


def test_ctrl_c_does_not_wait_for_a_text_that_is_being_read(world: Any) -> None:
    spec = world.spec(100)
    spec.write_text(spec.read_text().replace("min_peers = 2", "min_peers = 9"))  # nobody trains: it would take the CPU
    common = ("--listen", "127.0.0.1:0", "--threads", 1, "--json")
    host = world.shoal("host", spec, *common)
    world.until(lambda: events(host, "Ready"))
    joining = world.shoal("join", events(host, "Ready")[0]["invite"], *common, first=SLOW_TEXT)
    world.until(lambda: any(phase["name"] == "reading the text" for phase in events(joining, "Phase")))
    joining.process.send_signal(signal.SIGINT)
    assert joining.wait(30) == EXIT_INTERRUPTED
    assert "Traceback" not in joining.errors
