from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.replica.router import Router, in_turn
from shoal.protocol.identity import PeerID

A, B, C = (PeerID(name) for name in "abc")


def router(shares: dict[PeerID, float], *, ready: list[PeerID] | None = None) -> Router:
    made = Router()
    made.set_shares(shares)
    for peer in shares if ready is None else ready:
        made.set_ready(peer, True)
    return made


def test_nobody_ready_is_nobody_picked() -> None:
    made = router({A: 1.0}, ready=[])
    assert made.pick(now_s=0.0) is None


def test_the_ready_one_of_two_gets_everything() -> None:
    made = router({A: 5.0, B: 1.0}, ready=[B])
    assert [made.pick(now_s=0.0) for _ in range(3)] == [B, B, B]


def test_a_ready_peer_without_a_share_is_no_target() -> None:
    made = router({A: 1.0})
    made.set_ready(B, True)
    made.set_shares({C: 1.0})
    assert made.pick(now_s=0.0) is None


def test_ties_go_by_plan_order() -> None:
    assert router({B: 1.0, A: 1.0}).pick(now_s=0.0) == B


@pytest.mark.parametrize(("senders", "receivers", "each"), [(9, 11, 7), (11, 9, 6), (8, 8, 1), (3, 7, 2), (1, 5, 5)])
def test_senders_that_know_nothing_of_each_other_give_each_receiver_as_much(
    senders: int, receivers: int, each: int
) -> None:
    names = [PeerID(f"r{number}") for number in range(receivers)]
    given: Counter[PeerID] = Counter(dict.fromkeys(names, 0))
    for sender in range(senders):
        made = router(dict.fromkeys(in_turn(names, sender, senders), 1.0))
        for _ in range(each):
            target = made.pick(now_s=0.0)
            assert target is not None
            given[target] += 1
    assert max(given.values()) - min(given.values()) <= 2


@pytest.mark.parametrize("more", [0.0, 1e-12, 0.02])
def test_answered_at_once_the_split_still_follows_the_shares(more: float) -> None:
    """With nothing outstanding all replicas look alike: the count of what each was given decides, also where shares of
    equal devices differ by rounding or by noise."""
    made = router({A: 1.0, B: 1.0 + more, C: 1.0})
    given: Counter[PeerID] = Counter()
    for _ in range(9):
        target = made.pick(now_s=0.0)
        assert target is not None
        given[target] += 1
        made.returned(target)
    assert given == {A: 3, B: 3, C: 3}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 60))
