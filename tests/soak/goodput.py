"""What a swarm of 16 delivers while a peer is killed every 60 s, against what those who are alive could do.

Run by `make soak-goodput`. In virtual time, with real gradients of a tiny model: 4 stages, 16 microbatches a step. A
killed peer comes back 20 s later under its own name, with its disk and without its state. The yardstick is two runs
without any fault, of all peers and of one less, weighted by how long so many were alive.

A step counts as one, so all steps must be worth the same: with `--ahead 0` every one is synchronous, with 1 as many
microbatches run one step ahead as may. Left to itself the control of `peer/replica/flow.py` goes to and fro here
between synchronous steps of 6 s and stale ones of 3.6 s, which its price of staleness makes equal: three runs of it
differ by more than what churn costs.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from campaign_run import run_trial
from sightings import Injected
from sim_faults import Fault, FaultKind
from sim_swarm import SimSwarm
from tiny_run import tiny_spec
from trial import Trial
from uncontrolled import Uncontrolled
from witness import RunWitness

from shoal.peer.replica.flow import Control, Traffic, Window
from shoal.protocol.sim.network import LinkSpec
from shoal.protocol.spec import RunSpec
from shoal.protocol.staleness import FREE

STAGES = 4
SETTLES_S = 20.0
EVERY_S = 60.0
AWAY_S = 20.0
GOODPUT_MIN = 0.9

Script = Callable[[SimSwarm, RunWitness], Awaitable[None]]


class _InStep(Control):
    """Nothing ahead of the version begins."""

    def most_ahead(self, window: Window) -> float:
        return 0


class _Synchronous(Traffic):
    """`s_max = 0` would be the same, but that every loss would have to be a single process's own, within 1e-4: over a
    hundred steps and more the order of sums alone makes more than that."""

    def control(self, spec: RunSpec) -> Control:
        return _InStep(s_max=spec.training.s_max, price=FREE)


def steps_per_s(peers: int, *, seed: int, kills: int, ahead: int, killing: bool) -> float:
    """Over `kills` periods of 60 s. Raises: AssertionError: an invariant did not hold."""
    rates: list[float] = []

    async def script(swarm: SimSwarm, witness: RunWitness) -> None:
        rng = swarm.world.rng("goodput")
        await asyncio.sleep(SETTLES_S)
        from_s = swarm.world.now_s()
        for _ in range(kills):
            if killing:
                name = rng.choice(sorted(swarm.running))
                fault = Fault(kind=FaultKind.CRASH, at_s=0.0, lasts_s=AWAY_S, whom=(name,))
                witness.see(Injected(at_s=swarm.world.now_s(), fault=fault))
                swarm.world.crash(swarm.world.peers[name])
                await asyncio.sleep(AWAY_S)
                swarm.launch(name)
                await asyncio.sleep(EVERY_S - AWAY_S)
            else:
                await asyncio.sleep(EVERY_S)
        to_s = swarm.world.now_s()
        rates.append(sum(from_s < at_s <= to_s for at_s in witness.steps_s) / (to_s - from_s))

    trial = Trial(
        seed=seed,
        spec=tiny_spec(steps=int(kills * EVERY_S * 0.9), peers=peers, stages=STAGES, s_max=1, microbatches=16),
        link=LinkSpec(latency_s=0.03, rate_bytes_per_s=1e7, jitter_s=0.005),
        device_flop_per_s=8e6,
        speeds={f"n{number}": 1.0 for number in range(peers)},
        schedule=(),
        traffic=Uncontrolled() if ahead else _Synchronous(),
    )
    verdict = run_trial(trial, script).verdict
    assert verdict.broken is None, f"{verdict.broken}\n{verdict.detail}"
    return rates[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--ahead", type=int, choices=(0, 1), default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    how = {"seed": arguments.seed, "kills": arguments.kills, "ahead": arguments.ahead}
    whole = steps_per_s(arguments.peers, **how, killing=False)
    less = steps_per_s(arguments.peers - 1, **how, killing=False)
    churned = steps_per_s(arguments.peers, **how, killing=True)
    able = (AWAY_S * less + (EVERY_S - AWAY_S) * whole) / EVERY_S
    sys.stdout.write(
        f"{arguments.peers} peers {whole:.3f} steps/s, {arguments.peers - 1} peers {less:.3f}; a kill every "
        f"{EVERY_S:.0f} s: {churned:.3f}, goodput {churned / able:.3f} of what the survivors can do\n"
    )
    return int(churned < GOODPUT_MIN * able)


if __name__ == "__main__":
    sys.exit(main())
