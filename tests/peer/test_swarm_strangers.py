"""What anybody in the run may send ends no peer and stops no stage."""

import asyncio
import math

import msgspec
import pytest
import torch

from shoal.peer.data.labels import Labels
from shoal.peer.group import reductions
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.replica.microbatch_queue import MicrobatchQueue
from shoal.protocol.errors import Refused
from shoal.protocol.messages import (
    Activation,
    Again,
    Claim,
    Digest,
    Done,
    Gradient,
    Grant,
    Halt,
    PresenceUpdate,
    Progress,
    Reject,
    Repair,
    RoundMember,
    RoundStart,
    Save,
    StateOffer,
    StateRequest,
    ValidationResult,
)
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STAGES = [["0.0", "0.1"], ["1.0", "1.1"]]


def play(make_swarm, tiny_spec, scene, *, steps=6):
    """`scene` gets a swarm of two stages with a step behind it, and a peer that is in no plan. It must train on."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": steps, "validation_interval_steps": 0}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for names in [*STAGES, ["stranger"]]:
            for name in names:
                await swarm.add(name)
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(1)
        await scene(swarm)
        began_s = swarm.world.now_s()
        await swarm.until_step(6)
        assert swarm.world.now_s() < began_s + 30.0
        assert not any(driver.failure.done() for driver in swarm.drivers.values())
        await swarm.close()

    run(main())


async def is_refused(swarm, source, target, message):
    endpoint = swarm.drivers[source].services.endpoint
    with pytest.raises(Refused):
        await swarm.peer(source).spawn(endpoint.ask(swarm.peer(target).peer_id, message, Done))


@pytest.mark.sim
@pytest.mark.parametrize("step", [-1, 6, 2**62])
def test_a_repair_of_a_step_that_the_run_has_not_is_refused(make_swarm, tiny_spec, step):
    async def scene(swarm):
        leads = [name for name in STAGES[0] if swarm.drivers[name].replica.core.group.is_leader]
        await is_refused(swarm, "stranger", leads[0], Repair(step=step, indices=b"\x01"))

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_only_the_lead_says_what_runs_again(make_swarm, tiny_spec):
    async def scene(swarm):
        first = swarm.drivers[STAGES[0][0]].replica.core.group
        leader, mate = STAGES[0] if first.is_leader else STAGES[0][::-1]
        step = swarm.drivers[mate].replica.version
        for source, target in (("stranger", mate), ("stranger", leader), (mate, leader), ("1.1", mate)):
            await is_refused(swarm, source, target, Again(items=((step, 0),)))
        for item in ((step, 2**40), (step, -1), (900, 0)):
            await is_refused(swarm, leader, mate, Again(items=(item,)))

    play(make_swarm, tiny_spec, scene, steps=1000)


@pytest.mark.sim
@pytest.mark.parametrize("source", ["stranger", "1.1"])
@pytest.mark.parametrize("bandwidths", [(), (0.0, 0.0), (1.0, math.nan), (1.0, 1.0)])
def test_a_round_that_would_stop_its_stage_is_refused(make_swarm, tiny_spec, source, bandwidths):
    async def scene(swarm):
        core = swarm.drivers["1.0"].replica.core.group
        members = tuple(
            RoundMember(swarm.peer(name).peer_id, bandwidth, b"")
            for name, bandwidth in zip(STAGES[1], bandwidths, strict=False)
        )
        start = RoundStart(
            stage=1,
            step=core.version,
            attempt=2**60 if math.prod(bandwidths) == 1.0 else 2**40,
            members=members,
            duplicates=0,
            given_up=0,
            loss_sum=0.0,
            staleness_sum=0,
        )
        await is_refused(swarm, source, "1.0", start)

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
@pytest.mark.parametrize("item", [(0, 2**50), (-1, 0), (7, 0), (0, -(2**50))])
def test_who_is_granted_what_the_run_has_not_claims_on(make_swarm, tiny_spec, item):
    granted = []

    async def scene(swarm):
        first = swarm.drivers[STAGES[0][0]].replica.core.group
        leader, mate = STAGES[0] if first.is_leader else STAGES[0][::-1]
        honest = swarm.drivers[leader].replica._on_claim

        async def lies_once(source, message):
            if source == swarm.peer(mate).peer_id:
                granted.append(item)
                if len(granted) == 1:
                    return Grant(items=(item,))
            return await honest(source, message)

        swarm.drivers[leader].services.endpoint.on(Claim, lies_once)
        await swarm.until(lambda: len(granted) > 1)

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_a_bug_in_the_supply_is_heard(make_swarm, tiny_spec, monkeypatch):
    def broken(queue, grant, now_s):
        raise RuntimeError("a bug")

    async def main():
        swarm = make_swarm(tiny_spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        driver = await swarm.add("0.0", device_flop_per_s=1e8)
        swarm.obey([["0.0"]], not_started=True)
        await swarm.until_step(1)
        monkeypatch.setattr(MicrobatchQueue, "_take_grant", broken)
        async with asyncio.timeout(60.0):
            with pytest.raises(RuntimeError, match="a bug"):
                await driver.failure
        await swarm.close()

    run(main())


@pytest.mark.sim
@pytest.mark.parametrize("group", [0, 1])
def test_a_stranger_that_says_it_drains_is_no_mate_and_nobody_waits_for_it(make_swarm, tiny_spec, group):
    presence = PresenceUpdate(
        incarnation=1, plan_sequence=1, stage=group, version=1, ready=True, is_open=False, draining=True
    )

    async def scene(swarm):
        for name in STAGES[group]:
            await is_refused(swarm, "stranger", name, presence)
            core = swarm.drivers[name].replica.core.group
            assert swarm.peer("stranger").peer_id not in core.holders
            assert swarm.peer("stranger").peer_id not in dict(swarm.drivers[name].services.neighbours.words())

    play(make_swarm, tiny_spec, scene, steps=8)


@pytest.mark.sim
def test_digests_of_a_stranger_are_not_kept(make_swarm, tiny_spec):
    async def scene(swarm):
        endpoint = swarm.drivers["stranger"].services.endpoint
        for version in range(100, 400):
            word = Digest(stage=1, version=version, digest="d" * 64)
            await swarm.peer("stranger").spawn(endpoint.ask(swarm.peer("1.0").peer_id, word, Done))
        kept = swarm.drivers["1.0"].replica.core.group._agreement._digests
        assert max(kept) < 100

    play(make_swarm, tiny_spec, scene, steps=8)


@pytest.mark.sim
def test_digests_of_a_mate_are_kept_of_a_few_versions(make_swarm, tiny_spec):
    async def scene(swarm):
        endpoint, target = swarm.drivers["1.1"].services.endpoint, swarm.peer("1.0").peer_id
        for version in range(10**6, 10**6 + 100):
            word = Digest(stage=1, version=version, digest="d" * 32)
            await swarm.peer("1.1").spawn(endpoint.ask(target, word, Done))
        await is_refused(swarm, "1.1", "1.0", Digest(stage=1, version=2, digest="d" * 10**5))
        core = swarm.drivers["1.0"].replica.core.group
        assert sum(swarm.peer("1.1").peer_id in said for said in core._agreement._digests.values()) <= 32

    # It says that it is far ahead, so its mate asks it for what it has not: this is about memory alone.
    play(make_swarm, tiny_spec, scene, steps=8)


@pytest.mark.sim
def test_an_activation_from_no_neighbour_is_neither_learnt_from_nor_answered(make_swarm, tiny_spec):
    gradients = []

    async def scene(swarm):
        stranger, target = swarm.drivers["stranger"].services.endpoint, swarm.drivers["1.0"].replica

        async def got(source, meta, payload):
            gradients.append(meta)

        swarm.peer("stranger").context().run(stranger.on_frame, Gradient, got)
        wire = ActivationWire(swarm.spec)
        training, model = swarm.spec.training, swarm.spec.model
        x_BTD = torch.ones(training.microbatch_size, model.context, model.dim)
        payload = wire.encode_activation(x_BTD, Labels(targets_BT=torch.zeros(x_BTD.shape[:2], dtype=torch.int64)))
        for index in range(training.microbatches_per_step):
            meta = Activation(stage=1, incarnation=0, step=target.version + 1, index=index)
            send = stranger.send(swarm.peer("1.0").peer_id, meta, payload, priority=Priority.ACTIVATION)
            await swarm.peer("stranger").spawn(send)
        await swarm.until_step(5)

    play(make_swarm, tiny_spec, scene, steps=8)
    assert gradients == []


@pytest.mark.sim
def test_a_gradient_from_whom_the_microbatch_did_not_go_to_replaces_nothing(make_swarm, tiny_spec):
    found = []

    async def scene(swarm):
        stranger, target = swarm.drivers["stranger"].services.endpoint, swarm.drivers["0.0"].replica
        training, model = swarm.spec.training, swarm.spec.model
        payload = bytes(4 * training.microbatch_size * model.context * model.dim)

        async def forge(microbatch):
            meta = Gradient(stage=0, step=microbatch.step, index=microbatch.index, loss=0.0, waited_s=0.0, commit_s=0.0)
            await stranger.send(swarm.peer("0.0").peer_id, meta, payload, priority=Priority.GRADIENT)

        for _ in range(200):
            for microbatch in list(target.core.pipeline._flights):
                await swarm.peer("stranger").spawn(forge(microbatch))
            await asyncio.sleep(0.01)
            kept = (
                payloads.gradient for payloads in target.activations._payloads.values() if payloads.gradient is not None
            )
            found.extend(gradient for gradient in kept if bytes(gradient) == payload)

    play(make_swarm, tiny_spec, scene, steps=60)
    assert found == []


@pytest.mark.sim
@pytest.mark.parametrize(
    "message",
    [
        Claim(count=5),
        Halt(at_once=True),
        Repair(step=2, indices=b"\x01"),
        Reject(stage=0, items=((2, 0, False),)),
        ValidationResult(step=2, index=0, loss=0.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_lead_of_stage_0_supplies_and_believes_holders_alone(make_swarm, tiny_spec, message):
    async def scene(swarm):
        leads = [name for name in STAGES[0] if swarm.drivers[name].replica.core.group.is_leader]
        await is_refused(swarm, "stranger", leads[0], message)
        assert swarm.drivers[leads[0]].replica.core._queue.halts == ()

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
@pytest.mark.parametrize("message", [Halt(at_once=True), Save(version=2)], ids=lambda message: type(message).__name__)
def test_nobody_stands_still_or_saves_for_a_neighbour_that_has_said_that_it_stays(make_swarm, tiny_spec, message):
    async def scene(swarm):
        leads = [name for name in STAGES[0] if swarm.drivers[name].replica.core.group.is_leader]
        for source in {*STAGES[0], *STAGES[1]}.difference(leads):
            await is_refused(swarm, source, leads[0], message)
        assert swarm.drivers[leads[0]].replica.core._queue.halts == ()

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_what_a_stranger_says_it_has_made_is_still_handed_out(make_swarm, tiny_spec):
    async def scene(swarm):
        endpoint, training = swarm.drivers["stranger"].services.endpoint, swarm.spec.training
        made = ((1 << training.microbatches_per_step) - 1).to_bytes(1, "little")
        for step in range(1, training.steps):
            word = Progress(
                incarnation=1,
                count=step,
                stage=0,
                step=step,
                indices=made,
                leader="",
                claimed=made,
                loss_sum=0.0,
                staleness_sum=0,
            )
            for name in STAGES[0]:
                await swarm.peer("stranger").spawn(endpoint.ask(swarm.peer(name).peer_id, word, Done))

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
def test_who_asks_for_one_version_again_and_again_keeps_a_few_gradients(make_swarm, tiny_spec, monkeypatch):
    monkeypatch.setattr(reductions, "REPLAYED_BYTES_MAX", 0)
    monkeypatch.setattr(reductions, "REPLAYED_STEPS_MIN", 3)
    kept = []

    async def scene(swarm):
        replica, endpoint = swarm.drivers["1.0"].replica, swarm.drivers["0.0"].services.endpoint
        keys, target = replica.runtime.keys, swarm.peer("1.0").peer_id

        async def ask(version):
            return await endpoint.ask(target, StateRequest(layers=keys, version=version), StateOffer)

        pinned = (await swarm.peer("0.0").spawn(ask(-1))).version
        for step in range(pinned + 1, pinned + 12):
            await swarm.until_step(step)
            await swarm.peer("0.0").spawn(ask(pinned))
            kept.append(len(replica.reductions.means))
        assert swarm.drivers["1.0"].server.pinned_from() == pinned

    play(make_swarm, tiny_spec, scene, steps=20)
    assert max(kept) <= 4
