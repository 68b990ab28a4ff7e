"""What asynchrony buys, read off the devices' timelines in virtual time."""

from dataclasses import dataclass
from statistics import mean

import msgspec
import pytest
from timelines import busy_fraction
from uncontrolled import Uncontrolled

from shoal.peer.replica.flow import Control, Traffic
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.staleness import Price

STAGES = [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]


def busy(make_swarm, spec, *, s_max, from_step, to_step, seed=0):
    """(busy fraction of the slowest stage's devices between two steps, trace hash)."""
    builtins = msgspec.to_builtins(spec)
    builtins["training"] |= {"s_max": s_max, "steps": to_step, "microbatches_per_step": 12}
    builtins["training"]["validation_interval_steps"] = 0

    async def main():
        swarm = make_swarm(
            msgspec.convert(builtins, type(spec)),
            seed=seed,
            network=uniform(latency_s=0.05, rate_bytes_per_s=1e7, jitter_s=0.002),
        )
        for names in STAGES:
            for name in names:
                # Of a run this small no more than a few microbatches are ever seen: control would not run ahead.
                await swarm.add(name, device_flop_per_s=4e7, traffic=Uncontrolled())
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(from_step)
        started_s = swarm.world.now_s()
        await swarm.until_step(to_step)
        ended_s = swarm.world.now_s()
        busy_by_stage = [
            sum(busy_fraction(swarm.peer(name).compute.timeline, started_s, ended_s) for name in names) / len(names)
            for names in STAGES
        ]
        await swarm.close()
        assert swarm.world.failures == []
        return max(busy_by_stage), swarm.world.trace_hash()

    return run(main())


@pytest.mark.sim
def test_one_step_of_staleness_hides_the_bubble_and_the_commit(make_swarm, tiny_spec):
    asynchronous, _ = busy(make_swarm, tiny_spec, s_max=1, from_step=4, to_step=14)
    synchronous, _ = busy(make_swarm, tiny_spec, s_max=0, from_step=4, to_step=14)
    assert asynchronous >= 0.90
    assert synchronous <= 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced(Traffic):
    """With a price of staleness that no study can change."""

    price: float = 0.6

    def control(self, spec):
        return Control(s_max=spec.training.s_max, price=Price(self.price))


def ahead(make_swarm, spec, *, traffic, from_step=3, to_step=7):
    """(seconds a step, mean staleness) of a swarm whose pipeline is long and whose commits are short."""
    builtins = msgspec.to_builtins(spec)
    builtins["training"] |= {"s_max": 1, "steps": to_step, "microbatches_per_step": 24}
    builtins["training"]["validation_interval_steps"] = 0
    stages = [["0.0"], ["1.0"], ["2.0"]]

    async def main():
        swarm = make_swarm(
            msgspec.convert(builtins, type(spec)),
            network=uniform(latency_s=0.3, rate_bytes_per_s=1e8, jitter_s=0.002),
        )
        for names in stages:
            for name in names:
                await swarm.add(name, device_flop_per_s=4e7, traffic=traffic)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(from_step)
        started_s = swarm.world.now_s()
        await swarm.until_step(to_step)
        step_s = (swarm.world.now_s() - started_s) / (to_step - from_step)
        reports = [swarm.commits[stage][step] for stage in range(len(stages)) for step in range(from_step, to_step)]
        await swarm.close()
        assert swarm.world.failures == []
        return step_s, mean(report.staleness_steps_mean for report in reports)

    return run(main())


@pytest.mark.sim
def test_control_makes_fewer_microbatches_stale_and_steps_no_longer(make_swarm, tiny_spec):
    free_s, free_staleness = ahead(make_swarm, tiny_spec, traffic=Uncontrolled())
    step_s, staleness = ahead(make_swarm, tiny_spec, traffic=Priced())
    assert step_s <= 1.02 * free_s
    assert 0.0 < staleness <= 0.8 * free_staleness


@pytest.mark.sim
def test_replicas_of_one_stage_run_ahead_alike(make_swarm, tiny_spec):
    """Alone one of them would, and the other would not."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"s_max": 1, "steps": 6, "microbatches_per_step": 24, "validation_interval_steps": 0}

    async def main():
        swarm = make_swarm(
            msgspec.convert(builtins, type(tiny_spec)), network=uniform(latency_s=0.3, rate_bytes_per_s=1e8)
        )
        for name, price in (("0.0", 0.6), ("0.1", 9.0), ("1.0", 0.6)):
            await swarm.add(name, device_flop_per_s=4e7, traffic=Priced(price=price))
        swarm.obey([["0.0", "0.1"], ["1.0"]], not_started=True)
        await swarm.until_step(5)
        controls = [swarm.drivers[name].replica.core.pipeline.control for name in ("0.0", "0.1")]
        own = [(control.choice.steps_ahead, control.choice.gain) for control in controls]
        in_force = {control.in_force for control in controls}
        await swarm.close()
        assert swarm.world.failures == []
        return own, in_force

    own, in_force = run(main())
    assert [steps_ahead for steps_ahead, _ in own] == [1, 0]
    assert len(in_force) == 1, "the lead's"
    assert in_force < set(own)


@pytest.mark.sim
def test_one_seed_gives_one_trace_and_another_seed_another(make_swarm, tiny_spec):
    first, again, other = (
        busy(make_swarm, tiny_spec, s_max=1, from_step=1, to_step=3, seed=seed)[1] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.sim
def test_a_reduction_of_minutes_is_sent_once(make_swarm, tiny_spec):
    """Its halves take 44 s each on this link, many times what a round that has lost something is given.

    The first two steps do not count: the probe of the link takes nine minutes of it, and who waits so long for the
    first round's end asks for its result, which then travels beside the second round.
    """
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": 4, "validation_interval_steps": 0}

    async def main():
        swarm = make_swarm(
            msgspec.convert(builtins, type(tiny_spec)), network=uniform(latency_s=0.1, rate_bytes_per_s=2e3)
        )
        for name in ("a", "b"):
            await swarm.add(name, device_flop_per_s=1e9)
        swarm.obey([["a", "b"]], not_started=True)
        await swarm.until_step(2)
        started_s = swarm.world.now_s()
        await swarm.until_step(4)
        ended_s = swarm.world.now_s()
        gradient_bytes = 4 * swarm.drivers["a"].replica.runtime.num_parameters
        await swarm.close()
        assert swarm.world.failures == []
        return (ended_s - started_s) / 2, gradient_bytes / 2e3

    step_s, once_s = run(main())
    assert once_s > 60.0
    assert once_s < step_s < once_s + 5.0
