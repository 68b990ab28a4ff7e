"""What a peer no longer holds it does not keep in memory either: the next place may need all of it."""

import asyncio
import gc
import weakref

import msgspec
import pytest

from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform


@pytest.mark.sim
@pytest.mark.parametrize("goes_to", ["1", "spare"])
@pytest.mark.parametrize("name", ["0.0", "0.1"])
def test_who_leaves_a_stage_keeps_nothing_of_it(make_swarm, tiny_spec, name, goes_to):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["swarm"] |= {"snapshot_interval_steps": 0}
    spec = msgspec.convert(builtins, type(tiny_spec))
    stages = [["0.0", "0.1"], ["1.0"]]

    def replica_of(driver):
        assert driver.replica is not None
        assert driver.replica.stage == 0
        return weakref.ref(driver.replica)

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
        for names in stages:
            for peer in names:
                await swarm.add(peer, device_flop_per_s=1e8)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(3)
        driver = swarm.drivers[name]
        left = replica_of(driver)
        stages[0].remove(name)
        if goes_to == "1":
            stages[1].append(name)
        swarm.obey(stages, not_started=False, spares=(name,) if goes_to == "spare" else ())
        where = 1 if goes_to == "1" else None
        await swarm.until(lambda: (driver.replica.stage if driver.replica else None) == where)
        await asyncio.sleep(10.0)  # what was claimed of it is answered by then
        gc.collect()
        assert left() is None
        await swarm.close()
        assert swarm.world.failures == []

    run(main())
