"""Reuses the memory of large vectors.

A gradient, the sum of gradients and the mean of a round are each as large as the stage. Returning such memory to the
system takes as long as sending hundreds of frames, with the interpreter locked, and getting it again costs a page fault
for each page.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

LARGE: Final = 1 << 18
"""A vector of this many elements or more is reused here; the C library itself reuses smaller ones."""
KEPT_MAX: Final = 3
"""The most free vectors kept for each size: a step needs a gradient, the sum that is sent, and the mean."""
SIZES_MAX: Final = 2
"""The number of sizes for which free vectors are kept."""


class Recycling:
    """Gives out float32 vectors in the host's memory. A vector's memory comes back when nothing refers to the vector or
    a part of it any more.

    Thread-safe: each operation on the lists and the dictionary here is one that the interpreter does atomically."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return sum(len(free) for free in list(self._free.values()))

    def vector(self, size: int) -> Tensor:
        """Give out float32 [size], uninitialized."""
        if size < LARGE:
            return torch.empty(size)
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            memory = np.empty(size, dtype=np.float32)
        lease = memory.view(_Lease)
        lease.owner = self
        return torch.from_numpy(lease)  # its storage refers to the lease, and each part of it to its storage

    def clear(self) -> None:
        """Free all memory that has come back: return it to the system."""
        self._free.clear()

    def take_back(self, memory: Any) -> None:
        free = self._free.setdefault(len(memory), [])
        if len(free) < KEPT_MAX:
            free.append(memory)
        for size in list(self._free)[:-SIZES_MAX]:
            self._free.pop(size, None)


class _Lease(np.ndarray):
    """A view of memory that is given out. When nothing refers to the view any more, the memory can be reused."""

    owner: Recycling | None = None

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.take_back(self.base)
