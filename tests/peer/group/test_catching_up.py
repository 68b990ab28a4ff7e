"""Who is behind asks those who may know, and does not throw its state away over somebody who cannot be reached."""

import asyncio

import pytest
import torch

from shoal.peer.group.agreement import Agreement
from shoal.peer.group.catching_up import CatchingUp
from shoal.peer.group.pieces import Pieces
from shoal.peer.tasks import Tasks
from shoal.peer.vectors import Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.trust import OpenGate
from shoal.protocol.sim.world import World

STEP = 3
WHOLE = (STEP, list(map(float, range(10))))


class Replica:
    """Of a stage of ten numbers, at `version`."""

    def __init__(self, world, name, version, means):
        self.peer = world.add_peer(name)
        self.version = version
        self.means = means
        self.got = []
        self.gave_up_on = []
        self.strangers = set()
        self.tasks = Tasks(lambda error: self.gave_up_on.append(error))
        self.peer.context().run(self._start)

    def _start(self):
        vectors = Vectors(torch.device("cpu"), chunk_bytes=16)
        endpoint = Endpoint(self.peer.identity, self.peer.transport, run="run", gate=OpenGate(), first_sequence=1)
        self.pieces = Pieces(endpoint, vectors, self.tasks, self.peer.clock, self.peer.compute)
        self.catching_up = CatchingUp(
            stage=0,
            size=10,
            vectors=vectors,
            endpoint=endpoint,
            compute=self.peer.compute,
            pieces=self.pieces,
            means=lambda: self.means,
            version=lambda: self.version,
            on_mean=lambda step, mean_N: self.got.append((step, mean_N.tolist())),
            on_behind=self.gave_up_on.append,
            gives_to=lambda peer: peer not in self.strangers,
        )
        self.catching_up.install()

    async def catch_up(self, mate, *owing, is_still=False):
        names = [replica.peer.peer_id for replica in owing]
        await self.peer.spawn(self.catching_up.catch_up(mate.peer.peer_id, STEP, owing=names, is_still=is_still))


def play(scenario):
    """`scenario` gets three replicas: one past the step, and two that are not."""
    mean_N = torch.arange(10.0)

    async def main():
        world = World(0, uniform(latency_s=0.05, rate_bytes_per_s=1e6), acquainted=True)
        replicas = [
            Replica(world, "ahead", STEP + 1, {STEP: mean_N}),
            *(Replica(world, name, STEP, {}) for name in ("behind", "also behind")),
        ]
        await scenario(world, *replicas)
        for replica in replicas:
            await replica.tasks.cancel()
        assert world.failures == []

    run(main())


def test_who_owes_a_piece_is_believed_and_who_is_past_the_step_gives_the_whole():
    async def scenario(world, ahead, behind, also_behind):
        await behind.catch_up(ahead, also_behind)
        assert behind.got == []
        await behind.catch_up(ahead)
        assert behind.got == [WHOLE]

    play(scenario)


@pytest.mark.parametrize("is_on_its_way", [True, False])
def test_where_a_round_stands_still_who_says_that_its_pieces_have_yet_to_leave_is_believed(is_on_its_way):
    """All who owe a piece are asked: the first one may be behind itself, and its own line may be idle."""

    async def scenario(world, ahead, behind, also_behind):
        third = Replica(world, "third", STEP, {})
        third.pieces.may_arrive = lambda target, step: is_on_its_way and (target, step) == (behind.peer.peer_id, STEP)
        await behind.catch_up(ahead, also_behind, third, is_still=True)
        assert behind.got == ([] if is_on_its_way else [WHOLE])
        assert behind.gave_up_on == []
        await third.tasks.cancel()

    play(scenario)


@pytest.mark.parametrize("dies_after_s", [0.0, 0.08])
def test_a_mate_that_cannot_be_reached_is_no_reason_to_fetch_the_state(dies_after_s):
    async def scenario(world, ahead, behind, also_behind):
        asyncio.get_running_loop().call_later(dies_after_s, world.crash, ahead.peer)
        asyncio.get_running_loop().call_later(1.0, behind.catching_up.mate_lost, ahead.peer.peer_id)
        await behind.catch_up(ahead)
        assert (behind.got, behind.gave_up_on) == ([], [])
        assert world.now_s() < 15.0

    play(scenario)


def test_a_mate_that_no_longer_has_the_gradient_is():
    async def scenario(world, ahead, behind, also_behind):
        ahead.version = STEP + 5
        ahead.means = {}
        await behind.catch_up(ahead)
        assert behind.gave_up_on == [ahead.peer.peer_id]

    play(scenario)


def test_who_has_the_gradient_and_waits_for_its_device_asks_nobody():
    async def scenario(world, ahead, behind, also_behind):
        ahead.version = STEP + 5
        ahead.means = {}
        behind.means = {STEP: torch.zeros(10)}
        await behind.catch_up(ahead)
        assert behind.gave_up_on == []

    play(scenario)


def test_what_came_while_it_was_asked_for_is_not_lacking():
    async def scenario(world, ahead, behind, also_behind):
        ahead.version = STEP + 5
        ahead.means = {}
        asyncio.get_running_loop().call_later(0.05, behind.means.setdefault, STEP, torch.zeros(10))
        await behind.catch_up(ahead)
        assert behind.gave_up_on == []

    play(scenario)


def test_those_ahead_are_asked_who_are_least_far_and_not_gone():
    group = Agreement(me="a", stage=0, microbatches=2, tokens_per_microbatch=8, has_loss=True)
    for peer, version in (("a", 3), ("b", 3), ("c", 5), ("d", 4), ("e", 4)):
        group.heard(peer, version, "digest")
    assert group.is_behind(3)
    assert group.ahead_of(3, lambda peer: False) == ["d", "e"]
    assert group.ahead_of(3, lambda peer: peer == "d") == ["e"]
    assert group.ahead_of(3, lambda peer: peer in "de") == ["c"]
    assert not group.is_behind(5)
