"""Tensors in few bits, for slow links. `reference.py` explains the arithmetic.

    form = FORMATS["hadamard4"]
    payload_B = encode(x_N, form, key=(3, 5))     # uint8, form.payload_bytes(x_N.numel()) of them
    x_N = decode(payload_B, x_N.numel(), form)

The device of a tensor decides which twin (implementation) computes. On a CPU the first large tensor makes a thread load
the compiled twin; until that is loaded, the reference computes.
"""

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from shoal.kernels.codec import reference
from shoal.kernels.codec.formats import FORMATS, SCALE_BYTES, TILE, Format, num_tiles
from shoal.kernels.numba_twins import NumbaTwin
from shoal.kernels.triton_twins import triton_twins

__all__ = ["FORMATS", "TILE", "Format", "decode", "decode_tiles", "encode"]


def encode(x_N: Tensor, form: Format, *, key: tuple[int, int] | None = None) -> Tensor:
    """Encode a float32 tensor (see `reference.encode`) with the implementation for the device of `x_N`."""
    payload_B: Tensor = _twin(x_N).encode(x_N.contiguous(), form, key=key)
    return payload_B


def decode(payload_B: Tensor, numel: int, form: Format) -> Tensor:
    """Decode a payload to float32 [N] (see `reference.decode`) with the code for the device of `payload_B`."""
    x_N: Tensor = _twin(payload_B).decode(payload_B, numel, form)
    return x_N


def decode_tiles(payload_B: Tensor, numel: int, form: Format, which: slice | Tensor) -> Tensor:
    """Decode some tiles of a tensor into one tensor.

    Args:
        numel: the number of elements of the whole tensor.
        which: the indices of the tiles, int64 [T] or a slice.
    Returns: float32 [64 T]. Values of the tensor's last tile that lie beyond the tensor's end are meaningless.
    """
    tiles = num_tiles(numel)
    scale_TB = payload_B[: tiles * SCALE_BYTES].view(tiles, SCALE_BYTES)[which]
    code_TB = payload_B[tiles * SCALE_BYTES :].view(tiles, form.tile_bytes)[which]
    return decode(torch.cat([scale_TB.flatten(), code_TB.flatten()]), len(scale_TB) * TILE, form)


_triton = partial(triton_twins, "shoal.kernels.codec.triton_codec")
numba_twin = NumbaTwin("shoal.kernels.codec.numba_codec")
_LARGE = 1 << 18
"""A tensor of at least this many elements makes numba load: the reference takes some milliseconds for such a tensor."""


def _twin(tensor: Tensor) -> ModuleType:
    if tensor.is_cuda:
        return _triton() or reference
    if tensor.numel() >= _LARGE:
        numba_twin.start()
    return numba_twin.module or reference
