"""Training under each regime, with real gradients in virtual time: the exact order of forwards, backwards and updates.

`train` runs any of them. Regimes A and B are played from a schedule (`pipeline.py`); ours, `steps`, from a plan of who
is stale in each step (`plans.py`), all microbatches that share weights in one pass; the swarm itself is in `swarm.py`.
"""

from collections.abc import Sequence

import torch
from layers import Layer
from pipeline import play, schedule_of
from plans import Group, LightPlan, Plan
from recorder import Diverged, Recorder
from settings import HeavyTailed, Outcome, Paper, Run, Steps, Swarm
from tasks import Task, chunks
from torch import Tensor


def train(task: Task, run: Run) -> Outcome:
    """Raises: ValueError: the regime cannot be had with this task."""
    torch.set_num_threads(1)
    recorder = Recorder(task, run)
    regime = run.regime
    try:
        if isinstance(regime, Paper | HeavyTailed):
            play(task, run, schedule_of(run), recorder)
        elif isinstance(regime, Steps):
            steps(task, run, LightPlan(regime, run.shape.microbatches_per_step, task.keys, run.seed), recorder)
        else:
            assert isinstance(regime, Swarm)
            from swarm import train_swarm  # needs the whole project, which the others do not

            train_swarm(task, run, recorder)
    except Diverged:
        pass
    return recorder.outcome()


def steps(task: Task, run: Run, plan: Plan, recorder: Recorder) -> dict[str, Tensor]:
    """Train by `plan`. Weights for a step are made when the version that they are made from is the newest.

    Returns: the parameters at the end, by layer.
    """
    layers = {key: Layer(task, key, run.optimizer, run.method, updates=run.updates) for key in task.keys}
    stage_of = {key: stage for stage, keys in enumerate(plan.stages) for key in keys}
    made: dict[int, _Made] = {}  # step -> weights for it
    for step in range(run.updates):
        ahead = range(step + 1, min(step + plan.s_max, run.updates - 1) + 1)
        made.setdefault(step, {}).update(_weights(layers, stage_of, plan.groups(step), 0, {}))
        weights, loss = made.pop(step), 0.0
        displacement: dict[str, Tensor] = {}
        groups = plan.groups(step)
        num = sum(len(group.indices) for group in groups)
        views = {group.seen for later in ahead for group in plan.groups(later) if min(group.staleness) > 0}
        sums = _Sums(layers, views)
        for group in groups:
            used = {key: weights[key, group.staleness[stage_of[key]], group.seen] for key in task.keys}
            for indices in sums.apart(group.indices):
                parts = [task.microbatch(step, index) for index in indices]
                loss += _pass(task, layers, used, sums.into(indices), parts) / num
                sums.displaced(indices, used)
            part = len(group.indices) / num
            recorder.stale(sum(group.staleness) / len(group.staleness), part)
            _displaced(layers, used, part, displacement)
        recorder.updated(loss, plan.ends_s(step))
        for later in ahead:
            seen = sums.seen()
            made.setdefault(later, {}).update(_weights(layers, stage_of, plan.groups(later), later - step, seen))
        for key, gradient_N in sums.total().items():
            layers[key].step(gradient_N / num, displacement.get(key))
        if recorder.wants(step + 1):
            params = {key: layer.state.param_N for key, layer in layers.items()}
            recorder.reached(step + 1, params, plan.ends_s(step))
    return {key: layer.state.param_N for key, layer in layers.items()}


_Seen = tuple[int, ...]
"""Microbatches, by index."""
_Gradients = dict[str, Tensor]
"""By layer."""
_Displacements = dict[str, Tensor]
"""By layer, of those that were stale there: its weights minus those that gradients were taken at."""
_Made = dict[tuple[str, int, _Seen], Tensor]
"""(layer, staleness, what was seen) -> weights."""


