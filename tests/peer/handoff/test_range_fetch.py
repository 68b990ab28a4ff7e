"""Which range is asked of which peer, without a network: random plays with peers that refuse, fail and are slow."""

import math
from random import Random

import pytest

from shoal.peer.handoff.range_fetch import RangeFetch, RangeRequest
from shoal.protocol.identity import PeerID

ME = PeerID("me")
A, B, C, D = (PeerID(name) for name in "abcd")
SPANS = [(0, 0, 4), (0, 4, 8), (0, 8, 9), (1, 0, 4)]


def fetching(sources: dict[str, list[PeerID]], **helpers: list[PeerID]) -> RangeFetch:
    fetch = RangeFetch(ME, **helpers)
    fetch.sources = sources
    for key in sources:
        fetch.begin(key, SPANS, set(), 0.0)
    return fetch


def asked(asks: list[RangeRequest]) -> list[tuple[PeerID, str, int, int]]:
    return [(ask.peer, ask.wanted.key, ask.wanted.tensor, ask.wanted.start) for ask in asks]


def test_each_holder_is_asked_for_two_ranges_at_a_time_in_order():
    fetch = fetching({"x": [A, B]})
    first = fetch.due(0.0)
    assert asked(first) == [(A, "x", 0, 0), (A, "x", 0, 4), (B, "x", 0, 8), (B, "x", 1, 0)]
    assert fetch.due(0.0) == []
    assert all(fetch.came(ask, 1.0) for ask in first)
    assert not fetch.left


def test_a_range_that_is_here_already_is_not_asked_for():
    fetch = RangeFetch(ME)
    fetch.sources["x"] = [A]
    fetch.begin("x", SPANS, {(0, 0), (1, 0)}, 0.0)
    assert asked(fetch.due(0.0)) == [(A, "x", 0, 4), (A, "x", 0, 8)]


def test_a_holder_gets_the_ranges_of_slow_group_peers_after_a_while():
    fetch = fetching({"x": [A]}, group_peers=[B])
    asks = fetch.due(0.0)
    of_helper = [ask for ask in asks if ask.helps]
    assert {ask.peer for ask in of_helper} == {B}
    for ask in asks:
        if not ask.helps:
            fetch.came(ask, 0.1)
    while again := [ask for ask in fetch.due(0.1) if not ask.helps]:
        for ask in again:
            fetch.came(ask, 0.1)
    until_s = fetch.next_s(0.1)
    assert 0.1 < until_s < 2.0, "a holder's own time replaces two seconds"
    late = fetch.due(until_s)
    assert [ask.peer for ask in late] == [A], "one at a time"
    assert late[0].wanted in {ask.wanted for ask in of_helper}
    assert fetch.came(late[0], 1.0)
    assert not fetch.came(next(ask for ask in of_helper if ask.wanted == late[0].wanted), 1.1), "it is here already"


@pytest.mark.parametrize(("refused_s", "is_asked"), [(0.05, True), (2.05, False)])
def test_the_ranges_of_a_group_peer_that_fetches_something_else_are_asked_of_the_holder_at_once(refused_s, is_asked):
    """One that fetches the same waits for the range before it refuses."""
    spans = [(0, 4 * number, 4 * number + 4) for number in range(20)]
    fetch = RangeFetch(ME, [B])
    fetch.sources["x"] = [A]
    fetch.begin("x", spans, set(), 0.0)
    asks = fetch.due(0.0)
    for ask in asks:
        if ask.helps:
            fetch.failed(ask, refused_s, is_lost=False)
        else:
            assert ask.wanted.owner == ME
    while own := [wanted for wanted in fetch.left if wanted.owner == ME]:
        for ask in [ask for ask in asks if not ask.helps]:
            fetch.came(ask, refused_s)
        assert len([wanted for wanted in fetch.left if wanted.owner == ME]) < len(own)
        asks = [ask for ask in fetch.due(refused_s) if not ask.helps]
    assert [ask.wanted.owner for ask in asks] == ([B, B] if is_asked else [])


