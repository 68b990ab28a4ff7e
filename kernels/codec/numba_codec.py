"""The codec on a CPU: one pass over each tile, compiled by numba. It gives the same bytes as `reference.py`, which
explains the arithmetic.

A tile stays in a core's registers and first-level cache from the first operation to the last, while plain torch makes
some twenty passes over memory. Numba's fastmath is off: every operation is rounded as IEEE 754 says, and none is fused
with the next. The bits of non-negative floats have the same order as the floats, so the largest magnitude is found as a
maximum of integers, which the compiler may compare in any order.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.codec import reference
from shoal.kernels.codec.formats import FORMATS, SCALE_BYTES, TILE, Format, num_tiles

_njit: Any = njit  # the types of njit lack two of its options
_kernel = _njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
_inner = _njit(error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
_HALF = TILE // 2
_ONE = np.float32(1.0)
_NEAREST = np.float32(0.5)
_UNIT = np.float32(2.0**-16)
_FINE = np.float32(reference.FINE)
_WHOLE = np.float32(reference.FINE * TILE)
_MAGNITUDE, _INFINITE, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint16(0x7FC0)
_SMALLEST = np.uint32(np.float32(reference.SMALLEST).view(np.uint32))
_LOW = np.uint32(0xFFFF)
_S17, _S11, _S15, _S14, _S16 = (np.uint32(bits) for bits in (17, 11, 15, 14, 16))
_M1, _M2, _M3 = np.uint32(0xED5AD4BB), np.uint32(0xAC4C1B51), np.uint32(0x31848BAB)


def encode(x_N: Tensor, form: Format, *, key: tuple[int, int] | None = None) -> Tensor:
    """Encode float32 [N] to a payload, uint8 [B]: the twin of `reference.encode`."""
    flat_N, tiles = x_N.detach().reshape(-1), num_tiles(x_N.numel())
    payload_B = np.empty(form.payload_bytes(x_N.numel()), dtype=np.uint8)
    scale_T = payload_B[: tiles * SCALE_BYTES].view(np.uint16)
    code_TB = payload_B[tiles * SCALE_BYTES :].reshape(tiles, form.tile_bytes)
    first, second = (np.uint32(half & 0xFFFFFFFF) for half in key or (0, 0))
    _encode(flat_N.numpy(), scale_T, code_TB, form.bits, form.is_rotated, key is not None, first, second)
    return torch.from_numpy(payload_B)


def decode(payload_B: Tensor, numel: int, form: Format) -> Tensor:
    """Decode a payload, uint8 [B], to float32 [N]: the twin of `reference.decode`."""
    tiles = num_tiles(numel)
    payload: NDArray[np.uint8] = payload_B.numpy()
    scale_TB = payload[: tiles * SCALE_BYTES]
    code_TB = payload[tiles * SCALE_BYTES :].reshape(tiles, form.tile_bytes)
    x_TE = np.empty((tiles, TILE), dtype=np.float32)
    _decode(scale_TB, code_TB, x_TE, form.bits, form.is_rotated)
    return torch.from_numpy(x_TE).view(-1)[:numel]


def prove() -> None:
    """Compile all kernels. Raises: RuntimeError: on this machine they give other bytes than the reference."""
    x_N = torch.arange(-2 * TILE, 2 * TILE + 1, dtype=torch.float32).square_()
    for name, form in FORMATS.items():
        for key in (None, (1, 2)):
            payload_B = reference.encode(x_N, form, key=key)
            if not torch.equal(encode(x_N, form, key=key), payload_B):
                raise RuntimeError(f"it encodes {name} differently from the reference")
            if not torch.equal(decode(payload_B, len(x_N), form), reference.decode(payload_B, len(x_N), form)):
                raise RuntimeError(f"it decodes {name} differently from the reference")


@_inner
def _turn(y_E):
    """Multiply a tile, float32 [64], by the Hadamard matrix, in place.

    H of size 64 is the Kronecker product of two H of size 8. So the tile is treated as 8 x 8 numbers: each row, and
    then each column, is multiplied by H of size 8.
    """
    for row in range(8):
        _turn_eight(y_E, 8 * row, 1)
    for column in range(8):
        _turn_eight(y_E, column, 8)


@_inner
def _turn_eight(y_E, at, far):
    """Multiply y_E[at], y_E[at + far], ..., y_E[at + 7 far] by the Hadamard matrix of size 8, in place."""
    a0, a1, a2, a3 = y_E[at], y_E[at + far], y_E[at + 2 * far], y_E[at + 3 * far]
    a4, a5, a6, a7 = y_E[at + 4 * far], y_E[at + 5 * far], y_E[at + 6 * far], y_E[at + 7 * far]
    b0, b1, b2, b3, b4, b5, b6, b7 = a0 + a1, a0 - a1, a2 + a3, a2 - a3, a4 + a5, a4 - a5, a6 + a7, a6 - a7
    a0, a1, a2, a3, a4, a5, a6, a7 = b0 + b2, b1 + b3, b0 - b2, b1 - b3, b4 + b6, b5 + b7, b4 - b6, b5 - b7
    y_E[at], y_E[at + far], y_E[at + 2 * far], y_E[at + 3 * far] = a0 + a4, a1 + a5, a2 + a6, a3 + a7
    y_E[at + 4 * far], y_E[at + 5 * far], y_E[at + 6 * far], y_E[at + 7 * far] = a0 - a4, a1 - a5, a2 - a6, a3 - a7


@_kernel
def _encode(x_N, scale_T, code_TB, bits, is_rotated, is_by_chance, first, second):
    """Encode a tensor tile by tile.

    Args:
        x_N: float32 [N].
        scale_T: uint16 [T], receives the scales in bfloat16.
        code_TB: uint8 [T, B], receives the codes.
        first, second: the key, uint32 each, used if `is_by_chance` (stochastic rounding).
    """
    x_E = np.empty(TILE, np.float32)
    y_E = np.empty(TILE, np.float32)
    u_E = np.full(TILE, _NEAREST, np.float32)
    q_E = np.empty(TILE, np.uint8)
    levels = np.float32((1 << (bits - 1)) - 1)
    fine_levels = levels * _WHOLE
    bits_E, y_bits_E = x_E.view(np.uint32), y_E.view(np.uint32)
    one = np.empty(1, np.float32)
    one_bits = one.view(np.uint32)
    for t in range(len(scale_T)):
        begin = t * TILE
        if begin + TILE <= len(x_N):
            for e in range(TILE):
                x_E[e] = x_N[begin + e]
        else:
            for e in range(TILE):
                x_E[e] = x_N[begin + e] if begin + e < len(x_N) else np.float32(0.0)
        largest = np.uint32(0)
        for e in range(TILE):
            largest = max(largest, np.uint32(bits_E[e] & _MAGNITUDE))
        if largest >= _INFINITE or largest < _SMALLEST:
            scale_T[t] = _NAN if largest >= _INFINITE else np.uint16(0)
            for e in range(TILE):
                q_E[e] = np.uint8(levels)
        else:
            one_bits[0] = largest
            a = one[0]
            if is_by_chance:
                _draw(u_E, np.uint32(t * _HALF), first, second)
            if is_rotated:
                by = (_ONE / a) * _FINE  # two roundings, as in torch's number / tensor
                for e in range(TILE):
                    y_E[e] = np.floor(x_E[e] * by + _NEAREST)
                _turn(y_E)
                most = np.uint32(0)
                for e in range(TILE):
                    most = max(most, np.uint32(y_bits_E[e] & _MAGNITUDE))
                one_bits[0] = most
                one[0] = one[0] / fine_levels * a
            else:
                for e in range(TILE):
                    y_E[e] = x_E[e]
                one[0] = a / levels
            one_bits[0] = (one_bits[0] + _LOW) & ~_LOW
            scale_T[t] = np.uint16(one_bits[0] >> _S16)
            step = a / one[0] / _WHOLE if is_rotated else _ONE / one[0]
            for e in range(TILE):
                q = np.floor(y_E[e] * step + u_E[e])
                q = min(max(q, -levels), levels)
                q_E[e] = np.uint8(np.int32(q + levels))
        _pack(q_E, code_TB[t], bits)


@_inner
def _draw(u_E, start, first, second):
    """Fill u_E with a tile's random numbers as in `reference._chance`. Args: start: the number of its first hash."""
    for e in range(_HALF):
        h = np.uint32(start + np.uint32(e) + first)
        h = np.uint32(np.uint32(h ^ (h >> _S17)) * _M1 + second)
        h = np.uint32(np.uint32(h ^ (h >> _S11)) * _M2)
        h = np.uint32(np.uint32(h ^ (h >> _S15)) * _M3)
        h = np.uint32(h ^ (h >> _S14))
        u_E[e] = (np.float32(np.int32(h & _LOW)) + _NEAREST) * _UNIT
        u_E[e + _HALF] = (np.float32(np.int32(h >> _S16)) + _NEAREST) * _UNIT


