from fractions import Fraction

import numpy as np
import pytest
import torch

from shoal.kernels.optimizer.roots import rounded_sqrt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_other_number_is_nearer_to_the_root(dtype: torch.dtype) -> None:
    """torch's own root fails this, but for float32 on a processor with AVX2 and without AVX512."""
    x_N = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for scale in (1.0, 2.0**-120, 2.0**120, 2.0**-140):  # the last: numbers that have lost digits in float32
        scaled_N = x_N * scale
        for x, root in zip(scaled_N.tolist(), rounded_sqrt(scaled_N).numpy(), strict=True):
            # Halfway to a neighbour, squared, tells on which side of it the root lies, without a root.
            below = (Fraction(float(root)) + Fraction(float(np.nextafter(root, root * 0)))) / 2
            above = (Fraction(float(root)) + Fraction(float(np.nextafter(root, root * 4 + 1)))) / 2
            assert below**2 <= Fraction(x) <= above**2


def test_it_keeps_shape_zero_and_its_argument() -> None:
    x_RC = torch.tensor([[0.0, 4.0, 9.0]]).expand(2, 3)
    assert rounded_sqrt(x_RC).tolist() == [[0.0, 2.0, 3.0]] * 2
    assert x_RC.tolist() == [[0.0, 4.0, 9.0]] * 2
    assert rounded_sqrt(torch.tensor(4.0, dtype=torch.float64)).shape == ()
    assert rounded_sqrt(torch.empty(0)).shape == (0,)
