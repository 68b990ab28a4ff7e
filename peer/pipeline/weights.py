"""Keeps the sets of weights of one stage that are in use, and decides which set a step gets.

Theory of operation. A set of weights is referenced by its users: a microbatch between forward and backward, a gradient
that will be corrected, the cache of sets made at the current version. When the last reference goes, the set is freed.

How many sets can there be? The current version v is one. Each step ahead, t in (v, v + s_max], has at most one: the
step's first microbatch makes the set, and as long as the set is referenced, later microbatches share it, even if a
newer version could give a better one. A commit turns a step ahead into the current step: new microbatches get w_t
itself, but older ones may still hold their predicted set. So at most 1 + s_max + 1 sets are alive: 4 at s_max = 2,
where a new set at every version would make 6. Strategies that predict nothing hold past versions instead, at most s_max
+ 1.

A strategy that sees the open steps' gradients makes a new set for a step ahead after a commit, and once it has seen 1.5
times as many of them as for the old set, if there is room for a set. If there is no room for the first set of a step,
its microbatches use the current weights.
"""

import logging
from collections.abc import Mapping
from typing import Final
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from shoal.peer.model.state import LayerState, StageState, clipped, hyperparameters
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.prediction import COMPENSATIONS, compensation
from shoal.peer.pipeline.prediction.compensation import OwnGradients
from shoal.peer.pipeline.weight_set import OpenSum, Places, WeightSet
from shoal.protocol.spec import RunSpec
from shoal.protocol.staleness import staleness_bound

logger = logging.getLogger(__name__)

FRESHER: Final = 1.5
"""A step's weights are predicted again once this many times as many gradients are known as at the last prediction. With
a factor near 1, each microbatch would need a new set."""


