"""Memory of large vectors that is used again.

A gradient, its sum and the mean of a round are as large as the stage, and each lives for a moment. To give such memory
back to the system takes as long as hundreds of frames do, with the interpreter locked; to get it again costs a fault
for each of its pages. So a few of them are kept for the next ones.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

LARGE: Final = 1 << 18
"""Elements; smaller ones the C library keeps itself."""
KEPT_MAX: Final = 3
"""Of one size. A step has a gradient, the sum that is sent, and the mean."""
SIZES_MAX: Final = 2


class Recycling:
    """Gives out float32 vectors in the host's memory. One that nobody holds any more, nor a part of it, comes back.

    Any thread may ask, and any thread may be the last that holds one: what is looked at and changed here is one list or
    one dictionary at a time, which the interpreter does undivided.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        """By size."""

    def __len__(self) -> int:
        return sum(len(free) for free in list(self._free.values()))

    def vector(self, size: int) -> Tensor:
        """Give out float32 [size], of any values."""
        if size < LARGE:
            return torch.empty(size)
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            memory = np.empty(size, dtype=np.float32)
        lease = memory.view(_Lease)
        lease.owner = self
        return torch.from_numpy(lease)  # its storage holds the lease, and every part of the vector holds its storage

    def clear(self) -> None:
        """Keep nothing of what has come back by now."""
        self._free.clear()

    def take_back(self, memory: Any) -> None:
        free = self._free.setdefault(len(memory), [])
        if len(free) < KEPT_MAX:
            free.append(memory)
        for size in list(self._free)[:-SIZES_MAX]:
            self._free.pop(size, None)


class _Lease(np.ndarray):
    """A view of the memory that is given out; its end says that nobody uses the memory any more."""

    owner: Recycling | None = None

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.take_back(self.base)
