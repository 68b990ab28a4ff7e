"""Every twin of the optimizer kernels (`conftest.twin`). N elements of one layer."""

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS, clip, reference
from shoal.kernels.optimizer.rules import Hyperparameters
from twins import DEVICE

NAMES = ["sgd", "adamw", "nadam"]

SETTINGS: dict[str, Any] = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}

GOLDEN = {"sgd": "d946b9f6ae60f8e7", "adamw": "67b08474ff217d44", "nadam": "1087672c40cfacea"}

each_name = pytest.mark.parametrize("name", NAMES)


def functions(twin: ModuleType, name: str) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    return getattr(twin, f"{name}_step"), getattr(twin, f"{name}_predict")


def randn(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def start(name: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    param_N = randn(n, seed)
    return (param_N, *OPTIMIZERS[name].moments(param_N))


def torch_twin(name: str, decayed: Tensor, plain: Tensor) -> torch.optim.Optimizer:
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0}]
    settings: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    if name == "adamw":
        return torch.optim.AdamW(groups, **settings)
    if name == "nadam":
        return torch.optim.NAdam(groups, **settings, decoupled_weight_decay=True, momentum_decay=math.inf)
    return torch.optim.SGD([group | {"weight_decay": 0.0} for group in groups], lr=3e-3, momentum=0.9)


@each_name
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 5e-6)], ids=str)
def test_equals_torch_over_many_steps(twin: ModuleType, name: str, dtype: torch.dtype, tolerance: float) -> None:
    """torch keeps the product of NAdam's momenta in float32, and rounds elsewhere, which walks for 200 steps."""
    if twin is not reference and dtype == torch.float64:
        pytest.skip("the fast twins are for float32")
    step_fn, _ = functions(twin, name)
    param_N, moment1_N, moment2_N = (tensor.to(dtype) for tensor in start(name, 101))
    decayed, plain = param_N[:64].clone().requires_grad_(), param_N[64:].clone().requires_grad_()
    optimizer = torch_twin(name, decayed, plain)
    for step in range(200 if twin is reference else 30):  # interpreted kernels are slow
        grad_N = randn(101, step + 1).to(dtype) + 0.3
        decayed.grad, plain.grad = grad_N[:64].clone(), grad_N[64:].clone()
        if name == "sgd":  # torch's weight decay is coupled, ours is not
            decayed.data.mul_(1 - 3e-3 * 0.1)
        optimizer.step()
        hyper = Hyperparameters(**SETTINGS, num_decayed=64, step=step)
        param_N, moment1_N, moment2_N = step_fn(param_N, grad_N, moment1_N, moment2_N, hyper)
        torch.testing.assert_close(param_N, torch.cat((decayed, plain)).detach(), rtol=tolerance, atol=tolerance)


@each_name
def test_bits_are_the_same_on_every_device(twin: ModuleType, name: str) -> None:
    """Replicas compare digests, so these hold on any CPU (tried: with AVX512, AVX2, neither; MKL's oldest) and GPU."""
    step_fn, _ = functions(twin, name)
    param_N = (torch.arange(99_999, device=DEVICE) % 977 / 1024 - 0.5).contiguous()
    grad_N, _ = clip(torch.arange(99_999, device=DEVICE) % 1013 / 1024 - 0.5, clip_norm=1.0)
    state = (param_N, *OPTIMIZERS[name].moments(param_N))
    for step in range(3):
        state = step_fn(state[0], grad_N, *state[1:], Hyperparameters(**SETTINGS, num_decayed=70_001, step=step))
    digest = blake3()
    for tensor in state:
        digest.update(tensor.cpu().numpy().tobytes())
    assert digest.hexdigest(length=8) == GOLDEN[name]


@each_name
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    step_fn, _ = functions(reference, name)
    state = start(name, 300_001)
    threads = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            grad_N, norm = clip(randn(300_001, 1), clip_norm=1.0)
            results.append(
                (norm, step_fn(state[0], grad_N, *state[1:], Hyperparameters(**SETTINGS, num_decayed=200_000, step=3)))
            )
    finally:
        torch.set_num_threads(threads)
    for norm, tensors in results[1:]:
        assert norm == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(tensors, results[0][1], strict=True))


