"""Documents that share a sample: each token looks at its own document only, and positions begin anew in each.

What a document's tokens come to is then what they come to when it stands alone.

B samples   T tokens
"""

import math

import torch
from torch import Tensor

from shoal.peer.model.rotary import Rotary, at_positions


class Documents:
    """The documents of one microbatch.

    Args:
        begins_BT: bool, whether each token is the first that a document has here. The first of a sample always is.
    """

    def __init__(self, begins_BT: Tensor) -> None:
        T = begins_BT.shape[1]
        self._at_T = torch.arange(T, device=begins_BT.device)
        first_BT = torch.where(begins_BT, self._at_T, 0).cummax(1).values
        self.position_BT = self._at_T - first_BT
        """int64, tokens of the same document before each."""
        self._first_BT = first_BT
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def positioned(self, rotary: Rotary) -> Rotary:
        """The rotary tables at these positions."""
        return at_positions(rotary, self.position_BT)

    def mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, T, T], what is added to scores of this dtype: 0 for the tokens that each looks at, no more than
        `window` of its document's before it (0: all), and -inf for others.

        All layers get the same tensor, so that it is kept for their backward once: torch would make as much again of
        each mask of booleans.
        """
        if (window, dtype) not in self._masks:
            back_TT = self._at_T[:, None] - self._at_T
            seen_BTT = (back_TT >= 0) & (self._at_T >= self._first_BT[:, :, None])
            seen_BTT = seen_BTT & (back_TT < window) if window else seen_BTT
            mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=seen_BTT.device)
            self._masks[window, dtype] = mask_BTT.masked_fill_(~seen_BTT, -math.inf).unsqueeze(1)
        return self._masks[window, dtype]
