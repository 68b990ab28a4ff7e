"""Step and prediction in one pass. N elements of one layer."""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shoal.kernels.optimizer as package
from shoal.kernels.optimizer import OPTIMIZERS, Ahead, advance, reference
from shoal.kernels.optimizer.rules import Advance

SETTINGS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
each_name = pytest.mark.parametrize("name", ["sgd", "adamw", "nadam"])
aheads = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 0.5, 1.25])), max_size=3)


def advance_of(twin: ModuleType, name: str) -> Advance:
    function: Advance = getattr(advance if twin is reference else twin, f"{name}_advance")
    return function


def inputs(name: str, n: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    param_N, grad_N, moment1_N = (torch.randn(n, generator=generator) for _ in range(3))
    moment2_N = moment1_N.square() + 0.1 if name != "sgd" else moment1_N[:0]
    return param_N.to(device), grad_N.to(device), moment1_N.to(device), moment2_N.to(device)


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).tolist()
    return values


@each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(n=st.sampled_from([0, 1, 17, 1000]), step=st.integers(0, 9), ahead=aheads, seed=st.integers(0, 99))
def test_it_is_a_step_and_then_predictions(
    twin: ModuleType, device: str, name: str, dtype: torch.dtype, n: int, step: int, ahead: list[Ahead], seed: int
) -> None:
    """Bit for bit but for what fast twins predict, which stays on one peer."""
    param_N, grad_N, moment1_N, moment2_N = inputs(name, n, seed, device)
    settings = {**SETTINGS, "num_decayed": n // 2}
    *state, copies = advance_of(twin, name)(
        param_N, grad_N, moment1_N, moment2_N,
        learning_rate=3e-3, **settings, step=step, ahead=ahead, ahead_learning_rate=2e-3, compute_dtype=dtype,
    )  # fmt: skip
    wanted = getattr(reference, f"{name}_step")(
        param_N, grad_N, moment1_N, moment2_N, learning_rate=3e-3, **settings, step=step
    )
    assert all(torch.equal(got, want) for got, want in zip(state, wanted, strict=True))
    assert len(copies) == len(ahead)
    for copy_N, (staleness_steps, gain) in zip(copies, ahead, strict=True):
        ahead_N = getattr(reference, f"{name}_predict")(
            *wanted, learning_rate=2e-3, **settings, step=step + 1, staleness_steps=staleness_steps
        )
        if staleness_steps:
            ahead_N = wanted[0].lerp(ahead_N, gain) if gain != 1 else ahead_N
        assert copy_N.dtype == dtype
        if twin is reference or not staleness_steps:
            assert torch.equal(copy_N, ahead_N.to(dtype))
        else:
            tolerance = 1e-6 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(copy_N.float(), ahead_N, rtol=tolerance, atol=1e-6)


@each_name
def test_a_float32_copy_of_the_new_weights_is_the_new_weights(twin: ModuleType, device: str, name: str) -> None:
    settings: dict[str, Any] = {**SETTINGS, "num_decayed": 9, "step": 2, "ahead_learning_rate": 1e-3}
    param_N, _, _, copies = advance_of(twin, name)(
        *inputs(name, 33, 0, device), learning_rate=1e-3, **settings, ahead=[(1, 1.0), (0, 1.0), (0, 0.5)]
    )
    assert copies[1] is copies[2] is param_N
    assert copies[0] is not param_N


@each_name
def test_nothing_is_changed_in_place_and_copies_share_no_memory(twin: ModuleType, device: str, name: str) -> None:
    """A copy must be free to live longer than its neighbours."""
    old = inputs(name, 33, 0, device)
    before = [tensor.clone() for tensor in old]
    settings: dict[str, Any] = {**SETTINGS, "num_decayed": 9, "step": 2, "ahead_learning_rate": 1e-3}
    param_N, moment1_N, _, copies = advance_of(twin, name)(
        *old, learning_rate=1e-3, **settings, ahead=[(0, 1.0), (1, 1.0)], compute_dtype=torch.bfloat16
    )
    assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*old[:3], param_N, moment1_N, *copies)}
    assert len(storages) == 7


