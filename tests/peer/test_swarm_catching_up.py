"""A round that some members end, and others leave for a later attempt at the same step."""

import asyncio

import msgspec
import pytest

from shoal.protocol.messages import ReducedRequest, ReducePart
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 5


def keep_from(pieces, peers, step):
    """What it has reduced of `step` does not reach `peers`."""
    send = pieces.send

    def send_to_others(outgoing, start, kind):
        is_lost = kind is not ReducePart and start.step == step
        send([out for out in outgoing if not (is_lost and out.target in peers)], start, kind)

    pieces.send = send_to_others


def open_anew(replica, step):
    """As a lead does whose round a late contribution has outgrown."""
    group = replica.core.group
    assert group.is_leader
    assert group.version == step
    group._rounds.void(step)
    for command in group._try_round(replica._s.clock.now_s()):
        replica._perform(command)


class Resting:
    """A device that begins no step until it is awake."""

    def __init__(self, compute):
        self.awake = asyncio.Event()
        self._compute = compute

    async def run(self, kind, work, *, flop):
        if kind == "step":
            await self.awake.wait()
        return await self._compute.run(kind, work, flop=flop)

    async def run_on_host(self, work):
        return await self._compute.run_on_host(work)


@pytest.mark.sim
def test_whose_device_rests_while_its_mates_go_on_keeps_its_state_and_asks_nobody(make_swarm, tiny_spec):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": 8, "validation_interval_steps": 0}
    spec = msgspec.convert(builtins, type(tiny_spec))
    asked = []

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        names = ["0", "1", "2"]
        for name in names:
            await swarm.add(name)
        swarm.obey([names], not_started=True)
        await swarm.until_step(1)
        slow = swarm.drivers["2"]
        replica = slow.replica
        replica.core._queue.is_stopped = True  # the others make all there is
        await swarm.until_step(2)
        device = replica.compute = Resting(replica.compute)
        ask = slow.services.endpoint.ask

        def noted(peer, message, expect, **options):
            if isinstance(message, ReducedRequest):
                asked.append(message.step)
            return ask(peer, message, expect, **options)

        slow.services.endpoint.ask = noted
        until_s = swarm.world.now_s() + 10.0
        await swarm.until(lambda: all(swarm.drivers[name].replica.version > replica.version + 2 for name in "01"))
        assert swarm.world.now_s() < until_s - 4.0
        await asyncio.sleep(until_s - swarm.world.now_s())
        device.awake.set()
        await swarm.until(lambda: all(driver.replica.version == 8 for driver in swarm.drivers.values()))
        assert slow.replica is replica
        await swarm.close()

    run(main())
    assert asked == []


@pytest.mark.sim
@pytest.mark.parametrize("num_ahead", [1, 3])
def test_those_who_owe_each_other_a_later_attempt_get_the_step_from_those_who_have_it(make_swarm, tiny_spec, num_ahead):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "microbatches_per_step": 12, "validation_interval_steps": 0}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for number in range(6):
            await swarm.add(str(number), device_flop_per_s=4e7)
        # Those ahead come last by name: the others ask each other first.
        names = sorted(swarm.drivers, key=lambda name: swarm.peer(name).peer_id)
        behind, ahead = names[:-num_ahead], names[-num_ahead:]
        replicas = {name: swarm.drivers[name] for name in names}
        swarm.obey([names], not_started=True)
        await swarm.until_step(1)
        keep_from(replicas[ahead[0]].replica._pieces, {swarm.peer(name).peer_id for name in behind}, 1)
        await swarm.until(lambda: all(replicas[name].replica.version == 2 for name in ahead))
        swarm.peer(names[0]).context().run(open_anew, replicas[names[0]].replica, 1)
        anew_s = swarm.world.now_s()
        await swarm.until_step(3)
        assert swarm.world.now_s() < anew_s + 20.0
        await swarm.until(lambda: all(driver.replica.version == STEPS for driver in replicas.values()))
        await asyncio.sleep(5.0)  # the last reports
        await swarm.close()
        return swarm

    swarm = run(main())
    commits = [swarm.commits[0][step] for step in range(STEPS)]
    assert {(c.members, c.microbatches, c.duplicates, c.given_up, c.dissenting) for c in commits} == {(6, 12, 0, 0, 0)}
