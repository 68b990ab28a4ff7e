"""The square root as IEEE 754 rounds it: the nearest number, the same bits on every device.

`torch.sqrt` on a CPU is MKL's, which may be off by the last bit, in as many elements as the processor likes: of 100,000
numbers 520 with AVX512, none with AVX2, 17,156 with less. NumPy's is the processor's own instruction, and CUDA's is
rounded as it should be.
"""

import numpy as np
import torch
from torch import Tensor


def rounded_sqrt(x: Tensor) -> Tensor:
    """A new tensor of the shape, dtype and device of `x`, floating."""
    return torch.from_numpy(np.sqrt(x.numpy(), out=np.empty(x.shape, x.numpy().dtype))) if x.is_cpu else x.sqrt()
