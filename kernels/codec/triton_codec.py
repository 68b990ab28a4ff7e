"""Tensors in few bits, in Triton: the twin of `reference.py`, bit for bit.

Each Triton program encodes or decodes `TILES` tiles. The Hadamard transforms sum whole numbers below 2^24, so any order
gives the same result; divisions are correctly rounded, and nothing is fused (`enable_fp_fusion`).

If `TRITON_INTERPRET=1` is set when this file is first imported, the kernels run on a CPU; for tests only.

Letters as in `reference.py`.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.codec.formats import SCALE_BYTES, TILE, Format, num_tiles
from shoal.kernels.words import signed

TILES: int = 32
_WARPS: Final = 4


@triton.jit
def _max(x, y):
    """Return the larger of two numbers, for reductions. (Triton's `max` needs another import in the interpreter.)"""
    return tl.where(x > y, x, y)


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _hadamard(SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    common = index[:, None] & index[None, :]
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = common ^ (common >> 1)
    return (1 - 2 * (common & 1)).to(tl.float32)


@triton.jit
def _chance(number, first, second):
    """Return the hash of `number` with the key (first, second), as uint32."""
    h = number.to(tl.uint32) + first.to(tl.uint32)
    h = (h ^ (h >> 17)) * 0xED5AD4BB + second.to(tl.uint32)
    h = (h ^ (h >> 11)) * 0xAC4C1B51
    h = (h ^ (h >> 15)) * 0x31848BAB
    return h ^ (h >> 14)


@triton.jit
def encode_kernel(
    x_N, scale_T, code_B, numel, tiles, first, second,
    LEVELS: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr, BY_CHANCE: tl.constexpr,
    SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Encode `TILES` tiles: the scale of each as the bits of a bfloat16, and its packed codes."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    element = tl.arange(0, SIZE)
    at = tile.to(tl.int64)[:, None] * SIZE + element[None, :]
    x = tl.load(x_N + at, mask=at < numel, other=0.0)
    largest = tl.reduce(tl.abs(x), 1, _max)
    # A comparison with NaN is false, so `largest` does not show it.
    num_odd = tl.reduce(tl.where(tl.abs(x) < float("inf"), 0, 1), 1, _add)
    is_zero = largest < 2.0**-100
    a = tl.where(is_zero | (num_odd > 0), 1.0, largest)
    x = tl.where(num_odd[:, None] > 0, 0.0, x)
    if ROTATED:
        fine = tl.div_rn(tl.full((TILES,), 131072.0, tl.float32), a)
        z = tl.floor(x * fine[:, None] + 0.5)
        y = tl.dot(z, _hadamard(SIZE), input_precision="ieee")
        most = tl.reduce(tl.abs(y), 1, _max)
        factor = tl.div_rn(most, tl.full((TILES,), LEVELS * 131072.0 * SIZE, tl.float32)) * a
    else:
        y = x
        factor = tl.div_rn(a, tl.full((TILES,), LEVELS * 1.0, tl.float32))
    bits = (factor.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    factor = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
    if ROTATED:
        # The factor 2^23 is a power of two: multiplying by its inverse is the division.
        step = tl.div_rn(a, factor) * (1.0 / (131072.0 * SIZE))
    else:
        step = tl.div_rn(tl.full((TILES,), 1.0, tl.float32), factor)
    if BY_CHANCE:
        number = tile[:, None] * (SIZE // 2) + (element % (SIZE // 2))[None, :]
        h = _chance(number, first, second)
        h = tl.where(element[None, :] < SIZE // 2, h & 0xFFFF, h >> 16)
        chance = (h.to(tl.float32) + 0.5) * (1.0 / 65536.0)
    else:
        chance = tl.full((TILES, SIZE), 0.5, tl.float32)
    q = tl.floor(y * step[:, None] + chance)
    q = tl.where(q > LEVELS, LEVELS * 1.0, tl.where(q < -LEVELS, -LEVELS * 1.0, q))
    q = tl.where((is_zero | (num_odd > 0))[:, None], 0.0, q)
    code = q.to(tl.int32) + LEVELS
    bits = tl.where(num_odd > 0, 0x7FC0, tl.where(is_zero, 0, bits >> 16))
    tl.store(scale_T + tile, bits.to(tl.int16), mask=tile < tiles)
    at_byte = tile.to(tl.int64) * (SIZE * BITS // 8)
    below = 0
    if BITS == 8:
        _store(code, code_B, at_byte, tile, tiles, 8, SIZE, TILES)
    if BITS < 8 and BITS & 4:
        _store(code & 15, code_B, at_byte, tile, tiles, 4, SIZE, TILES)
        at_byte += SIZE // 2
        below += 4
    if BITS < 8 and BITS & 2:
        _store((code >> below) & 3, code_B, at_byte, tile, tiles, 2, SIZE, TILES)
        at_byte += SIZE // 4
        below += 2
    if BITS < 8 and BITS & 1:
        _store((code >> below) & 1, code_B, at_byte, tile, tiles, 1, SIZE, TILES)


@triton.jit
def _store(part, code_B, at_byte, tile, tiles, WIDTH: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr):
    """Pack `part` [TILES, SIZE], WIDTH bits of each number's code, and store each tile's bytes in `code_B`."""
    NUM_BYTES: tl.constexpr = SIZE * WIDTH // 8
    shift = WIDTH * tl.arange(0, 8 // WIDTH)
    packed = tl.reduce(tl.reshape(part, (TILES, 8 // WIDTH, NUM_BYTES)) << shift[None, :, None], 1, _add)
    at = at_byte[:, None] + tl.arange(0, NUM_BYTES)[None, :]
    tl.store(code_B + at, packed.to(tl.uint8), mask=(tile < tiles)[:, None])


@triton.jit
def decode_kernel(
    scale_T, code_B, x_N, numel, tiles,
    LEVELS: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Decode the `TILES` tiles of this program. A tile is 64 numbers: a bfloat16 scale and packed codes."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    element = tl.arange(0, SIZE)
    is_there = tile < tiles
    bits = tl.load(scale_T + tile, mask=is_there, other=0).to(tl.int32) << 16
    factor = bits.to(tl.float32, bitcast=True)
    at_byte = tile.to(tl.int64) * (SIZE * BITS // 8)
    code = tl.full((TILES, SIZE), 0, tl.int32)
    below = 0
    if BITS == 8:
        code = _load(code_B, at_byte, is_there, 8, SIZE)
    if BITS < 8 and BITS & 4:
        code = _load(code_B, at_byte, is_there, 4, SIZE)
        at_byte += SIZE // 2
        below += 4
    if BITS < 8 and BITS & 2:
        code += _load(code_B, at_byte, is_there, 2, SIZE) << below
        at_byte += SIZE // 4
        below += 2
    if BITS < 8 and BITS & 1:
        code += _load(code_B, at_byte, is_there, 1, SIZE) << below
    q = (code - LEVELS).to(tl.float32)
    if ROTATED:
        q = tl.dot(q, _hadamard(SIZE), input_precision="ieee")
    at = tile.to(tl.int64)[:, None] * SIZE + element[None, :]
    tl.store(x_N + at, q * factor[:, None], mask=at < numel)


@triton.jit
def _load(code_B, at_byte, is_there, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Read from `code_B` the parts (WIDTH bits each) of TILES tiles' codes: int32 [TILES, SIZE]."""
    NUM_BYTES: tl.constexpr = SIZE * WIDTH // 8
    element = tl.arange(0, SIZE)
    at = at_byte[:, None] + (element % NUM_BYTES)[None, :]
    packed = tl.load(code_B + at, mask=is_there[:, None], other=0).to(tl.int32)
    return (packed >> (WIDTH * (element // NUM_BYTES))[None, :]) & (2**WIDTH - 1)


def encode(x_N: Tensor, form: Format, *, key: tuple[int, int] | None = None) -> Tensor:
    """Encode float32 [N] to a payload, uint8 [B]: the twin of `reference.encode`."""
    numel, tiles = x_N.numel(), num_tiles(x_N.numel())
    payload_B = torch.empty(form.payload_bytes(numel), dtype=torch.uint8, device=x_N.device)
    if tiles:
        first, second = (signed(half) for half in key or (0, 0))  # Triton chooses an argument's type by its value
        encode_kernel[(triton.cdiv(tiles, TILES),)](
            x_N, payload_B[: tiles * SCALE_BYTES].view(torch.int16), payload_B[tiles * SCALE_BYTES :], numel, tiles,
            first, second,
            LEVELS=form.levels, BITS=form.bits, ROTATED=form.is_rotated, BY_CHANCE=key is not None,
            SIZE=TILE, TILES=TILES, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return payload_B


def decode(payload_B: Tensor, numel: int, form: Format) -> Tensor:
    """Decode a payload, uint8 [B], to float32 [N]: the twin of `reference.decode`."""
    tiles = num_tiles(numel)
    x_N = torch.empty(numel, device=payload_B.device)
    if tiles:
        decode_kernel[(triton.cdiv(tiles, TILES),)](
            payload_B[: tiles * SCALE_BYTES].view(torch.int16), payload_B[tiles * SCALE_BYTES :], x_N, numel, tiles,
            LEVELS=form.levels, BITS=form.bits, ROTATED=form.is_rotated, SIZE=TILE, TILES=TILES,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return x_N
