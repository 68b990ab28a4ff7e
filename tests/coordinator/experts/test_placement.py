"""Placements: the promise, the figures we know, and that neither MRO nor spread is ever better."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.experts.placement import attainable_min_replicas, mro, place, replica_counts, spread
from shoal.coordinator.experts.recovery import ExpertPlacement, holder_masks, loss_probability, recovery_by_failures


def zipf(num_experts: int) -> list[float]:
    return [1.0 / rank for rank in range(1, num_experts + 1)]


def recovery(placement: ExpertPlacement, num_experts: int) -> tuple[float, ...]:
    by_failures = recovery_by_failures(placement, num_experts)
    assert by_failures is not None
    return by_failures


def loss(placement: ExpertPlacement, num_experts: int, chances: Sequence[float]) -> float:
    return loss_probability(holder_masks(placement, num_experts), chances).probability


def counts_of(placement: ExpertPlacement, num_experts: int) -> tuple[int, ...]:
    return tuple(sum(experts.count(expert) for experts in placement) for expert in range(num_experts))


def test_three_nodes_two_slots_two_replicas_each() -> None:
    """The smallest case in which MRO's premise fails: 2/3 there, 1 here."""
    assert recovery(mro((2, 2, 2), (2, 2, 2)), 3)[1] == pytest.approx(2 / 3)
    assert recovery(place((2, 2, 2), (2, 2, 2), min_replicas=2), 3)[1] == 1.0


def test_ten_nodes_flat_load_on_eight_experts() -> None:
    slots = [6] * 10
    replicas = replica_counts([1.0] * 8, num_slots=60, min_replicas=2)
    assert recovery(mro(replicas, slots), 8)[3:9] == pytest.approx([0.992, 0.967, 0.917, 0.833, 0.7, 0.467], abs=5e-4)
    ours = recovery(place(replicas, slots, min_replicas=2), 8)
    assert all(a >= b for a, b in zip(ours[3:9], [1, 1, 1, 1, 0.967 - 5e-4, 0.711 - 5e-4], strict=True))


def test_ten_nodes_zipf_load_on_sixteen_experts() -> None:
    replicas = replica_counts(zipf(16), num_slots=60, min_replicas=2)
    ours = recovery(place(replicas, [6] * 10, min_replicas=2), 16)
    assert all(a >= b - 5e-4 for a, b in zip(ours[2:6], [0.956, 0.867, 0.733, 0.556], strict=True))


@st.composite
def tasks(draw: st.DrawFn, nodes_max: int) -> tuple[list[int], tuple[int, ...], int]:
    """(slots, replicas, minimum), any that can be."""
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=nodes_max).filter(any))
    if draw(st.booleans()):
        slots = [max(slots)] * len(slots)
    num_experts = draw(st.integers(1, min(12, sum(slots))))
    min_replicas = draw(st.integers(1, attainable_min_replicas(slots, num_experts)))
    loads = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0]), min_size=num_experts, max_size=num_experts))
    return slots, replica_counts(loads, num_slots=sum(slots), min_replicas=min_replicas), min_replicas


def every_placement(replicas: Sequence[int], slots: Sequence[int]) -> Iterator[ExpertPlacement]:
    if not slots:
        yield ()
        return
    for part in itertools.combinations_with_replacement(range(len(replicas)), slots[0]):
        left = [count - part.count(expert) for expert, count in enumerate(replicas)]
        if min(left) >= 0:
            yield from ((part, *others) for others in every_placement(left, slots[1:]))


@settings(max_examples=40)
@given(task=tasks(nodes_max=4), seed=st.integers(0, 999))
def test_small_cases_are_solved_to_the_end(task: tuple[list[int], tuple[int, ...], int], seed: int) -> None:
    """Against all placements that keep the promise."""
    slots, replicas, min_replicas = task
    if sum(slots) > 9:
        return
    rng = random.Random(seed)
    chance = [rng.choice([0.01, 0.05, 0.3]) for _ in slots]
    losses = [
        loss(placement, len(replicas), chance)
        for placement in every_placement(replicas, slots)
        if min(mask.bit_count() for mask in holder_masks(placement, len(replicas))) >= min_replicas
    ]
    ours = place(replicas, slots, failure_probability=chance, min_replicas=min_replicas)
    if len(set(chance)) > 1:
        assert loss(ours, len(replicas), chance) == pytest.approx(min(losses))


@settings(max_examples=300)
@given(task=tasks(nodes_max=7), chance_seed=st.none() | st.integers(0, 99))
def test_fewer_failures_than_the_minimum_lose_nothing(
    task: tuple[list[int], tuple[int, ...], int], chance_seed: int | None
) -> None:
    """With little search, so that there are hundreds of them; `tests/soak/experts.py` searches to the end."""
    slots, replicas, min_replicas = task
    rng = random.Random(chance_seed)
    chance = None if chance_seed is None else [rng.choice([0.0, 0.01, 0.2, 1.0]) for _ in slots]
    placement = place(replicas, slots, failure_probability=chance, min_replicas=min_replicas, patience=2)
    assert [len(experts) for experts in placement] == slots
    assert counts_of(placement, len(replicas)) == replicas
    assert all(p == 1.0 for p in recovery(placement, len(replicas))[:min_replicas])


