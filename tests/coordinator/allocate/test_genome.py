"""Individuals are sets of stages, not labels: what evolution does to them."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.allocate.evolution import HOMELESS, LEFT_OUT, align, crossover, key, mutate

K = 4


@st.composite
def assignments(draw, lowest=LEFT_OUT):
    size = draw(st.integers(5, 14))
    labels = st.lists(st.integers(lowest, K - 1), min_size=size, max_size=size)
    return tuple(np.array(draw(labels), dtype=np.int64) for _ in range(2))


@st.composite
def classes_of(draw, devices):
    return np.array(draw(st.lists(st.integers(0, 3), min_size=devices, max_size=devices)), dtype=np.int64)


def all_different(assignment):
    return np.arange(len(assignment))


@given(assignments(), st.permutations(range(K)))
def test_names_of_stages_do_not_matter(pair, names):
    first, _ = pair
    renamed = np.where(first >= 0, np.array(names)[np.maximum(first, 0)], first)
    assert key(first, all_different(first), K) == key(renamed, all_different(first), K)


@given(assignments(), st.data())
def test_keys_are_equal_only_where_stages_hold_the_same_classes(pair, data):
    first, second = pair
    classes = data.draw(classes_of(len(first)))

    def contents(assignment):
        groups = [sorted(classes[assignment == k].tolist()) for k in range(K)]
        return sorted(groups), sorted(classes[assignment < 0].tolist())

    assert (key(first, classes, K) == key(second, classes, K)) == (contents(first) == contents(second))


@given(assignments(), st.data())
def test_aligning_renames_but_does_not_change(pair, data):
    first, second = pair
    classes = data.draw(classes_of(len(first)))
    aligned = align(first, second, classes, K)
    assert key(aligned, classes, K) == key(second, classes, K)


@given(assignments(), st.permutations(range(K)))
def test_aligning_undoes_renaming(pair, names):
    first, _ = pair
    renamed = np.where(first >= 0, np.array(names)[np.maximum(first, 0)], first)
    aligned = align(first, renamed, all_different(first), K)
    assert (aligned == first).all()


def test_aligning_undoes_an_exchange_of_interchangeable_devices():
    first = np.array([0, 0, 1, 1, 2, 2, LEFT_OUT])
    second = np.array([2, 1, 1, 0, 0, LEFT_OUT, 2])
    assert (align(first, second, np.zeros(7, dtype=np.int64), 3) == first).all()


@given(assignments(), st.integers(0, 99))
def test_a_child_has_some_stages_of_the_first_whole_and_nothing_new(pair, seed):
    first, second = pair
    child = crossover(first, second, K, Random(seed))
    whole = [k for k in range(K) if np.array_equal(child == k, first == k)]
    assert whole
    for device, stage in enumerate(child.tolist()):
        assert stage in (first[device], second[device], HOMELESS)
        if stage == HOMELESS:
            assert first[device] != second[device]


@given(assignments(), st.integers(0, 99))
def test_a_parent_with_itself_has_itself(pair, seed):
    first, _ = pair
    assert (crossover(first, first, K, Random(seed)) == first).all()


@given(assignments(), st.integers(0, 299))
def test_a_mutant_names_no_stage_that_is_not(pair, seed):
    first, _ = pair
    before = first.copy()
    mutant = mutate(first, K, Random(seed))
    assert (first == before).all(), "a parent stays as it is"
    assert ((mutant >= HOMELESS) & (mutant < K)).all()


def test_mutants_differ():
    first = np.arange(24, dtype=np.int64) % K
    mutants = {mutate(first, K, Random(seed)).tobytes() for seed in range(30)}
    assert len(mutants) > 20
    assert any((mutate(first, K, Random(seed)) == HOMELESS).any() for seed in range(30))
