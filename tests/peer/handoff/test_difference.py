"""Weights in bf16 from one version to the next: exactly, in a byte each, whatever anybody sends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.peer.encoding.difference import changed, difference

BITS = st.integers(-32768, 32767)


def numbers(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)


def bits_of(values_C: Tensor) -> list[int]:
    return values_C.view(torch.int16).tolist()


@given(st.lists(st.tuples(BITS, BITS), min_size=1, max_size=40))
def test_any_numbers_follow_from_any_others_to_the_bit(pairs: list[tuple[int, int]]) -> None:
    before_C, after_C = (numbers([pair[i] for pair in pairs]) for i in (0, 1))
    sent_B = difference(before_C, after_C)
    assert len(pairs) <= sent_B.numel() <= 3 * len(pairs)
    assert bits_of(changed(before_C, sent_B)) == bits_of(after_C)


def test_a_step_of_training_takes_little_more_than_a_byte_a_number() -> None:
    generator = torch.Generator().manual_seed(0)
    before_N = 0.02 * torch.randn(1 << 16, generator=generator)
    after_N = before_N + 3e-4 * torch.randn(1 << 16, generator=generator)
    sent_B = difference(before_N.bfloat16(), after_N.bfloat16())
    assert before_N.numel() <= sent_B.numel() < 1.05 * before_N.numel()
    assert torch.equal(changed(before_N.bfloat16(), sent_B), after_N.bfloat16())


def test_the_smallest_steps_around_zero_are_short() -> None:
    before_C, after_C = (
        numbers([0, -32768, 1]),
        numbers([-32768, 1, -32767]),
    )  # 0, -0, least > 0; -0, least > 0, most < 0
    assert difference(before_C, after_C).numel() == 3
    assert bits_of(changed(before_C, difference(before_C, after_C))) == bits_of(after_C)


@given(st.binary(max_size=24))
def test_whatever_comes_is_read_to_the_end_or_refused(sent: bytes) -> None:
    sent_B = torch.tensor(list(sent), dtype=torch.uint8)
    try:
        after_C = changed(torch.ones(8).bfloat16(), sent_B)
    except ValueError:
        return
    assert after_C.numel() == 8
    assert len(sent) == 8 + 2 * sent[:8].count(0x80)


@pytest.mark.parametrize("sent", [[127], [0, 0], [0x80, 1], []])
def test_what_leads_out_of_all_numbers_or_is_too_long_or_too_short_is_refused(sent: list[int]) -> None:
    with pytest.raises(ValueError, match="difference"):
        changed(numbers([32767]), torch.tensor(sent, dtype=torch.uint8))