def test_narrowing_is_to_the_nearest_bf16_ties_to_even(twin: ModuleType, device: str) -> None:
    """Triton's interpreter would truncate; the kernel rounds by itself."""
    patterns = [
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0x3F807FFF,
        0x3FFFFFFF,
        0x7F7FFFFF,
        0x00000001,
        0x00018000,
        0x80018000,
    ]
    patterns += [0x3F800000 + 977 * i for i in range(200)]
    special = [0.0, -0.0, float("inf"), -float("inf")]
    values_N = torch.tensor([p - 2**32 if p >= 2**31 else p for p in patterns], dtype=torch.int32).view(torch.float32)
    param_N = torch.cat((values_N, -values_N, torch.tensor(special))).to(device)
    zero_N = torch.zeros_like(param_N)
    settings: dict[str, Any] = {
        **SETTINGS,
        "weight_decay": 0.0,
        "num_decayed": 0,
        "step": 0,
        "ahead_learning_rate": 0.0,
    }
    new_N, _, _, copies = advance_of(twin, "sgd")(
        param_N, zero_N, zero_N, zero_N[:0],
        learning_rate=1e-3, **settings, ahead=[(0, 1.0)], compute_dtype=torch.bfloat16,
    )  # fmt: skip
    assert bits(copies[0]) == bits(new_N.to(torch.bfloat16))
    nan_N = torch.tensor([float("nan"), -float("nan")], device=device)
    *_, copies = advance_of(twin, "sgd")(
        nan_N, nan_N, nan_N, nan_N[:0],
        learning_rate=1e-3, **settings, ahead=[(0, 1.0)], compute_dtype=torch.bfloat16,
    )  # fmt: skip
    assert copies[0].isnan().all()


@each_name
def test_predictions_of_the_twins_agree(twin: ModuleType, device: str, name: str) -> None:
    param_N, _, moment1_N, moment2_N = inputs(name, 5000, 3, device)
    for staleness_steps in (1, 2, 5):
        settings: dict[str, Any] = {
            **SETTINGS, "learning_rate": 3e-3, "num_decayed": 3001, "step": 4, "staleness_steps": staleness_steps,
        }  # fmt: skip
        got_N = getattr(twin, f"{name}_predict")(param_N, moment1_N, moment2_N, **settings)
        want_N = getattr(reference, f"{name}_predict")(param_N, moment1_N, moment2_N, **settings)
        torch.testing.assert_close(got_N, want_N, rtol=1e-6, atol=1e-6)


@each_name
def test_other_dtypes_are_refused(twin: ModuleType, device: str, name: str) -> None:
    settings: dict[str, Any] = {**SETTINGS, "num_decayed": 0, "step": 0, "ahead_learning_rate": 1e-3}
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        advance_of(twin, name)(
            *inputs(name, 3, 0, device), learning_rate=1e-3, **settings, ahead=[], compute_dtype=torch.float16
        )


@each_name
def test_signature_is_that_of_the_protocol(twin: ModuleType, name: str) -> None:
    wanted = inspect.signature(Advance.__call__)
    wanted = wanted.replace(parameters=list(wanted.parameters.values())[1:])
    assert inspect.signature(advance_of(twin, name)) == wanted


def test_muon_advances_too() -> None:
    param_N, grad_N, moment1_N, _ = inputs("adamw", 70, 0, "cpu")
    matrices, moment2_N = ((0, 6, 10),), torch.ones(10)
    settings: dict[str, Any] = {**SETTINGS, "num_decayed": 65, "matrices": matrices}
    *state, (copy_N, ahead_N) = OPTIMIZERS["muon"].advance(
        param_N, grad_N, moment1_N, moment2_N, learning_rate=3e-3, **settings, step=1, ahead=[(0, 1.0), (2, 1.0)],
        ahead_learning_rate=2e-3,
    )  # fmt: skip
    wanted = OPTIMIZERS["muon"].step(param_N, grad_N, moment1_N, moment2_N, learning_rate=3e-3, **settings, step=1)
    assert all(torch.equal(got, want) for got, want in zip(state, wanted, strict=True))
    assert copy_N is state[0]
    predicted_N = OPTIMIZERS["muon"].predict(*wanted, learning_rate=2e-3, **settings, step=2, staleness_steps=2)
    assert torch.equal(ahead_N, predicted_N)


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
        optimizer.advance(param_N, grad_N, moment1_N, moment2_N, **settings, ahead=[], ahead_learning_rate=1e-3)


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
    twins = SimpleNamespace(adamw_step=lambda *_, **__: "twin")
    monkeypatch.setattr(package, "_triton", lambda: twins if installed else None)
    tensor: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, numel=lambda: 1)
    assert package._by_device("adamw_step", lambda *_, **__: "reference")(tensor) == chosen
    assert package._by_device("muon_step", lambda *_, **__: "reference")(tensor) == "reference"
