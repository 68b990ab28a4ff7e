"""The exact products that Muon's bits rest on. R rows, C columns, K what a product sums over."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.optimizer import exact_products
from shoal.kernels.optimizer.exact_products import MOST_BITS, exact_matmul, exact_square, fixed, operand_bits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def int32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose products of int8 are exact: that of the machine which runs the tests may have none."""
    monkeypatch.setattr(torch, "_int_mm", lambda a_RK, b_KC: a_RK.int() @ b_KC.int())
    exact_products.multiplies_int8.cache_clear()


@pytest.fixture(params=["int8", "float64"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(exact_products, "multiplies_int8", lambda device: request.param == "int8")
    return str(request.param)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(K=st.integers(1, 70), peak=st.floats(-60, 60), seed=st.integers(0, 99))
def test_products_are_exact_in_every_order(K: int, peak: float, seed: int) -> None:
    a_RK = fixed(randn(5, K, seed=seed).double() * 2.0**peak, terms=K)
    b_KC = fixed(randn(K, 6, seed=seed + 1).double() * 2.0**-peak, terms=K)
    true_RC = a_RK.whole_RC.to(torch.int64) @ b_KC.whole_RC.to(torch.int64)
    for product in (exact_products.product_of_doubles, exact_products.product_of_slices):
        assert torch.equal(product(a_RK.whole_RC, b_KC.whole_RC), true_RC.double())
    assert torch.equal(exact_matmul(a_RK, b_KC), true_RC.double() * a_RK.unit * b_KC.unit)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(a_RK.whole_RC[:, order] @ b_KC.whole_RC[order], true_RC.double())
    halves = [a_RK.whole_RC[:, part] @ b_KC.whole_RC[part] for part in (slice(0, K // 2), slice(K // 2, None))]
    assert torch.equal(halves[1] + halves[0], true_RC.double())


@given(R=st.integers(1, 70), K=st.integers(1, 70), seed=st.integers(0, 99))
def test_a_matrix_by_itself_is_the_same_both_ways(R: int, K: int, seed: int) -> None:
    whole_RK = fixed(randn(R, K, seed=seed).double(), terms=K).whole_RC
    true_RR = (whole_RK.to(torch.int64) @ whole_RK.to(torch.int64).T).double()
    assert torch.equal(exact_products.square_of_doubles(whole_RK), true_RR)
    assert torch.equal(exact_products.square_of_slices(whole_RK), true_RR)


@pytest.mark.usefixtures("way")
def test_products_of_the_largest_operands_do_not_overflow() -> None:
    for K in (1, 2, 3, 1024, 8192, 8193, 1 << 16, 1 << 25, (1 << 25) + 1):
        a_1K = fixed(torch.ones(1, K).double(), terms=K)
        b_K1 = fixed(torch.full((K, 1), 1 - 2.0**-40, dtype=torch.float64), terms=K)
        assert b_K1.whole_RC[0, 0] == 2 ** operand_bits(K)
        true = a_1K.whole_RC[0, 0] * b_K1.whole_RC[0, 0] * K
        assert exact_matmul(a_1K, b_K1) == true * a_1K.unit * b_K1.unit
        assert exact_square(a_1K) == a_1K.whole_RC[0, 0] ** 2 * K * a_1K.unit**2
        assert operand_bits(K) == MOST_BITS or math.log2(K) > 25
        assert 2 * operand_bits(K) + math.log2(K) <= 53


def test_every_operand_is_two_slices() -> None:
    whole_RK = torch.arange(-(2**MOST_BITS), 2**MOST_BITS + 1, dtype=torch.float64).unsqueeze(0)
    high_RK, low_RK = exact_products._slices(whole_RK)
    assert torch.equal(high_RK.double()[:1, : whole_RK.numel()] * 256 + low_RK[:1, : whole_RK.numel()], whole_RK)
    assert not high_RK[1:].any()
    assert not low_RK[1:].any()


@pytest.mark.usefixtures("way")
def test_what_is_rounded_is_within_half_a_unit_and_zero_is_never_negative() -> None:
    x_RC = randn(7, 9, seed=0).double()
    rounded = fixed(x_RC, terms=9)
    assert ((rounded.whole_RC * rounded.unit - x_RC).abs() <= rounded.unit / 2).all()
    assert rounded.unit <= x_RC.abs().max() * 2.0 ** (1 - operand_bits(9))
    nothing, negative = fixed(torch.zeros(2, 2).double(), terms=2), fixed(-torch.ones(2, 2).double(), terms=2)
    assert not exact_matmul(nothing, negative).signbit().any()


# --- which way ---


def saturating(a_RK: Tensor, b_KC: Tensor) -> Tensor:
    """Products of int8 as processors without VNNI make them: two of them are added up in 16 bits."""
    each_RKC = (a_RK.int() + 128).unsqueeze(2) * b_KC.int().unsqueeze(0)
    pairs_RC = each_RKC.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1).sum(1)
    return (pairs_RC - 128 * b_KC.int().sum(0)).int()


def refused(a_RK: Tensor, b_KC: Tensor) -> Tensor:
    raise RuntimeError("_int_mm is not implemented")


def test_a_device_multiplies_int8_where_it_is_exact_and_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = {"product_of_slices": 1.0, "product_of_doubles": 2.0}
    monkeypatch.setattr(exact_products, "_best_s", lambda product, device: took_s[product.__name__])
    assert exact_products.multiplies_int8(CPU)
    for product in (saturating, refused):
        exact_products.multiplies_int8.cache_clear()
        with monkeypatch.context() as other:
            other.setattr(torch, "_int_mm", product)
            assert not exact_products.multiplies_int8(CPU)
    exact_products.multiplies_int8.cache_clear()
    took_s["product_of_doubles"] = 0.5
    assert not exact_products.multiplies_int8(CPU)


def test_a_device_that_is_out_of_memory_for_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = {"product_of_slices": 1.0, "product_of_doubles": 2.0}
    monkeypatch.setattr(exact_products, "_best_s", lambda product, device: took_s[product.__name__])

    def full(a_RK: Tensor, b_KC: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as other:
        other.setattr(torch, "_int_mm", full)
        with pytest.raises(torch.OutOfMemoryError):
            exact_products.multiplies_int8(CPU)
    assert exact_products.multiplies_int8(CPU)


def test_the_time_of_both_ways_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    times = iter([0.0, 5.0, 5.0, 7.0, 7.0, 8.0, 8.0, 12.0])
    monkeypatch.setattr(exact_products.time, "perf_counter", lambda: next(times))

    def product(a_RK: Tensor, b_KR: Tensor) -> Tensor:
        asked.append(f"{tuple(a_RK.shape)} {tuple(b_KR.shape)}")
        return exact_products.product_of_doubles(a_RK, b_KR)

    assert exact_products._best_s(product, CPU) == 1.0
    assert asked == ["(256, 1024) (1024, 256)"] * 4
