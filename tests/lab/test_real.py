"""What the lab says of a swarm that does not come up; no process, no namespace."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from figures import Step
from real import NoSwarm, Peer, RealSwarm, _until_first_step
from scenario import load_scenario

LATE = """
title = "two of whom nobody makes a step"
seconds = 20
waits_s = {waits_s}
hosts = [{{ name = "a" }}, {{ name = "b", joins_s = {joins_s} }}]
"""


class Silent(RealSwarm):
    """Its host is up, and nothing else ever happens."""

    async def start(self, host):
        self.peers[host.name] = peer = Peer(host=host, child=None, invite=self.invite if host.name == "a" else "")
        return peer

    async def let_in(self, peer):
        if self.refuses:
            raise NoSwarm("nobody has an invite")

    invite = "an invite"
    refuses = False


def swarm(folder: Path, *, waits_s=0.1, joins_s=0) -> Silent:
    path = folder / "late.toml"
    path.write_text(LATE.format(waits_s=waits_s, joins_s=joins_s))
    return Silent(load_scenario(path), None, folder)


def test_a_swarm_without_a_step_says_so_by_itself_and_not_in_a_group(tmp_path):
    with pytest.raises(NoSwarm, match=r"no step was made after 0\.1 s"):
        asyncio.run(_until_first_step(swarm(tmp_path)))


def test_a_swarm_without_a_host_says_so(tmp_path):
    silent = swarm(tmp_path)
    silent.invite = ""
    with pytest.raises(NoSwarm, match="the run's host is not up"):
        asyncio.run(_until_first_step(silent))


def test_whoever_cannot_be_let_in_ends_the_wait_at_once(tmp_path):
    silent = swarm(tmp_path, waits_s=600)
    silent.refuses = True
    with pytest.raises(NoSwarm, match="nobody has an invite"):
        asyncio.run(asyncio.wait_for(_until_first_step(silent), 30))


def test_who_was_counted_out_while_it_was_away_is_not_when_it_comes_back(tmp_path):
    lab = swarm(tmp_path)
    peer = lab.peers["b"] = Peer(host=lab.scenario.hosts[1], child=None, peer="peer b")
    lab.steps.append(Step(0, 0.0))

    def seen(at_s, *peers):
        entries = [SimpleNamespace(peer=name, name=name, stage=None, flop_per_s=2e9) for name in peers]
        lab._see(SimpleNamespace(term=1, plan_sequence=1, peers=entries, stages=[]), at_s)

    seen(1.0, "peer b")
    peer.expected = False
    seen(2.0)
    peer.expected = True
    seen(3.0)
    seen(9.0)
    assert lab.false_deaths == []
    seen(10.0, "peer b")
    seen(11.0)
    assert lab.false_deaths == []
    seen(15.0)
    assert lab.false_deaths == ["b was counted out at 11 s"]
    assert peer.probed == 2.0


def test_a_device_is_as_fast_as_all_that_it_did_by_all_that_it_used(tmp_path):
    host = swarm(tmp_path).scenario.hosts[0]
    host = msgspec.structs.replace(host, compute_share=0.5)
    peer = Peer(host=host, child=None, work=[(4e9, 0.5), (1e9, 0.25), (1e9, 0.0)])
    assert peer.gflops == pytest.approx(6.0 / 0.75 * 0.5)
    assert peer.share_used == pytest.approx(0.25 / 0.5)