def _weights(
    layers: dict[str, Layer],
    stage_of: dict[str, int],
    groups: Sequence[Group],
    staleness_steps: int,
    seen: dict[_Seen, tuple[_Gradients, _Displacements]],
) -> _Made:
    """What these groups' layers that are so stale compute with, made at the version that is there now."""
    made: _Made = {}
    for group in groups:
        gradients, displacements = seen.get(group.seen, ({}, {}))
        for key, layer in layers.items():
            if group.staleness[stage_of[key]] == staleness_steps:
                weights_N = layer.weights(staleness_steps, gradients.get(key), displacements.get(key))
                made[key, staleness_steps, group.seen] = weights_N
    return made


class _Sums:
    """The gradients of one step, those apart that somebody will be shown without the others.

    Args:
        views: what will be asked for.
    """

    def __init__(self, layers: dict[str, Layer], views: set[_Seen]) -> None:
        sees = any(layer.compensation.sees for layer in layers.values())
        self._layers = layers
        self._views = {view: frozenset(view) for view in views if view and sees}
        self._sums: dict[frozenset[_Seen], _Gradients] = {}  # by who sees them
        self._ways: dict[frozenset[_Seen], _Displacements] = {}

    def apart(self, indices: Sequence[int]) -> list[list[int]]:
        """In parts of which each view sees all or nothing."""
        parts: dict[frozenset[_Seen], list[int]] = {}
        for index in indices:
            parts.setdefault(self._who_sees(index), []).append(index)
        return list(parts.values())

    def into(self, indices: Sequence[int]) -> _Gradients:
        """Where such a part's gradients are added."""
        who = self._who_sees(indices[0])
        if who not in self._sums:
            self._sums[who] = self._zeros()
        return self._sums[who]

    def displaced(self, indices: Sequence[int], used: dict[str, Tensor]) -> None:
        """Such a part's gradients were taken at `used`."""
        who = self._who_sees(indices[0])
        if not who:
            return
        ways = self._ways.setdefault(who, {})
        for key, layer in self._layers.items():
            if used[key] is not layer.state.param_N:
                way_N = (layer.state.param_N - used[key]) * len(indices)
                ways[key] = ways[key] + way_N if key in ways else way_N

    def seen(self) -> dict[_Seen, tuple[_Gradients, _Displacements]]:
        """Each view's means."""
        return {view: (_means(self._sums, view, self._zeros()), _means(self._ways, view, {})) for view in self._views}

    def total(self) -> _Gradients:
        total = self._zeros()
        for gradients in self._sums.values():
            for key, gradient_N in gradients.items():
                total[key] += gradient_N
        return total

    def _who_sees(self, index: int) -> frozenset[_Seen]:
        return frozenset(view for view, indices in self._views.items() if index in indices)

    def _zeros(self) -> _Gradients:
        return {key: torch.zeros(layer.layout.numel) for key, layer in self._layers.items()}


def _means(sums: dict[frozenset[_Seen], dict[str, Tensor]], view: _Seen, into: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of what `view` sees, by layer, added to `into`."""
    for who, tensors in sums.items():
        if view in who:
            for key, tensor_N in tensors.items():
                into[key] = into[key] + tensor_N if key in into else tensor_N
    return {key: sum_N / len(view) for key, sum_N in into.items()}


def _pass(
    task: Task,
    layers: dict[str, Layer],
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    parts: Sequence[tuple[Tensor, Tensor]],
) -> float:
    """Forward and backward of all `parts`, microbatches, with `weights`; the sum of their gradients is added.

    Returns: the sum of their losses. In chunks, because a core is fastest with what its cache holds.
    """
    total, num = 0.0, sum(len(targets) for _, targets in parts)
    for x, targets in chunks(parts, task.chunk_samples):
        leaves = {key: layer.leaves(weights[key], gradients[key]) for key, layer in layers.items()}
        loss = task.loss(task.run(task.keys, leaves, x), targets)
        share = len(targets) / num * len(parts)
        torch.autograd.backward(loss * share)
        total += share * loss.item()
    return total


def _displaced(layers: dict[str, Layer], used: dict[str, Tensor], part: float, displacement: dict[str, Tensor]) -> None:
    """Add `part` of the way from the weights that were used to those that the gradient meets."""
    for key, layer in layers.items():
        if layer.compensation.corrects:
            way_N = (layer.state.param_N - used[key]) * part
            displacement[key] = displacement[key] + way_N if key in displacement else way_N
