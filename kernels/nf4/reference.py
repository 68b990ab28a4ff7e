"""NormalFloat: four bits a number, for weights that are about normally distributed. Plain torch, for every device;
`triton_nf4.py` decodes to the same bits on a GPU.

The 64 numbers of a tile share a scale f, their largest magnitude rounded up to bfloat16. The code of a number x is the
index of the level nearest to x / f, among 16 levels that are equally likely if x is normally distributed. The payload
of T tiles has T scales in bfloat16, little-endian, and then 32 bytes for each tile: byte e has code e in its low four
bits and code e + 32 in its high four bits.

IEEE 754 defines every operation here to the last bit: payloads and decoded numbers are equal on all devices.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv 2305.14314, section 3 and appendix
    E, which has the levels. Our scale takes 16 bits, so a number takes 4.25 bits in all; their scale takes 32 bits, or
    about 8.1 if the scales are quantised, too.

N elements   T tiles   E elements of a tile   B bytes
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

from shoal.kernels.codec.formats import SCALE_BYTES, TILE, num_tiles
from shoal.kernels.codec.reference import as_tiles

TILE_BYTES: Final = TILE // 2
LEVELS: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_CHUNK_TILES: Final = 1 << 14
"""The number of tiles computed at a time: 4 MiB in float32."""


def payload_bytes(numel: int) -> int:
    """Return the size of the payload of a tensor with `numel` elements."""
    return num_tiles(numel) * (SCALE_BYTES + TILE_BYTES)


def encode(x_N: Tensor) -> Tensor:
    """Encode a tensor in four bits a number.

    Args: x_N: float32, contiguous, of any shape, of finite numbers.
    Returns: the payload, uint8 [B].
    """
    flat_N, tiles = x_N.reshape(-1), num_tiles(x_N.numel())
    payload_B = torch.empty(payload_bytes(x_N.numel()), dtype=torch.uint8, device=x_N.device)
    scale_T, code_TB = _parts(payload_B, tiles)
    for start in range(0, tiles, _CHUNK_TILES):
        stop = min(start + _CHUNK_TILES, tiles)
        x_TE = as_tiles(flat_N[start * TILE : stop * TILE])
        factor_T = _rounded_up(x_TE.abs().amax(dim=1))
        scale_T[start:stop] = (factor_T.view(torch.int32) >> 16).to(torch.int16)
        share_TE = x_TE / torch.where(factor_T > 0, factor_T, 1.0)[:, None]
        code_TE = torch.bucketize(share_TE, _middles(x_N.device)).to(torch.uint8)
        code_TB[start:stop] = code_TE[:, :TILE_BYTES] | (code_TE[:, TILE_BYTES:] << 4)
    return payload_B


def decode(payload_B: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a tensor.

    Args:
        payload_B: uint8 [B], `payload_bytes(numel)` of them. Any bytes are valid.
        numel: the number N of elements of the tensor.
        dtype: the dtype to which each float32 number is rounded.
    Returns: [N] of `dtype`.
    """
    tiles = num_tiles(numel)
    scale_T, code_TB = _parts(payload_B, tiles)
    x_TE = torch.empty((tiles, TILE), dtype=dtype, device=payload_B.device)
    levels = levels_on(payload_B.device)
    for start in range(0, tiles, _CHUNK_TILES):
        stop = min(start + _CHUNK_TILES, tiles)
        factor_T = (scale_T[start:stop].to(torch.int32) << 16).view(torch.float32)
        part_TB = code_TB[start:stop]
        for first, code_TB32 in ((0, part_TB & 15), (TILE_BYTES, part_TB >> 4)):
            level_TB = levels[code_TB32.to(torch.int32)]
            torch.mul(level_TB, factor_T[:, None], out=x_TE[start:stop, first : first + TILE_BYTES])
    return x_TE.view(-1)[:numel]


def _parts(payload_B: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Return views of a payload: (its scales as int16 [T], its codes [T, B])."""
    scale_T = payload_B[: tiles * SCALE_BYTES].view(torch.int16)
    return scale_T, payload_B[tiles * SCALE_BYTES :].view(tiles, TILE_BYTES)


def _rounded_up(a_T: Tensor) -> Tensor:
    """Return scales: each tile's largest magnitude rounded up to a finite bfloat16, so no number / scale exceeds 1."""
    up_T = ((a_T.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(up_T.isfinite(), up_T, torch.finfo(torch.bfloat16).max)


@cache
def levels_on(device: torch.device) -> Tensor:
    """Return `LEVELS` as float32 [16]."""
    return torch.tensor(LEVELS, device=device)


@cache
def _middles(device: torch.device) -> Tensor:
    levels = torch.tensor(LEVELS)
    return ((levels[1:] + levels[:-1]) / 2).to(device)
