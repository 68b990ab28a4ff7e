"""Tensors in few bits, in plain torch: the CPU path, and bit for bit the result of the fast twins.

Let a be the largest magnitude in a tile x, and H the Hadamard matrix (64 x 64, of ones and minus ones) that rotates x:

    z = floor(x 2^17 / a + 1/2)              whole numbers
    y = H z                                  whole numbers too, below 2^24: exact in float32 in any order of its sums
    f = max|y| a / (L 2^23)                  rounded up to bfloat16, so that no code is out of range
    q = floor(y a / (f 2^23) + u)            from -L to L;   x ~ (H q) f, since H H = 64

Without rotation y = x, f = max|x| / L and q = floor(x / f + u). With u = 1/2, q is the nearest number. With u drawn
evenly from (0, 1), q is rounded up or down so that its mean is exact (stochastic rounding); this u is a hash of the
tensor's key and the element's position, so a peer that encodes a tensor again gets the same bytes.

IEEE 754 defines every operation here to the last bit, and none is fused with the next, so payloads are equal on all
devices.

Source: He et al., "TAH-Quant: Effective Activation Quantization in Pipeline Parallelism over Slow Network", 2025, arXiv
    2506.01352, sections 4.1 to 4.3: tiles, the Hadamard transform against outliers, few bits. We differ in that all
    tiles have the same number of bits, and that numbers are whole before the transform.

N elements   T tiles   E elements of a tile   B bytes
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

from shoal.kernels.codec.formats import SCALE_BYTES, TILE, Format, num_tiles
from shoal.kernels.words import shifted, signed

FINE: Final = 2.0**17
"""A tile's largest magnitude is scaled to this, so that its Hadamard sums stay within 64 x 2^17 = 2^23."""
SMALLEST: Final = 2.0**-100
"""A tile with all magnitudes below this becomes zeros: the factors that scale it would leave the range of float32."""
_CHUNK_TILES: Final = 1024
"""The number of tiles computed at a time: 256 KiB in float32, so that temporaries stay in a core's own cache."""
_MASK: Final = 0xFFFF


def encode(x_N: Tensor, form: Format, *, key: tuple[int, int] | None = None) -> Tensor:
    """Encode a tensor in few bits.

    Args:
        x_N: float32, contiguous, of any shape.
        key: two numbers of 32 bits, unique to this tensor, for stochastic rounding. None: round to the nearest.
    Returns: the payload, uint8 [B]. A tile with a number that is not finite decodes as NaN.
    """
    flat_N, tiles = x_N.reshape(-1), num_tiles(x_N.numel())
    payload_B = torch.empty(form.payload_bytes(x_N.numel()), dtype=torch.uint8, device=x_N.device)
    scale_T = payload_B[: tiles * SCALE_BYTES].view(torch.int16)
    code_TB = payload_B[tiles * SCALE_BYTES :].view(tiles, form.tile_bytes)
    for start in range(0, tiles, _CHUNK_TILES):
        stop = min(start + _CHUNK_TILES, tiles)
        x_TE = as_tiles(flat_N[start * TILE : stop * TILE])
        chance_TE = None if key is None else _chance(key, start, stop, x_N.device)
        factor_T, q_TE = _quantized(x_TE, form, chance_TE)
        scale_T[start:stop] = (factor_T.view(torch.int32) >> 16).to(torch.int16)
        _pack(q_TE.add_(form.levels).to(torch.uint8), form, code_TB[start:stop])
    return payload_B


def decode(payload_B: Tensor, numel: int, form: Format) -> Tensor:
    """Decode a tensor.

    Args:
        payload_B: uint8 [B], `form.payload_bytes(numel)` of them. Any bytes are valid.
        numel: the number N of elements of the tensor.
    Returns: float32 [N].
    """
    tiles = num_tiles(numel)
    x_TE = torch.empty((tiles, TILE), device=payload_B.device)
    scale_T = payload_B[: tiles * SCALE_BYTES].view(torch.int16)
    code_TB = payload_B[tiles * SCALE_BYTES :].view(tiles, form.tile_bytes)
    for start in range(0, tiles, _CHUNK_TILES):
        stop = min(start + _CHUNK_TILES, tiles)
        factor_T = (scale_T[start:stop].to(torch.int32) << 16).view(torch.float32)
        q_TE = _unpacked(code_TB[start:stop], form).to(torch.float32).sub_(form.levels)
        y_TE = torch.mm(q_TE, hadamard(q_TE.device)) if form.is_rotated else q_TE
        torch.mul(y_TE, factor_T[:, None], out=x_TE[start:stop])
    return x_TE.view(-1)[:numel]


