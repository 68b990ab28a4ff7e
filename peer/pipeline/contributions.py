"""The gradients that a replica has made of each step, until the step is committed.

What its sum of a step holds is exactly what the others have been told: a gradient waits aside until then, and one that
may have to be left out stays apart from the sum.
"""

import logging
from threading import Lock

import torch
from torch import Tensor

from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.pipeline.weight_set import OpenSum, Places, WeightSet
from shoal.peer.vectors import Vectors

logger = logging.getLogger(__name__)

APART_MAX = 16
"""Gradients of one step that are kept apart from its sum: each is as large as the stage."""


_Gradient = tuple[Tensor, WeightSet | None]
"""And the weights that it was taken at."""


class Contributions:
    """Of one stage with `size` = N parameters; gradients are float32 [N], on any device.

    Args:
        corrects: the weights of what is kept apart will be asked for, too.
    """

    def __init__(self, size: int, vectors: Vectors, *, corrects: bool = False) -> None:
        self._size = size
        self._vectors = vectors
        self._corrects = corrects
        self._sums: dict[int, Tensor] = {}  # by step
        self._nums: dict[int, int] = {}  # by step: how many gradients its sum is of
        self._adding = Lock()  # the device's thread looks at sums to which the loop's adds
        self._places: dict[int, Places] = {}  # by step, as far as anybody wants to know
        self._summed: set[Microbatch] = set()  # what the sums hold
        self._apart: dict[int, dict[int, _Gradient]] = {}  # step -> index -> what may be left out
        self._finished: dict[Microbatch, _Gradient] = {}  # of a backward that nobody has been told of yet

    @property
    def steps(self) -> list[int]:
        """Of which there is a sum."""
        return sorted(self._sums)

    def has(self, microbatch: Microbatch) -> bool:
        """It came again, because somebody before us died. The group counts it once."""
        return microbatch in self._summed or microbatch.index in self._apart.get(microbatch.step, {})

    def finish(self, microbatch: Microbatch, gradient_N: Tensor, weights: WeightSet | None = None) -> None:
        """Its backward writes into `gradient_N`. `weights` are those that it is taken at, if they will be asked for."""
        self._finished[microbatch] = (gradient_N, weights)

    def zero_if_not_finite(self, microbatch: Microbatch) -> None:
        """Its backward is done: no number in it that is not finite may enter the sum.

        Their sum is finite only if all are, and one pass without a copy. (Where finite numbers have one that is not,
        their norm is not either: no optimizer would take them.)
        """
        finished = self._finished.get(microbatch)
        if finished is not None and not bool(finished[0].sum().isfinite()):
            logger.warning("microbatch %s has a gradient that is not finite: it counts as zero", microbatch)
            finished[0].zero_()

    def forget(self, microbatch: Microbatch) -> None:
        self._finished.pop(microbatch, None)

    def contribute(self, microbatch: Microbatch, *, version: int, apart: bool) -> bool:
        """The others are about to be told: add it to the step's sum, or keep it `apart` if there is room.

        Returns: whether it is kept apart.
        """
        finished = self._finished.pop(microbatch, None)
        if finished is None or microbatch.step < version:
            return False
        kept = self._apart.setdefault(microbatch.step, {})
        gradient_N, weights = finished
        if apart and len(kept) < APART_MAX:
            kept[microbatch.index] = (gradient_N, weights if self._corrects else None)
            return True
        with self._adding:
            if microbatch.step in self._sums:
                self._sums[microbatch.step] += gradient_N
            else:
                self._sums[microbatch.step] = gradient_N
            self._nums[microbatch.step] = self.num(microbatch.step) + 1
            if weights is not None and weights.version < microbatch.step:
                if microbatch.step not in self._places:
                    self._places[microbatch.step] = Places(torch.zeros_like(gradient_N))
                self._places[microbatch.step].add(weights)
        self._summed.add(microbatch)
        return False

    def total(self, step: int, indices: IndexSet | None = None) -> Tensor:
        """The sum of our contributions to `step`, on the host; of those kept apart `indices`, if given.

        A copy: a microbatch that comes late must not change what others have seen of it. It is added to the sum all
        the same, for another attempt at the step.
        """
        total_N = self._sums.get(step)
        sum_N = self._vectors.zeros(self._size) if total_N is None else self._vectors.copied(total_N)
        for gradient_N, _ in self._asked_for(step, indices):
            sum_N += self._vectors.on_host(gradient_N)
        return sum_N

    def num(self, step: int) -> int:
        """Gradients in the sum of `step`, without those kept apart."""
        return self._nums.get(step, 0)

    def seen(self, step: int) -> OpenSum | None:
        """What the sum of `step` holds by now, without those kept apart; None if that is nothing."""
        with self._adding:
            sum_N, places = self._sums.get(step), self._places.get(step)
            if sum_N is None:
                return None
            there = Places(places.sum_N.clone(), places.num) if places else None
            return OpenSum(sum_N / self._nums[step], self._nums[step], there)

    def places(self, step: int, indices: IndexSet | None = None) -> tuple[Places | None, int]:
        """Where the gradients that `total` adds up were taken (None: all at the step's own weights), and how many
        these are."""
        kept = self._asked_for(step, indices)
        stale = [weights for _, weights in kept if weights is not None and weights.version < step]
        with self._adding:
            places, total = self._places.get(step), self.num(step) + len(kept)
            if places is None and not stale:
                return None, total
            sum_N = torch.zeros_like(kept[0][0]) if places is None else places.sum_N.clone()
            there = Places(sum_N, places.num if places else 0)
        for weights in stale:
            there.add(weights)
        return there, total

    def forget_before(self, version: int) -> None:
        # A step ends on the device's thread while the loop's may add to these: iterate over copies.
        with self._adding:
            for table in (self._nums, self._sums, self._places, self._apart):
                for step in [s for s in list(table) if s < version]:
                    table.pop(step, None)
        for microbatch in [m for m in list(self._summed) if m.step < version]:
            self._summed.discard(microbatch)

    def _asked_for(self, step: int, indices: IndexSet | None) -> list[_Gradient]:
        """Of those kept apart."""
        kept = self._apart.get(step, {})
        return [kept[index] for index in sorted(kept) if indices is None or index in indices]
