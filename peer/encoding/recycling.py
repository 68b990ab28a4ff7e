"""Reuses the memory of large vectors.

A gradient, its sum and the mean of a round are as large as the stage. Returning such memory to the system takes as long
as hundreds of frames, with the interpreter locked, and getting it again costs a fault for each of its pages.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

LARGE: Final = 1 << 18
"""Elements; the C library itself keeps smaller vectors."""
KEPT_MAX: Final = 3
"""Vectors kept per size. A step has a gradient, the sum that is sent, and the mean."""
SIZES_MAX: Final = 2


class Recycling:
    """Gives out float32 vectors in the host's memory. A vector comes back when nothing refers to it or a part of it.

    Thread-safe: each operation here is one of a list or a dictionary, which the interpreter does atomically."""

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
        return torch.from_numpy(lease)  # its storage refers to the lease, and every part of the vector to its storage

    def clear(self) -> None:
        """Free all memory that has come back."""
        self._free.clear()

    def take_back(self, memory: Any) -> None:
        free = self._free.setdefault(len(memory), [])
        if len(free) < KEPT_MAX:
            free.append(memory)
        for size in list(self._free)[:-SIZES_MAX]:
            self._free.pop(size, None)


class _Lease(np.ndarray):
    """A view of the memory that is given out; when it ends, the memory is free."""

    owner: Recycling | None = None

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.take_back(self.base)
