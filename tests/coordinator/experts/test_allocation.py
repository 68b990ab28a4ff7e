"""Replica counts: all slots, the minimum for each, and nobody busier than need be."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.experts.placement import (
    attainable_min_replicas,
    busiest_replica_load_ratio,
    replica_counts,
)
from shoal.protocol.errors import LocalError

LOADS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=12)


@given(loads=LOADS, min_replicas=st.integers(1, 3), extra=st.integers(0, 40))
def test_all_slots_are_given_and_nobody_is_below_the_minimum(loads: list[float], min_replicas: int, extra: int) -> None:
    num_slots = min_replicas * len(loads) + extra
    counts = replica_counts(loads, num_slots=num_slots, min_replicas=min_replicas)
    assert sum(counts) == num_slots
    assert min(counts) >= min_replicas


@given(
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=4), min_replicas=st.integers(1, 2), extra=st.integers(0, 5)
)
def test_no_counts_leave_the_busiest_replica_less_busy(loads: list[int], min_replicas: int, extra: int) -> None:
    num_slots = min_replicas * len(loads) + extra
    ours = replica_counts(loads, num_slots=num_slots, min_replicas=min_replicas)
    choices = itertools.product(range(min_replicas, num_slots + 1), repeat=len(loads))
    best = min(busiest_replica_load_ratio(loads, counts) for counts in choices if sum(counts) == num_slots)
    assert busiest_replica_load_ratio(loads, ours) == pytest.approx(best)


def test_a_hot_expert_may_have_more_replicas_than_there_are_nodes() -> None:
    assert replica_counts([8, 1, 1], num_slots=20, min_replicas=2) == (16, 2, 2)


def test_the_ratio_is_one_where_slots_follow_the_load_exactly() -> None:
    assert busiest_replica_load_ratio([4, 2, 2], [2, 1, 1]) == 1.0
    assert busiest_replica_load_ratio([4, 2, 2], [1, 2, 1]) == 2.0
    assert busiest_replica_load_ratio([0, 0], [1, 1]) == 1.0


@given(slots=st.lists(st.integers(0, 5), min_size=1, max_size=6), num_experts=st.integers(1, 6))
def test_attainable_holders_are_what_a_complete_search_finds(slots: list[int], num_experts: int) -> None:
    """By Hall for bipartite graphs with capacities: all subsets of experts, not only all of them."""
    most = attainable_min_replicas(slots, num_experts)
    fits = [
        f
        for f in range(len(slots) + 1)
        if all(sum(min(c, size) for c in slots) >= f * size for size in range(1, num_experts + 1))
    ]
    assert most == max(fits)


@pytest.mark.parametrize(
    ("loads", "num_slots", "min_replicas", "says"),
    [
        ([], 4, 1, "no experts"),
        ([1.0, -1.0], 4, 1, "not negative"),
        ([1.0, math.nan], 4, 1, "finite"),
        ([1.0, 1.0], 3, 2, "need 4 slots, there are 3"),
        ([1.0], 3, 0, "at least one replica"),
    ],
)
def test_what_cannot_be_is_refused(loads: list[float], num_slots: int, min_replicas: int, says: str) -> None:
    with pytest.raises(LocalError, match=says):
        replica_counts(loads, num_slots=num_slots, min_replicas=min_replicas)
