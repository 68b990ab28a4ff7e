"""A peer's process is stopped for 48 s and goes on (SIGSTOP, a laptop that sleeps): what that costs the others."""

import asyncio
import itertools
import re
from dataclasses import dataclass

import msgspec
import pytest
import torch
from sightings import CommitSeen
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

torch.set_num_threads(1)  # the models are tiny

STOP_S = 48.0
STEPS_BEFORE = 45
"""As long as these took, 58 s, the run waits for a peer that has what nobody else has."""
BACK_S = 5.0


@dataclass(frozen=True)
class Seen:
    eras: set[int]
    gaps_s: list[float]
    """Between commits of the last stage, from the stop on."""
    back_s: float
    """From the end of the stop to the next commit."""
    waits_for: list[str]
    """What a peer that was not stopped was told meanwhile, once a second."""


def stopped_run(*, replicas, seed=0):
    """`replicas` of the stage whose first holder is stopped."""
    commits: dict[tuple[int, int], float] = {}
    eras: set[int] = set()

    def note(event):
        if isinstance(event, CommitSeen) and event.report.stage == 1:
            commits.setdefault((event.report.era, event.report.step), event.at_s)
            eras.add(event.report.era)

    spec = tiny_spec(steps=400, peers=3, stages=2, s_max=1, snapshot_interval_steps=1000)
    spec = msgspec.structs.replace(spec, swarm=msgspec.structs.replace(spec.swarm, snapshot_interval_s=0.0))
    told: list[str] = []

    async def main():
        swarm = SimSwarm(
            spec,
            tiny_corpus(),
            seed=seed,
            network=uniform(latency_s=0.02, rate_bytes_per_s=1e7),
            device_flop_per_s=2e7,
            on_event=note,
        )
        for number in range(3):
            await swarm.add(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) > STEPS_BEFORE)
        holders = {stage: [name for name in swarm.nodes if swarm.stage_of(name) == stage] for stage in (0, 1)}
        name = next(names[0] for names in holders.values() if len(names) == replicas)
        began_s = swarm.world.now_s()
        swarm.world.pause(swarm.world.peers[name])
        for _ in range(int(STOP_S)):
            await asyncio.sleep(1.0)
            told.append(next((s.waits_for for n in swarm.nodes.values() if (s := n.coordination.status())), ""))
        swarm.world.resume(swarm.world.peers[name])
        await asyncio.sleep(20.0)
        for each in list(swarm.nodes):
            await swarm.world.peers[each].spawn(swarm.nodes[each].close())
        return began_s

    began_s = run(main())
    times = sorted(commits.values())
    after = [max(at_s for at_s in times if at_s <= began_s), *(at_s for at_s in times if at_s > began_s)]
    return Seen(
        eras=eras,
        gaps_s=[b - a for a, b in itertools.pairwise(after)],
        back_s=min((at_s for at_s in times if at_s > began_s + STOP_S), default=float("inf")) - began_s - STOP_S,
        waits_for=told,
    )


@pytest.mark.sim
def test_with_another_holder_a_stop_costs_what_it_takes_to_notice():
    seen = stopped_run(replicas=2)
    assert seen.eras == {0}
    assert max(seen.gaps_s) < 8.0, "three heartbeats until it is known, then a plan, then the step"


@pytest.mark.sim
def test_the_only_holder_of_a_stage_is_waited_for_and_work_goes_on_at_once():
    seen = stopped_run(replicas=1)
    assert seen.eras == {0}, "nothing is learnt again"
    assert seen.back_s < BACK_S
    silent = re.compile(r"stage \d: its only holder, n\d, does not answer, for (\d+) s")
    said = [int(words[1]) for text in seen.waits_for if (words := silent.fullmatch(text))]
    assert len(said) > STOP_S - 10, seen.waits_for
    assert said == sorted(said), "whoever coordinates"
    assert said[-1] > STOP_S - 5