def test_without_answers_each_replica_has_at_least_its_share_rounded_down(weights: list[int], count: int) -> None:
    """The least (n + 1) / share next is D'Hondt's rule, whose lower quota this is."""
    made = router({PeerID(str(i)): float(weight) for i, weight in enumerate(weights)})
    given_to = Counter(made.pick(now_s=0.0) for _ in range(count))
    assert all(given_to[PeerID(str(i))] >= count * weight // sum(weights) for i, weight in enumerate(weights))


def test_a_replica_that_answers_more_slowly_is_given_less() -> None:
    """A answers at once, B never: everything beyond B's first few goes to A."""
    made = router({A: 1.0, B: 1.0})
    given_to: Counter[PeerID] = Counter()
    for _ in range(40):
        target = made.pick(now_s=0.0)
        assert target is not None
        given_to[target] += 1
        if target == A:
            made.returned(A)
    assert given_to[B] == 1


@given(st.lists(st.sampled_from(["pick", "return", "a", "b", "c", "plan"]), max_size=60))
def test_outstanding_is_picked_less_returned_whatever_happens(events: list[str]) -> None:
    made = router({A: 1.0, B: 2.0, C: 3.0})
    owed: list[PeerID] = []
    for event in events:
        if event == "pick":
            target = made.pick(now_s=0.0)
            if target is not None:
                owed.append(target)
        elif event == "return" and owed:
            made.returned(owed.pop(0))
        elif event == "plan":
            made.set_shares({A: 2.0, C: 1.0} if B in made.shares else {A: 1.0, B: 1.0, C: 1.0})
        elif event in ("a", "b", "c"):
            made.set_ready(PeerID(event), not made.is_ready(PeerID(event)))
        assert made._outstanding == dict(Counter(owed))
    for peer in owed:
        made.returned(peer)
    assert made._outstanding == {}


def test_more_answers_than_questions_leave_no_debt_below_zero() -> None:
    made = router({A: 1.0, B: 1.0})
    made.returned(A)
    assert made.pick(now_s=0.0) == A
    made.returned(A)
    made.returned(A)
    assert made._outstanding == {}


def test_one_many_times_slower_gets_one_at_a_time_and_seldom() -> None:
    """Not shares, since a whole step waits for what it holds; and not nothing, since it may recover."""
    made = router({A: 1.0, B: 1.0})
    given_to: Counter[PeerID] = Counter()
    for tick in range(1000):
        target = made.pick(now_s=0.1 * tick)
        assert target is not None
        given_to[target] += 1
        made.took(target, 0.1 if target == A else 3.0)
        made.returned(target)
    assert 2 <= given_to[B] <= 4, "every 20 * 3 s, after the first ones"
    assert given_to[A] == 1000 - given_to[B]


def test_one_that_has_recovered_gets_its_share_again() -> None:
    made = router({A: 1.0, B: 1.0})
    made.took(A, 0.1)
    made.took(B, 10.0)
    given_to: Counter[PeerID] = Counter()
    for tick in range(40):
        target = made.pick(now_s=1000.0 * tick)  # so far apart that a laggard is tried each time
        assert target is not None
        made.took(target, 0.1)
        made.returned(target)
    for _ in range(10):
        target = made.pick(now_s=50_000.0)
        assert target is not None
        given_to[target] += 1
    assert given_to[A] == given_to[B] == 5


def test_a_small_window_does_not_starve_the_one_with_the_small_share() -> None:
    """One microbatch out at a time and nine to one: by the shares alone the ninth would always come first."""
    made = router({A: 1000.0, B: 1.0})
    given_to: Counter[PeerID] = Counter()
    for tick in range(61):
        target = made.pick(now_s=1.0 * tick)
        assert target is not None
        given_to[target] += 1
        made.returned(target)
    assert given_to[B] >= 6, "within five seconds, and then every five"


def test_one_that_owes_something_is_not_tried() -> None:
    made = router({A: 1.0, B: 1.0})
    assert made.pick(now_s=0.0) == A
    assert made.pick(now_s=0.0) == B
    made.returned(A)
    assert [made.pick(now_s=1000.0 + tick) for tick in range(1)] == [A]
    made.took(A, 0.1)
    made.took(B, 100.0)
    made.returned(A)
    assert made.pick(now_s=10_000.0) == A, "B still has its first"


@pytest.mark.parametrize("shares", [{A: 1.0, B: 3.0}, {A: 1.0, B: 1.0}])
def test_a_new_plan_splits_from_its_own_beginning(shares: dict[PeerID, float]) -> None:
    """What an older plan gave is no debt of the new one: nobody gets a burst to make up for the past."""
    made = router({A: 1.0, B: 9.0})
    for _ in range(50):
        target = made.pick(now_s=0.0)
        assert target is not None
        made.returned(target)
    made.set_shares(shares)
    given_to: Counter[PeerID] = Counter()
    for _ in range(4):
        target = made.pick(now_s=0.0)
        assert target is not None
        given_to[target] += 1
        made.returned(target)
    expected = {peer: round(4 * share / sum(shares.values())) for peer, share in shares.items()}
    assert all(abs(given_to[peer] - expected[peer]) <= 1 for peer in shares)


def test_who_is_shunned_gets_nothing_while_there_is_somebody_else() -> None:
    made = router({A: 5.0, B: 1.0})
    assert [made.pick(now_s=0.0, shunned={A}) for _ in range(3)] == [B, B, B]
    assert made.pick(now_s=0.0, shunned={A, B}) == A
    assert made.pick(now_s=0.0, avoid=B, shunned={A}) == A, "not who could not, though the other is slow"
