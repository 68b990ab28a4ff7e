"""Training under each regime, with real gradients in virtual time: the exact order of forwards, backwards and updates.

`train` runs any of them. Regimes A and B are played from a schedule (`pipeline.py`); ours, `steps`, from a plan of who
is stale in each step (`plans.py`), all microbatches that share weights in one pass; the swarm itself is in `swarm.py`.
"""

from collections.abc import Sequence

import torch
from layers import Layer
from pipeline import play, schedule_of
from plans import LightPlan, Plan
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
