"""How many microbatches a slow claimant may hold."""

import pytest

from shoal.peer.replica.router import SLOWER, Turns
from shoal.protocol.identity import PeerID

A, B, C, SLOW = (PeerID(name) for name in ("a", "b", "c", "slow"))
HELD = {A: 1, B: 1, C: 1, SLOW: 0}


def turns(slow_s: float) -> Turns:
    made = Turns()
    for turn in range(8):
        for peer, takes_s in ((A, 1.0), (B, 1.0), (C, 1.0), (SLOW, slow_s)):
            made.made(peer, given_s=turn * takes_s, now_s=(turn + 1) * takes_s)
    return made


@pytest.mark.parametrize(("left", "most"), [(27, 2), (100, 8), (8, 1), (0, 1)])
def test_a_slow_one_holds_what_it_makes_while_the_others_make_the_rest(left: int, most: int) -> None:
    assert turns(4.0).most(SLOW, HELD, left=left) == most


def test_who_is_about_as_quick_as_the_others_holds_what_it_likes() -> None:
    assert turns(SLOWER).most(SLOW, HELD, left=3) == 3
    assert turns(4.0).most(A, HELD, left=3) == 4


def test_of_whom_nothing_is_known_nothing_is_held_back() -> None:
    assert Turns().most(SLOW, HELD, left=3) == 3
    alone = turns(4.0)
    assert alone.most(SLOW, {SLOW: 0}, left=3) == 3


def test_what_waited_behind_another_one_counts_from_when_that_was_made() -> None:
    made = turns(1.0)
    for turn in range(20):
        made.made(SLOW, given_s=100.0, now_s=101.0 + 5.0 * turn)
    assert made.most(SLOW, HELD, left=27) == 2, "five seconds each, and ten for the others' thirty"
