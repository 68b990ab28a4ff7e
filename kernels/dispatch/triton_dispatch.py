"""Token dispatch and the experts' products in Triton: twins of `reference.py`.

Nothing waits for the device. The number of a product's tiles depends on counts that only the device knows, so the
largest possible number of programs starts: one for every `rows` rows and one more for each expert. Programs without a
tile end at once. A tile has rows of one expert only, and rows beyond the expert's last row are masked, so nothing is
padded in memory. Sums are in float32; bf16 operands go to the tensor cores unchanged.

If `TRITON_INTERPRET=1` is set when this file is first imported, the kernels run on a CPU; for tests only. The
interpreter's bf16 arithmetic is wrong: in the interpreter operands are first converted to float32, and on every device
results are rounded to bf16 by integer arithmetic.

The shape letters are those of `reference.py`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.dispatch.groups import Groups

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK_D: int = 1024
"""The number of elements of a row that a program copies at a time."""
GROUP: Final = 8
"""The number of row tiles that use the same column tile of a matrix in turn, so that the column tile stays in L2."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The size of a product's tile (rows, columns, terms summed at a time), and its warps and pipeline stages."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


TILES: Mapping[torch.dtype, Tile] = {
    torch.bfloat16: Tile(128, 128, 64, 8, 3),
    torch.float32: Tile(64, 64, 32, 4, 3),
}
"""The tile for each dtype: usual sizes for current GPUs, not measured on one."""


@triton.jit
def _add(x, y):
    """Add two numbers, for reductions. (Triton's `sum` needs another import in the interpreter.)"""
    return x + y


@triton.jit
def _narrowed(x):
    """Round float32 `x` to the nearest bf16, ties to even. Returns: the bits, as int16."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
    return (bits >> 16).to(tl.int16)


@triton.jit
def spread_kernel(
    x_ND, y_PD, weight_P, choice_P, token_P, out_PD, dot_P, width,
    WEIGHTED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token into one row. If WEIGHTED, multiply the copy by its choice's weight, and store in `dot_P` at the
    choice the token's dot product with that row of `y_PD`. NARROW: the output is bf16, viewed as int16."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_P + row)
    if WEIGHTED:
        choice = tl.load(choice_P + row)
        weight = tl.load(weight_P + choice)
        dot = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(x_ND + token * width + at, mask=inside, other=0.0)
        if WEIGHTED:
            x = x.to(tl.float32)
            dot += x * tl.load(y_PD + row * width + at, mask=inside, other=0.0).to(tl.float32)
            x = x * weight
            if NARROW:
                x = _narrowed(x)
        tl.store(out_PD + row * width + at, x, mask=inside)
    if WEIGHTED:
        tl.store(dot_P + choice, tl.reduce(dot, 0, _add))


@triton.jit
def gather_kernel(
    x_PD, weight_NK, row_NK, out_ND, width,
    CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one token's rows, for BLOCK elements of the width. If WEIGHTED, multiply each row by its choice's weight."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for k in tl.static_range(CHOICES):
        row = tl.load(row_NK + token * CHOICES + k)
        x = tl.load(x_PD + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weight_NK + token * CHOICES + k)
        total += x
    if NARROW:
        tl.store(out_ND + token * width + at, _narrowed(total), mask=inside)
    else:
        tl.store(out_ND + token * width + at, total, mask=inside)


@triton.jit
def matmul_kernel(
    x_PT, weight, offset_E, y_PW, num_experts, width, terms, stride_expert, stride_width, stride_term,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute one tile of rows [P, T] times their expert's matrix [T, W]. EXPERTS: a power of 2, >= `num_experts`."""
    program = tl.program_id(0)
    column_tiles = (width + COLUMNS - 1) // COLUMNS
    first_tile = program // (GROUP * column_tiles) * GROUP
    tiles_here = tl.minimum(tl.num_programs(0) // column_tiles - first_tile, GROUP)
    within = program % (GROUP * column_tiles)
    tile = first_tile + within % tiles_here
    columns = within // tiles_here * COLUMNS + tl.arange(0, COLUMNS)
    # Find the tile's expert: each expert has ceil(rows / ROWS) consecutive tiles.
    experts = tl.arange(0, EXPERTS)
    firsts = tl.load(offset_E + experts, mask=experts < num_experts, other=0)
    lasts = tl.load(offset_E + experts + 1, mask=experts < num_experts, other=0)
    tiles = (lasts - firsts + ROWS - 1) // ROWS
    upto = tl.associative_scan(tiles, 0, _add)
    expert = tl.reduce((upto <= tile).to(tl.int32), 0, _add)
    if expert < num_experts:
        mine = experts == expert
        last = tl.reduce(tl.where(mine, lasts, 0), 0, _add)
        before = tl.reduce(tl.where(mine, upto - tiles, 0), 0, _add)
        rows = tl.reduce(tl.where(mine, firsts, 0), 0, _add) + (tile - before) * ROWS + tl.arange(0, ROWS)
        weight += expert.to(tl.int64) * stride_expert
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in range(0, terms, TERMS):
            at = start + tl.arange(0, TERMS)
            x = tl.load(
                x_PT + rows[:, None] * terms + at[None, :],
                mask=(rows < last)[:, None] & (at < terms)[None, :],
                other=0.0,
            )
            w = tl.load(
                weight + at[:, None] * stride_term + columns[None, :] * stride_width,
                mask=(at < terms)[:, None] & (columns < width)[None, :], other=0.0,
            )  # fmt: skip
            if WIDEN:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision=PRECISION)
        out = y_PW + rows[:, None] * width + columns[None, :]
        inside = (rows < last)[:, None] & (columns < width)[None, :]
        if NARROW:
            tl.store(out, _narrowed(total), mask=inside)
        else:
            tl.store(out, total, mask=inside)


