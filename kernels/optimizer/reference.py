"""Optimizer steps and weight prediction in plain torch: the CPU path, and the test reference of the fast twins. Muon is
in `muon.py`.

The state of one layer is three flat fp32 tensors of N elements. The first `num_decayed` elements are matrices and get
decoupled weight decay; the rest are norms and biases and get none.

Nothing is changed in place, because microbatches in flight may still use the old version. Each function allocates its
results and at most one temporary.

**Steps give the same bits on every device.** Replicas have different CPUs, thread counts and GPUs, and compare digests
after a step. So a step uses only operations that IEEE 754 rounds in one way: +, -, * and /, with one rounding each, and
the square root of `roots.py`, since torch's may be rounded wrongly. A step uses no lerp, addcmul, addcdiv or alpha=,
which are fused only on a CPU with fused multiply-add; no division by a scalar, which CUDA turns into a multiplication;
and no float32 reduction, because its order depends on the number of threads. Predictions stay on one peer, so they may
differ and use the fused operations.

Sources: SGD with momentum; AdamW (Loshchilov and Hutter, 2019, arXiv 1711.05101); NAdam (Dozat, 2016), with constant
momentum as `torch.optim.NAdam(momentum_decay=math.inf)`. Prediction: PipeOptim (2023, arXiv 2312.00839), w' = w -
learning_rate * staleness * direction; we differ in that weight decay is predicted, too, and that the bias-corrected
first moment stands in for NAdam's next gradient, which is not known yet.

N elements of one layer
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.optimizer.roots import rounded_sqrt
from shoal.kernels.optimizer.rules import Hyperparameters, State


def sgd_step(param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters) -> State:
    """Make one step of SGD with momentum `beta1`: m = beta1 m + g, w = (1 - lr wd) w - lr m.

    Args:
        param_N, grad_N, moment1_N: float32 [N].
        moment2_N: float32 [0], returned unchanged. `beta2` and `epsilon` are unused, too.
    Returns: the new (param_N, moment1_N, moment2_N).
    """
    moment1_N = (moment1_N * hyper.beta1).add_(grad_N)
    return _decayed_once(param_N, hyper).add_(moment1_N * -hyper.learning_rate), moment1_N, moment2_N


def adamw_step(param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters) -> State:
    """Make one step of AdamW, as `torch.optim.AdamW` does. All tensors: float32 [N]. Returns the new (param_N,
    moment1_N, moment2_N)."""
    moment1_N, moment2_N = _moments(grad_N, moment1_N, moment2_N, hyper)
    change_N = _root(moment2_N, hyper, hyper.step + 1)
    torch.div(moment1_N, change_N, out=change_N).mul_(-hyper.learning_rate / (1 - hyper.beta1 ** (hyper.step + 1)))
    return _decayed_once(param_N, hyper).add_(change_N), moment1_N, moment2_N


def nadam_step(param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters) -> State:
    """Make one step of NAdam, equal to `torch.optim.NAdam(decoupled_weight_decay=True, momentum_decay=math.inf)`.

    All tensors are float32 [N]. Returns: the new (param_N, moment1_N, moment2_N).
    """
    moment1_N, moment2_N = _moments(grad_N, moment1_N, moment2_N, hyper)
    fresh, past = nesterov_shares(hyper)
    change_N = (grad_N * fresh).add_(moment1_N * past)
    change_N.div_(_root(moment2_N, hyper, hyper.step + 1)).mul_(-hyper.learning_rate)
    return _decayed_once(param_N, hyper).add_(change_N), moment1_N, moment2_N


def sgd_weights(
    param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters
) -> Tensor:
    """Return only the new weights of `sgd_step`. Only this peer uses them, so their last bits may differ."""
    change_N = torch.mul(moment1_N, hyper.beta1).add_(grad_N)
    return _decayed_once(param_N, hyper).add_(change_N, alpha=-hyper.learning_rate)


def adamw_weights(
    param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters
) -> Tensor:
    """Return only the new weights of `adamw_step`. Only this peer uses them, so their last bits may differ."""
    scale_N = _next_scale(grad_N, moment2_N, hyper)
    change_N = torch.mul(moment1_N, hyper.beta1).add_(grad_N, alpha=1 - hyper.beta1)
    rate = hyper.learning_rate / (1 - hyper.beta1 ** (hyper.step + 1))
    return _decayed_once(param_N, hyper).addcdiv_(change_N, scale_N, value=-rate)


def nadam_weights(
    param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters
) -> Tensor:
    """Return only the new weights of `nadam_step`. Only this peer uses them, so their last bits may differ."""
    scale_N = _next_scale(grad_N, moment2_N, hyper)
    fresh, past = nesterov_shares(hyper)
    change_N = torch.mul(moment1_N, past * hyper.beta1).add_(grad_N, alpha=fresh + past * (1 - hyper.beta1))
    return _decayed_once(param_N, hyper).addcdiv_(change_N, scale_N, value=-hyper.learning_rate)


def sgd_predict(
    param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters, staleness_steps: int
) -> Tensor:
    """Predict `param_N` after `staleness_steps` > 0 more steps of `sgd_step` in the direction of the last steps.

    Args: param_N, moment1_N, moment2_N: float32 [N], the state at a version > 0 (`moment2_N` is unused).
    Returns: float32 [N].
    """
    param_N, decayed, plain = _drifted(param_N, hyper, sgd_gains(hyper, staleness_steps))
    param_N[: hyper.num_decayed].add_(moment1_N[: hyper.num_decayed], alpha=-decayed)
    param_N[hyper.num_decayed :].add_(moment1_N[hyper.num_decayed :], alpha=-plain)
    return param_N


def adamw_predict(
    param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters, staleness_steps: int
) -> Tensor:
    """Predict `param_N` after `staleness_steps` > 0 more steps of `adamw_step`, in the direction m^ / (sqrt(v^) +
    epsilon), where m^ and v^ are the bias-corrected moments."""
    return _moved(param_N, moment1_N, moment2_N, hyper, adamw_gains(hyper, staleness_steps))


def nadam_predict(
    param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters, staleness_steps: int
) -> Tensor:
    """Predict `param_N` after `staleness_steps` > 0 more steps of `nadam_step`, if each gradient is the bias-corrected
    first moment."""
    return _moved(param_N, moment1_N, moment2_N, hyper, nadam_gains(hyper, staleness_steps))


def sgd_gains(hyper: Hyperparameters, staleness_steps: int) -> list[float]:
    """Return each coming step's length divided by (learning rate times first moment): `staleness_steps` numbers."""
    return [1.0] * staleness_steps


