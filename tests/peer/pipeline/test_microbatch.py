from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.pipeline.microbatch import Indices, Microbatch, bitmap_of, has_index, indices_from
from shoal.protocol.limits import MICROBATCHES_PER_STEP_MAX

INDICES = st.sets(st.integers(0, 70))


def set_of(indices: set[int]) -> Indices:
    return sum(1 << index for index in indices)


def members(of: Indices, count: int = 80) -> set[int]:
    return {index for index in range(count) if has_index(of, index)}


def test_lower_steps_come_first_and_validation_first_in_its_step() -> None:
    work = [Microbatch(1, 0), Microbatch(0, 2), Microbatch(1, -2), Microbatch(0, 10), Microbatch(1, -1)]
    assert [str(m) for m in sorted(work)] == ["(0, 2)", "(0, 10)", "(1, -2)", "(1, -1)", "(1, 0)"]
    assert [m.validates for m in sorted(work)] == [False, False, True, True, False]


@given(INDICES)
def test_a_set_holds_what_was_added_and_nothing_else(indices: set[int]) -> None:
    made = set_of(indices)
    assert members(made) == indices
    assert made.bit_count() == len(indices)


@given(INDICES, INDICES)
def test_union_is_that_of_sets_and_leaves_both_alone(a: set[int], b: set[int]) -> None:
    left, right = set_of(a), set_of(b)
    assert members(left | right) == a | b
    assert (members(left), members(right)) == (a, b)


@given(INDICES)
def test_a_bitmap_comes_back_as_it_went(indices: set[int]) -> None:
    made = set_of(indices)
    assert indices_from(bitmap_of(made), count=71) == made


@given(st.binary(max_size=600), st.integers(0, 80))
def test_a_hostile_bitmap_holds_no_index_that_the_step_has_not(data: bytes, count: int) -> None:
    made = indices_from(data, count=count)
    assert made.bit_count() <= count
    assert all(not has_index(made, index) for index in range(count, 8 * len(data) + 8))
    assert members(made, count) == {i for i in range(min(count, 8 * len(data))) if data[i // 8] >> i % 8 & 1}


def test_bit_i_stands_in_byte_i_over_8() -> None:
    assert bitmap_of(set_of({0, 9})) == bytes([0b1, 0b10])
    assert bitmap_of(0) == b""


def test_a_full_set_of_the_longest_step_is_half_a_kilobyte() -> None:
    full = (1 << MICROBATCHES_PER_STEP_MAX) - 1
    assert len(bitmap_of(full)) == MICROBATCHES_PER_STEP_MAX // 8
    assert full.bit_count() == MICROBATCHES_PER_STEP_MAX


def test_a_set_holds_no_index_below_0() -> None:
    """Found by the fuzzer: a mate's Progress may name one, and the shift raised."""
    assert not has_index(set_of({0, 1}), -1)
    assert not has_index(0, -(2**63))
