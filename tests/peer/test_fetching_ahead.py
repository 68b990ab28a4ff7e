"""A peer gets the layers of the following layout from those who go on training them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from open_gate import OpenGate
from pretend_services import Trained, ports_of, server_of

from shoal.peer.base.failures import Failures
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.handoff.fetching_ahead import FetchingAhead
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.model.layout import layer_layout
from shoal.peer.model.state import LayerState, StageState, initial_state, step_layer
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
STEP_S = 1.0


class Host(Arithmetic):
    """With so much free memory in the host."""

    free = 1 << 40

    def free_host_bytes(self) -> int:
        return self.free


class Scene:
    """`me` holds the first layer, and is to hold the others too, which `holder` trains."""

    def __init__(self, spec: RunSpec, *, free: int) -> None:
        self.spec = spec
        world = World(0, uniform(0.01, 1e7))
        sims = [world.add_peer(name, device_flop_per_s=1e12) for name in ("me", "holder")]
        endpoints = [Endpoint(sim.identity, sim.transport, run="run", gate=OpenGate()) for sim in sims]
        self.sims, self.me, self.holder = sims, sims[0].peer_id, sims[1].peer_id
        self.keys = stage_layer_keys(spec.model, 1, spec.model.num_layers)
        self.state = initial_state(spec, self.keys, CPU)
        arithmetic = Host(spec, None, CPU)
        arithmetic.free = free

        async def stored(era: int, version: int, keys: tuple[str, ...]) -> dict[str, LayerState]:
            return {}

        mine, theirs = (ports_of(e, sim.compute, sim.clock) for e, sim in zip(endpoints, sims, strict=True))
        parts = Trained(lambda keys: self.state if set(keys) <= set(self.keys) else None)
        self.server = server_of(theirs, parts, stored=stored)
        self.failures = Failures()
        self.ahead = FetchingAhead(
            mine,
            inbox=ChunkInbox(endpoints[0], compute=sims[0].compute),
            arithmetic=arithmetic,
            spec=spec,
            failures=self.failures,
        )

    def plan(self, *, follows: bool = True, era: int = 0, cutover_version: int = 0) -> Plan:
        layers = self.spec.model.num_layers
        me, holder = Member(PeerID(self.me), 1.0, 1.0), Member(PeerID(self.holder), 1.0, 1.0)
        return Plan(
            run="run",
            term=1,
            sequence=1,
            previous="",
            coordinator=self.me,
            stages=(Stage(0, 1, (me,)), Stage(1, layers, (holder,))),
            era=era,
            restore_era=max(0, era - 1),
            not_started=era > 0,
            next_layout=(Stage(0, layers, (me,)),) if follows else (),
            cutover_version=cutover_version,
        )

    def obey(self, plan: Plan) -> None:
        self.server.gradient_log.follow(plan)
        self.ahead.follow(plan)

    def step(self, *, noted: bool = True) -> None:
        """The holder steps with a gradient that depends on the version."""
        version, layers = self.state.version, dict(self.state.layers)
        gradients = {}
        for key in self.keys:
            gradients[key] = torch.sin(torch.arange(layer_layout(self.spec.model, key).numel) + float(version))
            with torch.no_grad():
                layers[key] = step_layer(self.spec, key, layers[key], gradients[key], version) or layers[key]
        self.state = StageState(version=version + 1, layers=layers)
        if noted:
            self.server.gradient_log.note(0, version + 1, gradients)

    def came_out_alike(self, got: Any) -> bool:
        return {key: layer.secure_digest() for key, layer in got.items()} == dict(self.state.proofs())


@pytest.fixture
def play(tiny_spec: RunSpec) -> Callable[..., None]:
    def played(scene: Callable[[Scene], Coroutine[Any, Any, None]], *, free: int = 1 << 40) -> None:
        async def main() -> None:
            made = Scene(tiny_spec, free=free)
            for one in made.sims:
                for other in made.sims:
                    await one.transport.introduce(other.peer_id, other.transport.addresses())
            await scene(made)
            await made.ahead.close()
            assert not made.failures.first.done()

        run(main())

    return played


def test_what_is_fetched_steps_as_its_holders_do(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        assert s.ahead.unfetched_bytes > 0
        for _ in range(8):
            await asyncio.sleep(STEP_S)
            s.step()
        await asyncio.sleep(STEP_S)
        assert s.ahead.unfetched_bytes == 0
        s.obey(s.plan(follows=False, era=1))
        assert s.came_out_alike(await s.ahead.ended(0, 8, [s.holder]))
        assert await s.ahead.ended(3, 8, [s.holder]) == {}

    play(scene)


def test_what_has_come_of_a_layer_on_its_way_is_told(play: Callable[..., None]) -> None:
    """Whoever decides whether to wait for it sees how quickly it comes."""

    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        told = {s.ahead.unfetched_bytes}
        for _ in range(1000):
            await asyncio.sleep(STEP_S / 1000)
            told.add(s.ahead.unfetched_bytes)
        num_layers = len(s.keys)
        assert len(told) > 2 * (num_layers + 1)
        assert min(told) == 0

    play(scene)


def test_nothing_is_fetched_for_a_layout_that_ends_before_anything_has_been(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan(cutover_version=2))
        assert s.ahead.unfetched_bytes == 0, "nothing is wanted yet"
        await asyncio.sleep(STEP_S)
        assert await s.ahead.ended(0, 2, [s.holder]) == {}

    play(scene)


def test_the_last_steps_are_replayed_after_the_end(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        await asyncio.sleep(STEP_S)
        s.step()
        s.step()
        s.obey(s.plan(follows=False, era=1))
        assert s.came_out_alike(await s.ahead.ended(0, 2, [s.holder]))

    play(scene)


def test_a_layer_whose_gradient_is_no_longer_kept_is_fetched_anew(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        await asyncio.sleep(STEP_S)
        s.step(noted=False)
        for _ in range(30):
            await asyncio.sleep(STEP_S)
            s.step()
        await asyncio.sleep(STEP_S)
        s.obey(s.plan(follows=False, era=1))
        assert s.came_out_alike(await s.ahead.ended(0, 31, [s.holder]))

    play(scene)


def test_layers_that_come_too_late_to_be_followed_are_left_for_the_end(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        for _ in range(60):
            await asyncio.sleep(STEP_S)
            s.step(noted=False)
        assert s.ahead.unfetched_bytes == 0
        s.obey(s.plan(follows=False, era=1))
        assert await s.ahead.ended(0, 60, [s.holder]) == {}

    play(scene)


def test_what_is_called_off_is_dropped(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        await asyncio.sleep(STEP_S)
        s.obey(s.plan(follows=False))
        assert s.ahead.unfetched_bytes == 0
        assert await s.ahead.ended(0, 0, [s.holder]) == {}

    play(scene)


def test_who_has_no_room_for_both_fetches_nothing(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        await asyncio.sleep(STEP_S)
        assert s.ahead.unfetched_bytes == 0
        assert await s.ahead.ended(0, 0, [s.holder]) == {}

    play(scene, free=20_000)


def test_a_holder_that_is_gone_when_the_layout_has_ended_costs_its_layers_only(play: Callable[..., None]) -> None:
    async def scene(s: Scene) -> None:
        s.obey(s.plan())
        await asyncio.sleep(STEP_S)
        s.step()
        s.obey(s.plan(follows=False, era=1))
        assert await s.ahead.ended(0, 1, [s.me]) == {}

    play(scene)
