"""Newcomers that join a group at the same time, while it trains, fetch its state from each other too."""

import msgspec
import pytest

from shoal.peer.handoff.server import TRAINED
from shoal.peer.membership import learner
from shoal.protocol.messages import StateChunk
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import LinkSpec, uniform

NEWCOMERS = ["b", "c", "d", "e", "f"]
STEPS = 30
FLOP_PER_S = 1e6
SLOW_BYTES_PER_S = 1e5
"""From the holder to each newcomer. State: 0.6 MB."""


def sent_by_the_holder(make_swarm, tiny_spec):
    """Five newcomers come to a group of one. Returns: (the numbers of the state that the holder has sent, divided by
    those that it has; seconds until all newcomers have the state; what heartbeats said that they fetch)."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": STEPS, "validation_interval_steps": 0, "s_max": 1}
    builtins["wire"] = {"gradients": "hadamard4"}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
        await swarm.add("a", device_flop_per_s=FLOP_PER_S)
        swarm.obey([["a"]], not_started=True)
        await swarm.until_step(1)
        holder, sent = swarm.drivers["a"], []
        send = holder.services.endpoint.send

        def noted(peer, message, payload, **options):
            if isinstance(message, StateChunk) and message.stored_era == TRAINED:
                sent.append(len(payload) // 4)
            return send(peer, message, payload, **options)

        holder.services.endpoint.send = noted
        for name in NEWCOMERS:
            await swarm.add(name, device_flop_per_s=FLOP_PER_S)
            link = LinkSpec(latency_s=0.02, rate_bytes_per_s=SLOW_BYTES_PER_S)
            swarm.world.set_link(swarm.peer("a"), swarm.peer(name), link)
        came_s = swarm.world.now_s()
        swarm.obey([["a", *NEWCOMERS]], not_started=False)
        fetches = []

        def are_whole():
            beats = [swarm.drivers[name].heartbeat() for name in NEWCOMERS]
            fetches.extend(beat.fetch for beat in beats if beat.fetch is not None)
            return all(beat.synced for beat in beats)

        await swarm.until(are_whole)
        newcomers = {swarm.peer(name).identity.peer_id for name in NEWCOMERS}
        assert any(newcomers.intersection(fetch.sources) for fetch in fetches), "heartbeats name the senders"
        assert all(0 <= fetch.left_bytes <= fetch.total_bytes for fetch in fetches)
        assert all(swarm.drivers[name].heartbeat().fetch is None for name in NEWCOMERS)
        took_s = swarm.world.now_s() - came_s
        await swarm.until_step(STEPS)
        assert not any(driver.failure.done() for driver in swarm.drivers.values())
        digests = {driver.replica.state.digest() for driver in swarm.drivers.values()}
        assert len(digests) == 1
        numel = 3 * holder.replica.runtime.num_parameters
        await swarm.close()
        return sum(sent) / numel, took_s, {fetch.what for fetch in fetches}

    return run(main())


@pytest.mark.sim
def test_the_state_leaves_its_holder_about_once(make_swarm, tiny_spec):
    times, took_s, whats = sent_by_the_holder(make_swarm, tiny_spec)
    assert times <= 1.3
    assert whats == {"state"}
    assert took_s < 20.0


@pytest.mark.sim
def test_the_layers_of_learners_leave_their_holder_less_than_half_as_often(make_swarm, tiny_spec, monkeypatch):
    """Five times without sharing. A layer has only three ranges here, and learners do not begin it at the same moment:
    the ranges of one that has not begun are asked of the holder."""
    monkeypatch.setattr(learner, "_SMALL_BYTES", 0)
    monkeypatch.setattr(learner, "LIGHT_STATE_S", 0.0)
    times, _, whats = sent_by_the_holder(make_swarm, tiny_spec)
    assert times <= 2.1
    assert whats == {"weights", "state while training"}
