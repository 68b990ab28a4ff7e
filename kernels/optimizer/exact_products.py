"""Matrix products without rounding errors, so that every device has the same bits.

The order of a product's sums depends on library, thread count and device. So operands are rounded to whole numbers with
so few bits that every sum of their products is exact: then neither the order nor a fused multiply-add can change it.
There are two ways to compute such a product, which give the same bits:

- in float64, which holds whole numbers up to 2^53: operands of (53 - log2 K) / 2 bits keep every sum below that;
- in int8: operands of at most 14 bits are cut into two slices of 8 bits each, and int32 holds the sums of products of
  slices. This takes four int8 products (three for a matrix times its transpose), which GPUs and newer processors
  compute many times as fast as one product in float64.

A device uses int8 if a test shows that its products are exact and faster (`multiplies_int8`): processors without VNNI
saturate sums of two products at 16 bits.

Source: operands cut so that products are free of error: Ozaki, Ogita, Oishi and Rump (Numerical Algorithms 59, 2012);
    in int8: Ootomo, Ozaki and Yokota (2024, arXiv 2306.11975).

R rows   C columns   K terms of a product's sums
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_BITS: Final = 14
"""The most bits of an operand cut into two int8 slices. (The largest, 2^14 = 256 x 64, has the slices 64 and 0.)"""
_SLICE: Final = 256
_MULTIPLE: Final = 32
"""Rows and columns are padded with zeros to multiples of this: cuBLASLt wants multiples of 8 and more than 16 rows."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The matrix `whole_RC * unit`, in fixed-point form."""

    whole_RC: Tensor
    """float64; its elements are whole numbers of at most `operand_bits(terms)` bits."""
    unit: Tensor
    """float64 [], a power of two."""