@_inner
def _pack(q_E, code_B, bits):
    """Write the codes of a tile to `code_B`, in parts of 4, 2 and 1 bits, as in `formats.py`."""
    if bits == 8:
        for e in range(64):
            code_B[e] = q_E[e]
        return
    at, below = 0, 0
    if bits & 4:
        for e in range(32):
            code_B[e] = (q_E[e] & 15) | (q_E[e + 32] & 15) << 4
        at, below = 32, 4
    if bits & 2:
        for e in range(16):
            code_B[at + e] = (
                (q_E[e] >> below & 3)
                | (q_E[e + 16] >> below & 3) << 2
                | (q_E[e + 32] >> below & 3) << 4
                | (q_E[e + 48] >> below & 3) << 6
            )
        at, below = at + 16, below + 2
    if bits & 1:
        for e in range(8):
            code = np.uint8(0)
            for index in range(8):
                code |= (q_E[8 * index + e] >> below & 1) << index
            code_B[at + e] = code


@_inner
def _unpack(code_B, q_E, bits):
    if bits == 8:
        for e in range(64):
            q_E[e] = code_B[e]
        return
    at, below = 0, 0
    for e in range(64):
        q_E[e] = 0
    if bits & 4:
        for e in range(32):
            q_E[e] = code_B[e] & 15
            q_E[e + 32] = code_B[e] >> 4
        at, below = 32, 4
    if bits & 2:
        for e in range(16):
            code = code_B[at + e]
            q_E[e] |= (code & 3) << below
            q_E[e + 16] |= (code >> 2 & 3) << below
            q_E[e + 32] |= (code >> 4 & 3) << below
            q_E[e + 48] |= (code >> 6) << below
        at, below = at + 16, below + 2
    if bits & 1:
        for index in range(8):
            for e in range(8):
                q_E[8 * index + e] |= (code_B[at + e] >> index & 1) << below


@_kernel
def _decode(scale_TB, code_TB, x_TE, bits, is_rotated):
    """Decode a tensor tile by tile.

    Args:
        scale_TB: uint8 [2 T], not uint16 [T], because a payload may begin at an odd address.
        code_TB: uint8 [T, B].
        x_TE: float32 [T, 64], receives the numbers.
    """
    q_E = np.empty(TILE, np.uint8)
    y_E = np.empty(TILE, np.float32)
    levels = np.float32((1 << (bits - 1)) - 1)
    one = np.empty(1, np.float32)
    one_bits = one.view(np.uint32)
    for t in range(len(x_TE)):
        _unpack(code_TB[t], q_E, bits)
        one_bits[0] = (np.uint32(scale_TB[2 * t]) | np.uint32(scale_TB[2 * t + 1]) << np.uint32(8)) << _S16
        factor = one[0]
        for e in range(TILE):
            y_E[e] = np.float32(q_E[e]) - levels
        if is_rotated:
            _turn(y_E)
        for e in range(TILE):
            x_TE[t, e] = y_E[e] * factor
