"""The weights of one stage that are alive: which of them a step gets, and what makes up for their age.

Theory of operation. A set of weights is held by whoever still needs it: a microbatch between its forward and its
backward, a gradient that will be corrected, the cache of what was made at the current version. It is gone with the last
of them, and nobody counts but Python.

How many can there be? The current version is one. Every step ahead, t in (v, v + s_max], has at most one more: it is
made when the step's first microbatch comes, and while somebody holds it, later microbatches of that step get the same
one, even if a commit has made a fresher one possible. A commit turns a step ahead into the current one, whose new
microbatches get w_t itself, but old ones may still hold what they got. So at most 1 + s_max + 1 are alive. (A fresher
set at every version would be up to (s_max + 1)(s_max + 2) / 2: the same at s_max = 1, 6 and not 4 at s_max = 2.)
Strategies that predict nothing need no such rule: their sets are the versions that were, at most s_max + 1.

A strategy that sees the open steps' gradients makes a fresher set for a step ahead when it has seen half as much again,
as long as there is room. There is, where not many microbatches are in flight: those of the step before that were let in
early have come back by then. Should the first set of a step find no room for once, its microbatches compute with the
current weights until there is.
"""

import logging
from collections.abc import Mapping
from typing import Final, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from shoal.peer.pipeline.prediction import COMPENSATIONS, Seen, compensation
from shoal.peer.pipeline.state import LayerState, StageState, clipped, hyperparameters
from shoal.peer.pipeline.weight_set import OpenSum, Places, WeightSet
from shoal.protocol.spec import RunSpec
from shoal.protocol.staleness import staleness_bound

logger = logging.getLogger(__name__)

FRESHER: Final = 1.5
"""A set is made anew for so many times the gradients that it was made with. Less would be a set for each microbatch."""


class OpenGradients(Protocol):
    """This member's own, of steps that are not committed yet."""

    def num(self, step: int) -> int:
        """How many there are."""
        ...

    def seen(self, step: int) -> OpenSum | None:
        """What is known of all `num`; None if there are none."""
        ...


