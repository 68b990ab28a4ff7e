"""Training under each regime, with real gradients in virtual time: the exact order of forwards, backwards and updates.

`train` runs any of them. Regimes A and B are played from a schedule (`schedule.py`), a stage at a time; ours from a
plan of who is stale in each step (`plans.py`), all microbatches that share weights in one pass; the swarm itself is in
`swarm.py`.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from layers import Layer, cut
from plans import LightPlan, Plan
from schedule import Action, MeanStaleness, heavy_tailed, one_by_one
from settings import HeavyTailed, Outcome, Paper, Point, Run, Steps, Swarm
from tasks import Task, chunks, validate
from torch import Tensor

TAIL = 0.1
"""Share of the updates, the last ones, whose mean training loss is reported."""


class Diverged(Exception):
    """A loss is not finite: nothing more will be learnt."""


class Recorder:
    """Sees a run: losses, curve, staleness. `outcome` at the end."""

    def __init__(self, task: Task, run: Run) -> None:
        self.losses: list[float] = []
        """Of each update, with the weights of its forwards."""
        self._task = task
        self._run = run
        self._curve: list[Point] = []
        self._virtual_s = 0.0
        self._staleness = 0.0
        self._num_staleness = 0.0
        self._final: tuple[float, float] | None = None
        self._started_s = time.process_time()

    def stale(self, staleness_steps: float, weight: float = 1.0) -> None:
        """A forward, or the `weight` of several."""
        self._staleness += weight * staleness_steps
        self._num_staleness += weight

    def updated(self, loss: float, virtual_s: float) -> None:
        """The last layer has made an update. Raises: Diverged."""
        self._virtual_s = virtual_s
        if not math.isfinite(loss):
            raise Diverged
        self.losses.append(loss)

    def wants(self, version: int) -> bool:
        """Whether `reached` is to be called with the weights of this version."""
        return version % self._run.validate_every == 0 or version == self._run.updates

    def reached(self, version: int, weights: dict[str, Tensor], virtual_s: float) -> None:
        """All layers have made `version` updates, the last of them at `virtual_s`. Raises: Diverged."""
        leaves = {key: self._task.layout(key).views(weights_N) for key, weights_N in weights.items()}
        loss, _ = validate(self._task, leaves, brief=True)
        self._virtual_s = max(self._virtual_s, virtual_s)
        if not math.isfinite(loss):
            raise Diverged
        self._curve.append(Point(version, version * self._units, round(virtual_s, 3), round(loss, 4)))
        if version == self._run.updates:
            self._final = validate(self._task, leaves)

    def outcome(self) -> Outcome:
        tail = self.losses[-max(1, round(len(self.losses) * TAIL)) :]
        loss, right = self._final or (math.nan, math.nan)
        return Outcome(
            validation_loss=round(loss, 5) if self._final else None,
            right=round(right, 4) if self._final else None,
            training_loss=round(sum(tail) / len(tail), 5) if self._final else None,
            units=len(self.losses) * self._units,
            virtual_s=round(self._virtual_s, 3),
            staleness_mean=round(self._staleness / max(1e-9, self._num_staleness), 4),
            curve=tuple(self._curve),
            processor_s=round(time.process_time() - self._started_s, 2),
        )

    @property
    def _units(self) -> int:
        shape = self._run.shape
        return shape.microbatches_per_step * shape.microbatch_size * self._task.units_per_sample


def train(task: Task, run: Run) -> Outcome:
    """Raises: ValueError: the regime cannot be had with this task."""
    torch.set_num_threads(1)
    recorder = Recorder(task, run)
    regime = run.regime
    try:
        if isinstance(regime, Paper):
            play(task, run, one_by_one(regime.stages, run.updates, synchronous=regime.synchronous), recorder)
        elif isinstance(regime, HeavyTailed):
            play(task, run, _heavy_tailed(regime, run), recorder)
        elif isinstance(regime, Steps):
            steps(task, run, LightPlan(regime, run.shape.microbatches_per_step, task.keys, run.seed), recorder)
        else:
            assert isinstance(regime, Swarm)
            from swarm import train_swarm  # needs the whole project, which the others do not

            train_swarm(task, run, recorder)
    except Diverged:
        pass
    return recorder.outcome()


def _heavy_tailed(regime: HeavyTailed, run: Run) -> list[Action]:
    return heavy_tailed(
        regime.stages,
        run.updates,
        in_flight=regime.in_flight,
        hop_s=regime.hop_s,
        tail=regime.tail,
        seed=run.seed,
    )


# --- regime C: steps of many microbatches ---


def steps(task: Task, run: Run, plan: Plan, recorder: Recorder) -> dict[str, Tensor]:
    """Train by `plan`. Weights for a step are made when the version that they are made from is the newest.

    Returns: the parameters at the end, by layer.
    """
    layers = {key: Layer(task, key, run.optimizer, run.method, updates=run.updates) for key in task.keys}
    gradients = {key: torch.zeros(layer.layout.numel) for key, layer in layers.items()}
    ahead: dict[int, dict[tuple[str, int], Tensor]] = {}  # step -> (layer, staleness) -> weights
    stage_of = {key: stage for stage, keys in enumerate(plan.stages) for key in keys}
    for step in range(run.updates):
        for s in range(min(plan.s_max, run.updates - 1 - step) + 1):
            for group in plan.groups(step + s):
                for key in task.keys:
                    made = ahead.setdefault(step + s, {})
                    if group.staleness[stage_of[key]] == s and (key, s) not in made:
                        made[key, s] = layers[key].weights(s)
        for gradient_N in gradients.values():
            gradient_N.zero_()
        weights, loss = ahead.pop(step), 0.0
        displacement: dict[str, Tensor] = {}
        num = sum(len(group.indices) for group in plan.groups(step))
        for group in plan.groups(step):
            used = {key: weights[key, group.staleness[stage_of[key]]] for key in task.keys}
            parts = [task.microbatch(step, index) for index in group.indices]
            part = len(parts) / num
            loss += part * _pass(task, layers, used, gradients, parts, scale=part)
            recorder.stale(sum(group.staleness) / len(group.staleness), part)
            _displaced(layers, used, part, displacement)
        recorder.updated(loss, plan.ends_s(step))
        for key, layer in layers.items():
            layer.step(gradients[key], displacement.get(key))
        if recorder.wants(step + 1):
            params = {key: layer.state.param_N for key, layer in layers.items()}
            recorder.reached(step + 1, params, plan.ends_s(step))
    return {key: layer.state.param_N for key, layer in layers.items()}


def _pass(
    task: Task,
    layers: dict[str, Layer],
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    parts: Sequence[tuple[Tensor, Tensor]],
    *,
    scale: float,
) -> float:
    """Forward and backward of all `parts` with `weights`; `scale` times their mean gradient is added to `gradients`.

    Returns: their mean loss. In chunks, because a core is fastest with what its cache holds.
    """
    total, num = 0.0, sum(len(targets) for _, targets in parts)
    for x, targets in chunks(parts, task.chunk_samples):
        leaves = {key: layer.leaves(weights[key], gradients[key]) for key, layer in layers.items()}
        loss = task.loss(task.run(task.keys, leaves, x), targets)
        share = len(targets) / num
        torch.autograd.backward(loss * (scale * share))
        total += share * loss.item()
    return total


def _displaced(layers: dict[str, Layer], used: dict[str, Tensor], part: float, displacement: dict[str, Tensor]) -> None:
    """Add `part` of the way from the weights that were used to those that the gradient meets."""
    for key, layer in layers.items():
        if layer.compensation.corrects:
            way_N = (layer.state.param_N - used[key]) * part
            displacement[key] = displacement[key] + way_N if key in displacement else way_N


# --- regimes A and B: one microbatch an update, a stage at a time ---


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


def actions_of(run: Run) -> Iterator[str]:
    """The schedule of a run of regime A or B, for people."""
    regime = run.regime
    if isinstance(regime, HeavyTailed):
        yield from map(str, _heavy_tailed(regime, run))
    elif isinstance(regime, Paper):
        yield from map(str, one_by_one(regime.stages, run.updates, synchronous=regime.synchronous))
