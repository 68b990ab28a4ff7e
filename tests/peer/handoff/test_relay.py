"""Peers that fetch the same state at the same time, from one that alone has it and has a slow line."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from open_gate import OpenGate
from pretend_services import Trained, ports_of, server_of

from shoal.peer.encoding.vectors import Vectors
from shoal.peer.handoff.fetcher import StateFetcher
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.range_fetch import owner_of
from shoal.peer.handoff.relay import Relay
from shoal.peer.handoff.server import StateServer
from shoal.peer.model.state import LayerState, StageState, initial_state
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import Done, StateChunkRequest
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import LinkSpec, uniform
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import RunSpec

ERA, VERSION = 1, 10
FETCHERS = 4
HOLDER = 0
"""Its place."""
HOLDER_BYTES_PER_S = 1e5
MATES_BYTES_PER_S = 1e7
CPU = torch.device("cpu")
VECTORS = Vectors(CPU, chunk_bytes=4096)
"""Small pieces, so that a layer has many ranges."""
LARGE_PIECES = Vectors(CPU)
"""Each tensor is one range."""


@dataclass
class Node:
    peer: SimPeer
    endpoint: Endpoint
    inbox: ChunkInbox
    server: StateServer
    stored: dict[str, LayerState]
    fetches: list[Relay]
    vectors: Vectors

    async def fetch(
        self,
        spec: RunSpec,
        keys: tuple[str, ...],
        nodes: list["Node"],
        group_peers: Sequence["Node"] = (),
        **how: Any,
    ) -> StageState:
        """From those of `nodes` that have it, together with the others. Args: mates: more that fetch it."""
        others = [n.peer.peer_id for n in (*nodes, *group_peers) if n is not self]
        relay = self.server.sharing(others)
        self.fetches.append(relay)
        fetcher = StateFetcher(spec, keys, self.inbox)
        holders = [node.peer.peer_id for node in nodes]
        state = await fetcher.fetch(holders, version=VERSION, stored_era=ERA, relay=relay, **how)
        relay.done()
        return state


def node(world: World, name: str, place: int, *, up_bytes_per_s: float, vectors: Vectors) -> Node:
    peer = world.add_peer(name, place=place, device_flop_per_s=1e12, up_bytes_per_s=up_bytes_per_s)
    endpoint = Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate())

    async def stored(era: int, version: int, keys: tuple[str, ...]) -> dict[str, LayerState]:
        return {k: v for k, v in made.stored.items() if k in keys} if (era, version) == (ERA, VERSION) else {}

    inbox = ChunkInbox(endpoint, compute=peer.compute, vectors=vectors)
    ports = ports_of(endpoint, peer.compute, peer.clock)
    server = server_of(ports, Trained(lambda _: None), stored=stored, inbox=inbox, vectors=vectors)
    made = Node(peer, endpoint, inbox, server, {}, [], vectors)
    return made


def play(scene: Callable[[World, Node, list[Node]], Coroutine[Any, Any, None]], *, vectors: Vectors = VECTORS) -> None:
    async def main() -> None:
        world = World(0, uniform(0.001, MATES_BYTES_PER_S))
        holder = node(world, "holder", HOLDER, up_bytes_per_s=HOLDER_BYTES_PER_S, vectors=vectors)
        group_peers = [
            node(world, f"mate {n}", HOLDER + 1 + n, up_bytes_per_s=MATES_BYTES_PER_S, vectors=vectors)
            for n in range(FETCHERS)
        ]
        for one in (holder, *group_peers):
            for other in (holder, *group_peers):
                await one.peer.transport.introduce(other.peer.peer_id, other.peer.transport.addresses())
        await scene(world, holder, group_peers)
        assert not world.failures

    run(main())


@pytest.fixture(scope="module")
def keys(tiny_spec: RunSpec) -> tuple[str, ...]:
    return stage_layer_keys(tiny_spec.model, 0, tiny_spec.model.num_layers)


@pytest.fixture(scope="module")
def state(tiny_spec: RunSpec, keys: tuple[str, ...]) -> StageState:
    return replace(initial_state(tiny_spec, keys, CPU), version=VERSION)


def bytes_of(state: StageState) -> int:
    return sum(4 * tensor.numel() for layer in state.layers.values() for tensor in layer.tensors)


def left_holder(world: World) -> int:
    return sum(sent for (source, _), sent in world.sent_bytes.items() if source == HOLDER)


def test_the_state_leaves_its_lone_holder_about_once(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        begun_s = asyncio.get_running_loop().time()
        fetched = await asyncio.gather(*(mate.fetch(tiny_spec, keys, [holder, *group_peers]) for mate in group_peers))
        took_s = asyncio.get_running_loop().time() - begun_s
        assert {one.digest() for one in fetched} == {state.digest()}
        assert left_holder(world) < 1.5 * bytes_of(state)
        assert took_s < 1.5 * bytes_of(state) / HOLDER_BYTES_PER_S

    play(scene)


@pytest.mark.parametrize("num_group_peers", [2, FETCHERS])
def test_so_does_one_of_a_few_ranges(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState, num_group_peers: int
) -> None:
    """Whoever has asked for all of its own leaves the rest to its mates for a while."""

    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = {key: state.layers[key] for key in keys[:1]}
        fetching = group_peers[:num_group_peers]
        fetched = await asyncio.gather(*(mate.fetch(tiny_spec, keys[:1], [holder, *fetching]) for mate in fetching))
        assert {one.layers[keys[0]].digest() for one in fetched} == {state.layers[keys[0]].digest()}
        num_bytes = sum(4 * tensor.numel() for tensor in state.layers[keys[0]].tensors)
        assert left_holder(world) < 1.1 * num_bytes + 10_000

    play(scene, vectors=LARGE_PIECES)


def test_who_has_a_layer_on_its_own_disk_takes_it_from_there(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        one = group_peers[0]
        await one.peer.transport.introduce(one.peer.peer_id, one.peer.transport.addresses())
        one.stored = {key: state.layers[key] for key in keys[1:]}
        fetched = await asyncio.gather(
            *(mate.fetch(tiny_spec, keys, [mate, holder, one]) for mate in (one, group_peers[1]))
        )
        assert {each.digest() for each in fetched} == {state.digest()}

    play(scene)


def test_what_a_holder_has_pinned_may_lapse_meanwhile(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        fetch = asyncio.ensure_future(group_peers[0].fetch(tiny_spec, keys, [holder, group_peers[0]]))
        await asyncio.sleep(0.5)
        assert holder.server._pins
        assert not fetch.done()
        holder.server._pins.clear()
        assert (await fetch).digest() == state.digest()

    play(scene)


def test_what_a_mate_does_not_pass_on_comes_from_the_holder(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        fetches = [
            asyncio.ensure_future(mate.fetch(tiny_spec, keys, [holder, *group_peers])) for mate in group_peers[:-2]
        ]
        await asyncio.sleep(0.5)
        world.crash(group_peers[-2].peer)  # the last one has never begun
        fetched = await asyncio.gather(*fetches)
        assert {one.digest() for one in fetched} == {state.digest()}

    play(scene)


@pytest.mark.parametrize("what", ["refuse", "say nothing"])
def test_a_fetch_is_over_when_all_is_here_whatever_others_are_asked_for(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState, what: str
) -> None:
    """Mates and carriers may be asked again, or are still awaited."""

    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        one, silent, *carriers = group_peers
        for other in (silent, *carriers):
            if what == "say nothing":
                world.pause(other.peer)
            other.server.sharing([PeerID("another")])
        begun_s = asyncio.get_running_loop().time()
        names = [carrier.peer.peer_id for carrier in carriers]
        fetched = await one.fetch(tiny_spec, keys, [holder], group_peers=[silent], carriers=names)
        took_s = asyncio.get_running_loop().time() - begun_s
        assert fetched.digest() == state.digest()
        assert took_s < 1.1 * bytes_of(state) / HOLDER_BYTES_PER_S + 0.1

    play(scene)


def test_a_layer_that_a_mate_has_spoilt_is_fetched_from_the_holder(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState
) -> None:
    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        liar, honest = group_peers[:2]
        lies = {key: replace(layer, param_N=layer.param_N + 1.0) for key, layer in state.layers.items()}
        relay = liar.server.sharing([honest.peer.peer_id])
        relay.at = ERA, VERSION
        for key, layer in lies.items():
            relay.begin(key, layer.tensors, whole=True)
        fetched = await honest.fetch(tiny_spec, keys, [holder, liar, honest])
        assert fetched.digest() == state.digest()

    play(scene)


def test_only_mates_are_given_what_has_come(tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState) -> None:
    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        one, mate, stranger, _ = group_peers
        relay = one.server.sharing([mate.peer.peer_id])
        relay.at = ERA, VERSION
        key = keys[0]
        relay.begin(key, state.layers[key].tensors)
        wanted = StateChunkRequest(stored_era=ERA, version=VERSION, layer=key, tensor=0, start=0, stop=1)
        with pytest.raises(Refused, match="not pinned"):
            await stranger.endpoint.ask(one.peer.peer_id, wanted, Done)
        with pytest.raises(Refused, match="has yet to get"):
            await mate.endpoint.ask(one.peer.peer_id, wanted, Done)
        asking = asyncio.ensure_future(mate.endpoint.ask(one.peer.peer_id, wanted, Done))
        await asyncio.sleep(1.0)
        assert not asking.done()
        relay.came(key, 0, 0)
        await asking
        relay.done(void=True)
        with pytest.raises(Refused, match="not pinned"):
            await mate.endpoint.ask(one.peer.peer_id, wanted, Done)

    play(scene)


def test_each_range_has_one_owner_and_all_own_about_as_many() -> None:
    fetching = ["a", "b", "c"]
    owners = [
        owner_of(f"layers.{k}", tensor, number, fetching)
        for k in range(9)
        for tensor in range(3)
        for number in range(7)
    ]
    assert all(50 < owners.count(peer) < 80 for peer in fetching)


@pytest.mark.parametrize("is_busy", [False, True], ids=["paths of their own", "they fetch themselves"])
def test_others_carry_what_comes_slowly_from_a_lone_holder(
    tiny_spec: RunSpec, keys: tuple[str, ...], state: StageState, is_busy: bool
) -> None:
    """The holder's card is quick and its paths are slow."""

    async def scene(world: World, holder: Node, group_peers: list[Node]) -> None:
        holder.stored = dict(state.layers)
        one, *others = group_peers
        for other in group_peers:
            world.set_link(holder.peer, other.peer, LinkSpec(latency_s=0.001, rate_bytes_per_s=HOLDER_BYTES_PER_S / 4))
        if is_busy:
            for other in others:
                other.server.sharing([PeerID("another")])
        begun_s = asyncio.get_running_loop().time()
        fetched = await one.fetch(tiny_spec, keys, [holder, one], carriers=[other.peer.peer_id for other in others])
        took_s = asyncio.get_running_loop().time() - begun_s
        assert fetched.digest() == state.digest()
        direct_s = bytes_of(state) / (HOLDER_BYTES_PER_S / 4)
        assert took_s > 0.95 * direct_s if is_busy else took_s < 0.4 * direct_s

    play(scene)
