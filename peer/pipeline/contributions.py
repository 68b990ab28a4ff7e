"""The gradients that a replica has made of each step, until the step is committed.

What its sum of a step holds is exactly what the others have been told: a gradient waits aside until then, and one that
may have to be left out stays apart from the sum.
"""

from torch import Tensor

from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.vectors import Vectors

APART_MAX = 16
"""Gradients of one step that are kept apart from its sum: each is as large as the stage."""


class Contributions:
    """Of one stage with `size` = N parameters; gradients are float32 [N], on any device."""

    def __init__(self, size: int, vectors: Vectors) -> None:
        self._size = size
        self._vectors = vectors
        self._sums: dict[int, Tensor] = {}  # by step
        self._summed: set[Microbatch] = set()  # what the sums hold
        self._apart: dict[int, dict[int, Tensor]] = {}  # step -> index -> what may be left out
        self._finished: dict[Microbatch, Tensor] = {}  # of a backward that nobody has been told of yet

    @property
    def steps(self) -> list[int]:
        """Of which there is a sum."""
        return sorted(self._sums)

    def has(self, microbatch: Microbatch) -> bool:
        """It came again, because somebody before us died. The group counts it once."""
        return microbatch in self._summed or microbatch.index in self._apart.get(microbatch.step, {})

    def finish(self, microbatch: Microbatch, gradient_N: Tensor) -> None:
        """Its backward writes into `gradient_N`."""
        self._finished[microbatch] = gradient_N

    def forget(self, microbatch: Microbatch) -> None:
        self._finished.pop(microbatch, None)

    def contribute(self, microbatch: Microbatch, *, version: int, apart: bool) -> bool:
        """The others are about to be told: add it to the step's sum, or keep it `apart` if there is room.

        Returns: whether it is kept apart.
        """
        gradient_N = self._finished.pop(microbatch, None)
        if gradient_N is None or microbatch.step < version:
            return False
        kept = self._apart.setdefault(microbatch.step, {})
        if apart and len(kept) < APART_MAX:
            kept[microbatch.index] = gradient_N
            return True
        if microbatch.step in self._sums:
            self._sums[microbatch.step] += gradient_N
        else:
            self._sums[microbatch.step] = gradient_N
        self._summed.add(microbatch)
        return False

    def total(self, step: int, indices: IndexSet | None = None) -> Tensor:
        """The sum of our contributions to `step`, on the host; of those kept apart `indices`, if given.

        A copy: a microbatch that comes late must not change what others have seen of it. It is added to the sum all
        the same, for another attempt at the step.
        """
        total_N = self._sums.get(step)
        sum_N = self._vectors.zeros(self._size) if total_N is None else self._vectors.copied(total_N)
        for index, gradient_N in sorted(self._apart.get(step, {}).items()):
            if indices is None or index in indices:
                sum_N += self._vectors.on_host(gradient_N)
        return sum_N

    def forget_before(self, version: int) -> None:
        # A step ends on the device's thread while the loop's may add to these: iterate over copies.
        for table in (self._sums, self._apart):
            for step in [s for s in list(table) if s < version]:
                del table[step]
        self._summed.difference_update([m for m in list(self._summed) if m.step < version])
