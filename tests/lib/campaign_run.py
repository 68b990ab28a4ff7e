"""Play one seed of a campaign: a swarm suffers the faults that the seed draws, while the invariants are checked.

The same seed and commit give the same run, event for event, as `RunVerdict.trace_hash` shows. Handwritten scenarios run
here, too, with their own `Trial` or a script that injects faults.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable

import torch
from sightings import Injected, Quiet, Ticked
from sim_faults import play
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus
from trial import CampaignOptions, Trial, draw_trial
from witness import RunVerdict, RunWitness

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import Deadlock, VirtualTimeLoop, run
from shoal.protocol.sim.network import Network
from shoal.protocol.sim.world import SimPeer

TICK_S = 0.25
BEGINS_S = 120.0
"""The first step must be committed by this time; there are no faults before it."""
LASTS_S_MAX = 3600.0

Script = Callable[[SimSwarm, RunWitness], Awaitable[None]]
"""A function that breaks a training swarm, and returns when all faults are healed."""


class Broken(Exception):
    """An invariant does not hold: the run ends here."""


def run_seed(seed: int, options: CampaignOptions) -> RunVerdict:
    return run_trial(draw_trial(seed, options)).verdict


def run_trial(trial: Trial, script: Script | None = None) -> RunWitness:
    """Play a trial. Args: script: injects faults in place of the trial's schedule."""
    begun_s = time.perf_counter()
    torch.set_num_threads(1)  # the models are tiny: a second thread costs each operation more than it gives
    witness = RunWitness(trial)
    try:
        run(_watch(trial, witness, script or _scheduled(trial)))
    except Deadlock as error:
        witness.condemn("there is always a next event", str(error))
    gc.collect()  # reports tasks that failed unobserved now, and not in the next seed
    witness.verdict.wall_s = time.perf_counter() - begun_s
    return witness


async def _watch(trial: Trial, witness: RunWitness, script: Script) -> None:
    swarm = SimSwarm(
        trial.spec,
        tiny_corpus(),
        seed=trial.seed,
        network=Network(trial.link),
        device_flop_per_s=trial.device_flop_per_s,
        traffic=trial.traffic,
        on_event=witness.see,
    )
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.set_exception_handler(lambda _, context: swarm.world.failures.append(("a task", _unheard(context))))
    try:
        for name, speed in trial.speeds.items():
            swarm.launch(name, speed=speed)
        await _suffer(swarm, witness, script)
    except Broken:
        pass
    finally:
        witness.conclude(trace_hash=swarm.world.trace_hash(), now_s=swarm.world.now_s())


async def _suffer(swarm: SimSwarm, witness: RunWitness, script: Script) -> None:
    while not witness.commits:
        if swarm.world.now_s() > BEGINS_S:
            witness.condemn(f"the first step is committed within {BEGINS_S:.0f} s", "there is none")
        await _tick(swarm, witness)
    breaking = asyncio.ensure_future(script(swarm, witness))
    while not breaking.done():
        await _tick(swarm, witness)
    breaking.result()
    healed_s = swarm.world.now_s()
    while any(_works_since(peer, healed_s) for peer in swarm.world.peers.values()):
        await _tick(swarm, witness)  # a job that began on a slow device takes its full time
    witness.see(Quiet(at_s=swarm.world.now_s()))
    while swarm.running:
        if swarm.world.now_s() > LASTS_S_MAX:
            witness.condemn(f"the run is over within {LASTS_S_MAX:.0f} s", f"{', '.join(swarm.running)} still run")
        await _tick(swarm, witness)


async def _tick(swarm: SimSwarm, witness: RunWitness) -> None:
    """Wait for a tick and check all invariants. Raises: Broken."""
    await asyncio.sleep(TICK_S)
    swarm.tell_failures()
    witness.see(Ticked(at_s=swarm.world.now_s(), running=swarm.running))
    if witness.verdict.broken is not None:
        raise Broken


def _works_since(peer: SimPeer, before_s: float) -> bool:
    """True if a job runs that began before `before_s`."""
    last = peer.compute.timeline[-1] if peer.is_alive and peer.compute.timeline else None
    return last is not None and last.started_s < before_s < last.ended_s and last.ended_s > peer.clock.now_s()


def _scheduled(trial: Trial) -> Script:
    async def script(swarm: SimSwarm, witness: RunWitness) -> None:
        await play(
            swarm.world,
            trial.schedule,
            on_return=swarm.launch,
            on_fault=lambda fault: witness.see(Injected(at_s=swarm.world.now_s(), fault=fault)),
        )

    return script


def _unheard(context: dict[str, object]) -> Exception:
    error = context.get("exception")
    return error if isinstance(error, Exception) else LocalError(str(context.get("message")))
