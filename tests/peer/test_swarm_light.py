"""A newcomer on a slow line computes with its group's weights before its state is whole."""

from types import SimpleNamespace

import msgspec
import pytest

from shoal.peer import light
from shoal.peer.handoff.server import TRAINED
from shoal.protocol.messages import StateChunkRequest
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import LinkSpec, uniform

HOLDERS = ["b", "c", "d"]
STEPS = 24
SLOW_BYTES_PER_S = 3e3
"""To the newcomer from each holder. State: 0.6 MB in all, weights in bf16 a sixth of that."""


def slow_down(swarm, name, *, rate=SLOW_BYTES_PER_S):
    """What others send to it is slow."""
    for other in swarm.drivers:
        if other != name:
            link = LinkSpec(latency_s=0.05, rate_bytes_per_s=rate)
            swarm.world.set_link(swarm.peer(other), swarm.peer(name), link)


def play(make_swarm, tiny_spec, scene, *, steps=STEPS, s_max=1, **training):
    """One stage has `HOLDERS` with a step behind it; `scene` lets a newcomer come."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": steps, "validation_interval_steps": 0, "s_max": s_max, **training}
    builtins["wire"] = {"gradients": "hadamard4"}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for name in HOLDERS:
            await swarm.add(name, device_flop_per_s=1e6)
        swarm.obey([HOLDERS], fresh=True)
        await swarm.until_step(1)
        await scene(swarm)
        await swarm.until_step(steps)
        assert not any(driver.failure.done() for driver in swarm.drivers.values())
        await swarm.close()
        return swarm

    return run(main())


def remember(replica):
    """Returns: version -> its parameters in bf16, by layer, of every state that a replica comes to."""
    versions = {}
    stepped = replica.stepped

    def noted(state, digest, skipped):
        versions[state.version] = {key: layer.param_N.bfloat16() for key, layer in state.layers.items()}
        stepped(state, digest, skipped)

    replica.stepped = noted
    return versions


async def newcomer_comes(swarm, stages=None):
    """A newcomer that is first by rank. Returns: what it has asked for, and the weights that it has computed with."""
    await swarm.add("e", device_flop_per_s=1e6)
    slow_down(swarm, "e")
    driver = swarm.drivers["e"]
    seen = SimpleNamespace(ranges=[], weights=[], driver=driver)
    ask = driver._endpoint.ask

    def noted(peer, message, expect, **options):
        if isinstance(message, StateChunkRequest):
            seen.ranges.append(message)
        return ask(peer, message, expect, **options)

    driver._endpoint.ask = noted
    swarm.obey(stages or [["e", *HOLDERS]], fresh=False)
    await swarm.until(lambda: driver.replica is not None)
    take = driver.replica._light._take

    def taken(weights):
        seen.weights.append(weights)
        take(weights)

    driver.replica._light._take = taken
    return seen


@pytest.fixture(autouse=True)
def tiny_states_are_not_small(monkeypatch):
    monkeypatch.setattr(light, "_SMALL_BYTES", 0)


@pytest.mark.sim
def test_a_newcomer_computes_with_its_mates_weights_until_its_state_is_theirs(make_swarm, tiny_spec):
    found = SimpleNamespace()

    async def scene(swarm):
        found.versions = remember(swarm.drivers["b"].replica)
        found.seen = seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        await swarm.until(lambda: newcomer.is_open)
        assert (newcomer.is_ready, newcomer.is_light, newcomer.state) == (True, True, None)
        assert not seen.driver.heartbeat().synced
        assert all(request.stored_era != TRAINED for request in seen.ranges), "weights come before anything else"
        assert mate.core.group.lead != swarm.peer("e").peer_id, "who is light does not lead, whatever its rank"
        found.light_from = newcomer.version
        await swarm.until(lambda: not newcomer.is_light)
        found.whole_at = newcomer.version
        assert seen.driver.heartbeat().synced
        assert newcomer is seen.driver.replica
        await swarm.until(lambda: newcomer.version == mate.version > found.whole_at)
        assert newcomer.state.digest() == mate.state.digest()

    swarm = play(make_swarm, tiny_spec, scene)
    while_light = [swarm.commits[0][step] for step in range(found.light_from + 1, found.whole_at)]
    assert len(while_light) >= 3
    assert {commit.members for commit in while_light} == {4}
    commits = [swarm.commits[0][step] for step in range(STEPS)]
    assert {(c.microbatches, c.duplicates, c.given_up, c.dissenting) for c in commits} == {(6, 0, 0, 0)}
    weights = [each for each in found.seen.weights if each.version in found.versions]
    assert len(weights) >= 3
    for each in weights:
        for key, param_N in each.params.items():
            assert param_N.equal(found.versions[each.version][key]), f"{key} at version {each.version}"
    whole = [(r.layer, r.tensor, r.start) for r in found.seen.ranges if r.stored_era == TRAINED]
    assert len(whole) == len(set(whole)), "nothing of the state is fetched twice"
    assert any(r.base >= 0 for r in found.seen.ranges), "weights of a next version come as a difference"
