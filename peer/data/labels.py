"""What goes along with a microbatch's tokens from the first stage to the last: what each of them is to predict, and
where documents begin.

**How microbatches are weighed.** Where some tokens are not learnt (all but the answers of a chat), microbatches differ
in how many are. Each has the mean over its own as its loss, and a weight c_i M / (c_1 + … + c_M) by which it is
multiplied, c_i being the tokens that microbatch i learns, of M in its step. The mean over the step's microbatches,
which is what a group commits and what is told as the step's loss, is then the mean over all tokens that the step
learns: each counts as much as any other. A microbatch with none has a loss of 0. Stage 0 knows all c_i, as microbatches
are a pure function of their address, and sends the weight along.

B samples   T tokens
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

IGNORED: Final = -100
"""In the place of a target: nothing is learnt there. torch's own losses skip it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What one microbatch's tokens are to predict."""

    targets_BT: Tensor
    """int64, the token after each, or IGNORED."""
    begins_BT: Tensor | None = None
    """bool, whether each token is the first that a document has here. None: attention looks across documents."""
    counted: int | None = None
    """The targets that are not IGNORED. None: there is none of those."""
    weight: float = 1.0
    """What the mean loss over these targets is multiplied by; a float32."""
    tokens_BT: Tensor | None = None
    """int64, the tokens themselves, where every stage needs them: in a subspace model. None: only stage 0 has them."""

    def to(self, device: torch.device) -> "Labels":
        begins_BT = None if self.begins_BT is None else self.begins_BT.to(device)
        tokens_BT = None if self.tokens_BT is None else self.tokens_BT.to(device)
        return replace(self, targets_BT=self.targets_BT.to(device), begins_BT=begins_BT, tokens_BT=tokens_BT)


def weight_of(counted: int, total: int, microbatches: int) -> float:
    """Args: counted: targets of one microbatch that are learnt; total: of all `microbatches` of its step.

    Returns: a float32 in [0, microbatches], the very number that every stage has.
    """
    return float(torch.tensor(counted * microbatches / max(1, total), dtype=torch.float32))
