"""Who keeps copies of a stage's snapshots, and who refuses."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import PurePosixPath
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from open_gate import OpenGate
from pretend_services import Trained, ports_of

from shoal.peer.base.plans import Plans
from shoal.peer.base.tasks import Tasks
from shoal.peer.disk.archive import Archive
from shoal.peer.disk.attesting import Attesting
from shoal.peer.handoff.copies import Copies, keepers
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.retained import RetainedLayers
from shoal.peer.handoff.server import StateServer
from shoal.peer.model.state import StageState, initial_state
from shoal.peer.presence.life import Life
from shoal.peer.presence.ports import inline
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys, stage_layer_keys
from shoal.protocol.messages import Keep, Saved
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage
from shoal.protocol.ports import Priority
from shoal.protocol.sim.disk import SimDisk
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec

VERSION = 4


def plan_of(stages: list[list[PeerID]], spares: list[PeerID]) -> Plan:
    return Plan(
        run="run",
        term=1,
        sequence=1,
        previous="",
        coordinator=stages[0][0],
        stages=tuple(
            Stage(i, i + 1, tuple(Member(peer, 1.0, 1.0) for peer in peers)) for i, peers in enumerate(stages)
        ),
        spares=tuple(spares),
    )


def test_spares_are_asked_first_then_the_stages_behind_once_around_and_neighbours_last() -> None:
    a, b, c, d, e = (PeerID(name) for name in "abcde")
    plan = plan_of([[a], [b], [c], [d]], [e])
    assert keepers(plan, 0) == [e, c, d, b]
    assert keepers(plan, 1) == [e, d, c, a]
    plan = plan_of([[a], [b, c], [d]], [e])
    assert keepers(plan, 1) == [e, d, a]
    assert keepers(plan, 2) == [e, a, b, c]
    assert keepers(plan_of([[a, b]], []), 0) == []


class Newest(Plans):
    """The last of a list is in force, and names everybody."""

    def __init__(self, plans: list[Plan]) -> None:
        self._plans = plans

    @property
    def newest(self) -> Plan:
        return self._plans[-1]

    def knows(self, peer: PeerID) -> bool:
        return True


class Peer:
    """One that holds a stage, or keeps for others."""

    def __init__(self, world: World, name: str, spec: RunSpec, plans: Plans, *, has_disk: bool) -> None:
        self.sim = world.add_peer(name, device_flop_per_s=1e12)
        self.name = self.sim.peer_id
        self.endpoint = Endpoint(self.sim.identity, self.sim.transport, run="run", gate=OpenGate())
        self.disk = SimDisk(Random(0), name) if has_disk else None
        self.state: StageState | None = None

        self.archive = Archive(self.disk, run="run", spec=spec, clock=self.sim.clock, run_blocking=inline)
        self.life = Life(self.endpoint)
        inbox = ChunkInbox(self.endpoint, compute=self.sim.compute)
        ports = ports_of(self.endpoint, self.sim.compute, self.sim.clock)
        server = StateServer(
            ports,
            plans=plans,
            parts=Trained(lambda _: self.state),
            archive=self.archive,
            retained=RetainedLayers(),
            inbox=inbox,
        )
        self.errors: list[BaseException] = []
        self.tasks = Tasks(self.errors.append)
        attesting = Attesting(
            self.archive,
            endpoint=self.endpoint,
            compute=self.sim.compute,
            model=spec.model,
            reports=cast(Any, SimpleNamespace(hurry=lambda: None)),
        )
        self.copies = Copies(
            attesting,
            ports,
            spec=spec,
            server=server,
            inbox=inbox,
            plans=plans,
            life=self.life,
            tasks=self.tasks,
        )


def play(
    spec: RunSpec, scene: Callable[[dict[str, Peer], list[Plan]], Coroutine[Any, Any, None]], *, diskless: str = ""
) -> None:
    spec = msgspec.structs.replace(spec, swarm=msgspec.structs.replace(spec.swarm, snapshot_interval_steps=VERSION))

    async def main() -> None:
        world = World(0, uniform(0.01, 1e8))
        plans: list[Plan] = []
        peers = {n: Peer(world, n, spec, Newest(plans), has_disk=n not in diskless) for n in "abcd"}
        for one in peers.values():
            for other in peers.values():
                await one.sim.transport.introduce(other.name, other.sim.transport.addresses())
        a, b, c, d = (peers[n].name for n in "abcd")
        plans.append(plan_of([[a, b], [d], [c]], []))  # c is asked first: d is a neighbour
        keys = stage_layer_keys(spec.model, 0, 1)
        for name in "ab":
            peers[name].state = replace(initial_state(spec, keys, torch.device("cpu")), version=VERSION)
        await scene(peers, plans)
        for peer in peers.values():
            assert peer.errors == []

    run(main())


def versions(peer: Peer) -> list[int]:
    return [holding.version for holding in peer.archive.holdings]


async def preserve(peer: Peer, *, rank: int, num_ready: int, among: dict[str, Peer]) -> None:
    assert peer.state is not None
    peer.copies.preserve(0, peer.state, rank=rank, num_ready=num_ready)
    await peer.tasks.wait()
    await asyncio.gather(*(other.tasks.wait() for other in among.values()))


def test_both_writers_write_and_their_copies_are_on_two_peers(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        for rank, name in enumerate("ab"):
            await preserve(peers[name], rank=rank, num_ready=2, among=peers)
        assert {name: versions(peer) for name, peer in peers.items()} == {name: [VERSION] for name in "abcd"}

    play(tiny_spec, scene)


def test_a_group_of_one_sees_to_both_copies(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        await preserve(peers["a"], rank=0, num_ready=1, among=peers)
        assert {name: versions(peer) for name, peer in peers.items()} == {
            "a": [VERSION],
            "b": [],
            "c": [VERSION],
            "d": [VERSION],
        }

    play(tiny_spec, scene)


@pytest.mark.parametrize(("next_holder", "copied"), [("c", False), ("a", True)])
def test_of_what_the_next_layout_gives_to_another_holder_no_copy_is_made_beside(
    tiny_spec: RunSpec, next_holder: str, copied: bool
) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        after = tuple(Stage(i, i + 1, (Member(peers[n].name, 1.0, 1.0),)) for i, n in enumerate((next_holder, "b")))
        plans.append(msgspec.structs.replace(plans[-1], cutover_version=VERSION, next_layout=after))
        await preserve(peers["a"], rank=0, num_ready=1, among=peers)
        assert versions(peers["a"]) == [VERSION]
        assert versions(peers["d"]) == ([VERSION] if copied else [])

    play(tiny_spec, scene)


def test_who_leaves_takes_no_copy_any_more(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        peers["c"].life.is_draining = True
        await preserve(peers["a"], rank=0, num_ready=2, among=peers)
        assert (versions(peers["c"]), versions(peers["d"])) == ([], [VERSION])

    play(tiny_spec, scene)


def test_of_the_runs_last_version_who_leaves_takes_one_too(tiny_spec: RunSpec) -> None:
    done = msgspec.structs.replace(tiny_spec, training=msgspec.structs.replace(tiny_spec.training, steps=VERSION))

    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        peers["c"].life.is_draining = True
        await preserve(peers["a"], rank=0, num_ready=2, among=peers)
        assert versions(peers["c"]) == [VERSION]

    play(done, scene)


def test_what_is_given_before_a_peer_goes_is_on_the_other_side_when_it_goes(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        one = peers["a"]
        assert one.state is not None
        assert await one.copies.save(0, one.state)
        assert versions(one) == [VERSION]
        given = await one.copies.give(0, one.state, until_s=one.sim.clock.now_s() + 30.0)
        assert given == [peers["c"].name, peers["d"].name]
        assert versions(peers["c"]) == versions(peers["d"]) == [VERSION]

    play(tiny_spec, scene)


def test_a_keeper_that_cannot_write_is_not_counted_and_another_is_asked(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        one, full = peers["a"], peers["c"]
        assert one.state is not None
        assert full.disk is not None
        full.disk.make_folder(PurePosixPath("run"))
        full.disk.limit(0)
        given = await one.copies.give(0, one.state, until_s=one.sim.clock.now_s() + 30.0)
        assert given == [peers["d"].name]
        assert (versions(full), versions(peers["d"])) == ([], [VERSION])

    play(tiny_spec, scene)


def test_what_a_keeper_has_already_is_counted_and_not_sent_again(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        one = peers["a"]
        await preserve(one, rank=0, num_ready=1, among=peers)
        assert one.state is not None
        sent: list[object] = []

        async def noting(*args: Any, **others: Any) -> None:
            sent.append(args)

        one.endpoint.send = noting  # type: ignore[method-assign]
        given = await one.copies.give(0, one.state, until_s=one.sim.clock.now_s() + 30.0)
        assert (given, sent) == ([peers["c"].name, peers["d"].name], [])

    play(tiny_spec, scene)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_only_a_copy_that_somebody_waits_for_leaves_before_other_bulk(tiny_spec: RunSpec, is_awaited: bool) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        one, seen = peers["a"], set()
        send = one.endpoint.send

        async def noting(*args: Any, priority: Priority, **others: Any) -> None:
            seen.add(priority)
            await send(*args, priority=priority, **others)

        one.endpoint.send = noting  # type: ignore[method-assign]
        assert one.state is not None
        if is_awaited:
            await one.copies.give(0, one.state, until_s=one.sim.clock.now_s() + 30.0)
        else:
            await preserve(one, rank=0, num_ready=1, among=peers)
        assert seen == {Priority.STATE if is_awaited else Priority.BULK}

    play(tiny_spec, scene)


def test_one_without_a_disk_refuses_and_the_next_is_asked(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        await preserve(peers["a"], rank=0, num_ready=2, among=peers)
        assert versions(peers["c"]) == []
        assert versions(peers["d"]) == [VERSION]

    play(tiny_spec, scene, diskless="c")


def test_no_copy_begins_while_the_one_before_is_under_way(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        a = peers["a"]
        for number in (1, 2):
            assert a.state is not None
            a.state = replace(a.state, version=number * VERSION)
            a.copies.preserve(0, a.state, rank=0, num_ready=2)
            await a.tasks.wait()
            await asyncio.sleep(0.005)
        await peers["c"].tasks.wait()
        assert sorted(versions(a)) == [VERSION, 2 * VERSION]
        assert (versions(peers["c"]), versions(peers["d"])) == ([VERSION], [])
        a.state = replace(a.state, version=3 * VERSION)
        await preserve(a, rank=0, num_ready=2, among=peers)
        assert 3 * VERSION in versions(peers["c"])

    play(tiny_spec, scene)


def test_the_third_member_writes_nothing(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        await preserve(peers["a"], rank=2, num_ready=3, among=peers)
        assert [versions(peer) for peer in peers.values()] == [[], [], [], []]

    play(tiny_spec, scene)


def test_a_stranger_and_other_layers_are_refused(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        a, d = peers["a"], peers["d"]
        assert a.state is not None
        with pytest.raises(Refused, match="layers that it does not hold"):
            await a.endpoint.ask(d.name, Keep(version=VERSION, layers=("head",)), Saved)
        plans.append(plan_of([[peers["b"].name], [d.name]], []))
        with pytest.raises(Refused, match="does not know the sender"):
            await a.endpoint.ask(d.name, Keep(version=VERSION, layers=tuple(a.state.layers)), Saved)
        assert versions(d) == []

    play(tiny_spec, scene)


def test_a_full_disk_is_no_reason_not_to_ask_others(tiny_spec: RunSpec) -> None:
    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        a = peers["a"]
        assert a.disk is not None
        a.disk.make_folder(PurePosixPath("run"))
        a.disk.limit(0)
        await preserve(a, rank=0, num_ready=2, among=peers)
        assert versions(a) == []
        assert versions(peers["c"]) == [VERSION]

    play(tiny_spec, scene)


def test_a_peer_of_several_groups_has_copies_of_all_at_once(tiny_spec: RunSpec) -> None:
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"num_experts": 2}
    spec = msgspec.convert(tables, RunSpec)

    async def scene(peers: dict[str, Peer], plans: list[Plan]) -> None:
        stages = plans[-1].stages
        experts = tuple(ExpertGroup(i, j, stages[i].members[:1]) for i in range(len(stages)) for j in range(2))
        plans.append(msgspec.structs.replace(plans[-1], experts=experts))
        held = [group_keys(spec.model, plans[-1], group) for group in plans[-1].groups_of(peers["a"].name)]
        assert len(held) == 3
        whole = initial_state(spec, tuple(key for keys in held for key in keys), torch.device("cpu"))
        peers["a"].state = replace(whole, version=VERSION)
        for group, keys in zip(plans[-1].groups_of(peers["a"].name), held, strict=True):
            state = StageState(version=VERSION, layers={key: whole.layers[key] for key in keys})
            peers["a"].copies.preserve(group, state, rank=0, num_ready=1)
        await peers["a"].tasks.wait()
        await asyncio.gather(*(other.tasks.wait() for other in peers.values()))
        kept = {name: {holding.layers for holding in peers[name].archive.holdings} for name in "bcd"}
        assert all(sum(keys in kept[name] for name in "bcd") == 2 for keys in held)

    play(spec, scene)
