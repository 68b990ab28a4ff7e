"""Whole nodes, peer and coordination together, in virtual time: what `shoal demo` does, without processes."""

import msgspec
import pytest
from sim_swarm import SimSwarm
from single_process import train
from tiny_run import tiny_corpus, tiny_spec

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Allocator
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec


@pytest.fixture
def spec() -> RunSpec:
    return tiny_spec(steps=30, peers=6, term_s=5.0)


def make_swarm(spec: RunSpec, *, seed: int = 0, allocator: Allocator | None = None) -> SimSwarm:
    """`n0` is the owner."""
    network = uniform(latency_s=0.02, rate_bytes_per_s=1e7)
    return SimSwarm(spec, tiny_corpus(), seed=seed, network=network, allocator=allocator)


@pytest.mark.sim
def test_a_swarm_elects_hands_over_trains_like_one_process_and_ends(spec: RunSpec) -> None:
    async def main() -> SimSwarm:
        swarm = make_swarm(spec)
        for number in range(6):
            await swarm.add(f"n{number}")
        await swarm.end()
        return swarm

    swarm = run(main())
    single = [step.loss for step in train(spec, swarm.corpus, steps=30)]
    assert sorted(swarm.steps) == list(range(30))
    losses = [swarm.steps[step].loss for step in range(30)]
    assert max(abs((a or 0.0) - b) for a, b in zip(losses, single, strict=True)) < 1e-4
    assert len({step.term for step in swarm.steps.values()}) > 1, "the role never moved"
    validated = {step.validation.step for step in swarm.steps.values() if step.validation}
    assert validated >= {0, 10, 20}  # that of the last version may come after the last step was told
    assert sum(step.duplicates + step.given_up for step in swarm.steps.values()) == 0


@pytest.mark.sim
@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_host_leaves_a_newcomer_finds_the_run_and_works(spec: RunSpec, at_the_end: bool) -> None:
    """Without the text the host is not of the first stage: what the stage before sends after its drain must not count
    as done there. The allocator gives everybody a place, whether that makes the run quicker or not."""
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=150))

    async def main() -> None:
        swarm = make_swarm(spec, allocator=GreedyAllocator())
        for number in range(6):
            await swarm.add(f"n{number}", has_text=not at_the_end or number > 0)
        await swarm.until(lambda: len(swarm.steps) > 5)
        await swarm.leave("n0")
        await swarm.add("late")
        await swarm.until(lambda: swarm.stage_of("late") is not None)
        seen = len(swarm.steps)
        await swarm.until(lambda: len(swarm.steps) > seen + 5)
        status = await swarm.nodes["late"].status()
        assert {peer.name for peer in status.peers if peer.stage is not None} == {f"n{i}" for i in range(1, 6)} | {
            "late"
        }
        await swarm.end()
        assert max(swarm.steps) == 149

    run(main())


@pytest.mark.sim
def test_a_peer_without_the_text_is_not_at_the_first_stage(spec: RunSpec) -> None:
    async def main() -> None:
        swarm = make_swarm(spec)
        for number in range(6):
            await swarm.add(f"n{number}", has_text=number == 0)
        await swarm.until(lambda: len(swarm.steps) > 5)
        assert {name: swarm.stage_of(name) for name in swarm.nodes if swarm.stage_of(name) == 0} == {"n0": 0}
        await swarm.end()

    run(main())


@pytest.mark.sim
def test_one_seed_is_one_history(spec: RunSpec) -> None:
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=4))

    def trace(seed: int) -> str:
        async def main() -> str:
            swarm = make_swarm(spec, seed=seed)
            for number in range(6):
                await swarm.add(f"n{number}")
            await swarm.end()
            return swarm.world.trace_hash()

        return run(main())

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


@pytest.mark.sim
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_peer_that_runs_out_of_memory_in_a_step_is_given_less(spec: RunSpec, kind: str) -> None:
    """An allocator that refuses every job of that kind with as many layers; with fewer the peer works on."""
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=60))

    async def main() -> SimSwarm:
        swarm = make_swarm(spec, allocator=GreedyAllocator())
        for number in range(6):
            await swarm.add(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) > 5)
        short = next(f"n{n}" for n in range(1, 6) if swarm.stage_of(f"n{n}") == 1)
        driver = swarm.nodes[short].peer
        assert driver.replica is not None
        full = driver.replica.runtime

        def refuse(*_: object, **__: object) -> None:
            raise MemoryError

        setattr(full, kind, refuse)
        began_s = swarm.world.now_s()
        await swarm.until(lambda: driver.replica is None or driver.replica.runtime is not full)
        assert swarm.world.now_s() - began_s < 2 * spec.swarm.term_s
        assert driver.replica is None or driver.replica.runtime.num_parameters < full.num_parameters
        status = await swarm.nodes[short].status()
        assert [peer.name for peer in status.peers if peer.shortages] == [short]
        await swarm.end()
        return swarm

    swarm = run(main())
    single = [step.loss for step in train(spec, swarm.corpus, steps=60)]
    losses = [swarm.steps[step].loss for step in range(60)]
    assert max(abs((a or 0.0) - b) for a, b in zip(losses, single, strict=True)) < 1e-4
    assert sum(step.duplicates + step.given_up for step in swarm.steps.values()) == 0
