"""Steps and predictions of each twin. N elements of one layer."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shoal.kernels.optimizer as package
from shoal.kernels.optimizer import OPTIMIZERS, Optimizer, reference
from shoal.kernels.optimizer.rules import Hyperparameters

SETTINGS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
each_name = pytest.mark.parametrize("name", ["sgd", "adamw", "nadam"])


def inputs(name: str, n: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    param_N, grad_N, moment1_N = (torch.randn(n, generator=generator) for _ in range(3))
    moment2_N = moment1_N.square() + 0.1 if name != "sgd" else moment1_N[:0]
    return param_N.to(device), grad_N.to(device), moment1_N.to(device), moment2_N.to(device)


@each_name
@given(n=st.sampled_from([0, 1, 17, 1000]), step=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_step_has_the_bits_of_the_reference(
    twin: ModuleType, device: str, name: str, n: int, step: int, seed: int
) -> None:
    tensors = inputs(name, n, seed, device)
    hyper = Hyperparameters(**SETTINGS, learning_rate=3e-3, num_decayed=n // 2, step=step)
    made = getattr(twin, f"{name}_step")(*tensors, hyper)
    wanted = getattr(reference, f"{name}_step")(*tensors, hyper)
    assert all(torch.equal(got, want) for got, want in zip(made, wanted, strict=True))


@each_name
def test_nothing_is_changed_in_place_and_results_share_no_memory(twin: ModuleType, device: str, name: str) -> None:
    """A prediction must be free to live longer than the state beside it."""
    old = inputs(name, 33, 0, device)
    before = [tensor.clone() for tensor in old]
    hyper = Hyperparameters(**SETTINGS, learning_rate=1e-3, num_decayed=9, step=2)
    param_N, moment1_N, moment2_N = getattr(twin, f"{name}_step")(*old, hyper)
    ahead_N = getattr(twin, f"{name}_predict")(param_N, moment1_N, moment2_N, replace(hyper, step=3), 1)
    assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*old[:3], param_N, moment1_N, ahead_N)}
    assert len(storages) == 6


@each_name
def test_predictions_of_the_twins_agree(twin: ModuleType, device: str, name: str) -> None:
    param_N, _, moment1_N, moment2_N = inputs(name, 5000, 3, device)
    hyper = Hyperparameters(**SETTINGS, learning_rate=3e-3, num_decayed=3001, step=4)
    for staleness_steps in (1, 2, 5):
        got_N = getattr(twin, f"{name}_predict")(param_N, moment1_N, moment2_N, hyper, staleness_steps)
        want_N = getattr(reference, f"{name}_predict")(param_N, moment1_N, moment2_N, hyper, staleness_steps)
        torch.testing.assert_close(got_N, want_N, rtol=1e-6, atol=1e-6)


# --- who computes ---


def test_tensors_on_a_cpu_never_ask_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("Triton was asked for")

    monkeypatch.setattr(package, "_triton", refuse)
    for name, optimizer in OPTIMIZERS.items():
        param_N, grad_N, moment1_N, moment2_N = inputs(name, 9, 0, "cpu")
        settings: dict[str, Any] = {**SETTINGS, "learning_rate": 1e-3, "num_decayed": 4, "step": 1}
        optimizer.step(param_N, grad_N, moment1_N, moment2_N, **settings)
        optimizer.predict(param_N, moment1_N, moment2_N, **settings, staleness_steps=1)


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "chosen"),
    [
        ("cuda", torch.float32, True, "twin"),
        ("cuda", torch.float64, True, "reference"),
        ("cuda", torch.float32, False, "reference"),
        ("cpu", torch.float32, True, "reference"),
    ],
)
def test_float32_on_cuda_is_tritons_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, installed: bool, chosen: str
) -> None:
    def adamw_step() -> None: ...

    rules: Any = SimpleNamespace(adamw_step=adamw_step, muon_step=adamw_step)
    monkeypatch.setattr(package, "_triton", lambda: SimpleNamespace(adamw_step="twin") if installed else None)
    tensor: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, numel=lambda: 1)
    found = Optimizer("adamw", rules, "all")._rule("step", tensor)
    assert found == ("twin" if chosen == "twin" else adamw_step)
    assert Optimizer("muon", rules, "rest")._rule("step", tensor) is adamw_step
