from shoal.peer.group.tally import Tally, share_out
from shoal.peer.pipeline.microbatch import Indices
from shoal.protocol.identity import PeerID

A, B, C = (PeerID(name) for name in "abc")


def indices(*which: int) -> Indices:
    return sum(1 << i for i in which)


def tally(firm: tuple[int, ...], apart: tuple[int, ...] = ()) -> Tally:
    """Each microbatch has its index as its loss and as its staleness."""
    whole = (*firm, *apart)
    return Tally(indices(*whole), float(sum(whole)), sum(whole), {i: (float(i), i) for i in apart})


def test_what_ran_twice_is_brought_once() -> None:
    shares = share_out([A, B], {A: tally((0, 1)), B: tally((2,), apart=(1, 3))})
    assert shares.brought == {A: indices(0, 1), B: indices(2, 3)}
    assert (shares.union, shares.duplicates) == (indices(0, 1, 2, 3), 0)
    assert (shares.loss_sum, shares.staleness_sum) == (6.0, 6)


def test_of_two_who_have_it_apart_the_first_brings_it() -> None:
    shares = share_out([B, A, C], {A: tally((0,), apart=(5,)), B: tally((), apart=(5,)), C: tally(())})
    assert shares.brought == {B: indices(5), A: indices(0), C: indices()}
    assert shares.duplicates == 0


def test_what_is_in_two_sums_is_counted_as_a_duplicate() -> None:
    shares = share_out([A, B], {A: tally((0, 1)), B: tally((1, 2))})
    assert (shares.union, shares.duplicates) == (indices(0, 1, 2), 1)
    assert shares.loss_sum == 4.0


def test_who_is_not_ranked_brings_nothing() -> None:
    shares = share_out([A], {A: tally((0,)), B: tally((1,))})
    assert shares.brought == {A: indices(0)}


def test_a_round_may_leave_out_what_is_apart_and_nothing_else() -> None:
    mine = tally((0, 1), apart=(2,))
    assert mine.may_bring(indices(0, 1))
    assert mine.may_bring(indices(0, 1, 2))
    assert not mine.may_bring(indices(0, 2)), "1 is in the sum"
    assert not mine.may_bring(indices(0, 1, 3)), "3 is not here"
