"""A new placement asks for the fewest fetches."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks
from shoal.coordinator.experts.replan import fewest_fetches, num_fetches


def draw(rng: random.Random, *, num_nodes: int, slots: list[int], num_experts: int) -> ExpertPlacement:
    return tuple(tuple(sorted(rng.choices(range(num_experts), k=slots[node]))) for node in range(num_nodes))


def fewest_without_names(now: ExpertPlacement, then: ExpertPlacement, slots: list[int]) -> int:
    """The fewest fetches of all ways to give the parts of `then` to nodes with as many slots."""
    orders = itertools.permutations(range(len(slots)))
    allowed = [p for p in orders if all(slots[p[node]] == slots[node] for node in range(len(slots)))]
    return min(num_fetches(now, [then[i] for i in p]) for p in allowed)


@given(seed=st.integers(0, 10_000))
def test_no_assignment_of_parts_fetches_less_and_nothing_else_changes(seed: int) -> None:
    rng = random.Random(seed)
    slots = [rng.choice([1, 2, 2, 3]) for _ in range(5)]
    now, then = (draw(rng, num_nodes=5, slots=slots, num_experts=4) for _ in range(2))
    ours = fewest_fetches(now, then, kinds=slots)
    assert [len(part) for part in ours] == slots
    assert num_fetches(now, ours) <= fewest_without_names(now, then, slots)
    counts = [[sum(part.count(e) for part in placement) for e in range(4)] for placement in (ours, then)]
    assert counts[0] == counts[1]
    sizes = [sorted(mask.bit_count() for mask in holder_masks(placement, 4)) for placement in (ours, then)]
    assert sizes[0] == sizes[1]


def test_the_same_placement_under_other_names_costs_nothing() -> None:
    now = ((0, 1), (0, 1), (2, 3), (2, 3))
    assert fewest_fetches(now, ((1, 3), (0, 2), (1, 3), (0, 2)), kinds=[0] * 4) == now


def test_a_part_stays_with_its_kind() -> None:
    """The reliable node's part is no other node's, however much that one has of it."""
    now, then = ((), (0, 0)), ((0, 0), (1, 2))
    assert fewest_fetches(now, then, kinds=["reliable", "flaky"])[0] == (0, 0)
    assert fewest_fetches(now, then, kinds=[0, 0])[1] == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_migration_is_the_same_every_time(seed: int) -> None:
    rng = random.Random(seed)
    now, then = (draw(rng, num_nodes=6, slots=[3] * 6, num_experts=6) for _ in range(2))
    assert fewest_fetches(now, then, kinds=[0] * 6) == fewest_fetches(now, then, kinds=[0] * 6)
