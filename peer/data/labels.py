"""The labels that travel with a microbatch's tokens: targets, and where documents begin.

**The weight of a microbatch.** Say that c_i targets of microbatch i count in the loss (in a chat, only those in
answers), and that a step has M microbatches. The loss of microbatch i is the mean over these c_i targets, times the
weight c_i M / (c_1 + … + c_M). So the mean over the step's microbatches, which a group commits and reports, is the mean
over all these targets. Stage 0 can compute all c_i, since the seed determines every microbatch; it sends the weight
with the activations.

B samples   T tokens
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

IGNORED: Final = -100
"""Stands in place of a target that does not count in the loss. torch's own losses skip it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The labels of one microbatch."""

    targets_BT: Tensor
    """int64: for each token the next one, or IGNORED if that does not count in the loss."""
    begins_BT: Tensor | None = None
    """bool, True where a document begins; None: attention crosses documents."""
    counted: int | None = None
    """The number of targets that are not IGNORED; None: no target is IGNORED."""
    weight: float = 1.0
    """The factor, rounded to float32, by which the mean loss over the counted targets is multiplied."""
    tokens_BT: Tensor | None = None
    """int64: the input tokens, if every stage needs them (in a subspace model); else None."""

    def to(self, device: torch.device) -> "Labels":
        begins_BT = None if self.begins_BT is None else self.begins_BT.to(device)
        tokens_BT = None if self.tokens_BT is None else self.tokens_BT.to(device)
        return replace(self, targets_BT=self.targets_BT.to(device), begins_BT=begins_BT, tokens_BT=tokens_BT)


def weight_of(counted: int, total: int, microbatches: int) -> float:
    """Return a microbatch's weight in [0, microbatches], rounded to float32 so that all stages have the same number.

    Args: counted: targets of this microbatch that count in the loss; total: those of all `microbatches` of its step.
    """
    return float(torch.tensor(counted * microbatches / max(1, total), dtype=torch.float32))
