"""Several documents in one sample: each token attends only to its own document, and positions begin anew in each.

So a document gives the same result as if it stood alone.

B samples   T tokens
"""

import math

import torch
from torch import Tensor

from shoal.peer.model.rotary import Rotary, at_positions


class Documents:
    """The documents of one microbatch.

    Args:
        begins_BT: bool, True where a document begins. The first token of a sample always begins one.
    """

    def __init__(self, begins_BT: Tensor) -> None:
        T = begins_BT.shape[1]
        self._at_T = torch.arange(T, device=begins_BT.device)
        first_BT = torch.where(begins_BT, self._at_T, 0).cummax(1).values
        self.position_BT = self._at_T - first_BT
        """int64, the number of earlier tokens of the same document."""
        self._first_BT = first_BT
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def positioned(self, rotary: Rotary) -> Rotary:
        return at_positions(rotary, self.position_BT)

    def mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """Return the mask [B, 1, T, T] to add to scores of this dtype: 0 for a token of the same document that is at
        most `window` - 1 before (0: no limit), -inf for others.

        All layers share one tensor, so that their backwards keep it once; of a boolean mask torch would make a copy a
        layer.
        """
        if (window, dtype) not in self._masks:
            back_TT = self._at_T[:, None] - self._at_T
            seen_BTT = (back_TT >= 0) & (self._at_T >= self._first_BT[:, :, None])
            seen_BTT = seen_BTT & (back_TT < window) if window else seen_BTT
            mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=seen_BTT.device)
            self._masks[window, dtype] = mask_BTT.masked_fill_(~seen_BTT, -math.inf).unsqueeze(1)
        return self._masks[window, dtype]
