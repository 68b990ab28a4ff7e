"""The sum of a step's gradients until the step is committed, and the *places* of stale gradients: the weights at which
these were taken.

A sum holds exactly the gradients that have been announced to the group. A gradient is kept apart until it is announced;
a gradient that a round may have to omit is *held out* of the sum.

**Two threads.** The event loop announces gradients and requests sums, and touches no tensor: it queues each such order.
The next thread that works with tensors (a job, or a thread that makes a sum) runs the orders in sequence. So a sum
holds the gradients that had been announced when it was requested.

**One tensor a step.** A sum is as large as the stage, so a request gets it without a copy if it is on the host, and a
later gradient makes a new tensor. The optimizer step needs only the reduced gradient: sum and places are freed before
the new state is made, and a later request gets None, not zeros.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor

from shoal.peer.encoding.vectors import Vectors
from shoal.peer.model.finite import zero_unless
from shoal.peer.pipeline.microbatch import Indices, Microbatch, has_index
from shoal.peer.pipeline.offload import Offload
from shoal.peer.pipeline.weight_set import OpenSum, Places, WeightSet

HELD_OUT_MAX = 16
"""The most gradients of one step that are kept apart from its sum (held out); each is as large as the stage."""

_Gradient = tuple[Tensor, WeightSet | None]
"""(a gradient, the weights at which it was taken, or None if the compensation for staleness needs none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """One replica's contribution to the reduction of one step."""

    sum_N: Tensor
    """The sum of the replica's gradients of the step, float32 [N], on the host."""
    places: Places | None
    """The same as in `OpenSum`: the sum of the weights at which the stale gradients were taken, or None."""
    num: int


class Contributions:
    """The gradient sums, float32, of a stage with `size` = N parameters. Gradients, [N], have the backward's dtype.

    Args: corrects: the compensation for staleness corrects sums, so each sum is returned with the sum of the weights
        at which its stale gradients were taken (`Places`).
    """

    def __init__(self, size: int, vectors: Vectors, *, corrects: bool = False, offload: Offload | None = None) -> None:
        self._size = size
        self._vectors = vectors
        self._corrects = corrects
        self._offload = offload or Offload(vectors.host)
        self._sums: dict[int, Tensor] = {}
        self._given: set[int] = set()  # steps with a sum that was returned without a copy
        self._looks: dict[int, WeakSet[OpenSum]] = {}  # by step: reads of its sum that are still in use
        self._nums: dict[int, int] = {}  # by step: the number of gradients in its sum
        self._told: deque[Callable[[], None]] = deque()  # queued orders of the event loop
        self._working = Lock()  # held while running `_told` or reading its results
        self._first_open = 0  # sums of earlier steps are closed
        self._places: dict[int, Places] = {}  # by step, if the compensation uses them
        self._summed: set[Microbatch] = set()  # announced, and in a sum or in `_told`
        self._apart: dict[int, dict[int, _Gradient]] = {}  # step -> index -> the gradient held out
        self._finished: dict[Microbatch, _Gradient] = {}  # backwards that are not announced yet

    def has(self, microbatch: Microbatch) -> bool:
        """True if a gradient of the microbatch is in a sum or held out: then a repeated run adds nothing."""
        return microbatch in self._summed or microbatch.index in self._apart.get(microbatch.step, {})

    def finish(self, microbatch: Microbatch, gradient_N: Tensor, weights: WeightSet | None = None) -> None:
        """Register a gradient to be contributed later, which the backward may yet have to fill. Args: weights: the
        backward's weights, if the compensation for staleness needs them."""
        self._finished[microbatch] = (gradient_N, weights)

    def zero_unless_finite(self, microbatch: Microbatch, fine: Tensor | None = None) -> Tensor:
        """Set the gradient of a finished backward to zero unless `fine` holds and the sum of its numbers is finite. (If
        the sum of finite numbers overflows, the norm overflows, too, and no optimizer would take the gradient.)

        Args: fine: bool [], True if the backward's input was finite; None: known to be finite.
        Returns: bool [] on the gradient's device, True if the gradient is unchanged.
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

    def contribute(self, microbatch: Microbatch, *, version: int, held_out: bool) -> bool | None:
        """Add a gradient to its step's sum, or keep it apart from the sum if `held_out` and there is room. Call this
        just before the gradient is announced.

        Returns: True: kept apart; False: in the sum, or there is no such gradient; None: its step is committed."""
        finished = self._finished.pop(microbatch, None)
        if microbatch.step < version:
            return None
        if finished is None:
            return False
        kept = self._apart.setdefault(microbatch.step, {})
        gradient_N, weights = finished
        if held_out and len(kept) < HELD_OUT_MAX:
            kept[microbatch.index] = (gradient_N, weights if self._corrects else None)
            return True
        self._summed.add(microbatch)
        self._told.append(partial(self._add, microbatch.step, gradient_N, weights))
        return False

    def total(self, step: int, indices: Indices | None = None) -> Callable[[], Summed | None]:
        """Request the sum of our contributions to `step` so far.

        Args: indices: the held-out gradients to include; None: all.
        Returns: a function for any thread but the event loop's. It returns the sum, read-only; None: the step is over.
        """
        made: list[Summed | None] = []
        apart = self._apart.get(step, {})
        kept = [apart[index] for index in sorted(apart) if indices is None or has_index(indices, index)]
        self._told.append(lambda: made.append(self._give(step, kept)))

        def make() -> Summed | None:
            self.settle()
            return made.pop()

        return make

    def settle(self) -> None:
        """Run the queued additions and requests. Not on the event loop's thread: large tensors take time."""
        with self._working:
            while self._told:
                self._told.popleft()()

    def num(self, step: int) -> int:
        """Return the number of gradients in the sum of `step`; gradients held out do not count."""
        return self._nums.get(step, 0)

    def seen(self, step: int) -> OpenSum | None:
        """Return the sum of `step` as it is now, without the gradients held out; None: no gradient has been added."""
        with self._working:
            sum_N, places = self._sums.get(step), self._places.get(step)
            if sum_N is None:
                return None
            there = Places(places.sum_N, places.num) if places else None
            look = OpenSum(sum_N, self._nums[step], there)
            self._looks.setdefault(step, WeakSet()).add(look)
            return look

    def forget_before(self, version: int) -> None:
        # This runs on the device's thread while the loop's thread may add to these tables: iterate over copies.
        with self._working:
            self._first_open = version
            for table in (self._nums, self._sums, self._places, self._apart, self._looks):
                for step in [s for s in list(table) if s < version]:
                    table.pop(step, None)
            self._given = {step for step in self._given if step >= version}
        for microbatch in [m for m in list(self._summed) if m.step < version]:
            self._summed.discard(microbatch)

    def move_out(self) -> None:
        """Move all `Places` (sums of weights at which gradients were taken) to the host. Call this within a job."""
        with self._working:
            for step, places in list(self._places.items()):
                self._places[step] = Places(self._offload.put(places.sum_N), places.num)

    def _add(self, step: int, gradient_N: Tensor, weights: WeightSet | None) -> None:
        """Add a gradient, taken at `weights`, to the sum of its step. Call this with the lock `_working` held."""
        if step < self._first_open:
            return  # the step was committed meanwhile
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
        """Return the step's sum plus the gradients `kept`; None: our step has begun. The caller holds `_working`."""
        if step < self._first_open:
            return None
        total_N, places = self._sums.get(step), self._places_with(step, kept)
        if total_N is not None and not kept and places is None and self._is_on_host(step):
            self._given.add(step)
            return Summed(sum_N=total_N, places=None, num=self.num(step))
        sum_N = self._vectors.zeros(self._size) if total_N is None else self._vectors.copied(total_N)
        if self._offload.is_on and total_N is not None and not kept and places is None:
            self._sums[step] = sum_N  # keep one of the two copies
            self._given.add(step)
        for gradient_N, _ in kept:
            sum_N += self._vectors.on_host(gradient_N)
        return Summed(sum_N=sum_N, places=places, num=self.num(step) + len(kept))

    def _is_on_host(self, step: int) -> bool:
        return self._sums[step].device == self._vectors.host

    def _places_with(self, step: int, kept: list[_Gradient]) -> Places | None:
        """Return the sum of the weights at which the step's stale gradients, also those in `kept`, were taken; None: no
        gradient is stale, or the compensation does not use this."""
        places = self._places.get(step)
        stale = [weights for _, weights in kept if weights is not None and weights.version < step]
        if not self._corrects or (places is None and not stale):
            return None
        sum_N = torch.zeros_like(kept[0][0], dtype=torch.float32) if places is None else places.sum_N.clone()
        there = Places(sum_N, places.num if places else 0)
        for weights in stale:
            there.add(weights)
        return there
