"""The square root rounded as in IEEE 754: the nearest number, the same bits on every device.

On a CPU `torch.sqrt` uses MKL, whose results may be wrong in the last bit: of 100,000 numbers 520 were wrong on a
processor with AVX512, none with AVX2, and 17,156 on older processors. NumPy uses the processor's own instruction, and
the square root of CUDA is correctly rounded.
"""

import numpy as np
import torch
from torch import Tensor


def rounded_sqrt(x: Tensor) -> Tensor:
    """Return the square roots of `x`, a floating-point tensor, as a new tensor of the same shape, dtype and device."""
    return torch.from_numpy(np.sqrt(x.numpy(), out=np.empty(x.shape, x.numpy().dtype))) if x.is_cpu else x.sqrt()
