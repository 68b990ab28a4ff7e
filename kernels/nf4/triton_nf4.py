"""Four bits a number, in Triton: the twin of `reference.decode`, bit for bit.

Each Triton program decodes `TILES` tiles. Each product of two float32 numbers is rounded once to float32 and then, for
bfloat16 results, to the nearest bfloat16, ties to even. There is no encoder: weights are encoded once, on a CPU.

If `TRITON_INTERPRET=1` is set when this file is first imported, the kernel runs on a CPU; for tests only.

The shape letters are those of `reference.py`.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.codec.formats import SCALE_BYTES, TILE, num_tiles
from shoal.kernels.nf4.reference import levels_on

TILES: int = 32
_WARPS: Final = 4


@triton.jit
def decode_kernel(
    scale_T, code_B, level_L, x_N, numel, tiles, NARROW: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Decode the `TILES` tiles of this program. A tile is 64 numbers: a bfloat16 scale and 32 bytes of codes.

    NARROW: the output `x_N` is bfloat16, viewed as int16.
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    element = tl.arange(0, SIZE)
    is_there = tile < tiles
    factor = (tl.load(scale_T + tile, mask=is_there, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    half: tl.constexpr = SIZE // 2
    at_byte = tile.to(tl.int64)[:, None] * half + (element % half)[None, :]
    packed = tl.load(code_B + at_byte, mask=is_there[:, None], other=0).to(tl.int32)
    level = tl.load(level_L + ((packed >> (4 * (element // half))[None, :]) & 15))
    x = level * factor[:, None]
    at = tile.to(tl.int64)[:, None] * SIZE + element[None, :]
    if NARROW:
        # Round by integer arithmetic: the interpreter's conversion would truncate.
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        tl.store(x_N + at, (bits >> 16).to(tl.int16), mask=at < numel)
    else:
        tl.store(x_N + at, x, mask=at < numel)


def decode(payload_B: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a payload, uint8 [B], to [N] of `dtype`: the twin of `reference.decode`."""
    tiles, is_narrow = num_tiles(numel), dtype == torch.bfloat16
    x_N = torch.empty(numel, dtype=torch.bfloat16 if is_narrow else torch.float32, device=payload_B.device)
    if tiles:
        # Triton launches on the current device, which may not be that of the tensors.
        with torch.cuda.device_of(payload_B):  # type: ignore[no-untyped-call]
            decode_kernel[(triton.cdiv(tiles, TILES),)](
                payload_B[: tiles * SCALE_BYTES].view(torch.int16), payload_B[tiles * SCALE_BYTES :],
                levels_on(payload_B.device), x_N.view(torch.int16) if is_narrow else x_N, numel, tiles,
                NARROW=is_narrow, SIZE=TILE, TILES=TILES, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return x_N.to(dtype)