@triton.jit
def outer_kernel(
    grad_PR, x_PC, offset_E, out_ERC, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute one tile of an expert's [R, C] gradient, summed over the expert's rows."""
    expert = tl.program_id(1).to(tl.int64)
    column_tiles = (width + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(offset_E + expert)
    last = tl.load(offset_E + expert + 1)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(first, last, TERMS):
        at = start + tl.arange(0, TERMS)
        grad = tl.load(
            grad_PR + at[None, :] * height + rows[:, None],
            mask=(at < last)[None, :] & (rows < height)[:, None], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_PC + at[:, None] * width + columns[None, :],
            mask=(at < last)[:, None] & (columns < width)[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            grad, x = grad.to(tl.float32), x.to(tl.float32)
        total = tl.dot(grad, x, total, input_precision=PRECISION)
    out = out_ERC + expert * height * width + rows[:, None].to(tl.int64) * width + columns[None, :]
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    if NARROW:
        tl.store(out, _narrowed(total), mask=inside)
    else:
        tl.store(out, total, mask=inside)


def permute(x_ND: Tensor, groups: Groups) -> Tensor:
    """Copy each token once for each of its choices, as `reference.permute` does."""
    return _spread(x_ND, groups)[0]


def permute_backward(grad_PD: Tensor, groups: Groups) -> Tensor:
    """Return the gradient of the input of `permute`, as `reference.permute_backward` does."""
    return _gathered(grad_PD, None, groups)


def combine(y_PD: Tensor, weight_NK: Tensor, groups: Groups) -> Tensor:
    """Return the weighted sum of each token's rows, as `reference.combine` does."""
    return _gathered(y_PD, weight_NK, groups)


def combine_backward(grad_ND: Tensor, y_PD: Tensor, weight_NK: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and weights of `combine`, as `reference.combine_backward` does."""
    return _spread(grad_ND, groups, y_PD, weight_NK)


def grouped_matmul(x_PC: Tensor, weights: Sequence[Tensor], offset_E: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply each expert's rows by its matrix: the twin of `reference.grouped_matmul`, [P, C] -> [P, R]."""
    num_experts, (R, C) = len(weights), weights[0].shape
    width, terms = (C, R) if transposed else (R, C)
    y_PW, tile = x_PC.new_empty(len(x_PC), width), TILES[x_PC.dtype]
    if y_PW.numel():
        first, stride_expert = _evenly_spaced(weights)
        row_tiles = min(len(x_PC), triton.cdiv(len(x_PC), tile.rows) + num_experts - 1)
        # Triton launches on the current device, which may not be that of the tensors.
        with torch.cuda.device_of(x_PC):  # type: ignore[no-untyped-call]
            matmul_kernel[(row_tiles * triton.cdiv(width, tile.columns),)](
                x_PC, first, offset_E, _bits(y_PW), num_experts, width, terms,
                stride_expert, 1 if transposed else C, C if transposed else 1,
                EXPERTS=triton.next_power_of_2(num_experts), GROUP=GROUP, **_launch(x_PC.dtype),
            )  # fmt: skip
    return y_PW


def grouped_outer(grad_PR: Tensor, x_PC: Tensor, offset_E: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of each expert's matrix, as `reference.grouped_outer` does."""
    num_experts, R, C, tile = len(offset_E) - 1, grad_PR.shape[1], x_PC.shape[1], TILES[x_PC.dtype]
    out_ERC = grad_PR.new_empty(num_experts, R, C)
    if out_ERC.numel():
        with torch.cuda.device_of(x_PC):  # type: ignore[no-untyped-call]
            outer_kernel[(triton.cdiv(R, tile.rows) * triton.cdiv(C, tile.columns), num_experts)](
                grad_PR, x_PC, offset_E, _bits(out_ERC), R, C, **_launch(x_PC.dtype)
            )
    return out_ERC.unbind()


def _spread(
    x_ND: Tensor, groups: Groups, y_PD: Tensor | None = None, weight_NK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy each token to the rows of its choices. With `y_PD` and `weight_NK`, weight the rows, and compute each
    choice's dot product: token times row of `y_PD`. Return (rows [P, D], dot products [N, K], else uninitialized)."""
    weighted, (P, D) = y_PD is not None, (len(groups.token_P), x_ND.shape[1])
    out_PD = x_ND.new_empty(P, D)
    dot_NK = x_ND.new_empty(groups.row_NK.shape, dtype=torch.float32)
    if dot_NK.numel():
        with torch.cuda.device_of(x_ND):  # type: ignore[no-untyped-call]
            spread_kernel[(P,)](
                x_ND, x_ND if y_PD is None else y_PD, dot_NK if weight_NK is None else weight_NK,
                groups.choice_P, groups.token_P, _bits(out_PD) if weighted else out_PD, dot_NK, D,
                WEIGHTED=weighted, NARROW=out_PD.dtype == torch.bfloat16, BLOCK=_block(D),
            )  # fmt: skip
    return out_PD, dot_NK


def _gathered(x_PD: Tensor, weight_NK: Tensor | None, groups: Groups) -> Tensor:
    (N, K), D = groups.row_NK.shape, x_PD.shape[1]
    out_ND = x_PD.new_empty(N, D)
    if out_ND.numel():
        with torch.cuda.device_of(x_PD):  # type: ignore[no-untyped-call]
            gather_kernel[(N, triton.cdiv(D, _block(D)))](
                x_PD, groups.row_NK if weight_NK is None else weight_NK, groups.row_NK, _bits(out_ND), D,
                CHOICES=K, WEIGHTED=weight_NK is not None, NARROW=out_ND.dtype == torch.bfloat16, BLOCK=_block(D),
            )  # fmt: skip
    return out_ND


def _block(width: int) -> int:
    return min(BLOCK_D, int(triton.next_power_of_2(width)))


def _bits(out: Tensor) -> Tensor:
    """Return the tensor as a kernel writes it: a bf16 tensor viewed as int16, any other tensor as it is."""
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


def _launch(dtype: torch.dtype) -> dict[str, Any]:
    tile, tf32 = TILES[dtype], torch.backends.cuda.matmul.allow_tf32
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "TERMS": tile.terms,
        "PRECISION": "tf32" if tf32 and dtype == torch.float32 else "ieee",
        "WIDEN": INTERPRETED,
        "NARROW": dtype == torch.bfloat16,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _evenly_spaced(weights: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return (first matrix, elements from one matrix to the next), after copying unevenly spaced ones to one tensor."""
    places = [weight.data_ptr() for weight in weights]
    step = places[1] - places[0] if len(places) > 1 else 0
    even = all(place == places[0] + i * step for i, place in enumerate(places))
    if even and step % weights[0].element_size() == 0 and all(weight.is_contiguous() for weight in weights):
        return weights[0], step // weights[0].element_size()
    together_ERC = torch.stack(tuple(weights))
    return together_ERC[0], together_ERC.stride(0)
