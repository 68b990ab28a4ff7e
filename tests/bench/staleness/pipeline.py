"""Regimes A and B: one microbatch an update, a stage at a time, in the order of a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from layers import Layer, cut
from recorder import Recorder
from schedule import Action, MeanStaleness, heavy_tailed, one_by_one
from settings import HeavyTailed, Paper, Run
from tasks import Task
from torch import Tensor


def schedule_of(run: Run) -> list[Action]:
    """Of a run of regime A or B; what seeds decide is decided by the run's."""
    regime = run.regime
    if isinstance(regime, Paper):
        return one_by_one(
            regime.stages,
            run.updates,
            synchronous=regime.synchronous,
            begins_synchronously=regime.begins_synchronously,
        )
    assert isinstance(regime, HeavyTailed)
    return heavy_tailed(
        regime.stages,
        run.updates,
        in_flight=regime.in_flight,
        hop_s=regime.hop_s,
        tail=regime.tail,
        seed=run.seed,
        begins_synchronously=regime.begins_synchronously,
    )


@dataclass(slots=True)
class _Passage:
    """A microbatch at a stage between its forward and its backward."""

    x: Tensor
    y: Tensor
    weights: dict[str, Tensor]
    """What the leaves lie on: the layers' own, predicted, or copies that will be written over."""
    gradients: dict[str, Tensor]


@dataclass(slots=True)
class _Stage:
    layers: list[Layer]
    open: dict[int, _Passage] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(layer.key for layer in self.layers)

    def forward(self, task: Task, microbatch: int, x: Tensor, staleness_steps: int) -> Tensor:
        x = x.detach().requires_grad_(x.is_floating_point())
        weights, gradients, leaves = {}, {}, {}
        for layer in self.layers:
            weights_N = layer.weights(staleness_steps)
            weights[layer.key] = weights_N if layer.stashes else weights_N.clone()
            gradients[layer.key] = torch.zeros_like(weights_N)
            leaves[layer.key] = layer.leaves(weights[layer.key], gradients[layer.key])
        y = task.run(self.keys, leaves, x)
        self.open[microbatch] = _Passage(x, y, weights, gradients)
        return y

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """With the gradient of what the forward returned (None: that was the loss), and update.

        Without stash the backward of the saved activations meets the weights that are there by now. They are written
        where the graph has those of the forward; `.data`, because autograd would refuse for its correctness, which is
        just what such a pipeline gives up.
        """
        passage = self.open.pop(microbatch)
        forwarded: dict[str, Tensor] = {}
        for layer in self.layers:
            if layer.compensation.corrects:
                forwarded[layer.key] = passage.weights[layer.key].clone()
            if not layer.stashes:
                passage.weights[layer.key].data.copy_(layer.weights(0))
        torch.autograd.backward(passage.y, gradient)
        for layer in self.layers:
            used_N = forwarded.get(layer.key)
            layer.step(passage.gradients[layer.key], None if used_N is None else layer.state.param_N - used_N)
        return passage.x.grad if passage.x.is_floating_point() else None


def play(task: Task, run: Run, actions: Sequence[Action], recorder: Recorder) -> dict[str, Tensor]:
    """Train by a schedule. Returns: the parameters at the end, by layer.

    Raises: ValueError: the data is cut into steps of more than one microbatch.
    """
    if run.shape.microbatches_per_step != 1:
        raise ValueError("regimes A and B have one microbatch a step")
    num_stages = 1 + max(action.stage for action in actions)
    stages = [
        _Stage([Layer(task, key, run.optimizer, run.method, updates=run.updates) for key in keys])
        for keys in cut(task.keys, num_stages)
    ]
    expected = MeanStaleness(num_stages) if isinstance(run.regime, HeavyTailed) and run.regime.known == "mean" else None
    versions = _Versions(recorder, num_stages)
    outputs: dict[tuple[int, int], Tensor] = {}  # (stage, microbatch) -> what waits there for its forward
    returned: dict[tuple[int, int], Tensor | None] = {}  # ... for its backward
    targets: dict[int, Tensor] = {}
    for action in actions:
        stage, at = stages[action.stage], (action.stage, action.microbatch)
        if action.kind == "F":
            if action.stage == 0:
                outputs[at], targets[action.microbatch] = task.microbatch(action.microbatch, 0)
            recorder.stale(action.staleness)
            y = stage.forward(
                task, action.microbatch, outputs.pop(at), action.staleness if expected is None else expected(action)
            )
            if action.stage < num_stages - 1:
                outputs[action.stage + 1, action.microbatch] = y
            else:
                stage.open[action.microbatch].y = loss = task.loss(y, targets.pop(action.microbatch))
                recorder.updated(loss.item(), action.ended_at_s)
                returned[at] = None
        else:
            gradient = stage.backward(action.microbatch, returned.pop(at))
            if action.stage > 0:
                returned[action.stage - 1, action.microbatch] = gradient
            if expected is not None:
                expected.ended(action)
            versions.updated(stage, action.ended_at_s)
    return {layer.key: layer.state.param_N for stage in stages for layer in stage.layers}


class _Versions:
    """Puts the layers of one version together: stages reach it at different times."""

    def __init__(self, recorder: Recorder, num_stages: int) -> None:
        self._recorder = recorder
        self._num_stages = num_stages
        self._there: dict[int, list[dict[str, Tensor]]] = {}

    def updated(self, stage: _Stage, at_s: float) -> None:
        version = stage.layers[0].version
        if not self._recorder.wants(version):
            return
        there = self._there.setdefault(version, [])
        there.append({layer.key: layer.state.param_N for layer in stage.layers})
        if len(there) == self._num_stages:
            self._recorder.reached(
                version, {key: w for part in self._there.pop(version) for key, w in part.items()}, at_s
            )
