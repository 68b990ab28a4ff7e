"""Several documents in one sample. Each document has its own positions and attends only to itself, so its result is the
same as in a sample of its own.

B samples   T tokens
"""

import math

import torch
from torch import Tensor

from shoal.peer.model.rotary import Rotary, at_positions


class Documents:
    """The documents of one microbatch. `begins_BT`, bool, marks each document's first token, so also each sample's."""

    def __init__(self, begins_BT: Tensor) -> None:
        T = begins_BT.shape[1]
        self._at_T = torch.arange(T, device=begins_BT.device)
        first_BT = torch.where(begins_BT, self._at_T, 0).cummax(1).values
        self.position_BT = self._at_T - first_BT
        """int64, the number of earlier tokens of the same document."""
        self._first_BT = first_BT
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    @classmethod
    def of(cls, begins_BT: Tensor | None, rotary: Rotary) -> "tuple[Documents | None, Rotary]":
        """Return (documents, `rotary` looked up at their positions), or (None, `rotary`) if `begins_BT` is None."""
        if begins_BT is None:
            return None, rotary
        documents = cls(begins_BT)
        return documents, at_positions(rotary, documents.position_BT)

    def mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """Return the mask [B, 1, T, T] to add to attention scores of this dtype: 0 where a token may attend (to itself
        and `window` - 1 tokens before it in its document; `window` = 0: all before), else -inf. All layers share the
        mask; torch would convert a boolean mask anew in each layer."""
        if (window, dtype) not in self._masks:
            back_TT = self._at_T[:, None] - self._at_T
            seen_BTT = (back_TT >= 0) & (self._at_T >= self._first_BT[:, :, None])
            seen_BTT = seen_BTT & (back_TT < window) if window else seen_BTT
            mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=seen_BTT.device)
            self._masks[window, dtype] = mask_BTT.masked_fill_(~seen_BTT, -math.inf).unsqueeze(1)
        return self._masks[window, dtype]