def adamw_gains(hyper: Hyperparameters, staleness_steps: int) -> list[float]:
    """Return, for each of the next `staleness_steps` steps, its length divided by lr * moment1 / (sqrt(v^) + epsilon)
    at version `step`, where v^ is the bias-corrected second moment."""
    return [1 / (1 - hyper.beta1**hyper.step)] * staleness_steps


def nadam_gains(hyper: Hyperparameters, staleness_steps: int) -> list[float]:
    """Return, for each of the next `staleness_steps` steps, its length divided by lr * moment1 / (sqrt(v^) + epsilon)
    at version `step`, where v^ is the bias-corrected second moment.

    If every gradient is g, the first moment after n steps is (1 - beta1^n) g. So the two terms of `nadam_step` at
    version n add up to a multiple of g, and g itself is moment1 / (1 - beta1^step).
    """
    beta1, step = hyper.beta1, hyper.step
    return [
        (beta1 * (1 - beta1 ** (n + 1)) / (1 - beta1 ** (n + 2)) + (1 - beta1) / (1 - beta1 ** (n + 1)))
        / (1 - beta1**step)
        for n in range(step, step + staleness_steps)
    ]


def nesterov_shares(hyper: Hyperparameters) -> tuple[float, float]:
    """Return NAdam's bias-corrected factors: (factor on the gradient, factor on the new first moment)."""
    beta1, step = hyper.beta1, hyper.step
    return (1 - beta1) / (1 - beta1 ** (step + 1)), beta1 / (1 - beta1 ** (step + 2))


