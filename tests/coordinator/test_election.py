from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.election import rank, standing

PEERS = [f"peer-{number}" for number in range(10)]


@given(st.permutations(PEERS), st.integers(1, 1000))
def test_everyone_computes_the_same_order(shuffled, term):
    assert rank("run", term, shuffled) == rank("run", term, PEERS)
    assert sorted(rank("run", term, shuffled)) == sorted(PEERS)


def test_the_first_differs_from_term_to_term_and_run_to_run():
    assert rank("run", 1, PEERS) != rank("run", 2, PEERS)
    assert rank("run", 1, PEERS) != rank("another", 1, PEERS)


def test_every_peer_has_its_turn_about_as_often():
    firsts = Counter(rank("run", term, PEERS)[0] for term in range(2000))
    # 200 each on average; five standard deviations (13.4) on either side
    assert all(133 < firsts[peer] < 267 for peer in PEERS)


def test_who_stays_keeps_the_order_when_others_leave():
    order = rank("run", 7, PEERS)
    assert rank("run", 7, PEERS[:5]) == tuple(peer for peer in order if peer in PEERS[:5])


def test_the_standby_is_the_first_that_is_not_the_coordinator():
    order = rank("run", 3, PEERS)
    assert standing("run", 3, order[0], PEERS, order[1]) == 0
    assert standing("run", 3, order[4], PEERS, order[0]) == 0
    assert standing("run", 3, order[0], PEERS, order[9]) == 8


def test_coordinator_and_strangers_stand_nowhere():
    assert standing("run", 3, PEERS[0], PEERS, PEERS[0]) is None
    assert standing("run", 3, PEERS[0], PEERS, "stranger") is None
