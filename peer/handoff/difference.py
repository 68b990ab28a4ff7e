"""The difference between two versions of weights in bf16, as bytes and exactly: one byte for most numbers.

A step moves most weights by a few of the numbers that bf16 has between them. Numbered in their order (-0 next below 0),
two versions of a weight are some places apart, and that is what travels, as int8. A weight whose way is longer, as
where one near 0 changes its size, is marked, and its new bits follow behind: of weights of 0.02 that move by 3e-4, one
in a hundred. Nothing is lost, so who has one version has the next to the bit, and no error grows from step to step.

C numbers of one chunk
"""

import torch
from torch import Tensor

_MARK = -128
"""The int8 that says that a weight has moved too far for one: its new bits follow behind all int8."""


def difference(before_C: Tensor, after_C: Tensor) -> Tensor:
    """Args: before_C, after_C: bfloat16 [C]. Returns: uint8 [C + 2 x marked], which `changed` reads."""
    steps_C = _places(after_C) - _places(before_C)
    is_marked_C = steps_C.abs() > 127
    short_C = steps_C.masked_fill(is_marked_C, _MARK).to(torch.int8)
    return torch.cat((short_C.view(torch.uint8), _bits(after_C)[is_marked_C].view(torch.uint8)))


def changed(before_C: Tensor, difference_B: Tensor) -> Tensor:
    """Args: before_C: bfloat16 [C]; difference_B: uint8, as `difference` gives it.

    Returns: bfloat16 [C], the later version.
    Raises: ValueError: these are not the bytes of a difference of C numbers, or one leads out of all numbers.
    """
    size = before_C.numel()
    short_C = difference_B[:size].view(torch.int8)
    is_marked_C = short_C == _MARK
    if difference_B.numel() != size + 2 * int(is_marked_C.sum()):
        raise ValueError(f"{difference_B.numel()} bytes are no difference of {size} numbers")
    places_C = _places(before_C) + short_C
    if bool((((places_C > 32767) | (places_C < -32768)) & ~is_marked_C).any()):
        raise ValueError("a difference leads out of all numbers")
    bits_C = torch.where(places_C < 0, -32768 - places_C - 1, places_C).masked_fill(is_marked_C, 0).to(torch.int16)
    bits_C[is_marked_C] = difference_B[size:].clone().view(torch.int16)
    return bits_C.view(torch.bfloat16)


def _places(values_C: Tensor) -> Tensor:
    """int32 [C]: where each stands among all numbers of bf16 in their order. 0 for 0, -1 for -0."""
    bits_C = _bits(values_C).to(torch.int32)
    return torch.where(bits_C < 0, -32768 - bits_C - 1, bits_C)


def _bits(values_C: Tensor) -> Tensor:
    """int16 [C]: a NaN that is moved as a number may come out as another one."""
    return values_C.contiguous().view(torch.int16)
