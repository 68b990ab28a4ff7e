"""Real peers: a snapshot that somebody only claims to have moves nobody."""

import json
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.process

FORGES = """
import msgspec
from shoal.peer.driver import PeerDriver
from shoal.protocol.layers import all_layer_keys
from shoal.protocol.messages import Holding

honest = PeerDriver.heartbeat

def forged(self):
    said = honest(self)
    held = Holding(era=said.era, version=4800, layers=all_layer_keys(self.services.spec.model))
    return msgspec.structs.replace(said, holdings=(held, *said.holdings))

PeerDriver.heartbeat = forged
"""


def steps(command: Any) -> list[int]:
    lines = (json.loads(line) for line in command.output.splitlines() if line.startswith('{"event":"StepDone"'))
    return [line["step"] for line in lines]


def test_three_newcomers_with_a_forged_snapshot_join_and_the_run_goes_on(world: Any) -> None:
    """The run went back to the forged version 1.4 s after the first of them had joined."""
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.2", "--state-dir")
    host = world.shoal("host", world.spec(100_000), *common, world.folder / "host")
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    stays = world.shoal("join", invite, *common, world.folder / "stays")
    world.until(lambda: len(steps(host)) >= 3)
    for number in range(3):
        forger = world.shoal("join", invite, *common, world.folder / f"forger{number}", first=FORGES)
        world.until(lambda forger=forger: '"event":"Obeys"' in forger.output)
        had = len(steps(host))
        world.until(lambda had=had: len(steps(host)) >= had + 10)
        forger.process.send_signal(signal.SIGINT)
        forger.wait(60)
    assert steps(host) == sorted(set(steps(host))), "no step was made twice"
    assert "back to version" not in host.output
    for command in (host, stays):
        command.process.send_signal(signal.SIGINT)
    assert (host.wait(60), stays.wait(60)) == (0, 0)
