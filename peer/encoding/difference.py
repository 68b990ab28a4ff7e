"""Encodes the exact difference between two versions of bf16 weights, with one byte for most numbers.

All bf16 values are numbered in order (-0 next below 0). For each weight, the distance between the numbers of its two
versions is sent as int8. A weight that moves too far for int8, as a weight near 0 may, is marked, and its new bits
follow at the end. If weights of 0.02 move by 3e-4, one in a hundred is marked. The code is lossless, so no error grows
from step to step.

C numbers of one chunk
"""

import torch
from torch import Tensor

_MARK = -128
"""The int8 that is sent in place of the distance for a weight that has moved too far for int8."""


def difference(before_C: Tensor, after_C: Tensor) -> Tensor:
    """Return the difference between two bfloat16 [C]: uint8 [C + 2 x number of marked weights]."""
    steps_C = _places(after_C) - _places(before_C)
    is_marked_C = steps_C.abs() > 127
    short_C = steps_C.masked_fill(is_marked_C, _MARK).to(torch.int8)
    return torch.cat((short_C.view(torch.uint8), _bits(after_C)[is_marked_C].view(torch.uint8)))


def changed(before_C: Tensor, difference_B: Tensor) -> Tensor:
    """Apply a difference to the earlier version, and return the later version, bfloat16 [C].

    Args: difference_B: uint8, from `difference`.
    Raises: ValueError: the bytes are no difference of C numbers, or lead out of the range of bf16.
    """
    size = before_C.numel()
    short_C = difference_B[:size].view(torch.int8)
    is_marked_C = short_C == _MARK
    if difference_B.numel() != size + 2 * int(is_marked_C.sum()):
        raise ValueError(f"{difference_B.numel()} bytes are no difference of {size} numbers")
    places_C = _places(before_C) + short_C
    if bool((((places_C > 32767) | (places_C < -32768)) & ~is_marked_C).any()):
        raise ValueError("a difference leads out of the range of bf16")
    bits_C = torch.where(places_C < 0, -32768 - places_C - 1, places_C).masked_fill(is_marked_C, 0).to(torch.int16)
    bits_C[is_marked_C] = difference_B[size:].clone().view(torch.int16)
    return bits_C.view(torch.bfloat16)


def _places(values_C: Tensor) -> Tensor:
    """Return int32 [C]: the position of each number in the order of all bf16 numbers; 0 for 0, -1 for -0."""
    bits_C = _bits(values_C).to(torch.int32)
    return torch.where(bits_C < 0, -32768 - bits_C - 1, bits_C)


def _bits(values_C: Tensor) -> Tensor:
    """Return the numbers' bits as int16 [C], because copying a NaN as a float may change its bits."""
    return values_C.contiguous().view(torch.int16)
