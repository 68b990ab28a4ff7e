"""The square root rounded as in IEEE 754: the nearest number, the same bits on every device.

On a CPU `torch.sqrt` is that of MKL, which may be wrong in the last bit, depending on the processor: for 520 of 100,000
numbers with AVX512, for none with AVX2, for 17,156 on older ones. NumPy uses the processor's own instruction, and the
square root of CUDA is correctly rounded.
"""

import numpy as np
import torch
from torch import Tensor


def rounded_sqrt(x: Tensor) -> Tensor:
    """Return the square roots of `x`, a floating-point tensor, as a new tensor of the same shape, dtype and device."""
    return torch.from_numpy(np.sqrt(x.numpy(), out=np.empty(x.shape, x.numpy().dtype))) if x.is_cpu else x.sqrt()
