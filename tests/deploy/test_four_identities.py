"""Real peers: four keys that came by one invite own nothing, though they vote against every plan, order all others out,
halt the run every second, and then vanish together."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from shoal.deploy.control.control_socket import SOCKET_NAME, ask

pytestmark = pytest.mark.process

SOON_ON_THE_ROLL = """
import shoal.coordinator.voting as voting
voting.PROBATION_HEARTBEATS = 4.0
"""
WANTS_TWO = """
import uuid
import shoal.coordinator.allocate.objective as objective
uuid.getnode = lambda: {number}
objective.HORIZON_S = 1.0
"""
"""The process claims another machine, and takes a failure of a sole holder for so likely that each stage gets two."""
LIES = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1] / 'lib')!r})\nimport insider\n"


def steps(command: Any) -> int:
    return sum(line.startswith('{"event":"Committed"') for line in command.output.splitlines())


def test_four_members_of_one_invite_can_neither_stop_the_run_nor_put_others_out(world: Any) -> None:
    """They were a majority after 2.4 s: the honest ones were excluded for good, or no plan was made any more."""
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.2", "--state-dir")
    firsts = [SOON_ON_THE_ROLL + WANTS_TWO.format(number=number) for number in range(6)]
    host = world.shoal("host", world.spec(100_000), *common, world.folder / "host", first=firsts[0])
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    stays = world.shoal("join", invite, *common, world.folder / "stays", first=firsts[1])
    world.until(lambda: steps(host) >= 3)
    (control,) = (world.folder / "host").rglob(SOCKET_NAME)
    theirs = ask(control.parent, "invite-new")["invite"]
    liars = [
        world.shoal("join", theirs, *common, world.folder / f"liar{n}", first=firsts[2 + n] + LIES) for n in range(4)
    ]
    world.until(lambda: all('"event":"Obeys"' in liar.output for liar in liars))
    world.until(lambda: any('"event":"Lied"' in liar.output for liar in liars))  # it holds a place, so it has a vote
    for told in (steps(host) + 10, steps(host) + 20):
        world.until(lambda told=told: steps(host) >= told)
    for liar in liars:
        liar.process.kill()
    had = steps(host)
    world.until(lambda: steps(host) >= had + 10)
    for command in (host, stays):
        assert "excluded" not in command.output
        command.process.send_signal(signal.SIGINT)
    assert (host.wait(60), stays.wait(60)) == (0, 0)


def test_the_owner_goes_on_alone_when_the_only_other_member_has_lied_and_gone(world: Any) -> None:
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--json", "--limit", "compute_share=0.2", "--state-dir")
    host = world.shoal("host", world.spec(100_000), *common, world.folder / "host")
    invite = json.loads(host.line('{"event":"Ready"'))["invite"]
    liar = world.shoal("join", invite, *common, world.folder / "liar", first=LIES)
    world.until(lambda: '"event":"Lied"' in liar.output)
    told = steps(host) + 20
    world.until(lambda: steps(host) >= told)
    liar.process.kill()
    world.until(lambda: steps(host) >= told + 10)
    host.process.send_signal(signal.SIGINT)
    assert host.wait(60) == 0
    newest = max(json.loads(line)["report"]["step"] for line in host.output.splitlines() if '"Committed"' in line)
    again = world.shoal("host", world.spec(100_000), *common, world.folder / "host")
    first = json.loads(again.line('{"event":"Committed"'))["report"]["step"]
    assert newest - 5 <= first <= newest + 1, "from its own newest state, or the newest snapshot"
    again.process.send_signal(signal.SIGINT)
    assert again.wait(60) == 0
