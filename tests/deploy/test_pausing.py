"""A volunteer wants its device back for a while: the swarm goes on, and loses nothing."""

import asyncio
import itertools
from dataclasses import dataclass

import pytest
from sightings import CommitSeen
from sim_swarm import SimSwarm
from single_process import train
from tiny_run import tiny_corpus, tiny_spec

from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 22
PACE_FLOP_PER_S = 2e7


@dataclass(frozen=True)
class Seen:
    """Of one run with a pause in it."""

    swarm: SimSwarm
    jobs_after_s: list[float]
    """When microbatch jobs of the paused peer ended, after the pause began."""
    gaps_s: list[float]
    """Between commits of the last stage."""
    ledger: list[tuple[int, int, int]]
    """(microbatches, given up, dissenting) of each commit of each stage."""
    plans_without: bool
    back_s: float
    """From the end of the pause to its first job."""


def watch_jobs(swarm, name, into):
    compute = swarm.world.peers[name].compute
    run_job = compute.run

    async def noting(kind, work, *, flop):
        timed = await run_job(kind, work, flop=flop)
        if kind in ("forward", "backward", "validate"):
            into.append(swarm.world.now_s())
        return timed

    compute.run = noting


def paused_run(spec, *, stage, for_s, seed=0):
    committed_at: dict[tuple[int, int], tuple[float, object]] = {}

    def note(event):
        if isinstance(event, CommitSeen):
            committed_at.setdefault((event.report.stage, event.report.step), (event.at_s, event.report))

    async def main():
        swarm = SimSwarm(
            spec,
            tiny_corpus(),
            seed=seed,
            network=uniform(latency_s=0.05, rate_bytes_per_s=1e7),
            device_flop_per_s=PACE_FLOP_PER_S,
            on_event=note,
        )
        for number in range(6):
            await swarm.add(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) > 3)
        name = next(n for n in swarm.nodes if swarm.stage_of(n) == stage)
        jobs: list[float] = []
        watch_jobs(swarm, name, jobs)
        await swarm.until(lambda: len(jobs) > 1)
        peer, pausing = swarm.world.peers[name], swarm.nodes[name].peer.pausing
        core = swarm.nodes[name].peer.replica.core.pipeline
        await swarm.until(lambda: core._running is not None and core._running.microbatch is not None)
        began_s = swarm.world.now_s()
        peer.context().run(pausing.pause)
        await asyncio.sleep(for_s)
        without = swarm.stage_of(name) is None
        jobs_after_s = [at_s - began_s for at_s in jobs if at_s > began_s]
        jobs.clear()
        peer.context().run(pausing.resume)
        await swarm.until(lambda: swarm.stage_of(name) is not None and bool(jobs))
        back_s = swarm.world.now_s() - began_s - for_s
        await swarm.end()
        return swarm, jobs_after_s, without, back_s

    swarm, jobs_after_s, without, back_s = run(main())
    last = spec.swarm.stages - 1
    at_s = [committed_at[last, step][0] for step in range(STEPS)]
    ledger = [(r.microbatches, r.given_up, r.dissenting) for _, r in committed_at.values()]
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(at_s)]
    return Seen(swarm, jobs_after_s, gaps_s, ledger, without, back_s)


@pytest.mark.sim
@pytest.mark.parametrize(("stage", "for_s"), [(0, 30.0), (2, 5.0)])
def test_a_peer_pauses_and_comes_back_and_nothing_is_lost(stage, for_s):
    spec = tiny_spec(steps=STEPS, peers=6, s_max=0, microbatches=8)
    seen = paused_run(spec, stage=stage, for_s=for_s)
    assert 0.0 < max(seen.jobs_after_s) < 1.0
    assert set(seen.ledger) == {(8, 0, 0)}
    assert seen.plans_without == (for_s > 10.0)
    assert seen.back_s < 10.0
    assert max(seen.gaps_s) < 4.0 * sorted(seen.gaps_s)[len(seen.gaps_s) // 2], "the swarm stood still"
    assert sum(step.duplicates for step in seen.swarm.steps.values()) == 0
    single = [step.loss for step in train(spec, seen.swarm.corpus, steps=STEPS)]
    losses = [seen.swarm.steps[step].loss for step in range(STEPS)]
    assert max(abs(a - b) for a, b in zip(losses, single, strict=True)) < 1e-4
