"""What comes before a replica has weights, or after it has drained, is not computed, whoever sends it."""

import pytest
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.peer.replica.events import DrainBegun, Drained
from shoal.protocol.messages import Activation
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

pytestmark = pytest.mark.sim


def test_an_activation_before_there_are_weights_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the fuzzer: it was run, and the process ended with an AssertionError."""

    async def scenario() -> None:
        swarm = SimSwarm(tiny_spec(steps=1000, peers=2, stages=2), tiny_corpus(), seed=1, network=uniform(0.01))
        for name in "ab":
            swarm.launch(name)
        await swarm.until(lambda: len(swarm.steps) > 1)
        node = next(node for node in swarm.nodes.values() if node.peer.replica and node.peer.replica.stage == 1)
        sender = next(other.peer_id for other in swarm.nodes.values() if other is not node)
        replica = node.peer.replica
        assert replica is not None
        pipeline, runtime = replica.core.pipeline, replica.runtime
        # Not runnable: it would be held.
        early = Activation(stage=1, incarnation=0, step=replica.version + 900, index=0)
        payload = bytes(2 * 32 * 32 * 4 + 2 * 32 * 4)
        held = pipeline.num_waiting
        state, runtime.state = runtime.state, None
        await replica._on_activation(sender, early, payload)
        assert pipeline.num_waiting == held
        runtime.state = state
        await replica._on_activation(sender, early, payload)
        assert pipeline.num_waiting == held + 1, "with weights it waits for its step"
        replica.handle(DrainBegun())
        replica.handle(Drained())
        late = Activation(stage=1, incarnation=0, step=replica.version + 900, index=1)
        await replica._on_activation(sender, late, payload)
        assert pipeline.num_waiting == held + 1, "its mates count a drained replica no more"

    run(scenario())
