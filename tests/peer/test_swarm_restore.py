"""What comes back: a stage from outside snapshots after all of its replicas died, a peer under its own name."""

import asyncio

import msgspec
import pytest
from single_process import train

from shoal.peer.data.corpus import load_corpus
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 14
INTERVAL = 4


def synchronous(spec):
    builtins = msgspec.to_builtins(spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 6, "validation_interval_steps": 0, "s_max": 0}
    builtins["swarm"] |= {"snapshot_interval_steps": INTERVAL}
    return msgspec.convert(builtins, type(spec))


def single_losses(spec):
    return [step.loss for step in train(spec, load_corpus(spec.data, context=spec.model.context), steps=STEPS)]


async def begin(make_swarm, spec, seed):
    stages = [[f"{k}.{r}" for r in range(2)] for k in range(3)]
    swarm = make_swarm(spec, seed=seed, network=uniform(latency_s=0.03, rate_bytes_per_s=1e7, jitter_s=0.01))
    for names in stages:
        for name in names:
            await swarm.add(name, device_flop_per_s=1e8, keeps=True)
    swarm.obey(stages, not_started=True)
    return swarm, stages


def kill(swarm, name):
    swarm.world.crash(swarm.peer(name))
    del swarm.drivers[name]


def common_version(swarm):
    """The newest version of which every layer is on some disk."""
    held = [h for driver in swarm.drivers.values() for h in driver.heartbeat().holdings if h.era == 0]
    layers = {key for h in held for key in h.layers}
    versions = sorted({h.version for h in held}, reverse=True)
    return next(v for v in versions if {key for h in held if h.version == v for key in h.layers} == layers)


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_a_stage_that_died_whole_comes_back_from_snapshots_outside_it(make_swarm, tiny_spec, seed):
    spec = synchronous(tiny_spec)

    async def main():
        swarm, stages = await begin(make_swarm, spec, seed)
        await swarm.until_step(10)
        for name in stages[1]:
            kill(swarm, name)
        died_at = max(swarm.commits[1]) + 1
        await asyncio.sleep(5.0)
        version = common_version(swarm)
        assert died_at - INTERVAL - 1 <= version <= died_at
        stages[1] = ["new", stages[2].pop()]  # a newcomer, and one who held another stage
        await swarm.add("new", device_flop_per_s=1e8, keeps=True)
        for reports in swarm.commits.values():
            for step in [s for s in reports if s >= version]:
                del reports[step]
        began_s = swarm.world.now_s()
        swarm.obey(stages, not_started=True, era=1, restore=version)
        await swarm.until_step(version + 1)
        assert swarm.world.now_s() - began_s < 10.0
        await swarm.until_step(STEPS)
        eras = {report.era for step, report in swarm.commits[1].items() if step >= version}
        await swarm.close()
        return swarm, eras

    swarm, eras = run(main())
    assert eras == {1}
    assert swarm.world.failures == []
    assert max(abs(a - b) for a, b in zip(swarm.losses, single_losses(spec), strict=True)) < 1e-4


@pytest.mark.sim
@pytest.mark.parametrize("name", ["0.0", "1.1", "2.0"])
def test_a_peer_that_is_back_before_anyone_missed_it_begins_anew(make_swarm, tiny_spec, name):
    """No plan changes: its mates see by its incarnation that what it held is gone."""
    spec = synchronous(tiny_spec)

    async def main():
        swarm, _ = await begin(make_swarm, spec, 0)
        await swarm.until_step(5)
        await asyncio.sleep(swarm.world.rng("moment").random())
        kill(swarm, name)
        await asyncio.sleep(1.0)
        driver = await swarm.add(name, device_flop_per_s=1e8, keeps=True)
        assert driver.heartbeat().holdings, "what it had on disk is still there"
        swarm.obey([[f"{k}.{r}" for r in range(2)] for k in range(3)], not_started=False, unless=tuple(swarm.drivers))
        swarm.tell(name, driver)
        await swarm.until_step(STEPS)
        assert driver.replica is not None
        assert driver.replica.version == STEPS
        await swarm.close()
        return swarm

    swarm = run(main())
    assert swarm.world.failures == []
    assert max(abs(a - b) for a, b in zip(swarm.losses, single_losses(spec), strict=True)) < 1e-4


@pytest.mark.sim
@pytest.mark.parametrize("name", ["0.0", "1.0", "2.1"])
def test_who_begins_an_era_again_beside_mates_that_have_gone_on_is_put_right(make_swarm, tiny_spec, name):
    """It died before the first commit, so it knows of none; and the plan is from before anybody heard of one."""
    spec = synchronous(tiny_spec)

    async def main():
        swarm, stages = await begin(make_swarm, spec, 0)
        await swarm.until(lambda: all(d.replica and d.replica.is_ready for d in swarm.drivers.values()))
        assert not swarm.commits
        kill(swarm, name)
        swarm.obey([[other for other in names if other != name] for names in stages], not_started=True)
        await swarm.until_step(6)
        driver = await swarm.add(name, device_flop_per_s=1e8, keeps=True)
        swarm.obey(stages, not_started=True)
        await swarm.until(lambda: driver.replica is not None and driver.replica.is_ready)
        assert driver.replica.version == 0
        await swarm.until_step(STEPS)
        await swarm.until(lambda: driver.replica is not None and driver.replica.version == STEPS)
        await swarm.close()
        return swarm

    swarm = run(main())
    assert swarm.world.failures == []
    assert max(abs(a - b) for a, b in zip(swarm.losses, single_losses(spec), strict=True)) < 1e-4


@pytest.mark.sim
def test_who_slept_through_the_plans_that_dropped_it_and_took_it_back_fetches_the_state(make_swarm, tiny_spec):
    spec = synchronous(tiny_spec)
    whole = [[f"{k}.{r}" for r in range(2)] for k in range(3)]

    async def main():
        swarm, stages = await begin(make_swarm, spec, 1)
        sleeper = swarm.drivers["1.1"]
        await swarm.until_step(4)
        membership = sleeper.replica
        swarm.world.pause(swarm.peer("1.1"))
        await asyncio.sleep(3.0)
        swarm.obey([stages[0], ["1.0"], stages[2]], not_started=False, unless=("1.1",))
        await swarm.until_step(8)
        swarm.obey(whole, not_started=False)  # told now, heard when it wakes
        swarm.world.resume(swarm.peer("1.1"))
        await swarm.until_step(STEPS)
        assert sleeper.replica is not membership
        digests = {swarm.drivers[name].replica.state.digest() for name in ("1.0", "1.1")}
        assert len(digests) == 1
        await swarm.close()
        return swarm

    swarm = run(main())
    assert max(abs(a - b) for a, b in zip(swarm.losses, single_losses(spec), strict=True)) < 1e-4
    assert sum(report.dissenting for reports in swarm.commits.values() for report in reports.values()) == 0
