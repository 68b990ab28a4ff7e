"""Matrix products without any error, so that every device has the same bits.

Libraries, thread counts and cards sum a product in different orders. So operands are rounded to whole numbers with few
enough bits that every sum of their products is exact: then neither the order nor a fused multiply-add can change it.
Two ways give the same bits:

- float64 holds whole numbers up to 2^53, and operands of (53 - log2 K) / 2 bits keep every sum below that;
- operands of at most 14 bits are two slices of 8 bits each, whose products int32 holds: four int8 products (three for a
  matrix by itself), which cards and newer processors compute many times as fast as one in float64.

A device uses int8 if that proves exact and faster (`multiplies_int8`): processors without VNNI saturate sums of two
products at 16 bits.

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
"""The bits that two slices of int8 hold: the largest operand, 2^14, is 64 x 256 + 0."""
_SLICE: Final = 256
_MULTIPLE: Final = 32
"""Zeros fill up rows and columns to multiples of this, for cuBLASLt: multiples of 8, and more than 16 rows."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The matrix `whole_RC * unit`."""

    whole_RC: Tensor
    """float64, whole numbers of at most `operand_bits`."""
    unit: Tensor
    """float64 [], a power of two."""


def operand_bits(terms: int) -> int:
    """Return the bits of operands with `terms` terms in a sum: 2 bits + log2 K <= 53, and at most two slices."""
    return min(MOST_BITS, (53 - (terms - 1).bit_length()) // 2)


def fixed(x_RC: Tensor, *, terms: int) -> Fixed:
    """Round float64 [R, C] to whole multiples of a unit, the finest at which the largest element fits."""
    # the norm of order infinity has no rounding
    exponent = torch.frexp(torch.linalg.vector_norm(x_RC, torch.inf)).exponent
    bits = operand_bits(terms)
    return Fixed((x_RC * _power_of_two(bits - exponent)).round_(), _power_of_two(exponent - bits))


def exact_matmul(a_RK: Fixed, b_KC: Fixed) -> Tensor:
    """Multiply a by b: float64 [R, C], without error if both were made with `terms` >= K."""
    whole = product_of_slices if _is_for_int8(a_RK) else product_of_doubles
    return whole(a_RK.whole_RC, b_KC.whole_RC).mul_(a_RK.unit * b_KC.unit)


def exact_square(a_RK: Fixed) -> Tensor:
    """Multiply a by its transpose: float64 [R, R], without error if `a_RK` was made with `terms` >= K."""
    whole = square_of_slices if _is_for_int8(a_RK) else square_of_doubles
    return whole(a_RK.whole_RC).mul_(a_RK.unit * a_RK.unit)


def product_of_doubles(a_RK: Tensor, b_KC: Tensor) -> Tensor:
    """Multiply whole numbers in float64: float64 [R, C]."""
    # The sign of a zero sum depends on the order; + 0.0 makes -0 to 0.
    return (a_RK @ b_KC).add_(0.0)


def square_of_doubles(a_RK: Tensor) -> Tensor:
    """Multiply whole numbers by their transpose in float64: float64 [R, R]."""
    return product_of_doubles(a_RK, a_RK.T)


def product_of_slices(a_RK: Tensor, b_KC: Tensor) -> Tensor:
    """Multiply whole numbers in int8: float64 [R, C].

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
    """Multiply whole numbers by their transpose in int8: float64 [R, R], in three products: a0 a1T is (a1 a0T)T."""
    high_RK, low_RK = _slices(a_RK)
    mixed_RR = torch._int_mm(high_RK, low_RK.T)
    middle_RR = mixed_RR + mixed_RR.T
    product_RR = _sum_of_slices(torch._int_mm(high_RK, high_RK.T), middle_RR, torch._int_mm(low_RK, low_RK.T))
    R = a_RK.shape[0]
    return product_RR[:R, :R]


def _is_for_int8(a_RK: Fixed) -> bool:
    # With 2^16 terms sums of both mixed products stay below 2 x 2^13 x 2^16 = 2^30.
    return a_RK.whole_RC.shape[1] <= 1 << 16 and multiplies_int8(a_RK.whole_RC.device)


def _sum_of_slices(high_RC: Tensor, middle_RC: Tensor, low_RC: Tensor) -> Tensor:
    """Return 2^16 high + 2^8 middle + low, float64, exactly: at most 53 bits above a power of two."""
    product_RC = high_RC.to(torch.float64).mul_(_SLICE**2)
    return product_RC.add_(middle_RC, alpha=_SLICE).add_(low_RC)


@functools.cache
def multiplies_int8(device: torch.device) -> bool:
    """True if a device's int8 products are exact and faster than float64. The first call takes some milliseconds."""
    try:
        return _is_exact(device) and _best_s(product_of_slices, device) < _best_s(product_of_doubles, device)
    except torch.OutOfMemoryError:
        raise  # says nothing about the device: the job is retried, and calls this again
    except RuntimeError:  # this build, or this kind of device, has no int8 product
        return False


def _is_exact(device: torch.device) -> bool:
    """Compare int8 products of the largest numbers, whose sums saturate first, and of others."""
    chance, shape_RK = torch.Generator().manual_seed(0), (72, 520)
    largest_RK = torch.full(shape_RK, 2.0**MOST_BITS, dtype=torch.float64)
    low_RK = torch.full(shape_RK, -1.0, dtype=torch.float64) * _SLICE // 2  # slices of -128, whose products are 2^14
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
    """Return the shortest of three times of a matrix by its transpose, large enough to hide a card's launch times."""
    shape_RK = (256, 1024) if device.type == "cpu" else (2048, 4096)
    x_RK, best_s = torch.full(shape_RK, 77.0, dtype=torch.float64, device=device), math.inf
    for _ in range(4):  # the first one warms up
        began_s = time.perf_counter()
        product(x_RK, x_RK.T)[0, 0].item()  # waits for a card
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def _slices(whole_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers as int8 slices, 256 high + low, padded with zeros to multiples of `_MULTIPLE`."""
    R, K = whole_RK.shape
    whole_RK = pad(whole_RK.to(torch.int16), (0, -K % _MULTIPLE, 0, -R % _MULTIPLE))
    high_RK = (whole_RK + _SLICE // 2) >> 8
    return high_RK.to(torch.int8), (whole_RK - (high_RK << 8)).to(torch.int8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float64 [], by its bits, since `pow` is not exact on every device."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
