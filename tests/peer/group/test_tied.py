"""A tied matrix is stepped with one gradient at both ends, and what has left a group is what the group steps with."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from open_gate import OpenGate

from shoal.peer.base.tasks import Tasks
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.tied import TiedGradient
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.messages import Done, RoundEnded, TiedChunk, TiedOffer, TiedRequest
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

STEP = 3
SPANS = ({"embed": slice(0, 6)}, {"head": slice(2, 8)})
"""At stage 0, and at the last one, which has two numbers more at either side."""
SIZES = (6, 10)


@dataclass
class Core:
    me: str
    stage: int
    group_peers: tuple = ()
    gone: set = field(default_factory=set)
    version: int = STEP
    ready: bool = True
    standing: tuple = (0, 1)

    @property
    def holders(self):
        return tuple(mate for mate in self.group_peers if mate not in self.gone)

    def has_place(self, peer):
        return peer in (self.me, *self.group_peers)

    def is_gone(self, peer):
        return peer in self.gone


class Member:
    """Of stage 0 or 1. Its group's mean is so many times 1, 2, 3 …"""

    def __init__(self, world, name, stage, sums):
        self.peer, self.stage = world.add_peer(name), stage
        self.core, self.form = Core(self.peer.peer_id, stage), sums[0]
        self.wholes, self.begun, self.failures = [], [], []
        self.tasks = Tasks(self.failures.append)
        self.other_end = ()
        self.peer.context().run(self._start, Vectors(torch.device("cpu"), chunk_bytes=16, sums=sums))

    def _start(self, vectors):
        self.endpoint = Endpoint(self.peer.identity, self.peer.transport, run="run", gate=OpenGate(), first_sequence=1)
        self.tied = TiedGradient(
            self.core,
            SPANS[self.stage],
            vectors=vectors,
            endpoint=self.endpoint,
            compute=self.peer.compute,
            tasks=self.tasks,
            keep_steps=1,
            other_end=lambda: (1 - self.stage, self.other_end),
            on_whole=lambda whole_N, start: self.wholes.append((start.attempt, whole_N.tolist())),
            begin=lambda start: self.begun.append(start.attempt),
        )
        self.tied.install()

    def ends(self, times, *, attempt=1):
        """Its round ends, by this attempt."""
        start = SimpleNamespace(stage=self.stage, step=STEP, attempt=attempt, form=self.form)
        mean_N = times * torch.arange(1.0, SIZES[self.stage] + 1)
        reduction = SimpleNamespace(start=start, others=list(self.core.group_peers), mean_N=mean_N)
        self.peer.context().run(self.tied.ended, reduction)

    def matrix(self):
        (whole,) = [whole for _, whole in self.wholes]
        return whole[next(iter(SPANS[self.stage].values()))]

    async def asks(self, other, message, reply):
        asking = self.endpoint.ask(other.peer.peer_id, message, reply)
        return await self.peer.spawn(asking)


def play(scenario, *, sums=("fp32",)):
    """`scenario` gets two members of each end."""

    async def main():
        world = World(0, uniform(latency_s=0.05, rate_bytes_per_s=1e6), acquainted=True)
        members = [Member(world, name, stage, sums) for name, stage in zip("abxy", (0, 0, 1, 1), strict=True)]
        for one in members:
            peers = [other.peer.peer_id for other in members if other is not one and other.stage == one.stage]
            one.core.group_peers = tuple(peers)
            one.other_end = tuple(other.peer.peer_id for other in members if other.stage != one.stage)
        await scenario(world, *members)
        for one in members:
            await one.tasks.cancel()
            assert one.failures == []
        assert world.failures == []

    run(main())


@pytest.mark.parametrize("sums", [("fp32",), ("bf16",), ("int8",)])
def test_members_of_both_ends_get_the_same_sum_in_the_matrix_alone(sums):
    async def scenario(world, a, b, x, y):
        for one in (a, b):
            one.ends(1.0)
        for one in (x, y):
            one.ends(0.375)
        await asyncio.sleep(5.0)
        total = torch.arange(1.0, 7.0) + 0.375 * torch.arange(3.0, 9.0)
        expected = total.to(torch.bfloat16).float() if sums == ("bf16",) else total
        assert a.matrix() == pytest.approx(expected.tolist(), abs=0.2 if sums == ("int8",) else 0.0)
        assert a.matrix() == b.matrix() == x.matrix() == y.matrix()
        assert x.wholes[0][1][:2] == [0.375, 0.75]
        assert x.wholes[0][1][8:] == [0.375 * 9, 0.375 * 10]

    play(scenario, sums=sums)


