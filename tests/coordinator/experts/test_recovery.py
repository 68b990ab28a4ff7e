"""Recovery probabilities against plain enumeration of all sets of failures."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.experts.recovery import (
    ExpertPlacement,
    holder_masks,
    loss_probability,
    minimal_masks,
    recovery_by_failures,
)

PLACEMENTS = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=7)


def loses(placement: list[list[int]], num_experts: int, failed: tuple[int, ...]) -> bool:
    alive = {expert for node, experts in enumerate(placement) if node not in failed for expert in experts}
    return len(alive) < num_experts


@given(placement=PLACEMENTS, num_experts=st.just(6) | st.integers(1, 3))
def test_recovery_by_failures_counts_sets(placement: list[list[int]], num_experts: int) -> None:
    placement = [[expert for expert in experts if expert < num_experts] for experts in placement]
    by_failures = recovery_by_failures(placement, num_experts)
    assert by_failures is not None
    for k, recovery in enumerate(by_failures):
        sets = list(itertools.combinations(range(len(placement)), k))
        assert recovery == pytest.approx(sum(not loses(placement, num_experts, failed) for failed in sets) / len(sets))


@given(placement=PLACEMENTS, data=st.data())
def test_loss_probability_adds_the_sets_up(placement: list[list[int]], data: st.DataObject) -> None:
    chance = data.draw(st.lists(st.floats(0.0, 1.0), min_size=len(placement), max_size=len(placement)))
    num_experts = 1 + max((expert for experts in placement for expert in experts), default=0)
    expected = math.fsum(
        math.prod(chance[node] if node in failed else 1.0 - chance[node] for node in range(len(placement)))
        for k in range(len(placement) + 1)
        for failed in itertools.combinations(range(len(placement)), k)
        if loses(placement, num_experts, failed)
    )
    loss = loss_probability(holder_masks(placement, num_experts), chance)
    assert loss.is_exact
    assert loss.probability == pytest.approx(expected, abs=1e-12)


def test_the_papers_counterexample() -> None:
    overlapping: ExpertPlacement = ((0, 1), (0, 1), (2, 2))
    ring: ExpertPlacement = ((0, 1), (1, 2), (0, 2))
    assert recovery_by_failures(overlapping, 3) == pytest.approx((1, 2 / 3, 0, 0))
    assert recovery_by_failures(ring, 3) == pytest.approx((1, 1, 0, 0))


def test_a_tiny_loss_does_not_drown_in_one() -> None:
    placement = [[0]] * 6 + [[1]] * 6
    loss = loss_probability(holder_masks(placement, 2), [1e-3] * 12)
    assert loss.probability == pytest.approx(2e-18, rel=1e-9)


def test_an_expert_without_holders_is_lost() -> None:
    assert loss_probability(holder_masks([[0], [0]], 2), [0.0, 0.0]).probability == 1.0
    assert recovery_by_failures([[0], [0]], 2) == (0.0, 0.0, 0.0)


def test_supersets_do_not_count() -> None:
    assert minimal_masks([0b111, 0b011, 0b110, 0b011]) == [0b011, 0b110]


@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_the_bound_holds_what_is_drawn(seed: int) -> None:
    """40 nodes in one component, 30 experts: more than is counted exactly. 4,000 draws, five deviations."""
    rng = random.Random(seed)
    masks = [sum(1 << node for node in rng.sample(range(40), 3)) for _ in range(30)]
    chance = [rng.uniform(0.02, 0.3) for _ in range(40)]
    loss = loss_probability(masks, chance)
    assert 0.0 < loss.probability <= 1.0
    assert not loss.is_exact
    draws, lost = 4_000, 0
    for _ in range(draws):
        failed = sum(1 << node for node, p in enumerate(chance) if rng.random() < p)
        lost += any(mask & ~failed == 0 for mask in masks)
    noise = 5.0 * math.sqrt(max(lost, 1)) / draws
    assert lost / draws <= loss.probability + noise


def test_the_bound_is_near_where_losses_are_rare() -> None:
    """Less than the sum over experts by at most the sum over pairs (Bonferroni), which the loss is not below either."""
    rng = random.Random(0)
    masks = [sum(1 << node for node in rng.sample(range(64), 3)) for _ in range(64)]
    loss = loss_probability(masks, [0.02] * 64)
    assert not loss.is_exact
    pairs = itertools.combinations(minimal_masks(masks), 2)
    least = len(minimal_masks(masks)) * 0.02**3 - sum(0.02 ** (a | b).bit_count() for a, b in pairs)
    assert least <= loss.probability < 1.01 * least


@given(seed=st.integers(0, 10_000))
def test_many_nodes_in_small_components_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [rng.sample(range(8 * b, 8 * b + 8), 2) for b in range(12)]
    placement: list[list[int]] = [[] for _ in range(96)]
    for expert, block in enumerate(blocks):
        for node in block:
            placement[node].append(expert)
    loss = loss_probability(holder_masks(placement, 12), [0.1] * 96)
    assert loss.is_exact
    assert loss.probability == pytest.approx(1 - 0.99**12)
    assert holder_masks(placement, 12)[0].bit_count() == 2
    by_failures = recovery_by_failures(placement, 12)
    assert by_failures is not None
    assert by_failures[2] == pytest.approx(1 - 12 / math.comb(96, 2))
