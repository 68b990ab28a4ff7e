"""Muon. N elements of one layer, R rows, C columns."""

from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.optimizer import OPTIMIZERS, exact_products
from shoal.kernels.optimizer.muon import muon_predict, muon_step
from shoal.kernels.optimizer.orthogonal import orthogonal, orthogonal_nearby
from shoal.kernels.optimizer.reference import adamw_predict, adamw_step
from shoal.kernels.optimizer.rules import Hyperparameters

SETTINGS: dict[str, Any] = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
MATRICES = ((0, 24, 40), (960, 40, 24), (1920, 8, 8))
H, DECAYED, N = 1984, 1984 + 30, 1984 + 30 + 17
"""Three hidden matrices, then 30 elements that decay as an embedding's do, then 17 of a norm."""

GOLDEN = "b3954551a7df48bc"


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def start(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    param_N = randn(N, seed=seed)
    return (param_N, *OPTIMIZERS["muon"].moments(param_N, MATRICES))


def step_on(state: tuple[Tensor, Tensor, Tensor], grad_N: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    return muon_step(state[0], grad_N, *state[1:], hyper(step))


def hyper(step: int) -> Hyperparameters:
    return Hyperparameters(**SETTINGS, num_decayed=DECAYED, step=step, matrices=MATRICES)


# --- orthogonality ---


@given(
    R=st.integers(1, 40), C=st.integers(1, 40), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]), seed=st.integers(0, 99)
)
def test_singular_values_come_near_one_and_singular_vectors_stay(R: int, C: int, scale: float, seed: int) -> None:
    x_RC = randn(R, C, seed=seed) * scale
    u_RK, s_K, v_KC = torch.linalg.svd(x_RC.double(), full_matrices=False)
    for got_RC, most in ((orthogonal(x_RC), 5e-3), (orthogonal_nearby(x_RC), 2e-3)):  # 6,000 seeds: 3.0e-3 at most
        assert got_RC.dtype == torch.float32
        assert got_RC.is_contiguous()
        core_KK = u_RK.T @ got_RC.double() @ v_KC.T
        values_K = core_KK.diagonal()
        assert (core_KK - values_K.diag()).abs().max() < most
        large_K = s_K > 0.002 * s_K.square().sum().sqrt()
        assert values_K[large_K].min() > 0.67  # 0.682 and 1.202 are the iteration's own extremes
        assert values_K[large_K].max() < 1.21
        assert values_K.min() > -1e-3


def test_zeros_stay_zeros() -> None:
    for make in (orthogonal, orthogonal_nearby):
        assert torch.equal(make(torch.zeros(4, 7)), torch.zeros(4, 7))


def test_the_exact_way_is_near_the_plain_one() -> None:
    for shape in ((64, 256), (256, 64), (96, 96)):
        x_RC = randn(*shape, seed=1)
        assert (orthogonal(x_RC) - orthogonal_nearby(x_RC)).abs().max() < 1.5e-3  # 20 seeds: 9e-4 at most


# --- bits ---


