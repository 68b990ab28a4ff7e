"""Experts placed by the coordinator of the day: a death costs no step, and the run is one model all the while."""

import asyncio

import msgspec
import pytest
from sightings import CommitSeen, Obeyed
from sim_swarm import SimSwarm
from single_process import train
from tiny_run import tiny_corpus, tiny_spec

from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

STEPS = 12


def placed_spec(**training) -> RunSpec:
    tables = msgspec.to_builtins(tiny_spec(steps=STEPS, peers=6, stages=2, s_max=0))
    tables["model"] |= {"num_experts": 4, "num_layers": 2, "router_aux_loss": 0.1}
    tables["training"] |= training
    tables["swarm"] |= {"expert_slots": 2}
    return msgspec.convert(tables, RunSpec)


def played(spec, main, *, seed=0):
    plans, commits = {}, {}

    def note(event):
        if isinstance(event, Obeyed):
            plans.setdefault(event.plan.plan.sequence, event.plan.plan)
        elif isinstance(event, CommitSeen):
            commits.setdefault((event.report.era, event.report.stage, event.report.step), event.report)

    async def play():
        swarm = SimSwarm(
            spec,
            tiny_corpus(),
            seed=seed,
            network=uniform(latency_s=0.03, rate_bytes_per_s=1e7),
            device_flop_per_s=5e7,
            on_event=note,
        )
        for number in range(6):
            await swarm.add(f"n{number}")
        await main(swarm)
        await swarm.end()
        return swarm

    swarm = run(play())
    return swarm, [plans[sequence] for sequence in sorted(plans)], commits


@pytest.mark.sim
def test_a_death_is_placed_anew_and_costs_no_step():
    spec = placed_spec()

    async def main(swarm):
        await swarm.until(lambda: len(swarm.steps) > 3)
        name = next(n for n in swarm.nodes if swarm.stage_of(n) == 1)
        await asyncio.sleep(0.3)
        swarm.world.crash(swarm.world.peers[name])

    swarm, plans, commits = played(spec, main)
    assert {plan.era for plan in plans} == {0}
    assert all(len(plan.experts) == 8 for plan in plans)
    first, last = plans[0], plans[-1]
    assert any(entry.peers != then.peers for entry, then in zip(first.experts, last.experts, strict=True))
    for plan in plans:
        for entry in plan.experts:
            assert set(entry.peers) <= set(plan.stages[entry.stage].peers)
    losses = [swarm.steps[step].loss for step in range(STEPS)]
    wanted = [step.loss for step in train(spec, tiny_corpus(), steps=STEPS)]
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-4
    M = spec.training.microbatches_per_step
    assert {(r.microbatches, r.given_up, r.dissenting) for r in commits.values()} == {(M, 0, 0)}
    assert len(commits) == (2 + 8) * STEPS


@pytest.mark.sim
def test_an_expert_without_a_holder_sends_the_run_back_to_its_snapshots():
    spec = placed_spec()
    once = msgspec.structs.replace(spec.swarm, snapshot_interval_steps=4, expert_replicas=1)
    spec = msgspec.structs.replace(spec, swarm=once)

    async def main(swarm):
        await swarm.until(lambda: len(swarm.steps) > 5)
        node = next(iter(swarm.nodes.values()))
        plan = node.peer.services.plans.newest
        alone = next(entry.peers[0] for entry in plan.experts if len(entry.peers) == 1)
        assert len(plan.stages[plan.stage_of(alone)].members) > 1, "the stage itself lives on"
        name = next(name for name, peer in swarm.world.peers.items() if peer.peer_id == alone)
        swarm.world.crash(swarm.world.peers[name])

    swarm, plans, commits = played(spec, main)
    assert plans[-1].era == 1
    assert plans[-1].restore_version == 4
    losses = [swarm.steps[step].loss for step in range(STEPS)]
    wanted = [step.loss for step in train(spec, tiny_corpus(), steps=STEPS)]
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-4
    for group in range(2 + 8):
        for step in range(4, STEPS):
            assert commits[1, group, step].microbatches == spec.training.microbatches_per_step


def watch_jobs(swarm, name, into):
    compute = swarm.world.peers[name].compute
    run_job = compute.run

    async def noting(kind, work, *, flop):
        timed = await run_job(kind, work, flop=flop)
        if kind in ("forward", "backward", "validate"):
            into.append(swarm.world.now_s())
        return timed

    compute.run = noting


@pytest.mark.sim
@pytest.mark.parametrize("for_s", [25.0])
def test_a_holder_that_pauses_computes_nothing_and_costs_no_step(for_s):
    spec = placed_spec()
    seen = []

    async def main(swarm):
        await swarm.until(lambda: len(swarm.steps) > 3)
        name = next(n for n in swarm.nodes if swarm.stage_of(n) == 1)
        jobs = []
        watch_jobs(swarm, name, jobs)
        peer, pausing, began_s = swarm.world.peers[name], swarm.nodes[name].peer.pausing, swarm.world.now_s()
        peer.context().run(pausing.pause)
        await asyncio.sleep(for_s)
        seen.extend(at_s - began_s for at_s in jobs)
        jobs.clear()
        peer.context().run(pausing.resume)

    swarm, plans, commits = played(spec, main)
    assert max(seen, default=0.0) < 1.0
    assert {plan.era for plan in plans} == {0}
    losses = [swarm.steps[step].loss for step in range(STEPS)]
    wanted = [step.loss for step in train(spec, tiny_corpus(), steps=STEPS)]
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-4
    M = spec.training.microbatches_per_step
    assert {(r.microbatches, r.given_up, r.dissenting) for r in commits.values()} == {(M, 0, 0)}
