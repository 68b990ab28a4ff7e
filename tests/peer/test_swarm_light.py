"""A newcomer on a slow line computes with its group's weights before its state is whole."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from shoal.peer.group.reductions import STEPS_MAX
from shoal.peer.handoff.fetcher import FetchProgress
from shoal.peer.handoff.server import TRAINED
from shoal.peer.membership import learner
from shoal.peer.model.state import state_bytes
from shoal.protocol.errors import Unreachable
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import GatherPart, StateChunk, StateChunkRequest, StateRequest
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


def play(make_swarm, tiny_spec, scene, *, steps=STEPS, s_max=1, flop_per_s=1e6, **training):
    """One stage has `HOLDERS` with a step behind it; `scene` lets a newcomer come."""
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"steps": steps, "validation_interval_steps": 0, "s_max": s_max, **training}
    builtins["wire"] = {"gradients": "hadamard4"}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for name in HOLDERS:
            await swarm.add(name, device_flop_per_s=flop_per_s)
        swarm.obey([HOLDERS], not_started=True)
        await swarm.until_step(1)
        await scene(swarm)
        await swarm.until_step(steps)
        assert not any(driver.failure.done() for driver in swarm.drivers.values())
        await swarm.close()
        return swarm

    return run(main())


def mate_beats(swarm):
    """What the others say of themselves as light members."""
    return {swarm.drivers[name].heartbeat().light for name in HOLDERS}


def remember(replica):
    """Returns: version -> its parameters in bf16, by layer, of every state that a replica comes to."""
    versions = {}
    stepped = replica.stepped

    def noted(state, digest, skipped):
        versions[state.version] = {key: layer.param_N.bfloat16() for key, layer in state.layers.items()}
        stepped(state, digest, skipped)

    replica.stepped = noted
    return versions


async def newcomer_comes(swarm, stages=None, *, keeps=False):
    """A newcomer that is first by rank. Returns: what it has asked for, the chunks that others have sent it, and the
    weights that it has computed with.

    Args: keeps: it has a disk.
    """
    await swarm.add("e", device_flop_per_s=1e6, keeps=keeps)
    slow_down(swarm, "e")
    driver = swarm.drivers["e"]
    seen = SimpleNamespace(ranges=[], chunks=[], weights=[], driver=driver, is_lost=lambda request: False)
    ask = driver.services.endpoint.ask

    def noted(peer, message, expect, **options):
        if isinstance(message, StateChunkRequest):
            if seen.is_lost(message):
                raise Unreachable(peer, "is gone")
            seen.ranges.append(message)
        return ask(peer, message, expect, **options)

    def sends(send):
        def sent(peer, message, *args, **options):
            if isinstance(message, StateChunk) and peer == driver.services.endpoint.peer_id:
                seen.chunks.append(message)
            return send(peer, message, *args, **options)

        return sent

    driver.services.endpoint.ask = noted
    for name in HOLDERS:
        swarm.drivers[name].services.endpoint.send = sends(swarm.drivers[name].services.endpoint.send)
    swarm.obey(stages or [["e", *HOLDERS]], not_started=False)
    await swarm.until(lambda: driver.replica is not None)
    take = driver.replica._light._take

    def taken(weights):
        seen.weights.append(weights)
        take(weights)

    driver.replica._light._take = taken
    return seen


async def has_the_state_of(swarm, mate, newcomer):
    """While a step ends, a state is already a version ahead of its replica."""

    def are_at_one_version():
        states = mate.state, newcomer.state
        return None not in states and states[0].version == states[1].version

    await swarm.until(are_at_one_version)
    assert newcomer.state.digest() == mate.state.digest()


@pytest.fixture(autouse=True)
def tiny_states_are_not_small(monkeypatch):
    monkeypatch.setattr(learner, "_SMALL_BYTES", 0)


@pytest.mark.sim
def test_a_newcomer_computes_with_its_mates_weights_until_its_state_is_theirs(make_swarm, tiny_spec):
    found = SimpleNamespace()

    async def scene(swarm):
        found.versions = remember(swarm.drivers["b"].replica)
        found.seen = seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        await swarm.until(lambda: newcomer.is_open)
        assert (newcomer.is_ready, newcomer.is_learner, newcomer.state) == (True, True, None)
        assert not seen.driver.heartbeat().synced
        assert (seen.driver.heartbeat().light, mate_beats(swarm)) == ((0, 5), {None})
        found.told, found.progress = set(), []
        assert all(request.stored_era != TRAINED for request in seen.ranges), "weights come before anything else"
        assert mate.core.group.leader != swarm.peer("e").peer_id, "who is light does not lead, whatever its rank"
        found.light_from, found.num_parameters = newcomer.version, newcomer.runtime.num_parameters

        def is_whole():
            found.told.add(seen.driver.heartbeat().light)
            if newcomer.joining.progress is not None:
                found.progress.append(replace(newcomer.joining.progress))
            return not newcomer.is_learner

        await swarm.until(is_whole)
        found.whole_at = newcomer.version
        assert seen.driver.heartbeat().synced
        assert newcomer.joining.progress is None
        assert newcomer is seen.driver.replica
        await swarm.until(lambda: newcomer.version == mate.version > found.whole_at)
        assert newcomer.state.digest() == mate.state.digest()

    swarm = play(make_swarm, tiny_spec, scene)
    assert found.told == {None, *((num, 5) for num in range(5 + 1))}
    whole = [each for each in found.progress if each.what == "state while training"]
    assert whole == sorted(whole, key=lambda each: each.done)
    assert whole[-1].done == whole[-1].total == 3 * found.num_parameters
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


@pytest.mark.sim
def test_what_a_light_member_had_contributed_runs_again_and_counts_once_when_it_dies(make_swarm, tiny_spec):
    async def scene(swarm):
        seen = await newcomer_comes(swarm)
        newcomer = seen.driver.replica
        group = swarm.drivers["b"].replica.core.group
        await swarm.until(lambda: newcomer.is_learner and newcomer.core.group.owes)
        assert swarm.peer("e").peer_id in group.ready_members
        swarm.world.crash(swarm.peer("e"))
        del swarm.drivers["e"]
        swarm.obey([HOLDERS], not_started=False)

    swarm = play(make_swarm, tiny_spec, scene, steps=8)
    commits = [swarm.commits[0][step] for step in range(8)]
    assert {(c.microbatches, c.duplicates, c.given_up, c.dissenting) for c in commits} == {(6, 0, 0, 0)}


@pytest.mark.sim
def test_a_learner_whose_holders_are_a_step_ahead_whenever_they_answer_becomes_whole(make_swarm, tiny_spec):
    """It names the version that it compares: the newest that they have signed would never be its own."""
    compared = []

    def has_signed(replica, version):
        kept = replica.witnesses._kept.get(version)
        return kept is not None and len(replica.witnesses._attestations.signers(version, kept[1])) == len(HOLDERS)

    async def scene(swarm):
        seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        ask = seen.driver.services.endpoint.ask

        async def late(peer, message, expect, **options):
            if isinstance(message, StateRequest) and message.to_compare:
                compared.append(own := newcomer.version)
                await swarm.until(lambda: all(has_signed(swarm.drivers[name].replica, own + 1) for name in HOLDERS))
            return await ask(peer, message, expect, **options)

        seen.driver.services.endpoint.ask = late
        await swarm.until(lambda: not newcomer.is_learner)
        await has_the_state_of(swarm, mate, newcomer)

    play(make_swarm, tiny_spec, scene)
    assert len(set(compared)) == 1


@pytest.mark.sim
def test_a_layer_that_is_not_what_holders_have_signed_comes_again_before_its_holder_is_whole(make_swarm, tiny_spec):
    found = SimpleNamespace()

    async def scene(swarm):
        seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        await swarm.until(lambda: newcomer._light is not None and "embed" in newcomer._light._gathered)
        gathered = newcomer._light._gathered["embed"]
        gathered.layer.moment1_N[0] += 1e-3  # as a holder's lie, or a bit that has tipped over
        await swarm.until(lambda: not newcomer.is_learner)
        await has_the_state_of(swarm, mate, newcomer)
        found.ranges = [r.layer for r in seen.ranges if r.stored_era == TRAINED]

    swarm = play(make_swarm, tiny_spec, scene)
    assert {found.ranges.count(layer) for layer in ("layers.0", "layers.1", "layers.2", "head")} == {3}
    assert found.ranges.count("embed") == 6
    assert {commit.dissenting for commit in swarm.commits[0].values()} == {0}


@pytest.mark.sim
def test_a_layer_whose_holders_were_out_of_reach_half_way_goes_on_where_it_was(make_swarm, tiny_spec):
    found = SimpleNamespace()

    async def scene(swarm):
        seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        lost = set()

        def is_lost(request):
            is_half_way = request.stored_era == TRAINED and request.tensor > 0 and request.layer not in lost
            if is_half_way and newcomer._light._unfinished:
                lost.add(request.layer)
            return is_half_way

        seen.is_lost = is_lost
        await swarm.until(lambda: newcomer.is_learner)
        await swarm.until(lambda: not newcomer.is_learner)
        assert len(lost) == 5
        await has_the_state_of(swarm, mate, newcomer)
        found.chunks = [chunk for chunk in seen.chunks if chunk.stored_era == TRAINED]

    swarm = play(make_swarm, tiny_spec, scene)
    came = [(chunk.layer, chunk.tensor, chunk.start) for chunk in found.chunks]
    assert len(came) == len(set(came)) == 15, "nothing of the state is sent twice"
    for layer in {chunk.layer for chunk in found.chunks}:
        assert len({chunk.version for chunk in found.chunks if chunk.layer == layer}) == 1
    assert {commit.dissenting for commit in swarm.commits[0].values()} == {0}


@pytest.mark.sim
@pytest.mark.parametrize(("away_s", "missed"), [(0.0, {1}), (60.0, {2, 3, 4}), (200.0, {*range(5, 20)})])
def test_layers_that_are_here_when_a_light_member_ends_do_not_come_again(make_swarm, tiny_spec, away_s, missed):
    found = SimpleNamespace()

    async def scene(swarm):
        seen = await newcomer_comes(swarm, keeps=True)
        before, mate = seen.driver.replica, swarm.drivers["b"].replica
        await swarm.until(lambda: before._light is not None and len(before._light._gathered) == 3)
        found.had, ended_at = set(before._light._gathered), mate.version
        await swarm.peer("e").spawn(seen.driver.close())
        swarm.world.crash(swarm.peer("e"))
        del swarm.drivers["e"]
        swarm.obey([HOLDERS], not_started=False)
        await asyncio.sleep(away_s)
        again = await newcomer_comes(swarm, keeps=True)
        newcomer = again.driver.replica
        await swarm.until(lambda: newcomer.is_learner)
        found.missed = mate.version - ended_at
        await swarm.until(lambda: not newcomer.is_learner)
        await swarm.until(lambda: newcomer.state and mate.state and newcomer.state.version == mate.state.version)
        assert newcomer.state.digest() == mate.state.digest()
        found.came = [r.layer for r in again.ranges if r.stored_era == TRAINED]

    swarm = play(make_swarm, tiny_spec, scene, steps=40)
    assert found.missed in missed
    assert len(found.had) == 3
    if found.missed <= STEPS_MAX:
        assert found.had.isdisjoint(found.came)
        assert len(set(found.came)) == 2
    else:
        assert len(set(found.came)) == 5, "nobody has kept what it lacks"
    commits = [swarm.commits[0][step] for step in range(40)]
    assert {(c.microbatches, c.duplicates, c.given_up, c.dissenting) for c in commits} == {(6, 0, 0, 0)}


@pytest.mark.sim
def test_a_member_that_missed_a_round_gets_its_gradient_or_the_layers_again_and_goes_on(make_swarm, tiny_spec):
    async def scene(swarm):
        seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        await swarm.until(lambda: newcomer._light is not None and len(newcomer._light._gathered) == 2)
        for name in HOLDERS:  # what ends in the next rounds does not come to it
            pieces, me = swarm.drivers[name].replica._pieces, swarm.peer("e").peer_id
            send, until = pieces.send, mate.version + 2

            def to_others(outgoing, start, kind, send=send, until=until, me=me):
                is_lost = kind is GatherPart and start.step < until
                send([out for out in outgoing if not (is_lost and out.target == me)], start, kind)

            pieces.send = to_others
        await swarm.until(lambda: not newcomer.is_learner)
        await has_the_state_of(swarm, mate, newcomer)

    play(make_swarm, tiny_spec, scene)


@pytest.mark.sim
@pytest.mark.parametrize(("rate", "s_max"), [(1e7, 1), (SLOW_BYTES_PER_S, 0)], ids=["a quick line", "synchronous"])
def test_who_gains_nothing_by_it_is_never_light(make_swarm, tiny_spec, monkeypatch, rate, s_max):
    seen_light = []

    async def scene(swarm):
        await swarm.add("e", device_flop_per_s=1e6)
        slow_down(swarm, "e", rate=rate)
        swarm.obey([["e", *HOLDERS]], not_started=False)
        driver = swarm.drivers["e"]

        def is_there():
            seen_light.append(driver.replica is not None and driver.replica.is_learner)
            return driver.heartbeat().synced

        await swarm.until(is_there)

    play(make_swarm, tiny_spec, scene, steps=6 if s_max else 4, s_max=s_max)
    assert not any(seen_light)


@pytest.mark.sim
def test_who_is_too_far_behind_takes_no_traffic_until_its_weights_are_fresh_again(make_swarm, tiny_spec):
    found = SimpleNamespace(closed_at=[], lags=[], waiting=[], given_back=0)

    async def scene(swarm):
        seen = await newcomer_comes(swarm)
        newcomer, mate = seen.driver.replica, swarm.drivers["b"].replica
        soon = newcomer._handing_back.soon

        def counted(command):
            found.given_back += 1
            soon(command)

        newcomer._handing_back.soon = counted

        def is_over():
            if newcomer.is_learner:
                if newcomer.core.is_lagging:
                    found.waiting.append(newcomer.core.pipeline.num_waiting)
                lag = mate.version - newcomer.version
                found.lags.append((lag, newcomer.is_open))
                if not newcomer.is_open:
                    found.closed_at.append(newcomer.version)
            return len({*found.closed_at}) >= 3

        await swarm.until(is_over)

    swarm = play(make_swarm, tiny_spec, scene, steps=60, flop_per_s=2e6)
    assert any(lag <= 1 and is_open for lag, is_open in found.lags), "it opens again"
    behind = [is_open for lag, is_open in found.lags if lag > 1]
    assert sum(behind) < 0.2 * len(behind), "it closes once it has heard that most are past it"
    assert found.given_back
    assert set(found.waiting) == {0}, "what it cannot begin is made by others"
    commits = [swarm.commits[0][step] for step in range(60)]
    assert {(c.microbatches, c.duplicates, c.given_up, c.dissenting) for c in commits} == {(6, 0, 0, 0)}


@pytest.mark.parametrize(("rate", "is_quick"), [(1 / 8, True), (1 / 80, False)])
def test_a_line_is_judged_by_an_eighth_of_the_weights_since_the_first_range_may_be_a_small_one(
    tiny_spec, rate, is_quick
):
    """A 200th has come after two seconds: from that the weights, of 8 s, seem to take 400."""
    keys = stage_layer_keys(tiny_spec.model, 0, tiny_spec.model.num_layers)
    total = state_bytes(tiny_spec, keys) // 12
    progress = FetchProgress(done=total // 200, total=total)
    of_learner = SimpleNamespace(_runtime=SimpleNamespace(spec=tiny_spec, keys=keys), _group=SimpleNamespace(stage=0))

    async def comes():
        await asyncio.sleep(3.0)
        while progress.done < total:
            progress.done = min(total, int(asyncio.get_running_loop().time() * rate * total))
            await asyncio.sleep(0.1)

    async def main():
        fetching = asyncio.create_task(comes())
        found = await learner.Learner._is_quick(of_learner, fetching, progress)
        fetching.cancel()
        return found

    assert run(main()) == is_quick