@pytest.mark.parametrize("is_int8", [True, False], ids=["int8", "float64"])
def test_bits_of_steps_are_the_same_on_every_device(is_int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_optimizer.py`'s: replicas compare digests, and multiply in int8 or in float64."""
    monkeypatch.setattr(torch, "_int_mm", lambda a_RK, b_KC: a_RK.int() @ b_KC.int())  # not exact on each processor
    monkeypatch.setattr(exact_products, "multiplies_int8", lambda device: is_int8)
    param_N = torch.arange(N) % 977 / 1024 - 0.5
    grad_N = torch.arange(N) ** 2 % 1013 / 1024 - 0.5
    state = (param_N, *OPTIMIZERS["muon"].moments(param_N, MATRICES))
    for step in range(3):
        state = step_on(state, grad_N, step)
    digest = blake3()
    for tensor in state:
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest(length=8) == GOLDEN


def test_bits_do_not_depend_on_threads_or_on_the_order_in_which_products_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_products, "multiplies_int8", lambda device: False)
    state, grad_N = start(), randn(150 * 200, seed=4)
    wanted = step_on(state, grad_N[:N], 3)
    large_RC = orthogonal(grad_N.view(150, 200))
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 7):
            torch.set_num_threads(num_threads)
            assert torch.equal(orthogonal(grad_N.view(150, 200)), large_RC)
            assert all(torch.equal(a, b) for a, b in zip(step_on(state, grad_N[:N], 3), wanted, strict=True))
    finally:
        torch.set_num_threads(threads)
    plain = Tensor.__matmul__

    def backwards_in_blocks(a_RK: Tensor, b_KC: Tensor) -> Tensor:
        parts = zip(a_RK.flip(1).split(7, dim=1), b_KC.flip(0).split(7), strict=True)
        return torch.stack([plain(a, b) for a, b in parts]).sum(0)

    x_RC = randn(96, 128, seed=2)
    assert not torch.equal(plain(x_RC, x_RC.T), backwards_in_blocks(x_RC, x_RC.T))
    monkeypatch.setattr(Tensor, "__matmul__", backwards_in_blocks)
    assert torch.equal(orthogonal(grad_N.view(150, 200)), large_RC)
    assert all(torch.equal(a, b) for a, b in zip(step_on(state, grad_N[:N], 3), wanted, strict=True))


# --- the rule ---


def plain_orthogonal(x_RC: Tensor) -> Tensor:
    x_RC = x_RC / x_RC.norm()
    for _ in range(5):
        gram_RR = x_RC @ x_RC.T
        x_RC = 3.4445 * x_RC + (-4.7750 * gram_RR + 2.0315 * gram_RR @ gram_RR) @ x_RC
    return x_RC


def test_matrices_step_as_plain_float32_muon_does_and_the_rest_as_adamw() -> None:
    state = start()
    plain = [state[0][first : first + R * C].view(R, C).clone() for first, R, C in MATRICES]
    momenta = [torch.zeros_like(matrix) for matrix in plain]
    rest = (state[0][H:], state[1][H:], state[2])
    for step in range(20):
        grad_N = randn(N, seed=step + 1) + 0.3
        state = step_on(state, grad_N, step)
        of_the_rest = Hyperparameters(**SETTINGS, num_decayed=DECAYED - H, step=step)
        rest = adamw_step(rest[0], grad_N[H:], *rest[1:], of_the_rest)
        for index, (first, R, C) in enumerate(MATRICES):
            grad_RC = grad_N[first : first + R * C].view(R, C)
            momenta[index] = 0.9 * momenta[index] + grad_RC
            change_RC = 0.2 * max(R, C) ** 0.5 * plain_orthogonal(0.9 * momenta[index] + grad_RC)
            plain[index] = plain[index] * (1 - 3e-3 * 0.1) - 3e-3 * change_RC
    torch.testing.assert_close(state[0][:H], torch.cat([matrix.view(-1) for matrix in plain]), rtol=1e-4, atol=1e-4)
    for got, want in zip((state[0][H:], state[1][H:], state[2]), rest, strict=True):
        assert torch.equal(got, want)


def test_a_step_is_as_long_as_one_of_adamw() -> None:
    """0.2 learning rates in the root mean square, which is AdamW's usual one."""
    for R, C in ((64, 256), (256, 64), (128, 128)):
        param_N = torch.zeros(R * C)
        first = Hyperparameters(**SETTINGS, num_decayed=R * C, step=0, matrices=((0, R, C),))
        after_N, _, _ = muon_step(param_N, randn(R * C, seed=3), param_N, param_N[:0], first)
        assert 0.14 < float(after_N.square().mean().sqrt()) / SETTINGS["learning_rate"] < 0.24


def test_without_matrices_it_is_adamw() -> None:
    param_N, grad_N, moment1_N = (randn(50, seed=seed) for seed in range(3))
    moment2_N = moment1_N.square()
    plain = Hyperparameters(**SETTINGS, num_decayed=30, step=4)
    got = muon_step(param_N, grad_N, moment1_N, moment2_N, plain)
    want = adamw_step(param_N, grad_N, moment1_N, moment2_N, plain)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    predicted_N = muon_predict(param_N, moment1_N, moment2_N, plain, 2)
    assert torch.equal(predicted_N, adamw_predict(param_N, moment1_N, moment2_N, plain, 2))


def test_only_what_is_no_hidden_matrix_has_a_second_moment() -> None:
    assert [tensor.numel() for tensor in start()] == [N, N, N - H]
    assert OPTIMIZERS["muon"].moment2_numel(50) == 50


@pytest.mark.parametrize("matrices", [((4, 2, 3),), ((0, 2, 3), (7, 2, 3)), ((6, 2, 3), (0, 2, 3))])
def test_matrices_with_gaps_are_refused(matrices: tuple[tuple[int, int, int], ...]) -> None:
    zero_N, gaps = torch.zeros(13), Hyperparameters(**SETTINGS, num_decayed=13, step=0, matrices=matrices)
    with pytest.raises(ValueError, match="without gaps"):
        muon_step(zero_N, zero_N, zero_N, zero_N, gaps)


def test_nothing_is_changed_in_place() -> None:
    state, grad_N = step_on(start(), randn(N, seed=8), 0), randn(N, seed=9)
    before = [tensor.clone() for tensor in (*state, grad_N)]
    step_on(state, grad_N, 1)
    muon_predict(*state, hyper(1), 2)
    assert all(torch.equal(a, b) for a, b in zip((*state, grad_N), before, strict=True))
