"""A small swarm in virtual time whose members are killed on the way."""

import asyncio

from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform


def killed(make_swarm, spec, kills, *, seed=0, formats=()):
    """Play a run of 3 x 3 peers to its end. The plan drops a killed peer four seconds later.

    Args:
        kills: who is killed at which step, {step: name}.
        formats: `Plan.formats` of the first plan and of the one after each kill; empty: none of them says any.
    """
    formats = iter(formats or [None] * (len(kills) + 1))
    stages = [[f"{k}.{r}" for r in range(3)] for k in range(3)]

    async def main():
        swarm = make_swarm(spec, seed=seed, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7, jitter_s=0.01))
        for names in stages:
            for name in names:
                await swarm.add(name, device_flop_per_s=1e8)
        swarm.obey(stages, not_started=True, formats=next(formats))
        for step, name in sorted(kills.items()):
            await swarm.until_step(step)
            await asyncio.sleep(swarm.world.rng(f"moment {step}").random() * 1.5)
            swarm.world.crash(swarm.peer(name))
            del swarm.drivers[name]
            await asyncio.sleep(4.0)
            stages[int(name[0])].remove(name)
            swarm.obey(stages, not_started=False, formats=next(formats))
        await swarm.until_step(spec.training.steps)
        await swarm.close()
        return swarm

    return run(main())