def ways(hyper: Hyperparameters, gains: Sequence[float]) -> tuple[float, float, float]:
    """Return the total effect of len(gains) steps on the weights; `gains` are the relative lengths of the updates.

    Returns: (the fraction of a weight that weight decay leaves, the distance that all updates move a weight with weight
        decay, the distance for a weight without it). Later steps decay earlier updates, too: an update with j steps
        after it counts as lr (1 - lr wd)^j times its gain.
    """
    learning_rate, keep = hyper.learning_rate, 1 - hyper.learning_rate * hyper.weight_decay
    decayed = learning_rate * sum(gain * keep**j for j, gain in enumerate(reversed(gains)))
    return keep ** len(gains), decayed, learning_rate * sum(gains)


def clip(grad_N: Tensor, *, clip_norm: float) -> tuple[Tensor, float]:
    """Scale a layer's gradient to a norm of at most `clip_norm`. If `clip_norm` is 0, do not scale.

    Returns: (the scaled gradient, float32 [N], or `grad_N` itself; the 2-norm of `grad_N`, rounded to float32).
    """
    # The order of a sum depends on threads and devices. In float64 its error is 1e-15 of the norm, which rounding to
    # float32 hides, except for one norm in 10^7: then replicas diverge, and one of them fetches the other's state.
    squares = (part_N.double().square_().sum() for part_N in torch.split(grad_N, 1 << 20))  # 8 MiB at a time
    norm = float(torch.tensor(math.sqrt(sum(float(square) for square in squares)), dtype=torch.float32))
    scale = clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    return (grad_N * scale if 0 < scale < 1 else grad_N), norm


def _decayed(param_N: Tensor, rate: float, num_decayed: int) -> Tensor:
    """Return a copy with the first `num_decayed` elements multiplied by 1 - `rate`."""
    param_N = param_N.clone()
    if rate:
        param_N[:num_decayed].mul_(1 - rate)
    return param_N


def _decayed_once(param_N: Tensor, hyper: Hyperparameters) -> Tensor:
    return _decayed(param_N, hyper.learning_rate * hyper.weight_decay, hyper.num_decayed)


def _moments(grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters) -> tuple[Tensor, Tensor]:
    term_N = grad_N * (1 - hyper.beta1)
    moment1_N = (moment1_N * hyper.beta1).add_(term_N)
    torch.mul(grad_N, grad_N, out=term_N).mul_(1 - hyper.beta2)
    return moment1_N, (moment2_N * hyper.beta2).add_(term_N)


def _root(moment2_N: Tensor, hyper: Hyperparameters, num_steps: int) -> Tensor:
    """Return sqrt(v^) + epsilon, float32 [N], where v^ is the second moment after `num_steps` steps, bias-corrected."""
    return rounded_sqrt(moment2_N).mul_((1 - hyper.beta2**num_steps) ** -0.5).add_(hyper.epsilon)


def _next_scale(grad_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters) -> Tensor:
    """Return sqrt(bias-corrected second moment) + epsilon after `grad_N`, up to rounding: float32 [N]."""
    scale_N = torch.mul(moment2_N, hyper.beta2).addcmul_(grad_N, grad_N, value=1 - hyper.beta2).sqrt_()
    return scale_N.mul_((1 - hyper.beta2 ** (hyper.step + 1)) ** -0.5).add_(hyper.epsilon)


def _drifted(param_N: Tensor, hyper: Hyperparameters, gains: Sequence[float]) -> tuple[Tensor, float, float]:
    """Return (the weights after the weight decay of len(gains) steps, not yet updated; the distance by which the
    updates then move a weight with weight decay; that distance for a weight without it)."""
    kept, decayed, plain = ways(hyper, gains)
    return _decayed(param_N, 1 - kept, hyper.num_decayed), decayed, plain


def _moved(
    param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters, gains: Sequence[float]
) -> Tensor:
    """Return a copy of the weights, decayed and moved as by len(gains) steps in the direction moment1 / `_root`."""
    scale_N = _root(moment2_N, hyper, hyper.step)
    param_N, decayed, plain = _drifted(param_N, hyper, gains)
    for part, way in ((slice(None, hyper.num_decayed), decayed), (slice(hyper.num_decayed, None), plain)):
        param_N[part].addcdiv_(moment1_N[part], scale_N[part], value=-way)
    return param_N