class Weights:
    """Of one stage. States are handed in: another thread may load one at any time.

    `keep = "recompute"` keeps nothing for steps ahead: their weights are made for each job anew.

    Args:
        spans: layer key -> where it lies in the stage's flat vector.
        gradients: what a strategy that sees is shown.
    """

    def __init__(self, spec: RunSpec, spans: Mapping[str, slice], gradients: OpenGradients) -> None:
        self._spec = spec
        self._spans = spans
        self._gradients = gradients
        self._first = next((key for key, span in spans.items() if span.stop > span.start), next(iter(spans)))
        name = spec.training.compensation
        self._compensations = {key: compensation(name, spec.optimizer.name) for key in spans}
        strategy = COMPENSATIONS[name]
        self._predicts, self._sees, self.corrects = strategy.predicts, strategy.sees, strategy.corrects
        self.keeps_places = strategy.corrects or strategy.sees
        """Whether it will be asked at which weights a gradient was taken."""
        self._made: tuple[StageState | None, dict[int, WeightSet]] = (None, {})  # of which state, step -> weights
        self._ahead: WeakValueDictionary[int, WeightSet] = WeakValueDictionary()  # step -> its newest that is alive
        self._alive: WeakSet[WeightSet] = WeakSet()
        self._before: WeightSet | None = None  # the version before the current one

    @property
    def remembers(self) -> bool:
        """Whether the version before the current one is still here."""
        return self._before is not None

    def of(self, state: StageState, step: int) -> WeightSet:
        """ŵ_step: the current weights if they are that step's, else what makes up for their age.

        A step that is committed here and not elsewhere wants weights of the past: the version before is kept for it.
        """
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
            sets.pop(step, None)  # now it is alive only if somebody computes with it
            if self._sees and not self._has_room(state):
                return self._ahead.get(step) or self._current(state)
            weights = self._make(state, step - state.version)
        self._ahead[step] = weights
        if self._spec.training.keep != "recompute":
            sets[step] = weights
        return weights

    def kept_of(self, state: StageState) -> WeightSet | None:
        """What outlives the step from `state`, whose layers go one after the other; None: nothing."""
        s_max, synchronous_steps = self._spec.training.s_max, self._spec.synchronous_steps
        if staleness_bound(state.version + 1, s_max=s_max, synchronous_steps=synchronous_steps) > 0:
            # With staleness admitted it is not worth a copy, `s_max + 2` are alive already.
            return None
        # Others may be a step behind us at most, and what they run again must give what it gave: exact repair.
        return WeightSet({key: layer.param_N for key, layer in state.layers.items()}, state.version)

    def layer_stepped(self, key: str, before: LayerState, after: LayerState, version: int) -> None:
        """A layer has stepped from `version`."""
        self._compensations[key].committed(before, after, hyperparameters(self._spec, key, version))

    def stepped(self, kept: WeightSet | None) -> None:
        """All layers have stepped. Args: kept: as `kept_of` gave it before."""
        self._before = self._kept(kept) if kept is not None else None

    def loaded(self) -> None:
        """The state is another one: what was made of the one before is nobody's but its holders'."""
        self._made = (None, {})
        self._before = None

    def forget_made(self) -> None:
        """Weights for steps ahead are made again when they are wanted; who computes with them still has them."""
        self._made = (None, {})

    @torch.no_grad()
    def correct(self, state: StageState, sum_N: Tensor, places: Places | None, total: int) -> None:
        """Correct the sum of our `total` gradients of step `state.version`, in place, for having been taken elsewhere.

        If all were taken at the current weights, the sum stays as it is, bit for bit.

        Args:
            sum_N: float32 [N] on the CPU.
        """
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
        """Distinct parameter buffers alive for the first layer that has any."""
        pointers = {weights.params[self._first].data_ptr() for weights in list(self._alive)}
        return len(pointers | ({state.layers[self._first].param_N.data_ptr()} if state else set()))

    def _current(self, state: StageState) -> WeightSet:
        sets = self._sets_of(state)
        if state.version not in sets:
            sets[state.version] = self._make(state, 0)
        return sets[state.version]

    def _outdated(self, weights: WeightSet, state: StageState, step: int) -> bool:
        """Whether a strategy that sees has seen enough more, since these were made for `step`."""
        if not self._sees:
            return False
        num_seen = self._num_seen(state, step)
        return weights.version < state.version or (num_seen > 0 and num_seen >= FRESHER * weights.num_seen)

    def _num_seen(self, state: StageState, step: int) -> int:
        return sum(self._gradients.num(open_step) for open_step in range(state.version, step))

    def _has_room(self, state: StageState) -> bool:
        return self.copies(state) < self._spec.training.s_max + 2

    def _sets_of(self, state: StageState) -> dict[int, WeightSet]:
        made_for, sets = self._made
        if made_for is not state:
            # A new dict: a job that still runs with the state before puts its sets where nobody will look for them.
            sets = {}
            self._made = (state, sets)
        return sets

    @torch.no_grad()
    def _make(self, state: StageState, staleness_steps: int) -> WeightSet:
        ahead = range(state.version, state.version + staleness_steps) if self._sees else ()
        # Counted first: what the loop's thread adds meanwhile makes the set look older than it is, never fresher.
        num_seen = self._num_seen(state, state.version + len(ahead))
        sums = [self._gradients.seen(step) for step in ahead]
        params = {}
        for key, layer in state.layers.items():
            settings = hyperparameters(self._spec, key, state.version)
            seen = [None if its is None else self._seen(key, layer, its, known=i == 0) for i, its in enumerate(sums)]
            here = layer.to(layer.param_N.device) if staleness_steps > 0 else layer
            params[key] = self._compensations[key].weights(here, settings, staleness_steps, seen)
        return self._kept(WeightSet(params, state.version, num_seen))

    def _seen(self, key: str, layer: LayerState, its: OpenSum, *, known: bool) -> Seen | None:
        """As the step will see it; None if that would leave the layer alone, because the gradient is not finite.

        Args: known: the weights of this step are, and `layer` has them.
        """
        span = self._spans[key]
        gradient_N = clipped(self._spec, key, its.sum_N[span].to(layer.param_N.device) / its.num).gradient_N
        if gradient_N is None:
            return None
        if not known or its.places is None:
            return Seen(gradient_N)
        return Seen(gradient_N, its.places.displacement(span, layer.param_N, its.num))

    def _kept(self, weights: WeightSet) -> WeightSet:
        self._alive.add(weights)
        return weights
