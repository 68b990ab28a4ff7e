"""Who is behind asks those who may know, and does not throw its state away over somebody who cannot be reached."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import torch
from open_gate import OpenGate

from shoal.peer.base.tasks import Tasks
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.catching_up import CatchingUp, _Fetch
from shoal.peer.group.pieces import Pieces
from shoal.peer.group.reduce import MeanPiece
from shoal.peer.replica.agreement import Agreement
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import ReducedChunk
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World
from shoal.protocol.wire_format import tensor_bytes

STEP = 3
SIZE = 10
WHOLE = (STEP, list(map(float, range(10))))


class Replica:
    """Of a stage of ten numbers, at `version`."""

    def __init__(self, world, name, version, means, sums=("fp32",)):
        self.vectors = Vectors(torch.device("cpu"), chunk_bytes=16, sums=sums)
        self.peer = world.add_peer(name)
        self.version = version
        self.means = means
        self.pieces = {}
        self.got = []
        self.gave_up_on = []
        self.strangers = set()
        self.wanted_from = 2**62
        self.tasks = Tasks(lambda error: self.gave_up_on.append(error))
        self.peer.context().run(self._start)

    def _start(self):
        endpoint = Endpoint(self.peer.identity, self.peer.transport, run="run", gate=OpenGate(), first_sequence=1)
        self.sender = Pieces(endpoint, self.vectors, self.tasks, self.peer.clock, self.peer.compute)
        self.catching_up = CatchingUp(
            self,
            SimpleNamespace(num_parameters=SIZE, vectors=self.vectors),
            endpoint=endpoint,
            compute=self.peer.compute,
            pieces=self.sender,
            kept=self,
            wanted_from=lambda: self.wanted_from,
            on_mean=self._on_mean,
            on_behind=self.gave_up_on.append,
        )
        self.catching_up.install()
        self.endpoint = endpoint

    stage = 0

    def has_place(self, peer):
        return peer not in self.strangers

    def _on_mean(self, step, mean_N, pieces):
        self.got.append((step, mean_N.tolist()))
        self.pieces[step] = pieces

    async def catch_up(self, mate, *owing, is_still=False):
        names = [replica.peer.peer_id for replica in owing]
        await self.peer.spawn(self.catching_up.catch_up(mate.peer.peer_id, STEP, owing=names, is_still=is_still))


def play(scenario, *, sums=("fp32",)):
    """`scenario` gets three replicas: one past the step, and two that are not."""
    mean_N = torch.arange(float(SIZE))

    async def main():
        world = World(0, uniform(latency_s=0.05, rate_bytes_per_s=1e6), acquainted=True)
        replicas = [
            Replica(world, "ahead", STEP + 1, {STEP: mean_N}, sums),
            *(Replica(world, name, STEP, {}, sums) for name in ("behind", "also behind")),
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
        third.sender.may_arrive = lambda target, step: is_on_its_way and (target, step) == (behind.peer.peer_id, STEP)
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


def test_what_something_of_ours_lacks_from_before_our_version_is_kept_too():
    async def scenario(world, ahead, behind, also_behind):
        behind.version = STEP + 1
        for behind.wanted_from in (STEP + 1, STEP):
            await behind.peer.spawn(behind.catching_up.fetch(ahead.peer.peer_id, STEP))
            assert behind.got == ([WHOLE] if behind.wanted_from == STEP else [])

    play(scenario)


# --- in few bits ---

NARROW = ("int8", "hadamard4")


def in_few_bits(replica, *bounds, form="hadamard4"):
    """Have it keep a mean as a round of few bits has brought it. Returns: the mean."""
    vectors, mean_N, pieces = replica.vectors, torch.randn(SIZE), []
    for start, stop in itertools.pairwise((0, *bounds, SIZE)):
        payload = bytes(vectors.round_mean(mean_N[start:stop], form, (start, 1)))
        pieces.append(MeanPiece(start, stop - start, form, payload))
    replica.means, replica.pieces = {STEP: mean_N}, {STEP: tuple(pieces)}
    return mean_N


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_what_a_round_brought_in_few_bits_goes_on_so_bit_for_bit():
    """From mate to mate: whoever has caught up gives it on as it came."""

    async def scenario(world, ahead, behind, also_behind):
        mean_N, brought = in_few_bits(ahead, 4, 7), []
        for replica in (behind, also_behind):
            take = replica.catching_up._on_chunk

            async def noted(source, meta, payload, take=take):
                brought.append(len(payload))
                await take(source, meta, payload)

            replica.endpoint.on_frame(ReducedChunk, noted, stage=0)
        await behind.catch_up(ahead)
        behind.means[STEP] = torch.tensor(behind.got[0][1])
        behind.version = STEP + 1
        await also_behind.catch_up(behind)
        assert behind.got == also_behind.got == [(STEP, mean_N.tolist())]
        assert behind.pieces == also_behind.pieces == ahead.pieces
        assert brought == 6 * [tensor_bytes("hadamard4", 3)]

    play(scenario, sums=NARROW)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_what_came_in_few_bits_and_was_changed_since_goes_exactly():
    """As where both ends of a tied model have added to it."""

    async def scenario(world, ahead, behind, also_behind):
        ahead.means[STEP] = torch.randn(SIZE)
        await behind.catch_up(ahead)
        assert behind.got == [(STEP, ahead.means[STEP].tolist())]
        assert behind.pieces == {STEP: ()}

    play(scenario, sums=NARROW)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize(
    ("start", "size", "form", "num_bytes"),
    [
        (8, 4, "fp32", 16),  # beyond the end
        (-1, 4, "fp32", 16),
        (4, 0, "fp32", 0),
        (4, 5, "fp32", 20),  # larger than a piece
        (4, 2**62, "hadamard4", 34),
        (4, 4, "bf16", 8),  # no format of this run's
        (4, 4, "hadamard3", 26),
        (4, 4, "hadamard4", 33),
        (2, 4, "fp32", 16),  # over one that has come
    ],
)
def test_a_piece_that_no_gradient_of_ours_has_is_refused_and_takes_nothing(start, size, form, num_bytes):
    async def scenario(world, ahead, behind, also_behind):
        catching_up = behind.catching_up
        fetch = catching_up._fetches[STEP] = _Fetch(ahead.peer.peer_id, torch.zeros(SIZE))

        async def arrive(start, size, form, num_bytes):
            meta = ReducedChunk(stage=0, step=STEP, start=start, size=size, form=form)
            await catching_up._on_chunk(ahead.peer.peer_id, meta, bytes(num_bytes))

        await behind.peer.spawn(arrive(0, 4, "fp32", 16))
        with pytest.raises(RemoteError):
            await behind.peer.spawn(arrive(start, size, form, num_bytes))
        assert (fetch.num_taken, list(fetch.pieces)) == (4, [0])
        await behind.peer.spawn(arrive(4, 4, "hadamard4", 34))
        await behind.peer.spawn(arrive(8, 2, "fp32", 8))
        assert fetch.is_whole
        assert fetch.as_it_came == (), "a part of it has not kept its bytes"

    play(scenario, sums=NARROW)


def test_those_ahead_are_asked_who_are_least_far_and_not_gone():
    group = Agreement(me="a", stage=0, microbatches=2, tokens_per_microbatch=8, has_loss=True)
    for peer, version in (("a", 3), ("b", 3), ("c", 5), ("d", 4), ("e", 4)):
        group.heard(peer, version, "digest")
    assert group.is_behind(3)
    assert group.ahead_of(3, lambda peer: False) == ["d", "e"]
    assert group.ahead_of(3, lambda peer: peer == "d") == ["e"]
    assert group.ahead_of(3, lambda peer: peer in "de") == ["c"]
    assert not group.is_behind(5)
