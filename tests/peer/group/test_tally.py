from collections.abc import Mapping, Sequence

from shoal.peer.pipeline.microbatch import Indices, indices_from
from shoal.peer.replica.tally import Tally, round_of
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart

A, B, C = (PeerID(name) for name in "abc")
M = 8


def indices(*which: int) -> Indices:
    return sum(1 << i for i in which)


def tally(firm: tuple[int, ...], held_out: tuple[int, ...] = ()) -> Tally:
    """Each microbatch has its index as its loss and as its staleness."""
    whole = (*firm, *held_out)
    return Tally(indices(*whole), float(sum(whole)), sum(whole), {i: (float(i), i) for i in held_out})


def opened(ranked: Sequence[PeerID], tallies: Mapping[PeerID, Tally]) -> RoundStart:
    return round_of(
        ranked, tallies, dict.fromkeys(tallies, 1.0), stage=0, step=0, attempt=0, microbatches=M, form="fp32"
    )


def brought(start: RoundStart) -> dict[PeerID, Indices]:
    return {member.peer: indices_from(member.indices, count=M) for member in start.members}


def test_what_ran_twice_is_brought_once() -> None:
    start = opened([A, B], {A: tally((0, 1)), B: tally((2,), held_out=(1, 3))})
    assert brought(start) == {A: indices(0, 1), B: indices(2, 3)}
    assert (start.given_up, start.duplicates) == (M - 4, 0)
    assert (start.loss_sum, start.staleness_sum) == (6.0, 6)


def test_of_two_who_have_it_apart_the_first_brings_it() -> None:
    start = opened([B, A, C], {A: tally((0,), held_out=(5,)), B: tally((), held_out=(5,)), C: tally(())})
    assert brought(start) == {B: indices(5), A: indices(0), C: indices()}
    assert start.duplicates == 0


def test_what_is_in_two_sums_is_counted_as_a_duplicate() -> None:
    start = opened([A, B], {A: tally((0, 1)), B: tally((1, 2))})
    assert brought(start) == {A: indices(0, 1), B: indices(1, 2)}
    assert (start.given_up, start.duplicates) == (M - 3, 1)
    assert start.loss_sum == 4.0


def test_who_is_not_ranked_brings_nothing() -> None:
    start = opened([A], {A: tally((0,)), B: tally((1,))})
    assert brought(start) == {A: indices(0)}


def test_a_round_may_leave_out_what_is_apart_and_nothing_else() -> None:
    mine = tally((0, 1), held_out=(2,))
    assert mine.may_bring(indices(0, 1))
    assert mine.may_bring(indices(0, 1, 2))
    assert not mine.may_bring(indices(0, 2)), "1 is in the sum"
    assert not mine.may_bring(indices(0, 1, 3)), "3 is not here"
