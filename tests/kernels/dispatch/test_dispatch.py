"""N tokens, K choices a token, P = N K rows, E experts, D width, R rows and C columns of a matrix"""

import inspect
from types import ModuleType

import pytest
import torch
from torch import Tensor

from shoal.kernels.dispatch import Groups, group, reference

N, K, E, D = 18, 2, 5, 19
LOADS = ["even", "none_and_one", "all"]


def chosen(load: str, device: str, *, num_tokens: int = N) -> Tensor:
    """Different experts for each token. none_and_one: nobody wants expert 0, one token expert 3; all: all want 2."""
    token_N = torch.arange(num_tokens)
    match load:
        case "even":
            pairs = (token_N % E, (token_N + 1 + token_N // E % (E - 1)) % E)
        case "none_and_one":
            pairs = (torch.where(token_N == 4, 3, 1), torch.where(token_N % 3 == 0, 2, 4))
        case _:
            pairs = (torch.full_like(token_N, 2), torch.where(token_N % 2 == 0, 0, 4))
    return torch.stack(pairs, 1).to(device)


def some(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def matrices(R: int, C: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Views of one buffer, with something else behind each, as a layer's are."""
    flat = some(E, R * C + 7, seed=3, device=device, dtype=dtype)
    return [flat_N[: R * C].view(R, C) for flat_N in flat]


def plain_matmul(x_PC: Tensor, weights: list[Tensor], chosen_NK: Tensor, groups: Groups) -> Tensor:
    """Row by row."""
    expert_P = chosen_NK.flatten()[groups.choice_P]
    return torch.stack([x_C @ weights[int(e)].T for x_C, e in zip(x_PC, expert_P, strict=True)])


each_load = pytest.mark.parametrize("load", LOADS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def close(got: Tensor, want: Tensor) -> None:
    """`want` in float32 or more; bf16 is rounded once, at the end."""
    narrow = got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want.double(), rtol=2**-8 if narrow else 1e-5, atol=1e-5)


# --- groups ---


@each_load
def test_rows_are_sorted_by_expert_and_then_by_token_and_none_is_lost(load: str, device: str) -> None:
    chosen_NK = chosen(load, device)
    groups = group(chosen_NK, E)
    expert_P = chosen_NK.flatten()[groups.choice_P]
    assert torch.equal(groups.choice_P.sort().values.cpu(), torch.arange(N * K))
    assert bool((expert_P.diff() >= 0).all())
    assert bool(((expert_P.diff() > 0) | (groups.token_P.diff() > 0)).all())
    assert torch.equal(groups.token_P, groups.choice_P // K)
    assert torch.equal(groups.row_NK.flatten()[groups.choice_P].cpu(), torch.arange(N * K))
    assert groups.offset_E.diff().tolist() == torch.bincount(chosen_NK.flatten().cpu(), minlength=E).tolist()
    assert groups.offset_E[0] == 0


def test_the_loads_are_what_their_names_say(device: str) -> None:
    counts = {load: group(chosen(load, device), E).offset_E.diff().tolist() for load in LOADS}
    assert min(counts["even"]) >= 6
    assert counts["none_and_one"][0] == 0
    assert counts["none_and_one"][3] == 1
    assert counts["all"][2] == N


def test_no_tokens_make_no_rows(device: str) -> None:
    groups = group(torch.zeros(0, K, dtype=torch.int64, device=device), E)
    assert groups.offset_E.tolist() == [0] * (E + 1)
    assert groups.choice_P.shape == (0,)


# --- what every twin does ---


@each_dtype
@each_load
def test_permute_copies_each_token_to_its_rows(twin: ModuleType, device: str, load: str, dtype: torch.dtype) -> None:
    groups = group(chosen(load, device), E)
    x_ND = some(N, D, seed=0, device=device, dtype=dtype)
    assert torch.equal(twin.permute(x_ND, groups), x_ND[groups.token_P])
    grad_PD = some(N * K, D, seed=1, device=device, dtype=dtype)
    want_ND = torch.zeros(N, D, dtype=torch.float64, device=device).index_add(0, groups.token_P, grad_PD.double())
    close(twin.permute_backward(grad_PD, groups), want_ND)


@each_dtype
@each_load
def test_combine_is_the_weighted_sum_and_its_backward_what_autograd_says(
    twin: ModuleType, device: str, load: str, dtype: torch.dtype
) -> None:
    groups = group(chosen(load, device), E)
    y_PD = some(N * K, D, seed=0, device=device, dtype=dtype)
    weight_NK = some(N, K, seed=1, device=device)
    grad_ND = some(N, D, seed=2, device=device, dtype=dtype)
    leaves = [y_PD.double().requires_grad_(), weight_NK.double().requires_grad_()]
    want_ND = (leaves[0][groups.row_NK] * leaves[1].unsqueeze(-1)).sum(1)
    got_ND = twin.combine(y_PD, weight_NK, groups)
    assert got_ND.dtype == dtype
    close(got_ND, want_ND.detach())
    want = torch.autograd.grad(want_ND, leaves, grad_ND.double())
    got = twin.combine_backward(grad_ND, y_PD, weight_NK, groups)
    assert [tensor.dtype for tensor in got] == [dtype, torch.float32]
    for one, other in zip(got, want, strict=True):
        close(one, other)


@each_dtype
@each_load
def test_each_experts_rows_meet_its_matrix_and_no_other(
    twin: ModuleType, device: str, load: str, dtype: torch.dtype
) -> None:
    R, C = 33, 19  # more than two tiles and a little; one and a little
    chosen_NK = chosen(load, device)
    groups = group(chosen_NK, E)
    weights = matrices(R, C, device, dtype)
    wide = [weight.double().requires_grad_() for weight in weights]
    x_PC = some(N * K, C, seed=1, device=device, dtype=dtype)
    grad_PR = some(N * K, R, seed=2, device=device, dtype=dtype)
    leaf_PC = x_PC.double().requires_grad_()
    want_PR = plain_matmul(leaf_PC, wide, chosen_NK, groups)
    want = torch.autograd.grad(want_PR, [leaf_PC, *wide], grad_PR.double(), allow_unused=True)
    close(twin.grouped_matmul(x_PC, weights, groups.offset_E), want_PR.detach())
    assert want[0] is not None
    close(twin.grouped_matmul(grad_PR, weights, groups.offset_E, transposed=True), want[0])
    outer = twin.grouped_outer(grad_PR, x_PC, groups.offset_E)
    assert len(outer) == E
    for got_RC, want_RC in zip(outer, want[1:], strict=True):
        close(got_RC, torch.zeros(R, C) if want_RC is None else want_RC)


@pytest.mark.parametrize("layout", ["scattered", "backwards", "turned"])
def test_matrices_may_lie_anywhere(twin: ModuleType, device: str, layout: str) -> None:
    groups = group(chosen("even", device), E)
    x_PC = some(N * K, 8, seed=1, device=device)
    weights = matrices(8, 8, device)
    want_PR = reference.grouped_matmul(x_PC, weights, groups.offset_E)
    match layout:
        case "scattered":
            weights = [weight.clone() for weight in weights]
        case "backwards":
            buffer = torch.stack(weights[::-1])
            weights = list(buffer.unbind())[::-1]
        case _:
            weights = [weight.T.contiguous().T for weight in weights]
    close(twin.grouped_matmul(x_PC, weights, groups.offset_E), want_PR)


def test_one_expert_is_a_plain_product_and_no_rows_give_none(twin: ModuleType, device: str) -> None:
    weights = matrices(6, D, device)[:1]
    x_ND = some(N, D, seed=0, device=device)
    groups = group(torch.zeros(N, 1, dtype=torch.int64, device=device), 1)
    close(twin.grouped_matmul(x_ND, weights, groups.offset_E), x_ND @ weights[0].T)
    groups = group(torch.zeros(0, 1, dtype=torch.int64, device=device), 1)
    assert twin.permute(x_ND[:0], groups).shape == (0, D)
    assert twin.grouped_matmul(x_ND[:0], weights, groups.offset_E).shape == (0, 6)
    assert twin.combine(x_ND[:0], x_ND[:0, :1], groups).shape == (0, D)
    assert not twin.grouped_outer(x_ND[:0, :6], x_ND[:0], groups.offset_E)[0].any()


@pytest.mark.parametrize(
    "name", ["permute", "permute_backward", "combine", "combine_backward", "grouped_matmul", "grouped_outer"]
)
def test_signature_is_the_references(twin: ModuleType, name: str) -> None:
    assert inspect.signature(getattr(twin, name)) == inspect.signature(getattr(reference, name))
