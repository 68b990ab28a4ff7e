"""A newcomer fetches what most holders have signed, whatever one of them claims."""

from dataclasses import replace

import msgspec
import pytest

from shoal.peer.handoff.server import TRAINED
from shoal.protocol.certificate import root_of, state_body
from shoal.protocol.errors import Refused
from shoal.protocol.messages import Attestation, Done, StateOffer, StateRequest
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

HOLDERS = ["b", "c", "d"]


def play(make_swarm, tiny_spec, scene, *, holders=HOLDERS, experts=0, steps=14):
    """Stage 1 has `holders` with two steps behind it, of which the last lies; `scene` lets newcomers come."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["model"]["num_experts"] = experts
    builtins["training"] |= {"steps": steps, "validation_interval_steps": 0}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for name in ["a", *holders]:
            await swarm.add(name, device_flop_per_s=1e8)
        swarm.obey([["a"], holders], not_started=True)
        await swarm.until_step(2)
        await scene(swarm)
        await swarm.until_step(steps)
        assert not any(driver.failure.done() for driver in swarm.drivers.values())
        await swarm.close()
        return swarm

    return run(main())


def forged(state, *, ahead):
    layers = {key: replace(layer, param_N=layer.param_N + 1.0) for key, layer in state.layers.items()}
    return replace(state, version=state.version + ahead, layers=layers)


def lie(swarm, name, *, ahead, sign=True):
    """`name` offers newcomers parameters of its own making, of a version that nobody else has come to."""
    driver, endpoint = swarm.drivers[name], swarm.drivers[name].services.endpoint
    server, asked = driver.server, []

    async def offer(source, message):
        if message.version >= 0 and (TRAINED, message.version) not in server._pins:
            raise Refused(endpoint.peer_id, "has not that version")
        state = forged(driver.replica.state, ahead=ahead)
        made = await server._offer(source, message, (TRAINED, state.version), state.layers)
        body = state_body(era=0, version=state.version, root=root_of(made.digests))
        signature = endpoint.seals.sign_statement(endpoint.identity, "state", run=endpoint.run, body=body)
        asked.append(state.version)
        stolen = [(swarm.peer(other).peer_id, signature) for other in HOLDERS]  # nobody else has signed it
        return msgspec.structs.replace(made, signatures=tuple(stolen) if sign else ())

    swarm.peer(name).context().run(endpoint.on, StateRequest, offer)
    return asked


async def joined(swarm, name, stages, **how):
    await swarm.add(name, device_flop_per_s=1e8)
    swarm.obey(stages, not_started=False, **how)
    await swarm.until(lambda: swarm.drivers[name].heartbeat().synced, timeout_s=60.0)


@pytest.mark.sim
@pytest.mark.parametrize("ahead", [0, 1, 5, 10**6])
@pytest.mark.parametrize("sign", [True, False])
def test_a_holder_that_claims_what_no_other_has_signed_gives_a_newcomer_nothing(make_swarm, tiny_spec, ahead, sign):
    async def scene(swarm):
        asked = lie(swarm, HOLDERS[-1], ahead=ahead, sign=sign)
        await joined(swarm, "e", [["a"], [*HOLDERS, "e"]])
        assert asked, "the liar was never asked"
        newcomer, honest = swarm.drivers["e"].replica, swarm.drivers["b"].replica
        await swarm.until(lambda: newcomer.version == honest.version)
        assert newcomer.state.digest() == honest.state.digest()

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_the_only_holder_is_believed_and_two_newcomers_do_not_wait_for_each_other(make_swarm, tiny_spec):
    async def scene(swarm):
        for name in ("e", "f"):
            await swarm.add(name, device_flop_per_s=1e8)
        began_s = swarm.world.now_s()
        swarm.obey([["a"], ["b", "e", "f"]], not_started=False)
        await swarm.until(lambda: all(swarm.drivers[name].heartbeat().synced for name in "ef"), timeout_s=60.0)
        assert swarm.world.now_s() - began_s < 5.0

    play(make_swarm, tiny_spec, scene, holders=["b"])


@pytest.mark.sim
def test_a_group_whose_members_are_all_ready_signs_and_keeps_nothing(make_swarm, tiny_spec):
    async def scene(swarm):
        await joined(swarm, "e", [["a"], [*HOLDERS, "e"]])
        await swarm.until_step(12)
        for name in (*HOLDERS, "e"):
            witnesses = swarm.drivers[name].replica.witnesses
            assert (witnesses._kept, witnesses._attestations._said) == ({}, {})

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_what_is_not_signed_by_a_member_of_the_group_is_refused(make_swarm, tiny_spec):
    async def scene(swarm):
        target = swarm.peer("b")
        word = Attestation(stage=1, version=2, root="r", signature=b"\0" * 64)
        for name, reason in (("a", "does not know"), ("c", "has not signed")):
            ask = swarm.drivers[name].services.endpoint.ask(target.peer_id, word, Done)
            with pytest.raises(Refused, match=reason):
                await swarm.peer(name).spawn(ask)
        assert swarm.drivers["b"].replica.witnesses._attestations._said == {}

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_who_is_no_newcomer_of_a_group_is_offered_nothing_signed(make_swarm, tiny_spec):
    async def scene(swarm):
        keys = swarm.drivers["b"].replica.runtime.keys
        ask = swarm.drivers["a"].services.endpoint.ask(swarm.peer("b").peer_id, StateRequest(layers=keys), StateOffer)
        offer = await swarm.peer("a").spawn(ask)
        assert offer.signatures == ()

    play(make_swarm, tiny_spec, scene)
