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
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from shoal.peer.pipeline.prediction import COMPENSATIONS, compensation
from shoal.peer.pipeline.state import StageState, hyperparameters
from shoal.protocol.spec import RunSpec


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WeightSet:
    """Parameters of a stage. Equal only to itself."""

    params: Mapping[str, Tensor]
    """Layer key -> float32 [numel]."""


class Weights:
    """Of the stage with the layers `keys`. States are handed in: another thread may load one at any time.

    `keep = "recompute"` keeps nothing for steps ahead: their weights are made for each job anew.
    """

    def __init__(self, spec: RunSpec, keys: tuple[str, ...]) -> None:
        self._spec = spec
        self._first = keys[0]
        name = spec.training.compensation
        self._compensations = {key: compensation(name, spec.optimizer.name) for key in keys}
        self._predicts, self.corrects = COMPENSATIONS[name].predicts, COMPENSATIONS[name].corrects
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
            return before
        staleness_steps = max(0, step - state.version)
        sets = self._sets_of(state)
        if (known := sets.get(state.version + staleness_steps)) is not None:
            return known
        weights = self._ahead.get(step) if staleness_steps and self._predicts else None
        if weights is None:
            weights = self._make(state, staleness_steps)
        if staleness_steps:
            self._ahead[step] = weights
        if not staleness_steps or self._spec.training.keep == "stash":
            sets[state.version + staleness_steps] = weights
        return weights

    def stepped(self, before: StageState, after: StageState) -> None:
        """The state is `after` now."""
        self.loaded()
        if self._spec.training.s_max == 0:
            # Others may be a step behind us at most, and what they run again must give what it gave: exact repair.
            # With staleness admitted it is not worth a copy, `s_max + 2` are alive already.
            self._before = self._kept({key: layer.param_N for key, layer in before.layers.items()})
        for key, layer in before.layers.items():
            if after.layers[key] is not layer:
                settings = hyperparameters(self._spec, key, before.version)
                self._compensations[key].committed(layer, after.layers[key], settings)

    def loaded(self) -> None:
        """The state is another one: what was made of the one before is nobody's but its holders'."""
        self._made = (None, {})
        self._before = None

    @torch.no_grad()
    def correct(
        self, state: StageState, sum_N: Tensor, taken_at: Iterable[WeightSet | None], spans: Mapping[str, slice]
    ) -> None:
        """Correct the sum of our gradients of step `state.version`, in place, for having been taken elsewhere.

        If all were taken at the current weights, the sum stays as it is, bit for bit.

        Args:
            sum_N: float32 [N] on the CPU, the stage's layers at `spans`.
            taken_at: the weights of each gradient in the sum.
        """
        counts = Counter(weights for weights in taken_at if weights is not None)
        total = counts.total()
        made_for, sets = self._made
        if made_for is state and state.version in sets:
            counts.pop(sets[state.version], None)
        if not counts:
            return
        for key, layer in state.layers.items():
            displacement_N = torch.zeros_like(layer.param_N)
            for weights, count in counts.items():
                displacement_N.add_(layer.param_N - weights.params[key], alpha=count / total)
            mean_N = sum_N[spans[key]].to(layer.param_N.device) / total
            settings = hyperparameters(self._spec, key, state.version)
            mean_N = self._compensations[key].corrected(mean_N, displacement_N, layer, settings)
            sum_N[spans[key]] = mean_N * total

    def copies(self, state: StageState | None) -> int:
        """Distinct parameter buffers alive for the first layer."""
        pointers = {weights.params[self._first].data_ptr() for weights in list(self._alive)}
        return len(pointers | ({state.layers[self._first].param_N.data_ptr()} if state else set()))

    def _sets_of(self, state: StageState) -> dict[int, WeightSet]:
        made_for, sets = self._made
        if made_for is not state:
            # A new dict: a job that still runs with the state before puts its sets where nobody will look for them.
            sets = {}
            self._made = (state, sets)
        return sets

    @torch.no_grad()
    def _make(self, state: StageState, staleness_steps: int) -> WeightSet:
        params = {}
        for key, layer in state.layers.items():
            settings = hyperparameters(self._spec, key, state.version)
            params[key] = self._compensations[key].weights(layer, settings, staleness_steps)
        return self._kept(params)

    def _kept(self, params: Mapping[str, Tensor]) -> WeightSet:
        weights = WeightSet(params)
        self._alive.add(weights)
        return weights
