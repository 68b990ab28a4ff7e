"""Fewest fetches, and an order that interrupts nobody."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.experts.migration import (
    SPARE_SLOTS,
    Fetch,
    assign_parts,
    fewest_fetches,
    num_fetches,
    transition,
)
from shoal.coordinator.experts.recovery import Placement, holder_masks


def draw(rng: random.Random, *, num_nodes: int, slots: list[int], num_experts: int) -> Placement:
    return tuple(tuple(sorted(rng.choices(range(num_experts), k=slots[node]))) for node in range(num_nodes))


@given(seed=st.integers(0, 10_000))
def test_no_assignment_of_parts_fetches_less(seed: int) -> None:
    rng = random.Random(seed)
    slots = [rng.choice([1, 2, 2, 3]) for _ in range(5)]
    now, then = (draw(rng, num_nodes=5, slots=slots, num_experts=4) for _ in range(2))
    ours = assign_parts(now, then)
    assert sorted(ours) == sorted(then)
    assert [len(part) for part in ours] == slots
    allowed = [p for p in itertools.permutations(range(5)) if all(slots[p[node]] == slots[node] for node in range(5))]
    assert num_fetches(now, ours) == min(num_fetches(now, [then[i] for i in p]) for p in allowed)


@given(seed=st.integers(0, 10_000))
def test_other_names_fetch_no_more_and_change_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    slots = [3] * 6
    now, then = (draw(rng, num_nodes=6, slots=slots, num_experts=5) for _ in range(2))
    ours = fewest_fetches(now, then)
    assert num_fetches(now, ours) <= num_fetches(now, assign_parts(now, then))
    counts = [[sum(part.count(e) for part in placement) for e in range(5)] for placement in (ours, then)]
    assert counts[0] == counts[1]
    sizes = [sorted(mask.bit_count() for mask in holder_masks(placement, 5)) for placement in (ours, then)]
    assert sizes[0] == sizes[1]


def test_the_same_placement_under_other_names_costs_nothing() -> None:
    now = ((0, 1), (0, 1), (2, 3), (2, 3))
    assert fewest_fetches(now, ((1, 3), (0, 2), (1, 3), (0, 2))) == now


def test_a_part_stays_with_its_kind() -> None:
    """The reliable node's part is no other node's, however much that one has of it."""
    now, then = ((), (0, 1)), ((0, 1), (2, 3))
    assert assign_parts(now, then, kinds=["reliable", "flaky"]) == then
    assert assign_parts(now, then) == ((2, 3), (0, 1))


@given(seed=st.integers(0, 10_000), min_replicas=st.integers(1, 3))
def test_nobody_is_interrupted_on_the_way(seed: int, min_replicas: int) -> None:
    rng = random.Random(seed)
    peers = [f"p{i}" for i in range(rng.randint(1, 7))]
    slots = {peer: rng.randint(0, 4) for peer in peers}
    experts = range(rng.randint(1, 8))
    now = {peer: set(rng.sample(experts, min(len(experts), slots[peer]))) for peer in peers if rng.random() < 0.9}
    then = {peer: set(rng.sample(experts, min(len(experts), slots[peer]))) for peer in peers if rng.random() < 0.9}
    held = {peer: set(now.get(peer, ())) for peer in peers}

    def holders(expert: int, where: dict[str, set[int]]) -> int:
        return sum(expert in having for having in where.values())

    floor = {e: min(min_replicas, holders(e, now), holders(e, then)) for e in experts}
    for wave in transition(now, then, slots=slots, min_replicas=min_replicas):
        assert wave.fetches or wave.drops
        before = {peer: set(having) for peer, having in held.items()}
        for fetch in wave.fetches:
            assert (fetch.source is None) == (holders(fetch.expert, before) == 0)
            assert fetch.source is None or fetch.expert in before[fetch.source]
            assert fetch.expert not in held[fetch.to]
            held[fetch.to].add(fetch.expert)
        for drop in wave.drops:
            held[drop.peer_id].remove(drop.expert)
            assert holders(drop.expert, held) >= floor[drop.expert]
    assert {peer: having for peer, having in held.items() if having} == {
        p: having for p, having in then.items() if having
    }


def test_the_scarcest_expert_comes_first_from_who_is_least_busy() -> None:
    now = {"a": {0, 1}, "b": {1, 2}, "c": {2}}
    waves = transition(now, now | {"d": {0, 1, 2}}, slots=dict.fromkeys("abcd", 3), min_replicas=2)
    assert [wave.fetches for wave in waves] == [
        (Fetch(expert=0, to="d", source="a"),),
        (Fetch(expert=1, to="d", source="b"),),
        (Fetch(expert=2, to="d", source="c"),),
    ]


def test_two_full_peers_change_places_with_one_spare_slot() -> None:
    waves = transition({"a": {0, 1}, "b": {2, 3}}, {"a": {2, 3}, "b": {0, 1}}, slots={"a": 2, "b": 2}, min_replicas=1)
    held = {"a": {0, 1}, "b": {2, 3}}
    for wave in waves:
        for fetch in wave.fetches:
            held[fetch.to].add(fetch.expert)
        assert max(map(len, held.values())) <= 2 + SPARE_SLOTS
        for drop in wave.drops:
            held[drop.peer_id].remove(drop.expert)
    assert held == {"a": {2, 3}, "b": {0, 1}}


def test_an_expert_that_nobody_has_comes_from_a_snapshot() -> None:
    (wave,) = transition({"a": set()}, {"a": {4}}, slots={"a": 1}, min_replicas=1)
    assert wave.fetches == (Fetch(expert=4, to="a", source=None),)


def test_nothing_to_do_is_no_wave() -> None:
    assert transition({"a": {1}}, {"a": {1}}, slots={"a": 1}, min_replicas=1) == ()


@pytest.mark.parametrize("seed", range(3))
def test_a_migration_is_the_same_every_time(seed: int) -> None:
    rng = random.Random(seed)
    now, then = (draw(rng, num_nodes=6, slots=[3] * 6, num_experts=6) for _ in range(2))
    assert fewest_fetches(now, then) == fewest_fetches(now, then)