class Weights:
    """The weights of one stage. Each call is passed the state, because another thread may load a new state.

    With `keep = "recompute"` no set is kept for steps ahead: each job predicts again.
    Args: spans: layer key -> slice of the stage's flat vector; gradients: sums of gradients of uncommitted steps.
    """

    def __init__(self, spec: RunSpec, spans: Mapping[str, slice], gradients: Contributions) -> None:
        self._spec = spec
        self._spans = spans
        self._gradients = gradients
        self._first = next((key for key, span in spans.items() if span.stop > span.start), next(iter(spans)))
        name = spec.training.compensation
        self._compensations = {key: compensation(name, spec.optimizer.name) for key in spans}
        strategy = COMPENSATIONS[name]
        self._predicts, self._sees, self.corrects = strategy.predicts, strategy.sees, strategy.corrects
        self.keeps_places = strategy.corrects or strategy.sees
        """True if the compensation for staleness needs the weights at which each gradient was taken."""
        self._made: tuple[StageState | None, dict[int, WeightSet]] = (None, {})  # state, step -> weights
        self._ahead: WeakValueDictionary[int, WeightSet] = WeakValueDictionary()  # step -> its newest set alive
        self._alive: WeakSet[WeightSet] = WeakSet()
        self._before: WeightSet | None = None  # the version before the current one

    @property
    def remembers(self) -> bool:
        """True if the weights of the previous version are kept."""
        return self._before is not None

    def of(self, state: StageState, step: int) -> WeightSet:
        """Return the weights for a microbatch of `step`. If `step` is the state's version: the current weights. If it
        is later: the weights that the strategy predicts. If it is earlier (only other peers repeat such steps): the
        previous version's weights if they are kept, else the current weights."""
        before = self._before
        if step < state.version and before is not None:
            if step < before.version:
                logger.warning(
                    "step %d runs again with the weights of step %d, which is not exact", step, before.version
                )
            return before
        if step <= state.version:
            return self._current(state)
        sets = self._sets_of(state)
        weights = sets.get(step)
        if weights is None and self._predicts:
            weights = self._ahead.get(step)
        if weights is None or self._outdated(weights, state, step):
            weights = None
            sets.pop(step, None)  # from now on only the jobs that use the set keep it alive
            if self._sees and self.copies(state) >= self._spec.training.s_max + 2:
                return self._ahead.get(step) or self._current(state)
            weights = self._make(state, step - state.version)
        self._ahead[step] = weights
        if self._spec.training.keep != "recompute":
            sets[step] = weights
        return weights

    def kept_of(self, state: StageState) -> WeightSet | None:
        """Return the weights of `state` if synchronous microbatches may need them after the coming step; else None."""
        s_max, synchronous_steps = self._spec.training.s_max, self._spec.synchronous_steps
        if staleness_bound(state.version + 1, s_max=s_max, synchronous_steps=synchronous_steps) > 0:
            # If staleness is admitted, `s_max + 2` copies may be alive: one more for exact repair is not worth it.
            return None
        # Other stages are at most one step behind; a microbatch repeated for them must give the same bits.
        return WeightSet({key: layer.param_N for key, layer in state.layers.items()}, state.version)

    def layer_stepped(self, key: str, before: LayerState, after: LayerState, version: int) -> None:
        self._compensations[key].committed(before, after, hyperparameters(self._spec, key, version))

    def stepped(self, kept: WeightSet | None) -> None:
        """Record the end of an optimizer step. Args: kept: the result of `kept_of` from before the step."""
        self._before = self._kept(kept) if kept is not None else None

    def loaded(self) -> None:
        """Forget the cached and the previous weights, which belong to another state. Jobs keep the sets they use."""
        self._made = (None, {})
        self._before = None

    def forget_made(self) -> None:
        """Forget the cached sets for steps ahead: they can be made again. Jobs keep the sets that they use."""
        self._made = (None, {})

    @torch.no_grad()
    def correct(self, state: StageState, sum_N: Tensor, places: Places | None, total: int) -> None:
        """Correct, in place, the sum of our `total` gradients of step `state.version`, float32 [N] on the CPU. Args:
        places: the weights at which stale gradients were taken; None: no gradient is stale, and the sum stays as it
        is."""
        if places is None:
            return
        for key, layer in state.layers.items():
            displacement_N = places.displacement(self._spans[key], layer.param_N, total)
            mean_N = sum_N[self._spans[key]].to(layer.param_N.device) / total
            settings = hyperparameters(self._spec, key, state.version)
            here = layer.to(layer.param_N.device)
            mean_N = self._compensations[key].corrected(mean_N, displacement_N, here, settings)
            sum_N[self._spans[key]] = mean_N * total

    def copies(self, state: StageState | None) -> int:
        """Count the copies of the weights in memory: the distinct buffers of the first layer that has parameters."""
        pointers = {weights.params[self._first].data_ptr() for weights in list(self._alive)}
        return len(pointers | ({state.layers[self._first].param_N.data_ptr()} if state else set()))

    def _current(self, state: StageState) -> WeightSet:
        sets = self._sets_of(state)
        if state.version not in sets:
            sets[state.version] = self._make(state, 0)
        return sets[state.version]

    def _outdated(self, weights: WeightSet, state: StageState, step: int) -> bool:
        """True if the strategy uses gradients, and a commit or many new gradients came since `weights` was made."""
        if not self._sees:
            return False
        num_seen = self._num_seen(state, step)
        return weights.version < state.version or (num_seen > 0 and num_seen >= FRESHER * weights.num_seen)

    def _num_seen(self, state: StageState, step: int) -> int:
        return sum(self._gradients.num(open_step) for open_step in range(state.version, step))

    def _sets_of(self, state: StageState) -> dict[int, WeightSet]:
        made_for, sets = self._made
        if made_for is not state:
            # Make a new dict: a job that still uses the old state puts its sets into the old one, which is not read.
            sets = {}
            self._made = (state, sets)
        return sets

    @torch.no_grad()
    def _make(self, state: StageState, staleness_steps: int) -> WeightSet:
        ahead = range(state.version, state.version + staleness_steps) if self._sees else ()
        # Count before the sums are read: if gradients are added meanwhile, the set looks older than it is, not newer.
        num_seen = self._num_seen(state, state.version + len(ahead))
        sums = [self._gradients.seen(step) for step in ahead]
        params = {}
        for key, layer in state.layers.items():
            settings = hyperparameters(self._spec, key, state.version)
            seen = [None if its is None else self._seen(key, layer, its, known=i == 0) for i, its in enumerate(sums)]
            here = layer.to(layer.param_N.device) if staleness_steps > 0 else layer
            params[key] = self._compensations[key].weights(here, settings, staleness_steps, seen)
        return self._kept(WeightSet(params, state.version, num_seen))

    def _seen(self, key: str, layer: LayerState, its: OpenSum, *, known: bool) -> OwnGradients | None:
        """Return our mean gradient of an uncommitted step for one layer, clipped as in the step; None: it is not
        finite. Args: known: `layer` is at the step's own version, so the displacement can be computed."""
        span = self._spans[key]
        gradient_N = clipped(self._spec, key, its.sum_N[span].to(layer.param_N.device) / its.num).gradient_N
        if gradient_N is None:
            return None
        if not known or its.places is None:
            return OwnGradients(gradient_N)
        return OwnGradients(gradient_N, its.places.displacement(span, layer.param_N, its.num))

    def _kept(self, weights: WeightSet) -> WeightSet:
        self._alive.add(weights)
        return weights