@settings(max_examples=60)
@given(task=tasks(nodes_max=40), many=st.integers(13, 30))
def test_fewer_failures_than_the_minimum_lose_nothing_in_large_swarms(
    task: tuple[list[int], tuple[int, ...], int], many: int
) -> None:
    slots, _, _ = task
    slots = (slots * many)[: max(many, len(slots))]
    min_replicas = min(4, attainable_min_replicas(slots, 20))
    if min_replicas < 1:
        return
    replicas = replica_counts(zipf(20), num_slots=sum(slots), min_replicas=min_replicas)
    placement = place(replicas, slots, min_replicas=min_replicas)
    assert counts_of(placement, 20) == replicas
    assert [len(experts) for experts in placement] == slots
    assert min(mask.bit_count() for mask in holder_masks(placement, 20)) >= min_replicas


@settings(max_examples=60)
@given(num_nodes=st.integers(2, 9), slots_each=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_neither_mro_nor_spread_loses_an_expert_less_often(num_nodes: int, slots_each: int, seed: int) -> None:
    rng = random.Random(seed)
    slots = [slots_each] * num_nodes
    num_experts = rng.randint(1, min(20, sum(slots)))
    min_replicas = rng.randint(1, min(3, attainable_min_replicas(slots, num_experts)))
    loads = rng.choice([[1.0] * num_experts, zipf(num_experts), [rng.random() for _ in range(num_experts)]])
    replicas = replica_counts(loads, num_slots=sum(slots), min_replicas=min_replicas)
    chances = [rng.choice([0.01, 0.05, 0.3])] * num_nodes
    if rng.random() < 0.5:
        chances = [10 ** rng.uniform(-3.0, 0.0) for _ in slots]
    ours = place(replicas, slots, failure_probability=chances, min_replicas=min_replicas)
    for rule in (mro, spread):
        theirs = rule(replicas, slots)
        if min(mask.bit_count() for mask in holder_masks(theirs, num_experts)) >= min_replicas:
            assert loss(ours, num_experts, chances) <= loss(theirs, num_experts, chances) * (1.0 + 1e-9)


@pytest.mark.parametrize(
    "replicas_slots",
    [
        ([6] * 10, [6] * 10),  # Both rules are better than the other at some number of failures.
        ([2] * 21, [6] * 7),
        ([3] * 5, [3] * 5),
        ([4] * 6 + [5] * 5, [7] * 7),
        ([7] * 4 + [6] * 10, [8] * 11),
    ],
    ids=str,
)
def test_hard_cases(replicas_slots: tuple[list[int], list[int]]) -> None:
    replicas, slots = replicas_slots
    chances = [0.05] * len(slots)
    ours = loss(place(replicas, slots, min_replicas=2), len(replicas), chances)
    assert all(ours <= loss(rule(replicas, slots), len(replicas), chances) for rule in (mro, spread))


def test_what_is_rare_is_on_reliable_nodes() -> None:
    """Two experts on two nodes: 0.01 * 0.02; the others are on all the rest. Any other two nodes are worse."""
    chance = [0.3, 0.01, 0.3, 0.02, 0.3, 0.3]
    placement = place((2, 2, 4, 4), [2] * 6, failure_probability=chance, min_replicas=2)
    masks = holder_masks(placement, 4)
    assert loss(placement, 4, chance) <= min(0.01 * 0.02 + 0.3**4, 0.01 * 0.3 + 0.3**3 * 0.02)
    assert masks[0] == masks[1]


def test_no_order_of_nodes_makes_mro_safer_than_the_search() -> None:
    rng = random.Random(5)
    slots = [2, 6, 4, 3, 5, 4, 2, 6]
    chance = [rng.uniform(0.01, 0.4) for _ in slots]
    replicas = replica_counts(zipf(10), num_slots=sum(slots), min_replicas=2)
    ours = loss(place(replicas, slots, failure_probability=chance, min_replicas=2), 10, chance)
    for _ in range(200):
        order = rng.sample(range(8), 8)
        assert ours <= loss(mro(replicas, slots, order=order), 10, chance)


def test_the_same_seed_gives_the_same_placement() -> None:
    replicas = replica_counts([1.0] * 8, num_slots=60, min_replicas=2)
    first, second = (place(replicas, [6] * 10, min_replicas=2, seed=3) for _ in range(2))
    assert first == second


def test_no_expert_is_twice_on_a_node_where_that_costs_nothing() -> None:
    placement = place((2,) * 6, (4, 4, 4), min_replicas=2)
    assert all(len(set(experts)) == len(experts) for experts in placement)


@given(task=tasks(nodes_max=8))
def test_constructions_fill_every_slot_once(task: tuple[list[int], tuple[int, ...], int]) -> None:
    slots, replicas, _ = task
    for placement in (mro(replicas, slots), spread(replicas, slots)):
        assert [len(experts) for experts in placement] == slots
        assert counts_of(placement, len(replicas)) == replicas


@given(num_nodes=st.integers(1, 7), slots_each=st.integers(1, 4), seed=st.integers(0, 999))
def test_where_mro_fits_every_group_is_lost_together(num_nodes: int, slots_each: int, seed: int) -> None:
    """Section 4.2 of the paper: a group's loss is that of its rarest expert, so groups fail like so many experts."""
    rng = random.Random(seed)
    slots = [slots_each] * num_nodes
    num_experts = rng.randint(1, sum(slots))
    loads = [rng.random() for _ in range(num_experts)]
    replicas = replica_counts(loads, num_slots=sum(slots), min_replicas=1)
    groups = sorted(replicas)[::slots_each]
    if sum(groups) > num_nodes:
        return  # a group finds fewer nodes than its rarest expert has replicas
    chances = [0.1] * num_nodes
    ours = loss(place(replicas, slots, failure_probability=chances, min_replicas=1), num_experts, chances)
    assert ours == pytest.approx(1 - math.prod(1 - 0.1**size for size in groups), rel=1e-9)
