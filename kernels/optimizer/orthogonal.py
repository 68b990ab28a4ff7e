"""The approximately nearest orthogonal matrix by Newton-Schulz iterations: the direction of Muon's steps.

A step must give the same bits on every device (see `reference.py`), so its matrix products are exact
(`exact_products.py`), with operands rounded to 14 bits. Newton-Schulz tolerates this rounding (`MEASURED.md` has
figures): each iteration draws all singular values towards 1, and so corrects earlier errors.

Source: Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon), the iteration and its coefficients.

R rows   C columns
"""

from typing import Final

import torch
from torch import Tensor

from shoal.kernels.optimizer.exact_products import exact_matmul, exact_square, fixed
from shoal.kernels.optimizer.roots import rounded_sqrt

ITERATIONS: Final = 5
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""The coefficients of x, x^3 and x^5. The polynomial is steep at zero, for speed: five iterations take each singular
value above 0.0015 into [0.68, 1.21], not exactly to 1."""


def orthogonal(x_RC: Tensor) -> Tensor:
    """Bring every singular value of `x_RC` near 1 and keep its singular vectors, with the same bits on every device.

    Args: x_RC: float32 [R, C], finite. A matrix of zeros gives zeros.
    Returns: float32 [R, C]; singular values that were above a five-hundredth of the norm are in [0.68, 1.21].
    """
    tall = x_RC.shape[0] > x_RC.shape[1]
    x_RC = (x_RC.T if tall else x_RC).to(torch.float64, memory_format=torch.contiguous_format)
    terms = x_RC.shape[1]
    flat = fixed(x_RC.reshape(1, -1), terms=x_RC.numel())
    x_RC = x_RC / _at_least_tiny(rounded_sqrt(exact_square(flat)))
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        x = fixed(x_RC, terms=terms)
        gram_RR = exact_square(x)
        gram = fixed(gram_RR, terms=terms)
        gain_RR = exact_square(gram).mul_(fifth)  # symmetric
        gain_RR.add_(gram_RR.mul_(third))
        x_RC.mul_(first)
        x_RC.add_(exact_matmul(fixed(gain_RR, terms=terms), x))
    return (x_RC.T if tall else x_RC).to(torch.float32, memory_format=torch.contiguous_format)


def orthogonal_nearby(x_RC: Tensor) -> Tensor:
    """Compute `orthogonal` in plain float32, with an error of about 1e-5, for predictions, which stay on one peer."""
    tall = x_RC.shape[0] > x_RC.shape[1]
    x_RC = x_RC.T if tall else x_RC
    x_RC = x_RC / _at_least_tiny(torch.linalg.vector_norm(x_RC, torch.inf))  # its squares fit in float32
    x_RC = x_RC / _at_least_tiny(x_RC.norm())
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_RR = x_RC @ x_RC.T
        gain_RR = torch.addmm(gram_RR, gram_RR, gram_RR, beta=third, alpha=fifth)
        x_RC = torch.addmm(x_RC, gain_RR, x_RC, beta=first)
    return (x_RC.T if tall else x_RC).contiguous()


def _at_least_tiny(norm: Tensor) -> Tensor:
    """Raise norms below 1e-37 (near the smallest normal float32) to 1e-37, so that 0 / norm is 0."""
    return norm.clamp_min(1e-37)
