"""Which reduced gradients a member keeps, and for how long it keeps its own sum."""

from types import SimpleNamespace

import pytest
import torch

from cuts import scatter
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.reduce import part_bounds
from shoal.peer.group.reductions import Reductions
from shoal.protocol.messages import RoundMember, RoundStart

SIZE = 8
ME, MATE = "me", "mate"
VECTORS = Vectors(torch.device("cpu"), chunk_bytes=8)


class Member:
    """One of two that have one microbatch each of every step; ones of ours and twos of the mate's."""

    def __init__(self, *, are_past=False, retained_from=2**62):
        self.core = SimpleNamespace(me=ME, microbatches=2, group_peers=(MATE,), draining=(), version=0)
        self.core.are_past = lambda step: are_past
        held = SimpleNamespace(vectors=VECTORS, num_parameters=SIZE, gradient_sum=lambda *_: lambda: torch.ones(SIZE))
        self.reductions = Reductions(self.core, held, retained_from=lambda: retained_from)

    def begin(self):
        members = (RoundMember(ME, 1.0, b"\x01"), RoundMember(MATE, 1.0, b"\x02"))
        start = RoundStart(
            stage=0,
            step=self.core.version,
            attempt=1,
            members=members,
            duplicates=0,
            given_up=0,
            loss_sum=0.0,
            staleness_sum=0,
        )
        reduction, make_sum, _ = self.reductions.begin(start)
        reduction.begin(make_sum())
        return reduction

    def reduce(self, reduction):
        _, half, _ = part_bounds([1.0, 1.0], SIZE)
        two = VECTORS.payload_of(torch.full((2,), 2.0))
        for at in range(0, half, 2):
            assert reduction.part_arrived(MATE, at, two)
            reduction.adding([at])()
            reduction.added([at])
        for at in range(half, SIZE, 2):
            reduction.result_arrived(MATE, at, VECTORS.payload_of(torch.full((2,), 1.5)))()
            reduction.taken(at)
        assert self.reductions.has_ended(reduction)
        self.reductions.keep(reduction.start.step, reduction.mean_N, reduction.start)

    def step(self):
        assert self.reductions.next_mean().tolist() == [1.5] * SIZE
        self.reductions.reached(self.core.version + 1)
        self.core.version += 1


def test_our_own_sum_goes_with_the_last_piece_of_the_mean_and_not_before():
    member = Member()
    reduction = member.begin()
    assert len(scatter(reduction)) == 2, "it can be sent again for as long as the mate may lack it"
    member.reduce(reduction)
    assert scatter(reduction) == []
    assert len(reduction.finished()) == 2, "what the mate may still lack is our part of the mean"


@pytest.mark.parametrize(
    ("are_past", "retained_from", "kept"),
    [(True, 2**62, {3}), (False, 2**62, {2, 3}), (True, 1, {1, 2, 3}), (False, 1, {1, 2, 3})],
)
def test_the_gradient_of_the_step_before_goes_when_the_next_is_reduced_and_nobody_wants_it(
    are_past, retained_from, kept
):
    member = Member(are_past=are_past, retained_from=retained_from)
    for _ in range(4):
        member.reduce(member.begin())
        last = set(member.reductions.means)
        member.step()
    assert last == kept
    assert 3 in member.reductions.means, "after the step it is kept, whoever is past it"
