"""What anybody in the run may send ends no peer and stops no stage."""

import asyncio
import math

import msgspec
import pytest

from shoal.protocol.errors import Refused
from shoal.protocol.messages import Again, Claim, Done, Grant, Repair, RoundMember, RoundStart
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STAGES = [["0.0", "0.1"], ["1.0", "1.1"]]


def play(make_swarm, tiny_spec, scene, *, steps=6):
    """`scene` gets a swarm of two stages with a step behind it, and a peer that is in no plan. It must train on."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": steps, "validation_interval_steps": 0}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for names in [*STAGES, ["stranger"]]:
            for name in names:
                await swarm.add(name)
        swarm.obey(STAGES, fresh=True)
        await swarm.until_step(1)
        await scene(swarm)
        began_s = swarm.world.now_s()
        await swarm.until_step(6)
        assert swarm.world.now_s() < began_s + 30.0
        assert not any(driver.failure.done() for driver in swarm.drivers.values())
        await swarm.close()

    run(main())


async def is_refused(swarm, source, target, message):
    endpoint = swarm.drivers[source]._endpoint
    with pytest.raises(Refused):
        await swarm.peer(source).spawn(endpoint.ask(swarm.peer(target).peer_id, message, Done))


@pytest.mark.sim
@pytest.mark.parametrize("step", [-1, 6, 2**62])
def test_a_repair_of_a_step_that_the_run_has_not_is_refused(make_swarm, tiny_spec, step):
    async def scene(swarm):
        leads = [name for name in STAGES[0] if swarm.drivers[name].replica.group.core.is_lead]
        await is_refused(swarm, "stranger", leads[0], Repair(step=step, indices=b"\x01"))

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_only_the_lead_says_what_runs_again(make_swarm, tiny_spec):
    async def scene(swarm):
        first = swarm.drivers[STAGES[0][0]].replica.group.core
        lead, mate = STAGES[0] if first.is_lead else STAGES[0][::-1]
        step = swarm.drivers[mate].replica.version
        for source, target in (("stranger", mate), ("stranger", lead), (mate, lead), ("1.1", mate)):
            await is_refused(swarm, source, target, Again(items=((step, 0),)))
        for item in ((step, 2**40), (step, -1), (900, 0)):
            await is_refused(swarm, lead, mate, Again(items=(item,)))

    play(make_swarm, tiny_spec, scene, steps=1000)


@pytest.mark.sim
@pytest.mark.parametrize("source", ["stranger", "1.1"])
@pytest.mark.parametrize("bandwidths", [(), (0.0, 0.0), (1.0, math.nan), (1.0, 1.0)])
def test_a_round_that_would_stop_its_stage_is_refused(make_swarm, tiny_spec, source, bandwidths):
    async def scene(swarm):
        core = swarm.drivers["1.0"].replica.group.core
        members = tuple(
            RoundMember(swarm.peer(name).peer_id, bandwidth, b"")
            for name, bandwidth in zip(STAGES[1], bandwidths, strict=False)
        )
        start = RoundStart(
            stage=1,
            step=core.version,
            attempt=2**60 if math.prod(bandwidths) == 1.0 else 2**40,
            members=members,
            duplicates=0,
            given_up=0,
            loss_sum=0.0,
            staleness_sum=0,
        )
        await is_refused(swarm, source, "1.0", start)

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
@pytest.mark.parametrize("item", [(0, 2**50), (-1, 0), (7, 0), (0, -(2**50))])
def test_who_is_granted_what_the_run_has_not_claims_on(make_swarm, tiny_spec, item):
    granted = []

    async def scene(swarm):
        first = swarm.drivers[STAGES[0][0]].replica.group.core
        lead, mate = STAGES[0] if first.is_lead else STAGES[0][::-1]
        honest = swarm.drivers[lead].replica.claims._on_claim

        async def lies_once(source, message):
            if source == swarm.peer(mate).peer_id:
                granted.append(item)
                if len(granted) == 1:
                    return Grant(items=(item,))
            return await honest(source, message)

        swarm.drivers[lead]._endpoint.on(Claim, lies_once)
        await swarm.until(lambda: len(granted) > 1)

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_a_bug_in_the_claims_is_heard(make_swarm, tiny_spec):
    def broken(microbatch, again):
        raise RuntimeError("a bug")

    async def main():
        swarm = make_swarm(tiny_spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        driver = await swarm.add("0.0", device_flop_per_s=1e8)
        swarm.obey([["0.0"]], fresh=True)
        await swarm.until_step(1)
        driver.replica.claims._on_grant = broken
        async with asyncio.timeout(60.0):
            with pytest.raises(RuntimeError, match="a bug"):
                await driver.failure
        await swarm.close()

    run(main())