def test_a_carrier_brings_the_last_ranges_of_a_single_holder_and_rests_after_a_refusal():
    fetch = fetching({"x": [A], "y": [A, B]}, carriers=[C])
    carried = [ask for ask in fetch.due(0.0) if ask.helps]
    assert [(ask.peer, ask.via, ask.wanted.key) for ask in carried] == [(C, A, "x")] * 2
    assert (carried[0].wanted.tensor, carried[0].wanted.start) == (1, 0)
    fetch.failed(carried[0], 0.5, is_lost=False)
    assert not [ask for ask in fetch.due(0.6) if ask.helps]
    assert fetch.next_s(0.6) == 1.5
    assert [ask.wanted for ask in fetch.due(1.5) if ask.helps] == [carried[0].wanted]


def test_a_layer_without_holders_is_named_once_nothing_else_is_left():
    fetch = fetching({"x": [A], "y": [B]})
    asks = fetch.due(0.0)
    for ask in asks:
        if ask.peer == A:
            fetch.failed(ask, 0.1, is_lost=True)
    while any(wanted.key == "y" for wanted in fetch.left):
        assert fetch.orphan() is None, "y is still coming"
        for ask in [ask for ask in asks if ask.peer == B]:
            assert fetch.came(ask, 0.1)
        asks = fetch.due(0.1)
    assert asks == []
    assert len(fetch.left) == len(SPANS)
    assert fetch.orphan() == "x"


@pytest.mark.parametrize(("helped", "holders", "culprit", "left"), [
    (False, [A], A, [A]),
    (False, [A, B], None, [B]),
    (True, [A, B], None, [A, B]),
])  # fmt: skip
def test_of_a_wrong_layer_the_only_holder_is_to_blame_or_else_the_first_is_left_out(helped, holders, culprit, left):
    fetch = fetching({"x": list(holders)})
    if helped:
        fetch.helped["x"] = True
    assert (fetch.again("x"), fetch.sources["x"], fetch.helped["x"]) == (culprit, left, False)


@pytest.mark.parametrize("seed", range(200))
def test_a_random_play_gets_every_range_or_loses_every_holder(seed):
    """Each request goes to a peer that may have the range, and none waits for ever."""
    random = Random(seed)
    peers = [A, B, C, D]
    sources = {key: random.sample(peers, random.randint(1, 3)) for key in "xyz"[: random.randint(1, 3)]}
    at_first = {key: set(holders) for key, holders in sources.items()}
    names = [PeerID(name) for name in "ghi"]
    fetch = fetching(
        sources, group_peers=names[: random.randint(0, 3)], carriers=random.sample(peers, random.randint(0, 2))
    )
    now_s, flying, here = 0.0, list[tuple[float, RangeRequest]](), set[tuple[str, int, int]]()
    for _ in range(10_000):
        if not fetch.left or fetch.orphan() is not None:
            break
        for ask in fetch.due(now_s):
            wanted = ask.wanted
            assert (wanted.key, wanted.tensor, wanted.start) not in here
            if not ask.helps:
                assert ask.peer in sources[wanted.key]
            elif ask.via is not None:
                assert ask.via in at_first[wanted.key]
                assert ask.peer != ask.via
            else:
                assert wanted.owner == ask.peer
            flying.append((now_s + random.expovariate(1.0), ask))
        for peer in peers:
            assert sum(not ask.helps and ask.peer == peer for _, ask in flying) <= 2
        next_s = min((at_s for at_s, _ in flying), default=math.inf)
        now_s = min(next_s, fetch.next_s(now_s))
        assert now_s < math.inf, "stuck"
        for landed in [each for each in flying if each[0] <= now_s]:
            flying.remove(landed)
            ask, fate = landed[1], random.random()
            if fate < 0.7:
                is_new = fetch.came(ask, now_s)
                name = (ask.wanted.key, ask.wanted.tensor, ask.wanted.start)
                assert is_new == (name not in here)
                here.add(name)
            else:
                fetch.failed(ask, now_s, is_lost=fate > 0.9)
    assert not fetch.left or fetch.orphan() is not None
    if not fetch.left:
        assert len(here) == len(SPANS) * len(at_first)