def test_pieces_of_an_earlier_answer_are_not_taken_for_those_of_this_one():
    async def scenario(world, a, b, x, y):
        for one in (b, x, y):
            one.ends(1.0)
        await asyncio.sleep(1.0)  # x waits for a
        stale = TiedChunk(stage=1, step=STEP, serial=7, start=0)
        nines = torch.full((4,), 9.0).numpy().tobytes()
        await a.peer.spawn(a.endpoint.send(x.peer.peer_id, stale, nines, priority=Priority.REDUCTION))
        await asyncio.sleep(1.0)
        a.ends(1.0)
        await asyncio.sleep(15.0)
        assert a.matrix() == b.matrix() == x.matrix() == y.matrix()
        assert a.matrix() == (torch.arange(1.0, 7.0) + torch.arange(3.0, 9.0)).tolist()

    play(scenario)


def test_nothing_leaves_a_group_before_its_members_have_answered_for_it():
    async def scenario(world, a, b, x, y):
        world.crash(b.peer)
        for one in (a, x, y):
            one.ends(1.0)
        await asyncio.sleep(30.0)
        assert x.wholes == y.wholes == []
        a.core.gone.add(b.peer.peer_id)  # the plan has dropped it
        x.other_end = y.other_end = (a.peer.peer_id,)
        await asyncio.sleep(15.0)
        assert a.matrix() == x.matrix() == y.matrix()

    play(scenario)


def test_who_has_answered_takes_part_in_no_other_attempt_while_somebody_has_that_result():
    async def scenario(world, a, b, x, y):
        later = SimpleNamespace(step=STEP, attempt=2)
        assert a.tied.may_begin(SimpleNamespace(step=STEP, attempt=1))
        a.ends(1.0)
        await asyncio.sleep(1.0)
        assert not b.tied.may_begin(later)
        b.tied.look()
        assert b.begun == []
        b.tied.mate_lost(a.peer.peer_id)  # it has begun anew, and is ready again
        b.tied.look()
        assert b.begun == [2]
        b.ends(2.0, attempt=2)
        with pytest.raises(Refused, match="holds to another attempt at step 3"):
            await a.asks(b, RoundEnded(stage=0, step=STEP, attempt=1), Done)

    play(scenario)


def test_a_member_that_ends_another_attempt_than_it_has_answered_for_gives_it_to_nobody():
    async def scenario(world, a, b, x, y):
        a.ends(1.0)
        await asyncio.sleep(1.0)
        b.ends(2.0, attempt=2)
        for one in (x, y):
            one.ends(1.0)
        await asyncio.sleep(30.0)
        assert b.wholes == []
        assert a.matrix() == x.matrix() == y.matrix()

    play(scenario)


def test_what_was_added_at_one_end_outlives_the_death_of_who_gave_it():
    """x gives its gradient to the other end and dies; y reduces again, to other bits, and steps with what x gave."""

    async def scenario(world, a, b, x, y):
        for one in (a, b):
            one.ends(1.0)
        x.core.gone.add(y.peer.peer_id)  # as if y had answered
        a.other_end = b.other_end = (x.peer.peer_id,)
        x.ends(1.0)
        await asyncio.sleep(5.0)
        world.crash(x.peer)
        a.core.version = STEP + 1
        a.tied.reached(STEP + 1)
        a.other_end = b.other_end = (x.peer.peer_id, y.peer.peer_id)
        y.core.gone.add(x.peer.peer_id)
        y.ends(1.0 + 2**-20, attempt=2)
        await asyncio.sleep(15.0)
        assert y.matrix() == a.matrix() == b.matrix()
        assert y.wholes[0][1][0] == 1.0 + 2**-20

    play(scenario)


def test_a_stranger_gets_nothing_and_a_step_that_is_not_kept_is_said():
    async def scenario(world, a, b, x, y):
        with pytest.raises(Refused, match="does not know the sender as a member of the end beyond 0"):
            await b.asks(a, TiedRequest(stage=0, step=STEP), TiedOffer)
        with pytest.raises(Refused, match="keeps nothing of step 1"):
            await x.asks(a, TiedRequest(stage=0, step=1), TiedOffer)
        for core, has_it in (({"ready": True}, False), ({"ready": False}, True), ({"version": STEP + 1}, True)):
            a.core = a.tied._core = Core(a.core.me, 0, **core)
            offer = await b.asks(a, TiedRequest(stage=0, step=STEP, peek=True), TiedOffer)
            assert offer.is_whole == has_it

    play(scenario)


def test_a_pair_that_cannot_meet_waits_once_and_steps_with_what_its_mates_have():
    async def scenario(world, a, b, x, y):
        world.partition([a.peer], [y.peer])
        for one in (a, b, x, y):
            one.ends(1.0)
        await asyncio.sleep(20.0)
        assert a.matrix() == b.matrix() == x.matrix() == y.matrix()

    play(scenario)
