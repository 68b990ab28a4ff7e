"""The gradients that a replica has made of each step, until the step is committed.

What its sum of a step holds is exactly what the others have been told: a gradient waits aside until then, and one that
may have to be left out stays apart from the sum.

**Two threads.** The event loop says in which order gradients are told of and sums are asked for; it touches no tensor.
Each such word is put into a queue, and whoever works with tensors next (the device's thread at the beginning of a job,
or the thread that was asked for a sum) does what waits there, in that order, one thread at a time. So a sum holds what
had been told of when it was asked for, whenever it is made.

**One tensor a step.** A sum that is given out is not copied, which would be as large as the stage: what comes after
that is added into a new tensor, and the one that was given out stays as it is. What a strategy looks at (`seen`) is
copied only if something comes while it looks.

**A step that begins closes its sum.** What it is made of is the reduced gradient; the sum and the places are as large
as the stage, and go before the new state comes. Whoever asks for the sum after that gets none, and not zeros.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor

from shoal.peer.model.finite import zero_unless
from shoal.peer.pipeline.microbatch import Indices, Microbatch, has_index
from shoal.peer.pipeline.offload import Offload
from shoal.peer.pipeline.weight_set import OpenSum, Places, WeightSet
from shoal.peer.vectors import Vectors

logger = logging.getLogger(__name__)

APART_MAX = 16
"""Gradients of one step that are kept apart from its sum: each is as large as the stage."""


_Gradient = tuple[Tensor, WeightSet | None]
"""And the weights that it was taken at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What a replica brings to the reduction of one step."""

    sum_N: Tensor
    """float32 [N] on the host."""
    places: Places | None
    """Where its gradients were taken, if that was asked for; None: all at the step's own weights."""
    num: int
    """How many they are."""


