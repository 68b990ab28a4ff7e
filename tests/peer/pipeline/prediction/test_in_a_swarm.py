"""Every strategy under the real drivers: what it does to weights and gradients, the members of a group stay one."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shoal.peer.pipeline.prediction import COMPENSATIONS
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec

STEPS = 6
STAGES = [["a", "b"], ["c", "d", "e"]]


@pytest.mark.sim
@pytest.mark.parametrize("name", COMPENSATIONS)
def test_members_are_bit_equal_at_every_commit_and_the_run_learns(
    make_swarm: Callable[..., Any], tiny_spec: RunSpec, name: str
) -> None:
    training = msgspec.structs.replace(
        tiny_spec.training, compensation=name, s_max=2, microbatches_per_step=4, steps=STEPS
    )
    spec = msgspec.structs.replace(tiny_spec, training=training)

    async def main() -> Any:
        swarm = make_swarm(spec, seed=1, network=uniform(latency_s=0.1, rate_bytes_per_s=1e7))
        for names in STAGES:
            for peer in names:
                await swarm.add(peer, device_flop_per_s=2e8)
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(STEPS)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    swarm = run(main())
    for names in STAGES:
        states = [swarm.drivers[peer].replica.runtime.state for peer in names]
        assert {state.version for state in states} == {STEPS}
        assert len({state.digest() for state in states}) == 1
    commits = [swarm.commits[stage][step] for stage in range(2) for step in range(STEPS)]
    assert not any(commit.dissenting for commit in commits)
    assert max(commit.staleness_steps_mean for commit in commits) > 0, (
        "nothing was stale: the strategy had nothing to do"
    )
    assert swarm.losses[-1] < swarm.losses[0]
