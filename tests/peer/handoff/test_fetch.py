"""State handed over between simulated peers: what they train, and what is in their snapshots."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from open_gate import OpenGate
from pretend_services import Trained, ports_of, server_of

from shoal.peer.group.witnesses import Witnessed
from shoal.peer.handoff.fetcher import StateFetcher, Unfinished
from shoal.peer.handoff.inbox import RANGE_TIMEOUT_S, WEIGHTS, ChunkInbox
from shoal.peer.handoff.server import PINNED_S, TRAINED, StateServer
from shoal.peer.model.state import LayerState, RoundedWeights, StageState, initial_state
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.limits import PINNED_S_MAX, PINNED_VERSIONS_MAX
from shoal.protocol.messages import Done, StateChunkRequest, StateOffer, StateRequest
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import OptimizerSpec, RunSpec

CPU = torch.device("cpu")
ERA, VERSION = 1, 10


@dataclass
class Holder:
    world: World
    peer: SimPeer
    endpoint: Endpoint
    inbox: ChunkInbox
    server: StateServer
    trained: StageState | None
    stored: dict[str, LayerState]
    strangers: set[PeerID]
    """Whom no plan of late names."""
    steps: bool = False
    """Its layers are on their way to their next version."""

    @property
    def name(self) -> PeerID:
        return self.peer.peer_id

    def fetcher(
        self,
        spec: RunSpec,
        keys: tuple[str, ...],
        *,
        patience_s: float = RANGE_TIMEOUT_S,
        may_ask: asyncio.Event | None = None,
    ) -> StateFetcher:
        return StateFetcher(spec, keys, self.inbox, patience_s=patience_s, may_ask=may_ask)


def holder(world: World, name: str) -> Holder:
    peer = world.add_peer(name, device_flop_per_s=1e12)
    endpoint = Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate())

    async def stored(era: int, version: int, keys: tuple[str, ...]) -> dict[str, LayerState]:
        return {k: v for k, v in made.stored.items() if k in keys} if (era, version) == (ERA, VERSION) else {}

    inbox = ChunkInbox(endpoint, compute=peer.compute)
    server = server_of(
        ports_of(endpoint, peer.compute, peer.clock),
        Trained(lambda _: made.trained, lambda _: made.steps),
        stored=stored,
        knows=lambda peer: peer not in made.strangers,
        inbox=inbox,
    )
    made = Holder(world, peer, endpoint, inbox, server, None, {}, set())
    return made


def play(scene: Callable[[list[Holder]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        world = World(0, uniform(0.01, 1e7))
        holders = [holder(world, name) for name in ("newcomer", "b", "c", "d")]
        for one in holders:
            for other in holders:
                await one.peer.transport.introduce(other.name, other.peer.transport.addresses())
        await scene(holders)

    run(main())


@pytest.fixture(scope="module")
def keys(tiny_spec: RunSpec) -> tuple[str, ...]:
    return stage_layer_keys(tiny_spec.model, 0, tiny_spec.model.num_layers)


@pytest.fixture(scope="module")
def state(tiny_spec: RunSpec, keys: tuple[str, ...]) -> StageState:
    return replace(initial_state(tiny_spec, keys, CPU), version=VERSION)


def test_layers_come_from_whoever_has_them_in_a_snapshot(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.stored = {key: state.layers[key] for key in keys[:2]}
        c.stored = {key: state.layers[key] for key in keys[1:]}
        names = [h.name for h in holders[1:]]
        fetched = await newcomer.fetcher(tiny_spec, keys).fetch(names, version=VERSION, stored_era=ERA)
        assert fetched.version == VERSION
        assert fetched.digest() == state.digest()

    play(scene)


def test_two_fetches_of_one_state_from_one_holder_both_end(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    """One for the group that we join, one for the copy that it has us keep."""

    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        both = [newcomer.fetcher(tiny_spec, keys).fetch([b.name], version=VERSION) for _ in range(2)]
        async with asyncio.timeout(30.0):
            fetched = await asyncio.gather(*both)
        assert [each.digest() for each in fetched] == [state.digest()] * 2

    play(scene)


def test_second_moments_may_be_shorter_than_the_parameters(tiny_spec: RunSpec, keys: tuple[str, ...]) -> None:
    spec = msgspec.structs.replace(tiny_spec, optimizer=OptimizerSpec(name="muon"))
    state = initial_state(spec, keys, CPU)
    assert 0 < state.layers["layers.0"].moment2_N.numel() < state.layers["layers.0"].param_N.numel()

    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        fetched = await newcomer.fetcher(spec, keys).fetch([b.name])
        assert fetched.digest() == state.digest()

    play(scene)


def test_a_layer_that_nobody_has_is_said_so(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.stored = {key: state.layers[key] for key in keys[1:]}
        with pytest.raises(Unreachable, match="nobody offers"):
            await newcomer.fetcher(tiny_spec, keys).fetch([b.name], version=VERSION, stored_era=ERA)

    play(scene)


def lie(layer: LayerState) -> LayerState:
    return replace(layer, param_N=layer.param_N + 1.0)


def test_the_majority_of_holders_names_the_state(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, liar, c, d = holders
        liar.trained = replace(state, layers={key: lie(layer) for key, layer in state.layers.items()})
        c.trained = d.trained = state
        fetched = await newcomer.fetcher(tiny_spec, keys).fetch([h.name for h in (liar, c, d)])
        assert fetched.digest() == state.digest()

    play(scene)


def test_one_that_sends_something_else_than_it_said_is_found_out(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, liar, c, _ = holders
        liar.trained = c.trained = state
        await liar.server.pin(state)
        pin = next(iter(liar.server._pins.values()))
        pin.layers = {key: lie(layer) for key, layer in pin.layers.items()}
        fetcher = newcomer.fetcher(tiny_spec, keys)
        fetched = await fetcher.fetch([liar.name, c.name])
        assert fetched.digest() == state.digest()
        numels = [tensor.numel() for layer in state.layers.values() for tensor in layer.tensors]
        progress = fetcher.progress
        assert progress.done == progress.total == sum(numels), "what came twice counts once"
        with pytest.raises(RemoteError, match="contradicts"):
            await newcomer.fetcher(tiny_spec, keys).fetch([liar.name])

    play(scene)


def test_when_the_last_holder_is_lost_on_the_way_the_fetch_says_so(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = c.trained = state
        fetch = asyncio.create_task(newcomer.fetcher(tiny_spec, keys).fetch([b.name, c.name]))
        await asyncio.sleep(0.03)  # both have offered, or are about to: 20 ms there and back
        for lost in (b, c):
            lost.world.crash(lost.peer)
        with pytest.raises(Unreachable):
            await fetch

    play(scene)


def lacking(holder: Holder, num: int) -> list[StateChunkRequest]:
    """`holder` gives so many ranges, and dies when it is asked for more. Returns: what it is asked for."""
    give, asked = holder.server._on_chunk_request, list[StateChunkRequest]()

    async def some(source: PeerID, message: StateChunkRequest) -> Done:
        asked.append(message)
        if len(asked) > num:
            await asyncio.sleep(1.0)  # what it gives is on its way
            holder.world.crash(holder.peer)
        return await give(source, message)

    holder.endpoint.on(StateChunkRequest, some)
    return asked


async def begun_by_one(newcomer: Holder, holder: Holder, spec: RunSpec, key: str, num: int) -> dict[str, Unfinished]:
    """What a fetch from `holder` has got when it fails after `num` ranges."""
    fetcher = newcomer.fetcher(spec, (key,))
    lacking(holder, num)
    with pytest.raises(Unreachable):
        await fetcher.fetch([holder.name], version=VERSION)
    return fetcher.unfinished()


def test_what_a_failed_fetch_has_got_of_a_layer_does_not_come_again(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = c.trained = state
        begun = await begun_by_one(newcomer, b, tiny_spec, keys[1], 1)
        came = set(begun[keys[1]].here)
        assert len(came) == 1
        asked = lacking(c, 9)
        fetcher = newcomer.fetcher(tiny_spec, keys[1:2])
        fetched = await fetcher.fetch([c.name], version=VERSION, begun=begun)
        assert fetched.layers[keys[1]].secure_digest() == state.layers[keys[1]].secure_digest()
        assert came.isdisjoint((request.tensor, request.start) for request in asked)
        assert len(asked) == 2
        assert fetcher.progress.done == fetcher.progress.total

    play(scene)


def test_what_a_failed_fetch_has_got_is_checked_with_the_rest(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, d = holders
        b.trained = c.trained = state
        d.trained = replace(initial_state(tiny_spec, keys, CPU), version=VERSION)
        d.trained.layers[keys[1]].param_N[0] += 1.0
        begun = await begun_by_one(newcomer, b, tiny_spec, keys[1], 1)
        ((tensor, start),) = begun[keys[1]].here
        begun[keys[1]].tensors[tensor][start] += 1.0
        with pytest.raises(Unreachable, match="nobody offers"):
            await newcomer.fetcher(tiny_spec, keys[1:2]).fetch([d.name], version=VERSION, begun=begun)
        fetched = await newcomer.fetcher(tiny_spec, keys[1:2]).fetch([c.name, d.name], version=VERSION, begun=begun)
        assert fetched.layers[keys[1]].secure_digest() == state.layers[keys[1]].secure_digest(), (
            "c is not blamed for what b sent"
        )

    play(scene)


def test_what_a_liar_has_sent_is_not_gone_on_with(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, *_ = holders
        b.trained = state
        payload = b.server._payload
        fetcher = newcomer.fetcher(tiny_spec, keys[1:2])
        b.server._payload = lambda message, part_C, before_C: payload(message, part_C + 1.0, before_C)
        with pytest.raises(RemoteError, match="contradicts"):
            await fetcher.fetch([b.name], version=VERSION)
        assert fetcher.unfinished() == {}

    play(scene)


def test_two_fetches_at_once_on_one_inbox_do_not_meet(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained, c.stored = state, {key: lie(layer) for key, layer in state.layers.items()}
        trained, stored = await asyncio.gather(
            newcomer.fetcher(tiny_spec, keys).fetch([b.name]),
            newcomer.fetcher(tiny_spec, keys).fetch([c.name], version=VERSION, stored_era=ERA),
        )
        assert trained.digest() == state.digest()
        assert stored.digest() != state.digest()

    play(scene)


def test_what_a_newcomer_replays_is_held_back_until_its_pin_is_old(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        for forget in (lambda: asyncio.sleep(PINNED_S + 1.0), lambda: b.server.forget(state.layers)):
            assert b.server.pinned_from() > VERSION
            await newcomer.fetcher(tiny_spec, keys).fetch([b.name])
            assert b.server.pinned_from() == VERSION
            waiting = forget()
            if waiting is not None:
                await waiting
            assert b.server.pinned_from() > VERSION

    play(scene)


def test_who_keeps_a_copy_holds_nothing_back_for_it_never_replays(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        _, b, keeper, _ = holders
        await b.server.pin(state)
        fetched = await keeper.fetcher(tiny_spec, keys).fetch([b.name], version=VERSION)
        assert fetched.digest() == state.digest()
        assert b.server.pinned_from() > VERSION

    play(scene)


def test_a_newcomer_may_ask_by_its_number_for_what_a_holder_has_reached_meanwhile(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, keeper, _ = holders
        b.trained = state
        await newcomer.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        b.trained = later = replace(state, version=VERSION + 1)
        await asyncio.sleep(PINNED_S - 1.0)
        await keeper.endpoint.ask(b.name, StateRequest(layers=keys, version=later.version), StateOffer)
        b.server._pins.pop((TRAINED, VERSION))
        assert b.server.pinned_from() > later.version
        await newcomer.endpoint.ask(b.name, StateRequest(layers=keys, version=later.version), StateOffer)
        assert b.server.pinned_from() == later.version

    play(scene)


def test_a_transfer_is_under_way_until_all_has_been_asked_for(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        _, b, keeper, other = holders
        await b.server.pin(state)
        assert not b.server.is_giving(keeper.name, VERSION)
        fetch = asyncio.create_task(keeper.fetcher(tiny_spec, keys).fetch([b.name], version=VERSION))
        await asyncio.sleep(0.05)
        assert b.server.is_giving(keeper.name, VERSION)
        assert not b.server.is_giving(other.name, VERSION)
        await fetch
        assert not b.server.is_giving(keeper.name, VERSION)

    play(scene)


def test_whom_no_plan_names_is_given_nothing(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(holders: list[Holder]) -> None:
        stranger, b, _, _ = holders
        b.trained, b.strangers = state, {stranger.name}
        with pytest.raises(Refused, match="does not know"):
            await stranger.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        assert b.server._pins == {}
        assert b.server._newcomers == {}

    play(scene)


def test_chunks_go_to_whom_they_were_offered(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, other, _ = holders
        b.trained = state
        await newcomer.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        wanted = StateChunkRequest(version=VERSION, layer=keys[0], tensor=0, start=0, stop=1)
        with pytest.raises(Refused, match="offered the sender no such"):
            await other.endpoint.ask(b.name, wanted, Done)

    play(scene)


def test_who_asks_again_and_again_keeps_no_version_for_ever(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        await newcomer.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        b.trained = replace(state, version=VERSION + 1000)
        request, asked_s = StateRequest(layers=keys, version=VERSION), 0.0
        while asked_s < 2 * PINNED_S_MAX and VERSION in {version for _, version in b.server._pins}:
            await asyncio.sleep(PINNED_S / 2)
            asked_s += PINNED_S / 2
            with contextlib.suppress(Refused):
                await newcomer.endpoint.ask(b.name, request, StateOffer)
        assert asked_s <= PINNED_S_MAX + PINNED_S
        assert b.server.pinned_from() > VERSION

    play(scene)


def test_who_asks_for_every_version_has_a_few_kept(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        for version in range(VERSION, VERSION + 3 * PINNED_VERSIONS_MAX):
            b.trained = replace(state, version=version)
            offer = await newcomer.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        assert len(b.server._pins) == PINNED_VERSIONS_MAX
        assert offer.version == VERSION + PINNED_VERSIONS_MAX - 1

    play(scene)


@pytest.mark.parametrize("takes_s", [0.5, 60.0])
def test_a_request_within_a_step_waits_for_the_next_version_unless_that_takes_long(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState, takes_s: float
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, stepping, _, _ = holders
        stepping.steps = True

        async def step() -> None:
            await asyncio.sleep(takes_s)
            stepping.steps, stepping.trained = False, state

        making = asyncio.create_task(step())
        message = StateRequest(layers=keys)
        if takes_s > 10.0:
            with pytest.raises(Refused):
                await newcomer.endpoint.ask(stepping.name, message, StateOffer)
            making.cancel()
        else:
            offer = await newcomer.endpoint.ask(stepping.name, message, StateOffer)
            assert offer.version == state.version

    play(scene)


# --- weights alone ---


def next_version(state: StageState) -> StageState:
    """A version whose weights are a small step away."""
    layers = {key: replace(layer, param_N=layer.param_N * 1.01 + 1e-4) for key, layer in state.layers.items()}
    return replace(state, version=state.version + 1, layers=layers)


def as_weights(state: StageState) -> RoundedWeights:
    return RoundedWeights(
        version=state.version, params={key: layer.param_N.bfloat16() for key, layer in state.layers.items()}
    )


def assert_equal(fetched: StageState, state: StageState) -> None:
    assert fetched.version == state.version
    for key, param_N in as_weights(state).params.items():
        assert torch.equal(fetched.layers[key].param_N, param_N)
        assert fetched.layers[key].moment1_N.numel() == fetched.layers[key].moment2_N.numel() == 0


async def fetch_weights(
    newcomer: Holder, spec: RunSpec, keys: tuple[str, ...], voters: list[PeerID], **how: Any
) -> StageState:
    return await newcomer.fetcher(spec, keys).fetch(voters, stored_era=WEIGHTS, voters=voters, **how)


def test_weights_come_rounded_to_bf16_and_without_moments(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = c.trained = state
        before = sum(newcomer.world.sent_bytes.values())
        assert_equal(await fetch_weights(newcomer, tiny_spec, keys, [b.name, c.name]), state)
        sent = sum(newcomer.world.sent_bytes.values()) - before
        numel = sum(layer.param_N.numel() for layer in state.layers.values())
        assert 2 * numel < sent < 3 * numel

    play(scene)


@pytest.mark.parametrize("keeps", [("b", "c"), ("b",)], ids=["all have the base", "one has not"])
def test_the_next_weights_come_as_a_difference_from_those_who_kept_the_base(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState, keeps: tuple[str, ...]
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = c.trained = state
        voters = [b.name, c.name]
        assert_equal(await fetch_weights(newcomer, tiny_spec, keys, voters), state)
        after = b.trained = c.trained = next_version(state)
        if "c" not in keeps:
            c.server.forget_weights(keys)
        asked: list[StateChunkRequest] = []
        ask = newcomer.endpoint.ask

        async def noted(peer: PeerID, message: Any, *args: Any, **how: Any) -> Any:
            if isinstance(message, StateChunkRequest):
                asked.append(message)
                assert (message.base == VERSION) == (peer == b.name or "c" in keeps)
            return await ask(peer, message, *args, **how)

        newcomer.endpoint.ask = noted  # type: ignore[method-assign]
        assert_equal(await fetch_weights(newcomer, tiny_spec, keys, voters, base=as_weights(state)), after)
        assert any(message.base == VERSION for message in asked)

    play(scene)


def test_weights_that_one_of_three_holders_makes_up_are_not_fetched_whatever_version_it_claims(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, liar = holders
        b.trained = c.trained = state
        voters = [liar.name, b.name, c.name]
        for ahead in (0, 1, 10**6):
            liar.trained = replace(next_version(state), version=VERSION + ahead)
            assert_equal(await fetch_weights(newcomer, tiny_spec, keys, voters), state)
        with pytest.raises(Unreachable, match="do not offer the same"):
            await fetch_weights(newcomer, tiny_spec, keys, [liar.name, b.name])
        with pytest.raises(Unreachable, match="do not offer the same"):
            await fetch_weights(newcomer, tiny_spec, keys, voters, at_least=VERSION + 1)

    play(scene)


def test_a_holder_that_sends_other_weights_than_it_has_named_is_found_out(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = c.trained = state
        for one in (b, c):
            await newcomer.endpoint.ask(one.name, StateRequest(layers=keys, stored_era=WEIGHTS), StateOffer)
        pin = b.server._pins[WEIGHTS, VERSION]
        pin.layers = dict(next_version(state).layers)  # its digests stay
        assert_equal(await fetch_weights(newcomer, tiny_spec, keys, [b.name, c.name]), state)

    play(scene)


def test_of_weights_the_two_newest_versions_are_kept_until_nobody_follows_them(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        for _ in range(4):
            await fetch_weights(newcomer, tiny_spec, keys, [b.name])
            b.trained = next_version(b.trained)
        assert sorted(b.server._pins) == [(WEIGHTS, VERSION + 2), (WEIGHTS, VERSION + 3)]
        await asyncio.sleep(4 * PINNED_S)  # a step is longer than anybody asks
        b.trained = replace(b.trained, version=VERSION + 4)
        request = StateRequest(layers=keys, stored_era=WEIGHTS, base=VERSION + 3)
        offer = await newcomer.endpoint.ask(b.name, request, StateOffer)
        assert (offer.version, offer.base) == (VERSION + 4, VERSION + 3)
        b.server.forget_weights(keys[:1])
        assert b.server._pins == {}

    play(scene)


def test_whom_no_plan_names_is_given_no_weights(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        b.strangers.add(newcomer.name)
        with pytest.raises(Unreachable):
            await fetch_weights(newcomer, tiny_spec, keys, [b.name])

    play(scene)


def test_a_fetch_that_is_held_up_for_minutes_goes_on_where_it_was(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = state
        may_ask = asyncio.Event()
        fetcher = newcomer.fetcher(tiny_spec, keys, may_ask=may_ask)
        fetching = asyncio.create_task(fetcher.fetch([b.name], version=VERSION))
        await asyncio.sleep(10 * PINNED_S)
        assert fetcher.progress.done == 0
        assert not fetching.done()
        b.trained = None  # what it has pinned is all that it has of that version
        with pytest.raises(Refused):  # and this looks what is over
            await c.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        may_ask.set()
        assert (await fetching).digest() == state.digest()

    play(scene)


def test_a_pin_lasts_while_a_range_of_it_waits_for_its_line(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = state
        send = b.endpoint.send

        async def late(*args: Any, **how: Any) -> None:
            await asyncio.sleep(1.5 * PINNED_S)
            await send(*args, **how)

        b.endpoint.send = late  # type: ignore[method-assign]
        fetcher = newcomer.fetcher(tiny_spec, keys[:1])
        fetching = asyncio.create_task(fetcher.fetch([b.name], version=VERSION))
        await asyncio.sleep(1.2 * PINNED_S)
        b.trained = None
        with pytest.raises(Refused):  # and this looks what is over
            await c.endpoint.ask(b.name, StateRequest(layers=keys), StateOffer)
        assert (TRAINED, VERSION) in b.server._pins
        assert (await fetching).layers[keys[0]].secure_digest() == state.layers[keys[0]].secure_digest()

    play(scene)


def test_a_patient_fetch_asks_again_for_a_range_that_was_lost(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        send, lost = b.endpoint.send, []

        async def once_lost(peer: PeerID, header: Any, *args: Any, **how: Any) -> None:
            if not lost:
                lost.append(header)
                return
            await send(peer, header, *args, **how)

        b.endpoint.send = once_lost  # type: ignore[method-assign]
        fetcher = newcomer.fetcher(tiny_spec, keys[:1], patience_s=300.0)
        fetched = await fetcher.fetch([b.name], version=VERSION)
        assert fetched.layers[keys[0]].secure_digest() == state.layers[keys[0]].secure_digest()
        assert lost
        assert RANGE_TIMEOUT_S < newcomer.peer.clock.now_s() < RANGE_TIMEOUT_S + 5.0

    play(scene)


def test_a_range_that_is_leaving_is_not_sent_twice_to_who_asks_again(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(holders: list[Holder]) -> None:
        newcomer, b, _, _ = holders
        b.trained = state
        send, sent = b.endpoint.send, []

        async def late(peer: PeerID, header: Any, *args: Any, **how: Any) -> None:
            sent.append(header)
            await asyncio.sleep(2.5 * RANGE_TIMEOUT_S)
            await send(peer, header, *args, **how)

        b.endpoint.send = late  # type: ignore[method-assign]
        fetcher = newcomer.fetcher(tiny_spec, keys[:1], patience_s=300.0)
        fetched = await fetcher.fetch([b.name], version=VERSION)
        assert fetched.layers[keys[0]].secure_digest() == state.layers[keys[0]].secure_digest()
        assert len(sent) == len(set(sent)) == 3  # parameters and two moments

    play(scene)


def test_what_holders_have_signed_is_told_to_compare_with_and_nothing_is_kept_for_it(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    """A light member that has all layers asks again and again; a version kept for each time would leave no room."""

    async def scene(holders: list[Holder]) -> None:
        newcomer, b, c, _ = holders
        b.trained = c.trained = state

        async def witnessed(source: PeerID, wanted: Any, version: int) -> Witnessed:
            assert (source, version) == (newcomer.name, VERSION)
            return Witnessed(state, state.proofs(), ((b.name, b"signed"),))

        b.server._parts.witnessed = witnessed
        request = StateRequest(layers=keys, version=VERSION, to_compare=True)
        offer = await newcomer.endpoint.ask(b.name, request, StateOffer)
        assert (offer.version, offer.digests, offer.signatures) == (VERSION, state.proofs(), ((b.name, b"signed"),))
        assert b.server._pins == {}
        with pytest.raises(Refused, match="nothing signed of version"):
            await newcomer.endpoint.ask(c.name, request, StateOffer)

    play(scene)
