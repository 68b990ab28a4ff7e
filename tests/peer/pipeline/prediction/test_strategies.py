"""Each strategy against its formula, on layers small enough to write down.

N parameters of the layer
"""

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.model.state import LayerState
from shoal.peer.pipeline.prediction import COMPENSATIONS, compensation
from shoal.peer.pipeline.prediction.compensation import OwnGradients
from shoal.peer.pipeline.prediction.extrapolation import LookAhead, SpecTrain
from shoal.peer.pipeline.prediction.stale import STRENGTH
from shoal.protocol.spec import TrainingSpec

N = 12
MATRICES = ((0, 2, 3),)
EVERY = pytest.mark.parametrize("name", COMPENSATIONS)
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def settings(version: int, **changed: Any) -> dict[str, Any]:
    fixed = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.0, "num_decayed": 8}
    return {**fixed, "step": version, "matrices": MATRICES, **changed}


def random(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def layer_at(version: int, optimizer: str) -> LayerState:
    """After `version` steps with random gradients."""
    param_N = random(99)
    moments = OPTIMIZERS[optimizer].moments(param_N, MATRICES)
    layer = LayerState(param_N=param_N, moment1_N=moments[0], moment2_N=moments[1])
    for step in range(version):
        layer = stepped(layer, random(step), optimizer, settings(step))
    return layer


def stepped(layer: LayerState, grad_N: Tensor, optimizer: str, how: dict[str, Any]) -> LayerState:
    made = OPTIMIZERS[optimizer].step(layer.param_N, grad_N, layer.moment1_N, layer.moment2_N, **how)
    return LayerState(param_N=made[0], moment1_N=made[1], moment2_N=made[2])


@EVERY
@EVERY_OPTIMIZER
def test_staleness_0_and_repairs_are_the_very_weights_whatever_was_learnt(name: str, optimizer: str) -> None:
    strategy = compensation(name, optimizer)
    before = layer_at(2, optimizer)
    strategy.weights(before, settings(2), 1)
    layer = stepped(before, random(7), optimizer, settings(2))
    strategy.committed(before, layer, settings(2))
    assert strategy.weights(layer, settings(3), 0) is layer.param_N
    assert strategy.weights(layer, settings(3), -1) is layer.param_N


@EVERY
@EVERY_OPTIMIZER
@pytest.mark.parametrize("staleness_steps", [1, 3])
def test_nothing_is_changed_that_others_hold(name: str, optimizer: str, staleness_steps: int) -> None:
    strategy, layer = compensation(name, optimizer), layer_at(3, optimizer)
    copies = [tensor.clone() for tensor in layer.tensors]
    gradient_N, displacement_N = random(1), random(2)
    weights_N = strategy.weights(layer, settings(3), staleness_steps)
    strategy.corrected(gradient_N, displacement_N, layer, settings(3))
    strategy.committed(layer, stepped(layer, gradient_N, optimizer, settings(3)), settings(3))
    assert all(torch.equal(*pair) for pair in zip(layer.tensors, copies, strict=True))
    assert torch.equal(gradient_N, random(1))
    assert torch.equal(displacement_N, random(2))
    assert (weights_N is layer.param_N) == (not strategy.predicts)


@EVERY
def test_who_says_that_it_corrects_nothing_gives_back_the_very_gradient(name: str) -> None:
    strategy, gradient_N = compensation(name, "adamw"), random(1)
    corrected_N = strategy.corrected(gradient_N, random(2), layer_at(3, "adamw"), settings(3))
    assert (corrected_N is gradient_N) == (not strategy.corrects)


@EVERY
@EVERY_OPTIMIZER
def test_before_the_first_step_nothing_is_known_and_nothing_is_moved(name: str, optimizer: str) -> None:
    layer = layer_at(0, optimizer)
    assert torch.equal(compensation(name, optimizer).weights(layer, settings(0), 2), layer.param_N)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("staleness_steps", [1, 2])
def test_pipeoptim_is_the_prediction_of_the_runs_optimizer(optimizer: str, staleness_steps: int) -> None:
    layer = layer_at(3, optimizer)
    expected_N = OPTIMIZERS[optimizer].predict(*layer.tensors, staleness_steps=staleness_steps, **settings(3))
    weights_N = compensation("pipeoptim", optimizer).weights(layer, settings(3), staleness_steps)
    assert torch.equal(weights_N, expected_N)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("staleness_steps", [1, 2, 5])
def test_spectrain_goes_along_the_momentum_whatever_the_optimizer(optimizer: str, staleness_steps: int) -> None:
    layer = layer_at(3, optimizer)
    weights_N = SpecTrain(optimizer).weights(layer, settings(3), staleness_steps)
    torch.testing.assert_close(weights_N, layer.param_N - 0.1 * staleness_steps * layer.moment1_N)


def test_spectrain_and_pipeoptim_are_one_for_sgd_without_decay() -> None:
    layer = layer_at(3, "sgd")
    made = [compensation(name, "sgd").weights(layer, settings(3), 2) for name in ("spectrain", "pipeoptim")]
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("staleness_steps", [1, 2, 5])
def test_looking_ahead_is_where_the_momentum_goes_if_no_gradient_comes(staleness_steps: int) -> None:
    layer = layer_at(3, "sgd")
    weights_N = LookAhead("sgd").weights(layer, settings(3), staleness_steps)
    for step in range(3, 3 + staleness_steps):
        layer = stepped(layer, torch.zeros(N), "sgd", settings(step))
    torch.testing.assert_close(weights_N, layer.param_N)


@EVERY_OPTIMIZER
def test_looking_one_step_ahead_is_nesterovs_way(optimizer: str) -> None:
    layer = layer_at(3, optimizer)
    next_N = OPTIMIZERS[optimizer].predict(*layer.tensors, staleness_steps=1, **settings(3))
    weights_N = LookAhead(optimizer).weights(layer, settings(3), 1)
    torch.testing.assert_close(weights_N, layer.param_N + 0.9 * (next_N - layer.param_N))


def test_delay_compensation_is_its_formula() -> None:
    gradient_N, displacement_N = random(1), random(2)
    corrected_N = compensation("dc", "sgd").corrected(gradient_N, displacement_N, layer_at(3, "sgd"), settings(3))
    torch.testing.assert_close(corrected_N, gradient_N + STRENGTH * gradient_N**2 * displacement_N)


def test_delay_compensation_finds_the_gradient_of_a_quadratic_whose_curvature_it_guesses() -> None:
    """Loss Σ h w² / 2: the gradient at w_t is that at ŵ plus h (w_t - ŵ), and h = λ g² if it is made so."""
    stale_N, fresh_N = random(1), random(2)
    curvature_N = 1 / (STRENGTH * stale_N**2)
    gradient_N = curvature_N * stale_N
    corrected_N = compensation("dc", "sgd").corrected(gradient_N, fresh_N - stale_N, layer_at(1, "sgd"), settings(1))
    torch.testing.assert_close(corrected_N, curvature_N * fresh_N)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("name", ["pipeoptim", "calibrated"])
@pytest.mark.parametrize("staleness_steps", [1, 2, 3])
def test_the_prediction_is_nearer_to_the_weights_to_come_than_those_that_are_there(
    name: str, optimizer: str, staleness_steps: int
) -> None:
    """With a gradient that does not change; half of the way at least."""
    strategy, layer = compensation(name, optimizer), layer_at(0, optimizer)
    path = [layer]
    for version in range(8):
        strategy.weights(layer, settings(version), staleness_steps)
        after = stepped(layer, random(0), optimizer, settings(version))
        strategy.committed(layer, after, settings(version))
        layer = after
        path.append(layer)
    predicted_N = strategy.weights(path[5], settings(5), staleness_steps)
    truth_N, stale_N = path[5 + staleness_steps].param_N, path[5].param_N
    assert (predicted_N - truth_N).norm() < 0.5 * (stale_N - truth_N).norm()


@pytest.mark.parametrize(
    ("curvature", "shown", "together"),
    [(0.9, True, True), (0.9, False, True), (1.1, False, False), (1.6, True, True), (1.8, True, False)],
)
def test_eager_members_stay_together_further_if_they_know_where_they_were(
    curvature: float, shown: bool, together: bool
) -> None:
    """Two members on a quadratic, SGD at rate 1 with momentum 0.9, which itself converges to a curvature of 3.8: by
    their own gradients they drift apart above 1; shown their displacements, above 1 + KEPT."""
    strategy, layer = compensation("eager", "sgd"), layer_at(0, "sgd")
    at = [layer.param_N + 1e-3 * random(seed) for seed in (1, 2)]
    for version in range(300):
        now = settings(version, learning_rate=1.0)
        gradients = [curvature * weights_N for weights_N in at]
        seen = [
            OwnGradients(gradient_N, layer.param_N - weights_N if shown else None)
            for gradient_N, weights_N in zip(gradients, at, strict=True)
        ]
        at = [strategy.weights(layer, now, 1, [its]) for its in seen]
        layer = stepped(layer, (gradients[0] + gradients[1]) / 2, "sgd", now)
    assert (float((at[0] - at[1]).norm()) < 1e-4) == together


def test_the_run_spec_names_them_all_and_knows_which_run_a_forward_again() -> None:
    assert set(get_args(get_type_hints(TrainingSpec)["compensation"])) == set(COMPENSATIONS)
    for name in COMPENSATIONS:
        repeats = name in ("none", "spectrain")
        assert TrainingSpec(compensation=name, keep="stash").recomputes == repeats  # type: ignore[arg-type]
        assert TrainingSpec(compensation=name, keep="recompute").recomputes  # type: ignore[arg-type]
