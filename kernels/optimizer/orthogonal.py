"""The nearest orthogonal matrix, nearly, by Newton-Schulz iterations; and matrix products that are exact.

What Muon steps along. A step must give the same bits on every device (see `reference.py`), and a matrix product does
not: libraries sum in their own order, threads and cards in another. So its operands are rounded to whole numbers, of
so few bits that float64 holds every sum of their products exactly. Then no order can change it, and no fused
multiply-add. Newton-Schulz is content with 20 bits (`MEASURED.md` has figures): it draws every singular value towards 1
whatever it was, and errors with them.

Sources: Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon), the iteration and its coefficients. Operands
cut so that products are free of error: Ozaki, Ogita, Oishi and Rump (Numerical Algorithms 59, 2012); we keep the first
of their slices only.

R rows   C columns   K what a product sums over
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.kernels.optimizer.roots import rounded_sqrt

SIGNIFICAND_BITS: Final = 53
"""float64 holds whole numbers up to 2^53."""
ITERATIONS: Final = 5
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""The coefficients of x, x^3, x^5: steep at zero, for speed. The iteration does not converge: what began above 0.0015
ends in [0.68, 1.21]."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The matrix `whole_RC * unit`."""

    whole_RC: Tensor
    """float64, whole numbers."""
    unit: Tensor
    """float64 [], a power of two."""

    @property
    def transposed(self) -> "Fixed":
        return Fixed(self.whole_RC.T, self.unit)


def operand_bits(terms: int) -> int:
    """Count the bits that operands of a product may have whose elements are sums of `terms`: 2 bits + log2 K <= 53."""
    return (SIGNIFICAND_BITS - (terms - 1).bit_length()) // 2


def fixed(x_RC: Tensor, *, terms: int) -> Fixed:
    """Round float64 [R, C] to the nearest whole multiples of a unit, fine enough that the largest has all bits."""
    exponent = torch.frexp(torch.linalg.vector_norm(x_RC, torch.inf)).exponent  # a largest element has no rounding
    bits = operand_bits(terms)
    return Fixed((x_RC * _power_of_two(bits - exponent)).round_(), _power_of_two(exponent - bits))


def exact_matmul(a_RK: Fixed, b_KC: Fixed) -> Tensor:
    """float64 [R, C], without any error if both were made with `terms` >= K."""
    product_RC = a_RK.whole_RC @ b_KC.whole_RC
    # Whether a sum of nothing but zeros is -0 does depend on the order; + 0.0 makes it 0.
    return product_RC.add_(0.0).mul_(a_RK.unit * b_KC.unit)


def orthogonal(x_RC: Tensor) -> Tensor:
    """Every singular value of `x_RC` brought near 1, its singular vectors kept: the same bits on every device.

    Args:
        x_RC: float32 [R, C], finite. A matrix of zeros gives zeros.
    Returns: float32 [R, C]; singular values that were above a five-hundredth of the norm are in [0.68, 1.21].
    """
    tall = x_RC.shape[0] > x_RC.shape[1]
    x_RC = (x_RC.T if tall else x_RC).to(torch.float64, memory_format=torch.contiguous_format)
    terms = x_RC.shape[1]
    flat = fixed(x_RC.reshape(1, -1), terms=x_RC.numel())
    x_RC = x_RC / _at_least_tiny(rounded_sqrt(exact_matmul(flat, flat.transposed)))
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        x = fixed(x_RC, terms=terms)
        gram_RR = exact_matmul(x, x.transposed)
        gram = fixed(gram_RR, terms=terms)
        gain_RR = exact_matmul(gram, gram).mul_(fifth)
        gain_RR.add_(gram_RR.mul_(third))
        x_RC.mul_(first)
        x_RC.add_(exact_matmul(fixed(gain_RR, terms=terms), x))
    return (x_RC.T if tall else x_RC).to(torch.float32, memory_format=torch.contiguous_format)


def orthogonal_nearby(x_RC: Tensor) -> Tensor:
    """Do as `orthogonal` does, in plain float32: for predictions, which no other peer makes. The result is some 1e-5
    from it."""
    tall = x_RC.shape[0] > x_RC.shape[1]
    x_RC = x_RC.T if tall else x_RC
    x_RC = x_RC / _at_least_tiny(torch.linalg.vector_norm(x_RC, torch.inf))  # squares of it have room in float32
    x_RC = x_RC / _at_least_tiny(x_RC.norm())
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_RR = x_RC @ x_RC.T
        gain_RR = torch.addmm(gram_RR, gram_RR, gram_RR, beta=third, alpha=fifth)
        x_RC = torch.addmm(x_RC, gain_RR, x_RC, beta=first)
    return (x_RC.T if tall else x_RC).contiguous()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, float64 [], put together from its bits: pow() is not exact everywhere."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _at_least_tiny(norm: Tensor) -> Tensor:
    """Raise numbers below 1e-37, which is below every normal float32, so that zero stays zero."""
    return norm.clamp_min(1e-37)
