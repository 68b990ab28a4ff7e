"""Pieces of rounds that nobody has told us of: kept from mates, and of each a few rounds; from nobody else."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from open_gate import OpenGate

from cuts import scatter
from shoal.peer.encoding.vectors import VECTORS
from shoal.peer.group.reductions import ROUNDS_MAX, Early
from shoal.peer.membership.group_membership import GroupMembership
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.events import GradientCounted
from shoal.peer.replica.group_core import GroupCore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import GatherPart, ReducePart, RoundMember, RoundStart
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.spec import RunSpec

A, B = PeerID("a"), PeerID("b")
SIZE = 10


def part(start, *, step=0, attempt=1, kind=ReducePart):
    return kind(stage=0, step=step, attempt=attempt, start=start)


def numbers(count):
    return bytearray(torch.ones(count).numpy().tobytes())


def test_what_came_of_a_round_is_taken_once_and_what_came_twice_is_one() -> None:
    early = Early(40, 3)
    for mate in (A, B, A):
        early.keep(mate, part(0), numbers(5))
    early.keep(A, part(0, kind=GatherPart), numbers(5))
    early.keep(A, part(0, attempt=0), numbers(5))
    early.keep(A, part(0, attempt=2), numbers(5))
    came = early.take(0, 1)
    assert [(mate, type(piece)) for mate, piece, _ in came] == [(A, ReducePart), (A, GatherPart), (B, ReducePart)]
    assert early.take(0, 1) == []
    assert len(early) == 1, "the attempt before it will not come any more"
    assert len(early.take(0, 2)) == 1


def test_of_one_mate_a_few_rounds_are_kept_the_latest() -> None:
    early = Early(40, 3)
    early.keep(B, part(0), numbers(5))
    for attempt in range(1000):
        early.keep(A, part(0, attempt=attempt), numbers(5))
    assert len(early) == ROUNDS_MAX + 1
    assert len(early.take(0, 999)) == 1
    early.keep(A, part(0, step=1), numbers(5))
    early.forget_before(1, group_peers=[A])
    assert len(early) == 1
    early.forget_before(1, group_peers=[B])
    assert len(early) == 0


def test_no_round_has_such_pieces() -> None:
    early = Early(40, 3)
    with pytest.raises(RemoteError):
        early.keep(A, part(0), numbers(11))
    for start in range(3):
        early.keep(A, part(start), numbers(5))
    with pytest.raises(RemoteError):
        early.keep(A, part(3), numbers(5))


class Replica(GroupMembership):
    """A member of a group of ten numbers, with one mate, which has contributed the other of a step's two
    microbatches. It notes what it would step with."""

    def __init__(self, world, *, has_sum=True):
        self._has_sum = has_sum
        self.me, self.mate, self.stranger = (world.add_peer(name) for name in ("me", "mate", "stranger"))
        self.committed = []
        self.me.context().run(self._begin)

    def _begin(self):
        names = self.me.peer_id, self.mate.peer_id
        sum_N = torch.ones(SIZE) if self._has_sum else None
        held = SimpleNamespace(
            vectors=VECTORS, num_parameters=SIZE, gradient_sum=lambda *_: lambda: sum_N, keys=(), state=None
        )
        group = GroupCore(
            me=names[0],
            stage=0,
            steps=5,
            microbatches=2,
            tokens_per_microbatch=1,
            has_loss=True,
            deadline_s=0.0,
            quorum=1.0,
        )
        core = SimpleNamespace(group=group, handle=group.handle, next_timer_s=lambda: math.inf)
        services = SimpleNamespace(
            endpoint=Endpoint(self.me.identity, self.me.transport, run="run", gate=OpenGate(), first_sequence=1),
            compute=self.me.compute,
            clock=self.me.clock,
            spec=RunSpec(),
            layers=SimpleNamespace(server=SimpleNamespace(pinned_from=lambda: 0)),
            failures=SimpleNamespace(add=self._failed),
            neighbours=SimpleNamespace(unreachable=lambda peer: None),
        )
        super().__init__(services, None, core, held, incarnation=0)
        stages = (Stage(0, 1, tuple(Member(name, 1.0, 1.0, 1) for name in names)),)
        group.follow(Plan(run="run", term=1, sequence=1, previous="", coordinator=A, stages=stages), (), now_s=0.0)
        group.take_part(True, now_s=0.0)
        group.handle(GradientCounted(Microbatch(0, 0), 1.0, 0), now_s=0.0)

    version = 0
    is_idle = True

    def _failed(self, error):
        raise error

    def _install(self):
        pass

    def _load(self, state):
        pass

    def _near(self):
        return []

    def _step(self, step, mean_gradient_N):
        self.committed.append((step, mean_gradient_N.tolist()))

    def first_round(self):
        members = tuple(
            RoundMember(peer=peer.peer_id, bandwidth=1.0, indices=indices)
            for peer, indices in ((self.me, b"\x01"), (self.mate, b"\x02"))
        )
        return RoundStart(
            stage=0, step=0, attempt=1, members=members, duplicates=0, given_up=0, loss_sum=0.0, staleness_sum=0
        )

    async def hear(self, source, message, payload=None):
        handler = self._on_round_start if payload is None else self._on_piece
        await self.me.spawn(handler(source.peer_id, message, *([] if payload is None else [payload])))


def play(scenario, **how):
    async def main():
        world = World(0, uniform(latency_s=0.05, rate_bytes_per_s=1e6), acquainted=True)
        replica = Replica(world, **how)
        await scenario(replica)
        await replica.me.spawn(replica.close())

    run(main())


def test_what_strangers_send_of_made_up_rounds_is_not_kept_and_a_mates_is_bounded() -> None:
    async def scenario(replica):
        for attempt in range(300):
            await replica.hear(replica.stranger, part(0, attempt=attempt), numbers(5))
        assert len(replica.reductions.early) == 0
        for attempt in range(300):
            await replica.hear(replica.mate, part(0, attempt=attempt), numbers(5))
            await replica.hear(replica.mate, part(0, step=attempt), numbers(5))
        assert 0 < len(replica.reductions.early) <= ROUNDS_MAX

    play(scenario)


def test_a_round_begins_with_what_has_come_of_it_but_for_what_is_not_of_it() -> None:
    async def scenario(replica):
        for piece in (part(3), part(5, kind=GatherPart)):
            await replica.hear(replica.mate, piece, numbers(5))
        await replica.hear(replica.mate, replica.first_round())
        await replica.hear(replica.mate, part(0), numbers(5))
        assert replica.committed == [(0, [1.0] * SIZE)]

    play(scenario)


def test_a_stranger_opens_no_round() -> None:
    async def scenario(replica):
        with pytest.raises(Refused):
            await replica.hear(replica.stranger, replica.first_round())
        assert 0 not in replica.reductions

    play(scenario)


def test_whoever_steps_already_takes_no_part_in_another_attempt() -> None:
    """Its sum is gone. It would bring zeros for a gradient."""

    async def scenario(replica):
        await replica.hear(replica.mate, part(0), numbers(5))
        await replica.hear(replica.mate, replica.first_round())
        await asyncio.sleep(1.0)
        assert replica.committed == []
        assert scatter(replica.reductions.get(0)) == []

    play(scenario, has_sum=False)
