"""The gain of `calibrated`, against layers that move in ways one can write down.

N parameters of the layer
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction.calibrated import GAIN_MAX, Calibrated

N = 8
GRADIENT_N = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0, 2.0, -0.25, 4.0])


def settings(version: int) -> dict[str, Any]:
    fixed = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "num_decayed": 4}
    return {**fixed, "step": version, "matrices": ()}


def start(optimizer: str) -> LayerState:
    param_N = torch.ones(N)
    moment1_N, moment2_N = OPTIMIZERS[optimizer].moments(param_N, ())
    return LayerState(param_N=param_N, moment1_N=moment1_N, moment2_N=moment2_N)


def train(strategy: Calibrated, optimizer: str, gradients: list[Tensor], asked: tuple[int, ...]) -> LayerState:
    layer = start(optimizer)
    for version, grad_N in enumerate(gradients):
        for staleness_steps in asked:
            strategy.weights(layer, settings(version), staleness_steps)
        made = OPTIMIZERS[optimizer].step(layer.param_N, grad_N, layer.moment1_N, layer.moment2_N, **settings(version))
        after = LayerState(param_N=made[0], moment1_N=made[1], moment2_N=made[2])
        strategy.committed(layer, after, settings(version))
        layer = after
    return layer


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
@pytest.mark.parametrize("asked", [(1,), (2,), (1, 2, 3)])
def test_a_gradient_that_does_not_change_calibrates_to_1(optimizer: str, asked: tuple[int, ...]) -> None:
    strategy = Calibrated(optimizer)
    layer = train(strategy, optimizer, [GRADIENT_N] * 20, asked)
    for staleness_steps in asked:
        assert strategy.gain(staleness_steps) == pytest.approx(1.0, abs=1e-4)
        expected_N = OPTIMIZERS[optimizer].predict(*layer.tensors, staleness_steps=staleness_steps, **settings(20))
        weights_N = strategy.weights(layer, settings(20), staleness_steps)
        torch.testing.assert_close(weights_N, expected_N, rtol=1e-4, atol=1e-6)


def test_sgd_calibrates_to_1_when_its_momentum_has_settled() -> None:
    strategy = Calibrated("sgd")
    train(strategy, "sgd", [GRADIENT_N] * 150, (1, 2))
    assert [strategy.gain(s) for s in (1, 2)] == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("staleness_steps", [1, 2, 3])
def test_the_gain_is_the_way_taken_as_a_share_of_the_way_predicted(staleness_steps: int) -> None:
    """The layer goes 0.3 of what each of its steps is predicted to go, and its moments stay."""
    strategy = Calibrated("adamw")
    layer = replace(start("adamw"), moment1_N=GRADIENT_N.clone(), moment2_N=GRADIENT_N**2)
    for version in range(50, 50 + 3 * staleness_steps):
        how = {**settings(version), "weight_decay": 0.0}
        strategy.weights(layer, how, staleness_steps)
        way_N = OPTIMIZERS["adamw"].predict(*layer.tensors, staleness_steps=1, **how) - layer.param_N
        after = replace(layer, param_N=layer.param_N + 0.3 * way_N)
        strategy.committed(layer, after, how)
        layer = after
    assert strategy.gain(staleness_steps) == pytest.approx(0.3, rel=0.02)
    how = {**settings(60), "weight_decay": 0.0}
    predicted_N = OPTIMIZERS["adamw"].predict(*layer.tensors, staleness_steps=staleness_steps, **how)
    expected_N = layer.param_N + strategy.gain(staleness_steps) * (predicted_N - layer.param_N)
    torch.testing.assert_close(strategy.weights(layer, how, staleness_steps), expected_N)


@pytest.mark.parametrize(("moved", "gain"), [(-1.0, 0.0), (5.0, GAIN_MAX)])
def test_the_gain_is_clamped(moved: float, gain: float) -> None:
    strategy = Calibrated("adamw")
    layer = replace(start("adamw"), moment1_N=GRADIENT_N, moment2_N=GRADIENT_N**2)
    strategy.weights(layer, settings(50), 1)
    way_N = OPTIMIZERS["adamw"].predict(*layer.tensors, staleness_steps=1, **settings(50)) - layer.param_N
    strategy.committed(layer, replace(layer, param_N=layer.param_N + moved * way_N), settings(50))
    assert strategy.gain(1) == gain


def test_gradients_that_turn_back_calibrate_below_1() -> None:
    strategy = Calibrated("adamw")
    train(strategy, "adamw", [GRADIENT_N * (-1) ** step for step in range(40)], (1,))
    assert strategy.gain(1) < 0.9


def test_what_nobody_asks_for_is_not_measured() -> None:
    strategy = Calibrated("adamw")
    train(strategy, "adamw", [-GRADIENT_N, GRADIENT_N] * 3, ())
    assert strategy.gain(1) == 1.0
    assert strategy._trace is None


def test_a_state_that_was_loaded_in_between_is_no_way_that_was_taken() -> None:
    strategy = Calibrated("adamw")
    layer = train(strategy, "adamw", [GRADIENT_N] * 20, (2,))
    strategy.weights(layer, settings(20), 2)
    strategy.committed(layer, layer, settings(20))  # the first of two steps
    elsewhere = replace(layer, param_N=layer.param_N + 100)
    before = strategy.gain(2)
    strategy.committed(elsewhere, elsewhere, settings(30))
    assert strategy.gain(2) == before