class Contributions:
    """Of one stage with `size` = N parameters. Gradients are [N] in what jobs multiply in, on any device; their sums
    are float32.

    Args:
        corrects: a sum is asked for with the places of its gradients.
        offload: what is kept in the machine's memory; None: nothing.
    """

    def __init__(self, size: int, vectors: Vectors, *, corrects: bool = False, offload: Offload | None = None) -> None:
        self._size = size
        self._vectors = vectors
        self._corrects = corrects
        self._offload = offload or Offload(vectors.host)
        self._sums: dict[int, Tensor] = {}  # by step
        self._given: set[int] = set()  # the steps of whose sum somebody else has the very tensor
        self._looks: dict[int, WeakSet[OpenSum]] = {}  # by step: who looks at its sum and places now
        self._nums: dict[int, int] = {}  # by step: how many gradients its sum is of
        self._told: deque[Callable[[], None]] = deque()  # what the loop has said and no thread has done yet, in order
        self._working = Lock()  # held by the thread that does it, or looks at what came of it
        self._first_open = 0  # the step from which on sums are kept
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

    def zero_unless_finite(self, microbatch: Microbatch, fine: Tensor | None = None) -> Tensor:
        """Its backward is done: no number in it that is not finite may enter the sum.

        Their sum is finite only if all are, and one pass without a copy. (Where finite numbers have one that is not,
        their norm is not either: no optimizer would take them.)

        Args: fine: bool [], whether what it was made of was finite; None: it was.
        Returns: bool [], on its device: whether it counts as what it is, and not as zero.
        """
        finished = self._finished.get(microbatch)
        if finished is None:
            return torch.tensor(True) if fine is None else fine
        counts = finished[0].sum().isfinite()
        counts = counts if fine is None else counts & fine
        zero_unless(counts, finished[0])
        return counts

    def forget(self, microbatch: Microbatch) -> None:
        self._finished.pop(microbatch, None)

    def contribute(self, microbatch: Microbatch, *, version: int, apart: bool) -> bool | None:
        """The others are about to be told: add it to the step's sum, or keep it `apart` if there is room.

        Returns: whether it is kept apart; None: it comes too late for its step, and is in no sum.
        """
        finished = self._finished.pop(microbatch, None)
        if microbatch.step < version:
            return None
        if finished is None:
            return False
        kept = self._apart.setdefault(microbatch.step, {})
        gradient_N, weights = finished
        if apart and len(kept) < APART_MAX:
            kept[microbatch.index] = (gradient_N, weights if self._corrects else None)
            return True
        self._summed.add(microbatch)
        self._told.append(partial(self._add, microbatch.step, gradient_N, weights))
        return False

    def total(self, step: int, indices: Indices | None = None) -> Callable[[], Summed | None]:
        """Ask for the sum of our contributions to `step`; of those kept apart `indices`, if given.

        A microbatch that comes late does not change what others have seen of it. It is added to the sum all the same,
        for another attempt at the step.

        Returns: what makes it, on any thread but the loop's. Nobody may write into it. It makes None if the step has
            begun that ends this one: the sum is gone.
        """
        made: list[Summed | None] = []
        kept = self._asked_for(step, indices)
        self._told.append(lambda: made.append(self._give(step, kept)))

        def make() -> Summed | None:
            self.settle()
            return made.pop()

        return make

    def settle(self) -> None:
        """Do what the loop has said by now: not on the loop's thread, since it takes as long as large tensors do."""
        with self._working:
            while self._told:
                self._told.popleft()()

    def num(self, step: int) -> int:
        """Gradients in the sum of `step`, without those kept apart."""
        return self._nums.get(step, 0)

    def seen(self, step: int) -> OpenSum | None:
        """What the sum of `step` holds by now, without those kept apart; None if that is nothing."""
        with self._working:
            sum_N, places = self._sums.get(step), self._places.get(step)
            if sum_N is None:
                return None
            there = Places(places.sum_N, places.num) if places else None
            look = OpenSum(sum_N, self._nums[step], there)
            self._looks.setdefault(step, WeakSet()).add(look)
            return look

    def forget_before(self, version: int) -> None:
        # A step ends on the device's thread while the loop's may add to these: iterate over copies.
        with self._working:
            self._first_open = version
            for table in (self._nums, self._sums, self._places, self._apart, self._looks):
                for step in [s for s in list(table) if s < version]:
                    table.pop(step, None)
            self._given = {step for step in self._given if step >= version}
        for microbatch in [m for m in list(self._summed) if m.step < version]:
            self._summed.discard(microbatch)

    def move_out(self) -> None:
        """What is kept in the machine's memory from now on goes there. Within a job."""
        with self._working:
            for step, places in list(self._places.items()):
                self._places[step] = Places(self._offload.put(places.sum_N), places.num)

    def _add(self, step: int, gradient_N: Tensor, weights: WeightSet | None) -> None:
        """To the step's sum, taken at these weights. While `_working` is held."""
        if step < self._first_open:
            return  # it was committed meanwhile
        is_looked_at = bool(self._looks.pop(step, ()))
        if step in self._given or is_looked_at:
            self._given.discard(step)
            shared_N = self._sums[step]
            self._sums[step] = self._vectors.copied(shared_N) if self._is_on_host(step) else shared_N.clone()
        if is_looked_at and step in self._places:
            self._places[step] = Places(self._places[step].sum_N.clone(), self._places[step].num)
        if step in self._sums:
            self._sums[step] += gradient_N.to(self._sums[step].device)
        else:
            self._sums[step] = gradient_N.float()
        self._nums[step] = self.num(step) + 1
        if weights is not None and weights.version < step:
            if step not in self._places:
                self._places[step] = Places(self._offload.put(torch.zeros_like(gradient_N, dtype=torch.float32)))
            self._places[step].add(weights)

    def _give(self, step: int, kept: list[_Gradient]) -> Summed | None:
        """The step's sum, with `kept` beside it; None if the step is over. While `_working` is held."""
        if step < self._first_open:
            return None
        total_N, places = self._sums.get(step), self._places_with(step, kept)
        if total_N is not None and not kept and places is None and self._is_on_host(step):
            self._given.add(step)
            return Summed(sum_N=total_N, places=None, num=self.num(step))
        sum_N = self._vectors.zeros(self._size) if total_N is None else self._vectors.copied(total_N)
        if self._offload.is_on and total_N is not None and not kept and places is None:
            self._sums[step] = sum_N  # one of the two is enough
            self._given.add(step)
        for gradient_N, _ in kept:
            sum_N += self._vectors.on_host(gradient_N)
        return Summed(sum_N=sum_N, places=places, num=self.num(step) + len(kept))

    def _is_on_host(self, step: int) -> bool:
        return self._sums[step].device == self._vectors.host

    def _places_with(self, step: int, kept: list[_Gradient]) -> Places | None:
        """Where the gradients of the step's sum and those of `kept` were taken. None: all at the step's own weights,
        or nobody wants to know."""
        places = self._places.get(step)
        stale = [weights for _, weights in kept if weights is not None and weights.version < step]
        if not self._corrects or (places is None and not stale):
            return None
        sum_N = torch.zeros_like(kept[0][0], dtype=torch.float32) if places is None else places.sum_N.clone()
        there = Places(sum_N, places.num if places else 0)
        for weights in stale:
            there.add(weights)
        return there

    def _asked_for(self, step: int, indices: Indices | None) -> list[_Gradient]:
        """Of those kept apart."""
        kept = self._apart.get(step, {})
        return [kept[index] for index in sorted(kept) if indices is None or has_index(indices, index)]
