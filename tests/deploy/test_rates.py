"""Tokens a second as the swarm tells them, against the tokens that were counted: before, during and after a standstill
of a minute, whoever coordinates, and though a coordinator dies in the middle of it."""

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from sightings import CommitSeen
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.coordinator.token_rate import WINDOW_S
from shoal.protocol.messages import SwarmStatus
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

torch.set_num_threads(1)  # the models are tiny

STANDS_S = 60.0
KILLED_AFTER_S = 20.0
WATCHED_AFTER_S = 75.0
OFF_SHARE = 0.1
OFF_STEPS = 2
"""Of the minute's: a commit is told with the next heartbeat, and one may be under way."""


@dataclass
class Watched:
    commits: dict[int, tuple[float, int]] = field(default_factory=dict)
    """(time, tokens) of each step, when a member of the last stage first said so."""
    told: list[tuple[float, str, SwarmStatus]] = field(default_factory=list)
    """(time, who coordinated, what it said), once a second."""
    stood_s: tuple[float, float] = (0.0, 0.0)
    survivors: tuple[str, ...] = ()

    def counted(self, now_s: float) -> float:
        """Tokens a second of the last minute, or since the first step."""
        first_s = min(at_s for at_s, _ in self.commits.values())
        length_s = min(WINDOW_S, now_s - first_s)
        return sum(tokens for at_s, tokens in self.commits.values() if now_s - length_s < at_s <= now_s) / length_s


def hold_jobs(swarm: SimSwarm, name: str, gate: asyncio.Event) -> None:
    """From now on the device of `name` computes nothing while `gate` is closed."""
    compute = swarm.world.peers[name].compute
    run_job = compute.run

    async def held(kind, work, *, flop):
        await gate.wait()
        return await run_job(kind, work, flop=flop)

    compute.run = held


@pytest.fixture(scope="module")
def watched() -> Watched:
    seen = Watched()

    def note(event):
        if isinstance(event, CommitSeen) and event.report.stage == 1:
            seen.commits.setdefault(event.report.step, (event.at_s, event.report.tokens))

    async def main():
        swarm = SimSwarm(
            tiny_spec(steps=400, peers=4, stages=2, s_max=1, term_s=5.0),
            tiny_corpus(),
            seed=5,
            network=uniform(latency_s=0.02, rate_bytes_per_s=1e7),
            device_flop_per_s=2e7,
            on_event=note,
        )
        for number in range(4):
            await swarm.add(f"n{number}")
        gate = asyncio.Event()
        gate.set()
        for name in swarm.nodes:
            hold_jobs(swarm, name, gate)
        await swarm.until(lambda: len(swarm.steps) > 1)

        async def watch(seconds: float) -> None:
            for _ in range(int(seconds)):
                await asyncio.sleep(1.0)
                for name, node in swarm.nodes.items():
                    status = node.coordination.status() if swarm.world.peers[name].is_alive else None
                    if status is not None:
                        seen.told.append((swarm.world.now_s(), name, status))

        await watch(30.0)
        began_s = swarm.world.now_s()
        gate.clear()
        await watch(KILLED_AFTER_S)
        victim = seen.told[-1][1]
        swarm.world.crash(swarm.world.peers[victim])
        await watch(STANDS_S - KILLED_AFTER_S)
        gate.set()
        seen.stood_s = began_s, swarm.world.now_s()
        await watch(WATCHED_AFTER_S)
        seen.survivors = tuple(name for name in swarm.nodes if name != victim)
        for name in seen.survivors:
            await swarm.world.peers[name].spawn(swarm.nodes[name].close())

    run(main())
    return seen


@pytest.mark.sim
def test_the_rate_is_what_was_committed_in_the_last_minute_whoever_coordinates(watched: Watched) -> None:
    tokens = max(tokens for _, tokens in watched.commits.values())
    off = [
        (round(at_s, 1), name, round(status.tokens_per_s, 1), round(watched.counted(at_s), 1))
        for at_s, name, status in watched.told
        if abs(status.tokens_per_s - watched.counted(at_s))
        > OFF_SHARE * watched.counted(at_s) + OFF_STEPS * tokens / WINDOW_S
        and at_s > watched.told[0][0] + 10.0  # so long two steps are much of all there is
    ]
    assert not off
    began_s, ended_s = watched.stood_s
    during = {name for at_s, name, _ in watched.told if began_s < at_s <= ended_s}
    after = {name for at_s, name, _ in watched.told if at_s > ended_s}
    assert during >= set(watched.survivors), "each of them coordinated while it stood still"
    assert after == set(watched.survivors), "and when it went on"


@pytest.mark.sim
def test_a_standstill_is_told_with_its_length_and_no_time_left(watched: Watched) -> None:
    began_s, ended_s = watched.stood_s
    during = [(at_s, status) for at_s, _, status in watched.told if began_s + 10.0 < at_s <= ended_s]
    last_s = max(at_s for at_s, _ in watched.commits.values() if at_s <= began_s + 5.0)
    assert during
    for at_s, status in during:
        assert status.stands_s == pytest.approx(at_s - last_s, abs=2.0)
        assert status.left_s is None
    later = [status for at_s, _, status in watched.told if at_s > ended_s + 10.0]
    assert all(status.stands_s == 0.0 and status.left_s is not None for status in later)
