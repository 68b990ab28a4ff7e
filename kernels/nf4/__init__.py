"""Frozen weights in four bits a number. `reference.py` explains the arithmetic.

payload_B = encode(x_N)                  # uint8, payload_bytes(x_N.numel()) of them
x_N = decode(payload_B, x_N.numel())     # on a CUDA device by the Triton twin
"""

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from shoal.kernels.nf4 import reference
from shoal.kernels.nf4.reference import encode, payload_bytes
from shoal.kernels.triton_twins import triton_twins

__all__ = ["decode", "encode", "payload_bytes"]

_triton = partial(triton_twins, "shoal.kernels.nf4.triton_nf4")


def decode(payload_B: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a payload to [N] of `dtype` (see `reference.decode`) on the device of `payload_B`."""
    twin: ModuleType = (payload_B.is_cuda and _triton()) or reference
    x_N: Tensor = twin.decode(payload_B, numel, dtype)
    return x_N
