from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.experts.choice import SHARE_MIN, HolderRouter, sent_by
from shoal.protocol.identity import PeerID

A, B, C, D = (PeerID(name) for name in "abcd")
ALIKE = dict.fromkeys((A, B, C, D), 0.25)

shares = st.dictionaries(st.sampled_from([A, B, C, D]), st.floats(0.01, 1.0), min_size=1)


def picked(me: PeerID, holders: Mapping[PeerID, float], senders: Mapping[PeerID, float], count: int) -> Counter[PeerID]:
    router = HolderRouter(me=me)
    router.follow(holders, senders)
    for peer in holders:
        router.set_ready(peer, True)
    given_to: Counter[PeerID] = Counter()
    for tick in range(count):
        target = router.pick(now_s=60.0 * tick)  # so far apart that a replica of a stage would be tried
        assert target is not None
        router.returned(target)
        given_to[target] += 1
    return given_to


def test_a_holder_with_the_share_of_its_own_tokens_serves_itself_alone() -> None:
    assert picked(A, {A: 0.25, B: 0.75}, ALIKE, 40) == {A: 40}


def test_a_holder_with_less_sends_the_rest_to_who_is_short() -> None:
    """A has 0.25 of the tokens and should serve 0.15; B and C have room for 0.3 and 0.05, D for none."""
    given_to = picked(A, {A: 0.15, B: 0.5, C: 0.3, D: 0.05}, dict.fromkeys((A, B, C, D), 1.0), 400)
    assert given_to[A] / 400 == pytest.approx(0.6, abs=0.02)
    assert given_to[B] / 400 == pytest.approx(0.4 * 0.25 / 0.3, abs=0.02)
    assert given_to[C] / 400 == pytest.approx(0.4 * 0.05 / 0.3, abs=0.02)
    assert given_to[D] == 0


def test_who_holds_none_of_it_sends_to_those_who_are_short() -> None:
    given_to = picked(A, {B: 0.25, C: 0.75}, ALIKE, 40)
    assert given_to == {C: 40}, "B has enough of its own"


def test_who_is_no_member_any_more_goes_by_the_shares() -> None:
    assert sent_by(D, {A: 3.0, B: 1.0}, {A: 1.0, B: 1.0, C: 1.0}) == pytest.approx({A: 1.0, B: SHARE_MIN})
    assert sent_by(D, {A: 3.0, B: 1.0}, {A: 3.0, B: 1.0}) == pytest.approx({A: 0.75, B: 0.25})


def test_the_only_one_that_is_there_gets_everything() -> None:
    router = HolderRouter(me=A)
    router.follow({A: 0.9, B: 0.1}, ALIKE)
    router.set_ready(B, True)
    assert [router.pick(now_s=0.0) for _ in range(3)] == [B, B, B]


def test_who_owes_much_is_given_less_than_its_share() -> None:
    router = HolderRouter(me=D)
    router.follow({A: 0.5, B: 0.5}, dict.fromkeys((C, D), 0.5))
    for peer in (A, B):
        router.set_ready(peer, True)
    given_to: Counter[PeerID] = Counter()
    for _ in range(30):
        target = router.pick(now_s=0.0)
        assert target is not None
        given_to[target] += 1
        if target == A:
            router.returned(A)
    assert given_to[B] <= 11


def test_the_same_shares_again_do_not_begin_anew() -> None:
    router = HolderRouter(me=D)
    for _ in range(6):
        router.follow({A: 0.75, B: 0.25}, {D: 1.0})  # a plan that changes something else
        for peer in (A, B):
            router.set_ready(peer, True)
        router.pick(now_s=0.0)
    assert router._outstanding[B] >= 1


@given(shares, shares)
def test_all_together_each_holder_gets_its_share(holders: dict[PeerID, float], senders: dict[PeerID, float]) -> None:
    total, sent = sum(holders.values()), dict.fromkeys(holders, 0.0)
    for me, part in senders.items():
        for peer, share in sent_by(me, holders, senders).items():
            sent[peer] += share * part / sum(senders.values())
    for peer, share in holders.items():
        assert sent[peer] == pytest.approx(share / total, abs=4 * SHARE_MIN)