def as_tiles(x_N: Tensor) -> Tensor:
    """Return the numbers as [T, E], with zeros after the last number."""
    if x_N.numel() % TILE:
        x_N = torch.nn.functional.pad(x_N, (0, -x_N.numel() % TILE))
    return x_N.view(-1, TILE)


def _quantized(x_TE: Tensor, form: Format, chance_TE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round each tile.

    Args: chance_TE: u in the formulas at the top of this file, float32 [T, E]; None: 1/2.
    Returns: (scales f, float32 [T], exact in bfloat16; codes q, float32 [T, E], whole numbers from -L to L).
    """
    largest_T = x_TE.abs().amax(dim=1)
    is_zero_T, is_finite_T = largest_T < SMALLEST, largest_T < torch.inf
    a_T = torch.where(is_zero_T | ~is_finite_T, 1.0, largest_T)
    if form.is_rotated:
        z_TE = (x_TE * (FINE / a_T)[:, None]).add_(0.5).floor_()
        y_TE = torch.mm(z_TE, hadamard(x_TE.device))
        factor_T = y_TE.abs().amax(dim=1) / (form.levels * FINE * TILE) * a_T
    else:
        y_TE, factor_T = x_TE, a_T / form.levels
    factor_T = ((factor_T.view(torch.int32) + _MASK) & ~_MASK).view(torch.float32)
    step_T = a_T / factor_T / (FINE * TILE) if form.is_rotated else 1.0 / factor_T
    q_TE = y_TE * step_T[:, None]
    q_TE = q_TE.add_(0.5 if chance_TE is None else chance_TE).floor_().clamp_(-form.levels, form.levels)
    is_used_T = is_finite_T & ~is_zero_T
    q_TE = torch.where(is_used_T[:, None], q_TE, 0.0)
    return torch.where(is_finite_T, torch.where(is_zero_T, 0.0, factor_T), torch.nan), q_TE


def _pack(code_TE: Tensor, form: Format, into_TB: Tensor) -> None:
    at = 0
    for width, below in form.parts:
        num_bytes = TILE * width // 8
        part_TGB = code_TE if width == 8 else (code_TE >> below) & (2**width - 1)
        part_TGB = part_TGB.view(-1, 8 // width, num_bytes)
        packed_TB = into_TB[:, at : at + num_bytes]
        packed_TB.copy_(part_TGB[:, 0])
        for index in range(1, 8 // width):
            packed_TB |= part_TGB[:, index] << (width * index)
        at += num_bytes


def _unpacked(code_TB: Tensor, form: Format) -> Tensor:
    code_TE = torch.zeros((code_TB.shape[0], TILE), dtype=torch.uint8, device=code_TB.device)
    at = 0
    for width, below in form.parts:
        num_bytes = TILE * width // 8
        for index in range(8 // width):
            part_TB = code_TB[:, at : at + num_bytes] >> (width * index)
            code_TE[:, index * num_bytes : (index + 1) * num_bytes] |= (part_TB & (2**width - 1)) << below
        at += num_bytes
    return code_TE


@cache
def hadamard(device: torch.device) -> Tensor:
    """Return Sylvester's matrix, float32 [TILE, TILE]: (i, j) has -1 if i & j has an odd number of 1 bits, else 1."""
    index_E = torch.arange(TILE)
    common_EE = index_E[:, None] & index_E[None, :]
    num_common_EE = torch.stack([(common_EE >> bit) & 1 for bit in range(TILE.bit_length() - 1)]).sum(0)
    return (1 - 2 * (num_common_EE % 2)).to(device, torch.float32)


def _chance(key: tuple[int, int], start: int, stop: int, device: torch.device) -> Tensor:
    """Return random numbers in (0, 1), with 16 random bits each, for the tiles [start, stop): float32 [T, E].

    Hash number 32 t + e gives the bits of the elements e and e + 32 (e < 32) of tile t. Source of the hash: Wellons,
    "Prospecting for Hash Functions", 2018: triple32, with half of the key added before its first round and the other
    half before its second.
    """
    first, second = (signed(half) for half in key)
    half = TILE // 2
    h_N = torch.arange(start * half, stop * half, dtype=torch.int32, device=device).add_(first)
    h_N = h_N.bitwise_xor_(shifted(h_N, 17)).mul_(signed(0xED5AD4BB)).add_(second)
    h_N = h_N.bitwise_xor_(shifted(h_N, 11)).mul_(signed(0xAC4C1B51))
    h_N = h_N.bitwise_xor_(shifted(h_N, 15)).mul_(signed(0x31848BAB))
    h_TE = h_N.bitwise_xor_(shifted(h_N, 14)).view(-1, half)
    low_high_TE = torch.cat([h_TE & _MASK, shifted(h_TE, 16)], dim=1)
    return low_high_TE.to(torch.float32).add_(0.5).mul_(2.0**-16)
