"""Rotary positions: tables of the angles, and the rotation by these angles.

T tokens   K head size   W kinds of layers (0: full attention, 1: window), if their angles differ
"""

import math

import torch
from torch import Tensor

from shoal.protocol.decoder import RopeScaling
from shoal.protocol.spec import ModelSpec

Rotary = tuple[Tensor, Tensor]
"""(cosines, sines), each [T, K], or [T, W, K] if window layers have other angles. The sines of the first half of K are
negated. Tables from `at_positions` have two more dimensions in front, B and 1."""


def rotary_tables(model: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Rotary:
    """Return (cos, sin) of every position's angles, each [context, K], or [context, 2, K] if window layers (index 1)
    have other angles. Both halves of K have the same angles; the sines of the first half are negated."""
    decoder = model.decoder
    tables = [_tables(model, model.rope_theta, decoder.rope)]
    if decoder.window_rope_theta is None:
        cos, turned = tables[0]
    else:
        tables.append(_tables(model, decoder.window_rope_theta, None))
        cos, turned = (torch.stack(kinds, dim=1) for kinds in zip(*tables, strict=True))
    return cos.to(device, dtype), turned.to(device, dtype)


def at_positions(rotary: Rotary, position_BT: Tensor) -> Rotary:
    """Return the tables, [B, 1, T, K] or [B, 1, T, 2, K], at the positions `position_BT`, int64 [B, T]."""
    cos, turned = (table[position_BT].unsqueeze(1) for table in rotary)
    return cos, turned


def rotate(x_BHTK: Tensor, rotary: Rotary, *, windowed: bool = False) -> Tensor:
    """Rotate each pair of elements (k, k + K/2) by its position's angle, or by the angle of window layers if
    `windowed`. The result equals that of Hugging Face's `rotate_half` bit for bit: our sines include its minus sign."""
    T, K = x_BHTK.shape[2:]
    cos, turned = (_of_kind(table, T, int(windowed)) for table in rotary)
    return (x_BHTK * cos + x_BHTK.roll(K // 2, dims=-1) * turned).to(x_BHTK.dtype)


def _of_kind(table: Tensor, num_tokens: int, kind: int) -> Tensor:
    match table.ndim:
        case 2:
            return table[:num_tokens]
        case 3:
            return table[:num_tokens, kind]
        case 4:
            return table
        case _:
            return table[..., kind, :]


def _tables(model: ModelSpec, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Return the tables (cos, sin) of one kind of layers, float64 [context, K] each."""
    half = torch.arange(0, model.head_dim, 2, dtype=torch.float64)
    frequency = theta ** -(half / model.head_dim)
    factor = 1.0
    if scaling is not None:
        frequency, factor = _scaled(frequency, scaling, theta), scaling.turned_factor
    angle = torch.outer(torch.arange(model.context, dtype=torch.float64), frequency)
    angle_TK = torch.cat((angle, angle), dim=-1)
    turned_TK = angle_TK.sin()
    turned_TK[:, : model.head_dim // 2].neg_()
    return angle_TK.cos() * factor, turned_TK * factor


def _scaled(frequency: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Scale the frequencies, float64 [K/2] in falling order, by linear, llama3 or yarn (sources: `RopeScaling`)."""
    divided = frequency / scaling.factor
    match scaling.kind:
        case "linear":
            return divided
        case "llama3":
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            turns = scaling.original_context * frequency / (2 * math.pi)
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            return divided * (1 - kept) + frequency * kept
        case "yarn":
            pairs = len(frequency)
            first, last = (_pair_of(turns, scaling, theta, pairs) for turns in (scaling.beta_fast, scaling.beta_slow))
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * pairs - 1)
            width = last - first if last != first else 0.001
            kept = 1 - ((torch.arange(pairs, dtype=torch.float64) - first) / width).clamp(0, 1)
            return divided * (1 - kept) + frequency * kept


def _pair_of(turns: float, scaling: RopeScaling, theta: float, pairs: int) -> float:
    """Return the fractional index of the pair that turns `turns` times over the original context (arXiv 2309.00071)."""
    return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)
