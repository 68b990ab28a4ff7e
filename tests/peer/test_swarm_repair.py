"""A killed replica costs time, not samples: what it had contributed runs again, and the loss is the same."""

import asyncio
import math
from collections import Counter

import msgspec
import pytest
from single_process import train

from kills import killed
from shoal.peer.data.corpus import load_corpus
from shoal.protocol.errors import Refused
from shoal.protocol.messages import Again
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 16


def with_training(spec, **training):
    builtins = msgspec.to_builtins(spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 9, "validation_interval_steps": 0} | training
    return msgspec.convert(builtins, type(spec))


KILLS = {2: "1.0", 5: "0.1", 8: "2.2", 10: "0.0", 12: "1.2"}


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_five_kills_change_no_step_of_a_synchronous_run(make_swarm, tiny_spec, seed):
    spec = with_training(tiny_spec, s_max=0)
    swarm = killed(make_swarm, spec, KILLS, seed=seed)
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=True)) < 1e-4
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(STEPS)]
        assert {(c.microbatches, c.given_up) for c in commits} == {(9, 0)}
        assert sum(c.duplicates for c in commits) == 0


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_five_kills_lose_no_microbatch_of_an_asynchronous_run(make_swarm, tiny_spec, seed):
    swarm = killed(make_swarm, with_training(tiny_spec, s_max=1), KILLS, seed=seed)
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(STEPS)]
        assert {(c.microbatches, c.given_up) for c in commits} == {(9, 0)}
        assert sum(c.duplicates for c in commits) == 0
    assert swarm.losses[-1] < swarm.losses[0] - 0.5


@pytest.mark.sim
@pytest.mark.parametrize("mates_refuse", [False, True])
def test_what_died_with_a_replica_runs_again_at_all_of_stage_0(make_swarm, tiny_spec, mates_refuse):
    """Or at its lead, where its mates do not take their part."""
    spec = with_training(tiny_spec, s_max=0, microbatches_per_step=18)
    stages = [["0.0", "0.1", "0.2"], ["1.0", "1.1", "1.2"], ["2.0"]]
    again = Counter()

    def counted(name, core):
        make = core._make

        def made(microbatch, is_again, now_s):
            again[name] += is_again
            return make(microbatch, is_again, now_s)

        core._make = made

    async def refuses(source, message):
        raise Refused(source, "has no time")

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for names in stages:
            for name in names:
                await swarm.add(name, device_flop_per_s=1e8)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(3)
        for name in stages[0]:
            replica = swarm.drivers[name].replica
            counted(name, replica.core)
            if mates_refuse and not replica.core.group.is_leader:
                swarm.drivers[name].services.endpoint.on(Again, refuses)
        dying = swarm.drivers["1.1"].replica.core.group
        await swarm.until(lambda: dying._tallies.tally(dying.version, dying.me).indices.bit_count() >= 5)
        leader = next(name for name in stages[0] if swarm.drivers[name].replica.core.group.is_leader)
        swarm.world.crash(swarm.peer("1.1"))
        del swarm.drivers["1.1"]
        stages[1].remove("1.1")
        await asyncio.sleep(1.0)
        swarm.obey(stages, not_started=False)
        await swarm.until_step(6)
        await swarm.close()
        return swarm, leader

    swarm, leader = run(main())
    assert again.total() >= 3
    if mates_refuse:
        assert again[leader] == again.total()
    else:
        assert max(again.values()) == math.ceil(again.total() / 3), again
    single = [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=6)]
    assert max(abs(a - b) for a, b in zip(swarm.losses, single, strict=False)) < 1e-4
    assert {(c.microbatches, c.given_up, c.duplicates) for c in swarm.commits[0].values()} == {(18, 0, 0)}


@pytest.mark.sim
def test_nothing_is_granted_to_the_open_claim_of_a_mate_that_is_lost(make_swarm, tiny_spec):
    """Suspended with a claim open: its connection stays up, and nobody reads the answer. What it is granted then
    stage 0 misses after ten seconds."""
    spec = with_training(tiny_spec, s_max=0, microbatches_per_step=8)
    stages = [["0.0", "0.1"], ["1.0"]]

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for name in ("0.0", "0.1", "1.0"):
            await swarm.add(name, device_flop_per_s=1e8)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(3)
        replicas = {name: swarm.drivers[name].replica for name in stages[0]}
        leader = next(name for name in stages[0] if replicas[name].core.group.is_leader)
        mate = next(name for name in stages[0] if name != leader)
        queue = replicas[leader].core._queue
        await swarm.until(lambda: swarm.peer(mate).peer_id in queue.open_claims)
        swarm.world.pause(swarm.peer(mate))
        del swarm.drivers[mate]
        swarm.obey([[leader], ["1.0"]], not_started=False)
        step, began_s = replicas[leader].version, swarm.world.now_s()
        await swarm.until_step(step + 2)
        took_s = swarm.world.now_s() - began_s
        await swarm.close()
        return took_s

    assert run(main()) < 6.0
