"""The loss without its logits is torch's, with its gradients, however many rows are taken at a time."""

import pytest
import torch
from torch.nn import functional

from shoal.peer.model import head_loss as module
from shoal.peer.model.head_loss import head_loss


def inputs(dtype=torch.float32, rows=37, vocabulary=50, scale=3.0):
    generator = torch.Generator().manual_seed(rows)
    x_ND = (scale * torch.randn(rows, 16, generator=generator)).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocabulary, 16, generator=generator).to(dtype).requires_grad_()
    return x_ND, weight_VD, torch.randint(0, vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize("rows_at_once", [1, 8, 37, 1000])
@pytest.mark.parametrize("times", [1.0, -2.5])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_it_is_torchs_with_both_gradients(monkeypatch, rows_at_once, times, cap):
    x_ND, weight_VD, target_N = inputs()
    monkeypatch.setattr(module, "CHUNK_BYTES", rows_at_once * 4 * len(weight_VD))
    logits_NV = x_ND @ weight_VD.T
    wanted = functional.cross_entropy(cap * (logits_NV / cap).tanh() if cap else logits_NV, target_N)
    gradients = torch.autograd.grad(times * wanted, (x_ND, weight_VD))
    found = head_loss(x_ND, weight_VD, target_N, cap)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(times * found, (x_ND, weight_VD)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_in_bfloat16_the_loss_is_float32s_of_the_same_numbers():
    x_ND, weight_VD, target_N = inputs(torch.bfloat16)
    logits_NV = (x_ND @ weight_VD.T).float()
    wanted = functional.cross_entropy(logits_NV, target_N)
    found = head_loss(x_ND, weight_VD, target_N)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    gradients = torch.autograd.grad(wanted, (x_ND, weight_VD))
    for mine, theirs in zip(torch.autograd.grad(found, (x_ND, weight_VD)), gradients, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-3)


def test_large_logits_do_not_overflow():
    x_ND, weight_VD, target_N = inputs(scale=1e4)
    assert head_loss(x_ND, weight_VD, target_N).isfinite()


def test_without_gradients_none_are_made(monkeypatch):
    x_ND, weight_VD, target_N = inputs()
    monkeypatch.setattr(torch, "zeros_like", lambda *_: pytest.fail("nobody wants a gradient"))
    with torch.no_grad():
        found = head_loss(x_ND, weight_VD, target_N)
    assert not found.requires_grad


def test_one_that_is_not_finite_is_not_hidden():
    x_ND, weight_VD, target_N = inputs()
    with torch.no_grad():
        x_ND[3, 2] = torch.nan
    assert head_loss(x_ND, weight_VD, target_N).isnan()


@pytest.mark.parametrize("rows_at_once", [1, 8, 1000])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_rows_without_a_target_count_for_nothing(monkeypatch, rows_at_once, cap):
    x_ND, weight_VD, target_N = inputs()
    target_N[torch.arange(37) % 3 != 0] = -100
    monkeypatch.setattr(module, "CHUNK_BYTES", rows_at_once * 4 * len(weight_VD))
    logits_NV = x_ND @ weight_VD.T
    wanted = functional.cross_entropy(cap * (logits_NV / cap).tanh() if cap else logits_NV, target_N)
    gradients = torch.autograd.grad(wanted, (x_ND, weight_VD))
    found = head_loss(x_ND, weight_VD, target_N, cap, counted=13)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(found, (x_ND, weight_VD)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_without_a_single_target_the_loss_and_its_gradients_are_zero():
    x_ND, weight_VD, target_N = inputs()
    found = head_loss(x_ND, weight_VD, torch.full_like(target_N, -100), counted=0)
    assert found.item() == 0.0
    assert not any(gradient.any() for gradient in torch.autograd.grad(found, (x_ND, weight_VD)))
