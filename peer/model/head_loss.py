"""The loss without all logits in memory: projection, cross entropy and both gradients, computed some rows at a time.

    logit = x W^T      loss = mean(log sum exp(logit) - logit[target])      dlogit = (softmax(logit) - onehot) / N

The logits of 4,096 tokens with a vocabulary of 128,256 take 2.1 GB in float32, and their gradients as much again.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv 2411.09009, section 4. There
the backward computes the logits again. Here a backward follows every loss in training, so the forward computes the
gradients at once, while it has the logits.

N tokens   D width   V vocabulary   C rows at a time
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES: Final = 1 << 28
"""The most bytes of float32 logits in memory at a time."""


def head_loss(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, cap: float = 0.0, counted: int | None = None
) -> Tensor:
    """Return the mean cross entropy of `x_ND @ weight_VD.T` in nats a token, a float32 scalar.

    Args:
        x_ND, weight_VD: both of one dtype, in which the products and the gradients are computed.
        target_N: int64 in [0, V); if `counted` is given, a negative number means that the row has no target.
        cap: if not 0, each logit is replaced by cap * tanh(logit / cap).
        counted: the number of rows that have a target; the mean is over these rows (0: the loss is 0). None: every row
            has a target.
    """
    wants = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    loss: Tensor = _HeadLoss.apply(x_ND, weight_VD, target_N, cap, counted, wants)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, cap: float, counted: int | None, wants: bool
    ) -> Tensor:
        num_rows, vocabulary = len(target_N), len(weight_VD)
        mean_over = num_rows if counted is None else max(1, counted)
        rows = max(1, min(num_rows, CHUNK_BYTES // (4 * vocabulary)))
        total = torch.zeros((), device=x_ND.device)
        grad_ND = torch.empty_like(x_ND) if wants else None
        grad_VD = torch.zeros_like(weight_VD) if wants and ctx.needs_input_grad[1] else None
        for start in range(0, num_rows, rows):
            x_CD, target_C1 = x_ND[start : start + rows], target_N[start : start + rows, None]
            has_target_C1 = None if counted is None else target_C1 >= 0
            target_C1 = target_C1 if counted is None else target_C1.clamp(min=0)
            logit_CV = (x_CD @ weight_VD.T).float()
            slope_CV = None
            if cap:
                bent_CV = logit_CV.div_(cap).tanh_()
                slope_CV = 1 - bent_CV.square() if wants else None
                logit_CV = bent_CV.mul_(cap)
            logit_CV -= logit_CV.amax(1, keepdim=True)
            wanted_C1 = logit_CV.gather(1, target_C1)
            exp_CV = logit_CV.exp_()
            sum_C1 = exp_CV.sum(1, keepdim=True)
            loss_C1 = sum_C1.log() - wanted_C1
            total += (loss_C1 if has_target_C1 is None else loss_C1.where(has_target_C1, 0.0)).sum()
            if grad_ND is None:
                continue
            exp_CV /= sum_C1 * mean_over
            exp_CV.scatter_add_(1, target_C1, torch.full_like(wanted_C1, -1.0 / mean_over))
            if has_target_C1 is not None:
                exp_CV *= has_target_C1
            if slope_CV is not None:
                exp_CV *= slope_CV
            grad_CV = exp_CV.to(x_ND.dtype)
            torch.mm(grad_CV, weight_VD, out=grad_ND[start : start + rows])
            if grad_VD is not None:
                torch.addmm(grad_VD, grad_CV.T, x_CD, out=grad_VD)
        ctx.gradients = grad_ND, grad_VD
        return total / mean_over

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_ND, grad_VD = ctx.gradients
        return grad_ND.mul_(grad), None if grad_VD is None else grad_VD.mul_(grad), None, None, None, None
