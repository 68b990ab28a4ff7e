"""A peer for whose job there is no memory loses no microbatch, counts none twice, and asks for less."""

import asyncio

import msgspec
import pytest
import torch
from single_process import train

from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 10
STAGES = [["0.0", "0.1"], ["1.0", "1.1"], ["2.0"]]
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


class Refusing:
    """An allocator that refuses the jobs `kind` of one replica from call `since` on, so many times; each fails at its
    end, when it has taken all that it needs."""

    def __init__(self, runtime, kind, *, since, times, error):
        self._work, self.error = getattr(runtime, kind), error
        self.calls, self.since, self.until = 0, since, since + times
        setattr(runtime, kind, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.since < self.calls <= self.until:
            if self._work.__name__ == "backward":
                self.spend_graph(*args)
            raise self.error
        return self._work(*args, **kwargs)

    def spend_graph(self, microbatch, payload):
        """What a backward that fails half-way leaves: a graph whose buffers are gone, and gradients that are there."""
        context = self._work.__self__._contexts[microbatch]
        if context.kept is not None:
            torch.autograd.backward(context.kept[2].sum())


async def swarm_of(make_swarm, spec):
    swarm = make_swarm(spec, network=uniform(latency_s=0.01, rate_bytes_per_s=1e8))
    for names in STAGES:
        for name in names:
            await swarm.add(name, device_flop_per_s=1e9)
    swarm.obey(STAGES, not_started=True)
    await swarm.until(lambda: all(driver.replica and driver.replica.is_ready for driver in swarm.drivers.values()))
    return swarm


def spec_of(tiny_spec):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "validation_interval_steps": 0}
    return msgspec.convert(builtins, type(tiny_spec))


def expected(swarm):
    return [step.loss for step in train(swarm.spec, swarm.corpus, steps=STEPS)]


def made(swarm):
    return {name: driver.replica.runtime for name, driver in swarm.drivers.items()}


@pytest.mark.sim
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("name", "kind"), [("1.1", "forward"), ("1.1", "backward"), ("2.0", "loss"), ("1.1", "step")])
def test_a_job_that_fails_once_is_done_again_with_room(make_swarm, tiny_spec, name, kind, error):
    async def main():
        swarm = await swarm_of(make_swarm, spec_of(tiny_spec))
        refusing = Refusing(made(swarm)[name], kind, since=3, times=1, error=error)
        await swarm.until_step(STEPS)
        assert refusing.calls > 4, "it has gone on"
        assert swarm.losses == pytest.approx(expected(swarm), abs=1e-4)
        assert swarm.drivers[name].heartbeat().shortages == 0
        await swarm.close()
        assert swarm.world.failures == []

    run(main())


@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "kind"), [("0.1", "forward"), ("1.1", "forward"), ("1.1", "backward"), ("1.1", "step")]
)
def test_who_has_no_memory_hands_its_microbatches_to_its_mate_and_asks_for_less(make_swarm, tiny_spec, name, kind):
    async def main():
        swarm = await swarm_of(make_swarm, spec_of(tiny_spec))
        driver = swarm.drivers[name]
        before = driver.advert().memory_bytes
        runtime = made(swarm)[name]
        assert isinstance(runtime, StageRuntime)
        refusing = Refusing(runtime, kind, since=3, times=10**9, error=ERRORS[0])
        await swarm.until(lambda: driver.heartbeat().shortages > 0)
        assert driver.advert().memory_bytes == 15 * runtime.num_parameters < 0.75 * before
        await asyncio.sleep(0.5)
        tried = refusing.calls
        assert min(other.replica.version for other in swarm.drivers.values()) < STEPS, "the run is over"
        stages = [[other for other in names if other != name] for names in STAGES]
        swarm.obey(stages, not_started=False, spares=(name,))
        await swarm.until_step(STEPS)
        await swarm.until(lambda: driver.replica is None)
        assert kind == "step" or refusing.calls == tried, "nothing is tried while it waits for the plan"
        assert swarm.losses == pytest.approx(expected(swarm), abs=1e-4)
        for commits in swarm.commits.values():
            assert all(report.microbatches == swarm.spec.training.microbatches_per_step for report in commits.values())
        await swarm.close()
        assert swarm.world.failures == []

    run(main())


@pytest.mark.sim
def test_who_is_alone_with_its_stage_tries_again_after_a_while(make_swarm, tiny_spec):
    async def main():
        swarm = await swarm_of(make_swarm, spec_of(tiny_spec))
        Refusing(made(swarm)["2.0"], "loss", since=3, times=4, error=ERRORS[1])
        await swarm.until_step(STEPS)
        assert swarm.drivers["2.0"].heartbeat().shortages == 2
        assert swarm.losses == pytest.approx(expected(swarm), abs=1e-4)
        await swarm.close()
        assert swarm.world.failures == []

    run(main())
