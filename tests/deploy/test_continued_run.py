"""Whole nodes in virtual time that go on with a run past its end: what comes of it is what one longer run gives."""

from typing import Any

import msgspec
import pytest
from sim_swarm import SimSwarm
from single_process import train
from tiny_run import tiny_corpus, tiny_spec

from shoal.deploy.state.spec_record import seal_spec
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import ContinuedSpec, RunSpec, continued_spec

pytestmark = pytest.mark.sim

STEPS, LONGER = 8, 16
PEERS = 3


def spec_of(steps: int, schedule: Any = "constant") -> RunSpec:
    """Synchronous, and nothing is rounded on the wire."""
    spec = tiny_spec(steps=steps, peers=PEERS, term_s=5.0)
    optimizer = msgspec.structs.replace(spec.optimizer, schedule=schedule)
    return msgspec.structs.replace(spec, optimizer=optimizer)


def make_swarm(spec: RunSpec) -> SimSwarm:
    """`n0` is the owner."""
    return SimSwarm(spec, tiny_corpus(), seed=0, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))


def again(swarm: SimSwarm, *numbers: int) -> None:
    """Processes that have ended are started again."""
    for number in numbers:
        name = f"n{number}"
        swarm.world.crash(swarm.world.peers[name])  # of what has ended nothing is left but its disk
        swarm.launch(name)


def losses(swarm: SimSwarm, spec: RunSpec) -> list[float]:
    assert sorted(swarm.steps) == list(range(spec.training.steps))
    return [swarm.steps[step].loss or 0.0 for step in range(spec.training.steps)]


def same(some: list[float], others: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(some, others, strict=True)) < 1e-6


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_that_is_continued_is_one_longer_run(schedule: str) -> None:
    first = spec_of(STEPS, schedule)
    longer = continued_spec(first, spec_of(LONGER, schedule), at=STEPS)

    async def main() -> SimSwarm:
        swarm = make_swarm(first)
        for number in range(PEERS):
            await swarm.add(f"n{number}")
        await swarm.end()
        assert max(swarm.steps) == STEPS - 1
        swarm.spec = longer
        again(swarm, 2, 1, 0)
        await swarm.end()
        return swarm

    swarm = run(main())
    found = losses(swarm, longer)
    assert same(found, [step.loss for step in train(longer, swarm.corpus, steps=LONGER)])
    at_once = [step.loss for step in train(spec_of(LONGER, schedule), swarm.corpus, steps=LONGER)]
    assert same(found, at_once) == (schedule == "constant"), "a cosine depends on the end that was planned"


def test_peers_that_are_up_go_over_to_the_new_revision_as_they_hear_of_it() -> None:
    """The host comes back with a higher number of steps while the others still train towards the old one."""
    first = spec_of(12)

    async def main() -> tuple[SimSwarm, RunSpec]:
        swarm = make_swarm(first)
        for number in range(PEERS):
            await swarm.add(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) > 4)
        await swarm.leave("n0")
        at = 1 + max(swarm.steps)
        swarm.spec = continued_spec(first, spec_of(LONGER), at=at)
        before = {name: swarm.nodes[name] for name in ("n1", "n2")}
        again(swarm, 0)
        await swarm.until(lambda: {"n0", "n1", "n2"} <= swarm.nodes.keys())
        await swarm.until(lambda: all(swarm.nodes.get(name, before[name]) is not before[name] for name in before))
        assert {node.spec.revision for node in swarm.nodes.values()} == {1}
        await swarm.end()
        return swarm, swarm.spec

    swarm, spec = run(main())
    assert same(losses(swarm, spec), [step.loss for step in train(spec_of(LONGER), swarm.corpus, steps=LONGER)])


def test_a_peer_that_has_only_seen_the_old_revision_ends_with_the_new_one() -> None:
    """The directory has a copy of the old spec alone when the volunteer looks: the host's new one is not there yet."""
    first = spec_of(STEPS)
    longer = continued_spec(first, spec_of(LONGER), at=STEPS)

    async def main() -> None:
        swarm = make_swarm(first)
        for number in range(PEERS):
            await swarm.add(f"n{number}")
        await swarm.end()
        again(swarm, 1, 2)  # they begin by the old revision: the owner's new one is on no disk but its own
        await swarm.until(lambda: {"n1", "n2"} <= swarm.nodes.keys())
        assert {swarm.nodes[name].spec.revision for name in ("n1", "n2")} == {0}
        swarm.spec = longer
        again(swarm, 0)
        await swarm.end()
        assert sorted(swarm.steps) == list(range(LONGER))

    run(main())


def test_the_owners_record_is_the_same_each_time_it_is_sealed() -> None:
    """Or each start of the host would be a record of its own."""
    swarm = make_swarm(spec_of(STEPS))
    owner = swarm.world.identity("n0")
    spec = msgspec.structs.replace(spec_of(STEPS), continued=(ContinuedSpec(at=1, steps=STEPS),))
    assert seal_spec(owner, spec) == seal_spec(owner, spec)
