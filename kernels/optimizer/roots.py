"""The square root rounded as in IEEE 754: the nearest number, the same bits on every device.

`torch.sqrt` on a CPU is MKL's, which may be wrong in the last bit, depending on the processor: in 520 of 100,000
numbers with AVX512, in none with AVX2, in 17,156 with less. NumPy's is the processor's own instruction, and CUDA's is
correctly rounded.
"""

import numpy as np
import torch
from torch import Tensor


def rounded_sqrt(x: Tensor) -> Tensor:
    """Return the roots as a new tensor of the shape, dtype and device of `x`, floating."""
    return torch.from_numpy(np.sqrt(x.numpy(), out=np.empty(x.shape, x.numpy().dtype))) if x.is_cpu else x.sqrt()