@each_name
def test_nothing_is_changed_in_place(twin: ModuleType, name: str) -> None:
    step_fn, predict_fn = functions(twin, name)
    state = start(name, 33)
    grad_N = randn(33, 9)
    inputs = (state[0], grad_N, *state[1:])
    before = [tensor.clone() for tensor in inputs]
    first = step_fn(*inputs, Hyperparameters(**SETTINGS, num_decayed=20, step=0))
    frozen = [tensor.clone() for tensor in first]
    predict_fn(*first, Hyperparameters(**SETTINGS, num_decayed=20, step=1), 2)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(frozen, first, strict=True))
    assert first[0].data_ptr() != state[0].data_ptr()
    assert first[1].data_ptr() != state[1].data_ptr()


@each_name
def test_only_matrices_decay(twin: ModuleType, name: str) -> None:
    step_fn, _ = functions(twin, name)
    param_N, moment1_N, moment2_N = start(name, 12)
    zero_N = torch.zeros(12, device=DEVICE)
    after_N, _, _ = step_fn(param_N, zero_N, moment1_N, moment2_N, Hyperparameters(**SETTINGS, num_decayed=7, step=0))
    torch.testing.assert_close(after_N[:7], param_N[:7] * (1 - 3e-3 * 0.1))
    assert torch.equal(after_N[7:], param_N[7:])


@each_name
@given(n=st.sampled_from([0, 1, 3, 15, 16, 17, 63, 65, 1025]), stride=st.integers(1, 3), seed=st.integers(0, 99))
def test_empty_odd_and_strided_tensors_give_what_contiguous_ones_give(
    twin: ModuleType, name: str, n: int, stride: int, seed: int
) -> None:
    step_fn, predict_fn = functions(twin, name)
    param_N, grad_N = randn(n * stride, seed)[::stride], randn(n * stride, seed + 1)[::stride]
    moment1_N = randn(n * stride, seed + 2)[::stride]
    has_moment2 = OPTIMIZERS[name].moment2_of == "all"
    moment2_N = randn(n * stride, seed + 3).square()[::stride] if has_moment2 else torch.zeros(0, device=DEVICE)
    arguments = (param_N, grad_N, moment1_N, moment2_N)
    got = step_fn(*arguments, Hyperparameters(**SETTINGS, num_decayed=n // 2, step=4))
    want = step_fn(
        *(tensor.contiguous() for tensor in arguments), Hyperparameters(**SETTINGS, num_decayed=n // 2, step=4)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert got[0].shape == (n,)
    predicted_N = predict_fn(*got, Hyperparameters(**SETTINGS, num_decayed=n // 2, step=5), 2)
    assert predicted_N.shape == (n,)
    assert predicted_N.isfinite().all()


@each_name
def test_signature_is_that_of_the_reference(twin: ModuleType, name: str) -> None:
    for function, wanted in zip(functions(twin, name), functions(reference, "sgd"), strict=True):
        assert inspect.signature(function) == inspect.signature(wanted)


@each_name
def test_moments_of_version_0_are_zero_and_sgd_has_one(name: str) -> None:
    moment1_N, moment2_N = OPTIMIZERS[name].moments(torch.ones(5))
    assert moment1_N.tolist() == [0.0] * 5
    assert moment2_N.shape == ((0,) if name == "sgd" else (5,))


@given(clip_norm=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_clip_is_torchs(clip_norm: float, seed: int) -> None:
    grad_N = randn(50, seed)
    parameter = torch.zeros(50, requires_grad=True)
    parameter.grad = grad_N.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
    clipped_N, got_norm = clip(grad_N, clip_norm=clip_norm)
    torch.testing.assert_close(clipped_N, parameter.grad, rtol=1e-6, atol=1e-7)
    assert got_norm == pytest.approx(float(norm))


def test_clip_of_zero_does_nothing() -> None:
    grad_N = randn(50, 0) * 1000
    assert clip(grad_N, clip_norm=0)[0] is grad_N
