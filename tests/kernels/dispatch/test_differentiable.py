"""Letters as in test_dispatch.py"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.dispatch import combine, differentiable, group, grouped_matmul, permute, reference

N, K, E, D, R = 7, 2, 4, 3, 5
CHOSEN_NK = torch.tensor([[1, 2], [2, 1], [2, 3], [2, 1], [1, 2], [2, 1], [1, 2]])
"""Nobody wants expert 0, one token expert 3, all expert 1 or 2."""
GROUPS = group(CHOSEN_NK, E)


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def mixed(x_ND: Tensor, weight_NK: Tensor, *weights: Tensor) -> Tensor:
    return combine(grouped_matmul(permute(x_ND, GROUPS), weights, GROUPS.offset_E), weight_NK, GROUPS)


def test_gradients_are_those_of_finite_differences() -> None:
    weights = [leaf(R, D, seed=10 + e) for e in range(E)]
    assert torch.autograd.gradcheck(mixed, (leaf(N, D, seed=0), leaf(N, K, seed=1), *weights))


def test_the_three_together_are_each_tokens_weighted_experts() -> None:
    x_ND, weight_NK, weights = leaf(N, D, seed=0), leaf(N, K, seed=1), [leaf(R, D, seed=10 + e) for e in range(E)]
    for n, y_R in enumerate(mixed(x_ND, weight_NK, *weights)):
        want_R = sum(weight_NK[n, k] * (weights[int(CHOSEN_NK[n, k])] @ x_ND[n]) for k in range(K))
        assert isinstance(want_R, Tensor)
        torch.testing.assert_close(y_R, want_R)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    weights = [leaf(R, D, seed=10 + e) for e in range(E)]
    mixed(leaf(N, D, seed=0), leaf(N, K, seed=1), *weights).sum().backward()
    assert [bool(weight.grad is not None and weight.grad.any()) for weight in weights] == [False, True, True, True]


def test_gradients_add_up_in_place_in_what_is_there() -> None:
    """As `LayerLayout.collect` has it: each leaf's gradient is a part of one flat tensor."""
    gradient_N = torch.ones(E * R * D, dtype=torch.float64)
    weights = [leaf(R, D, seed=10 + e) for e in range(E)]
    for weight, part_N in zip(weights, gradient_N.split(R * D), strict=True):
        weight.grad = part_N.view(R, D)
    x_ND, weight_NK = leaf(N, D, seed=0), leaf(N, K, seed=1)
    mixed(x_ND, weight_NK, *weights).sum().backward()
    want = torch.autograd.grad(mixed(x_ND, weight_NK, *weights).sum(), weights)
    torch.testing.assert_close(gradient_N, 1 + torch.cat([gradient.flatten() for gradient in want]))


def test_a_gradient_that_nobody_wants_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the matrices' gradients were computed")

    monkeypatch.setattr(reference, "grouped_outer", refuse)
    x_ND = leaf(N, D, seed=0)
    mixed(x_ND, leaf(N, K, seed=1), *(leaf(R, D, seed=e).detach() for e in range(E))).sum().backward()
    assert x_ND.grad is not None
    assert x_ND.grad.any()


def test_wrong_arguments_are_refused() -> None:
    x_ND, weights = leaf(N, D, seed=0), [leaf(R, D, seed=e) for e in range(E)]
    with pytest.raises(ValueError, match="3 matrices for 4 groups"):
        grouped_matmul(permute(x_ND, GROUPS), weights[:3], GROUPS.offset_E)
    with pytest.raises(ValueError, match="float32, not"):
        combine(permute(x_ND.float(), GROUPS), leaf(N, K, seed=1), GROUPS)


def test_tensors_on_a_cpu_never_ask_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("Triton was asked for")

    monkeypatch.setattr(differentiable, "_triton", refuse)
    weights = [leaf(R, D, seed=e, dtype=torch.float32) for e in range(E)]
    mixed(leaf(N, D, seed=0, dtype=torch.float32), leaf(N, K, seed=1, dtype=torch.float32), *weights).sum().backward()


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "chosen"),
    [
        ("cuda", torch.float32, True, "twins"),
        ("cuda", torch.bfloat16, True, "twins"),
        ("cuda", torch.float64, True, reference),
        ("cuda", torch.float32, False, reference),
        ("cpu", torch.float32, True, reference),
    ],
)
def test_who_computes(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, installed: bool, chosen: Any
) -> None:
    monkeypatch.setattr(differentiable, "_triton", lambda: "twins" if installed else None)
    tensor: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    assert differentiable._twins(tensor) == chosen