def operand_bits(terms: int) -> int:
    """Return the most bits that operands may have if `terms` of their products are summed in float64 without error: (53
    - log2 terms) / 2, rounded down, but never more than `MOST_BITS`."""
    return min(MOST_BITS, (53 - (terms - 1).bit_length()) // 2)


def fixed(x_RC: Tensor, *, terms: int) -> Fixed:
    """Round float64 [R, C] to whole multiples of a unit: the smallest unit with which the largest element has at most
    `operand_bits(terms)` bits."""
    # The infinity norm (the largest magnitude) has no rounding error.
    exponent = torch.frexp(torch.linalg.vector_norm(x_RC, torch.inf)).exponent
    bits = operand_bits(terms)
    return Fixed((x_RC * _power_of_two(bits - exponent)).round_(), _power_of_two(exponent - bits))


def exact_matmul(a_RK: Fixed, b_KC: Fixed) -> Tensor:
    """Return the product of a and b, float64 [R, C], without error if both were made with `terms` >= K."""
    whole = product_of_slices if _is_for_int8(a_RK) else product_of_doubles
    return whole(a_RK.whole_RC, b_KC.whole_RC).mul_(a_RK.unit * b_KC.unit)


def exact_square(a_RK: Fixed) -> Tensor:
    """Return `a_RK` times its transpose, float64 [R, R], without error if `a_RK` was made with `terms` >= K."""
    whole = square_of_slices if _is_for_int8(a_RK) else square_of_doubles
    return whole(a_RK.whole_RC).mul_(a_RK.unit * a_RK.unit)


def product_of_doubles(a_RK: Tensor, b_KC: Tensor) -> Tensor:
    """Multiply matrices of whole numbers in float64: float64 [R, C]."""
    # The sign of a zero sum depends on the order of the sum; adding 0.0 turns -0 into 0.
    return (a_RK @ b_KC).add_(0.0)


def square_of_doubles(a_RK: Tensor) -> Tensor:
    """Multiply a matrix of whole numbers by its transpose in float64: float64 [R, R]."""
    return product_of_doubles(a_RK, a_RK.T)


def product_of_slices(a_RK: Tensor, b_KC: Tensor) -> Tensor:
    """Multiply matrices of whole numbers in int8: float64 [R, C].

    Each operand is cut into two slices, a = 256 a1 + a0 and b = 256 b1 + b0. Then
    a b = 2^16 a1 b1 + 2^8 (a1 b0 + a0 b1) + a0 b0, which takes four int8 products.

    Args: a_RK, b_KC: float64, whole numbers of at most `MOST_BITS` bits.
    """
    high_a_RK, low_a_RK = _slices(a_RK)
    if a_RK.device.type == "cpu":
        high_b_KC, low_b_KC = _slices(b_KC)
    else:  # cuBLASLt multiplies int8 only if the columns of b are contiguous
        high_b_KC, low_b_KC = (part_CK.T for part_CK in _slices(b_KC.T))
    middle_RC = torch._int_mm(high_a_RK, low_b_KC).add_(torch._int_mm(low_a_RK, high_b_KC))
    product_RC = _sum_of_slices(torch._int_mm(high_a_RK, high_b_KC), middle_RC, torch._int_mm(low_a_RK, low_b_KC))
    return product_RC[: a_RK.shape[0], : b_KC.shape[1]]


def square_of_slices(a_RK: Tensor) -> Tensor:
    """Multiply a matrix of whole numbers by its transpose in int8: float64 [R, R]. This takes three int8 products,
    because a0 a1^T is the transpose of a1 a0^T."""
    high_RK, low_RK = _slices(a_RK)
    mixed_RR = torch._int_mm(high_RK, low_RK.T)
    middle_RR = mixed_RR + mixed_RR.T
    product_RR = _sum_of_slices(torch._int_mm(high_RK, high_RK.T), middle_RR, torch._int_mm(low_RK, low_RK.T))
    R = a_RK.shape[0]
    return product_RR[:R, :R]


def _is_for_int8(a_RK: Fixed) -> bool:
    # With up to 2^16 terms the sum of the two mixed products stays below 2 x 2^13 x 2^16 = 2^30, which int32 holds.
    return a_RK.whole_RC.shape[1] <= 1 << 16 and multiplies_int8(a_RK.whole_RC.device)


def _sum_of_slices(high_RC: Tensor, middle_RC: Tensor, low_RC: Tensor) -> Tensor:
    """Return 2^16 high + 2^8 middle + low, float64. This is exact, since no sum here needs more than 53 bits."""
    product_RC = high_RC.to(torch.float64).mul_(_SLICE**2)
    return product_RC.add_(middle_RC, alpha=_SLICE).add_(low_RC)


@functools.cache
def multiplies_int8(device: torch.device) -> bool:
    """True if a device's int8 products are exact and faster than float64. The first call takes some milliseconds."""
    try:
        return _is_exact(device) and _best_s(product_of_slices, device) < _best_s(product_of_doubles, device)
    except torch.OutOfMemoryError:
        raise  # this says nothing about the device; the caller retries its job and so this test
    except RuntimeError:  # this build, or this kind of device, has no int8 product
        return False


def _is_exact(device: torch.device) -> bool:
    """Return whether int8 products are exact for random numbers and for the largest numbers."""
    chance, shape_RK = torch.Generator().manual_seed(0), (72, 520)
    largest_RK = torch.full(shape_RK, 2.0**MOST_BITS, dtype=torch.float64)
    low_RK = torch.full(shape_RK, -1.0, dtype=torch.float64) * _SLICE // 2  # slices of -128 with products of 2^14
    others_RK = torch.randint(-(2**MOST_BITS), 2**MOST_BITS, shape_RK, generator=chance).to(torch.float64)
    for a_RK in (largest_RK, low_RK, low_RK + _SLICE - 1, others_RK):
        for b_KR in (a_RK.T, -a_RK.T, others_RK.T):
            product_RR = product_of_slices(a_RK.to(device), b_KR.to(device)).cpu()
            if not torch.equal(product_RR, product_of_doubles(a_RK, b_KR)):
                return False
        if not torch.equal(square_of_slices(a_RK.to(device)).cpu(), square_of_doubles(a_RK)):
            return False
    return True


def _best_s(product: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> float:
    """Return the seconds of the fastest of three products of a matrix and its transpose. The matrix is so large that a
    GPU's launch time hardly counts."""
    shape_RK = (256, 1024) if device.type == "cpu" else (2048, 4096)
    x_RK, best_s = torch.full(shape_RK, 77.0, dtype=torch.float64, device=device), math.inf
    for _ in range(4):  # the first one warms up
        began_s = time.perf_counter()
        product(x_RK, x_RK.T)[0, 0].item()  # waits for a GPU
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def _slices(whole_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 slices (high, low) of whole numbers 256 high + low, padded with zeros to multiples of `_MULTIPLE`."""
    R, K = whole_RK.shape
    whole_RK = pad(whole_RK.to(torch.int16), (0, -K % _MULTIPLE, 0, -R % _MULTIPLE))
    high_RK = (whole_RK + _SLICE // 2) >> 8
    return high_RK.to(torch.int8), (whole_RK - (high_RK << 8)).to(torch.int8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float64 [], made from its bits, since `pow` is not exact on every device."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
