"""Tokens sorted by the experts to which they are sent.

Each token is sent to K experts, so N tokens make P = N K rows. The rows of one expert are consecutive, in the order of
the tokens. Nothing is padded or dropped: an expert has one row for each token that chose it, from no token to all.

N tokens   K choices a token   P rows   E experts
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The rows of each token and each expert. All tensors are int64 and on the device of the choices."""

    row_NK: Tensor
    """[N, K]: the row that belongs to choice k of token n."""
    choice_P: Tensor
    """[P]: for each row the number n K + k of its choice (choice k of token n). The inverse of `row_NK`, flattened."""
    token_P: Tensor
    """[P]: for each row the token n from which it is copied."""
    offset_E: Tensor
    """[E + 1]: the rows [offset_E[e], offset_E[e + 1]) belong to expert e; the last element is P."""


def group(chosen_NK: Tensor, num_experts: int) -> Groups:
    """Sort the choices by expert, without waiting for the device.

    Args: chosen_NK: int64 [N, K], each token's experts, in [0, num_experts); unchecked: a check waits for the GPU.
    """
    chosen_P = chosen_NK.reshape(-1)
    choice_P = chosen_P.argsort(stable=True)
    row_NK = torch.empty_like(choice_P)
    row_NK[choice_P] = torch.arange(len(choice_P), device=chosen_P.device)
    offset_E = chosen_P.new_zeros(num_experts + 1)
    offset_E[1:] = counts(chosen_NK, num_experts).cumsum(0)
    return Groups(
        row_NK=row_NK.view(chosen_NK.shape),
        choice_P=choice_P,
        token_P=choice_P // chosen_NK.shape[1],
        offset_E=offset_E,
    )


def counts(chosen_NK: Tensor, num_experts: int) -> Tensor:
    """Return int64 [E], the number of choices of each expert. (`bincount` would wait for a GPU.)"""
    chosen_P = chosen_NK.reshape(-1)
    return chosen_P.new_zeros(num_experts).scatter_add_(0, chosen_P, torch.ones_like(chosen_P))
