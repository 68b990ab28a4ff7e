"""Muon in plain torch: hidden matrices step along an orthogonal matrix, all other elements take AdamW's rule.

As in `reference.py`, nothing is changed in place, and steps give the same bits on every device. The first moment is a
running average of gradients, as in AdamW, instead of a sum: the orthogonal matrix is the same for both, because the
moment's length does not change it. A hidden matrix has no second moment: `moment2_N` has only the elements after the
matrices.

Sources: Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon), in its Nesterov form with five iterations; step
length and weight decay from Moonlight (2025, arXiv 2502.16982, section 2.2). The steps equal those of
`torch.optim.Muon(nesterov=True, adjust_lr_fn="match_rms_adamw")`, except that torch rounds the iterations to bfloat16.

N elements of one layer   H elements of its hidden matrices, which come first   R rows   C columns
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from shoal.kernels.optimizer.orthogonal import orthogonal, orthogonal_nearby
from shoal.kernels.optimizer.reference import adamw_predict, adamw_step
from shoal.kernels.optimizer.rules import Hyperparameters, Matrices, State


def muon_step(param_N: Tensor, grad_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters) -> State:
    """Make one step of Muon. Returns: the new (param_N, moment1_N, moment2_N).

    Args:
        param_N, grad_N, moment1_N: float32 [N].
        moment2_N: float32, for the elements after the hidden matrices only.
        hyper: its `matrices` are consecutive from element 0 on, and all of them have weight decay.
    Raises: ValueError: the matrices are not consecutive from element 0 on.
    """
    H = hidden_numel(hyper.matrices)
    rest = adamw_step(param_N[H:], grad_N[H:], moment1_N[H:], moment2_N, _of_the_rest(hyper, H))
    beta1, learning_rate = hyper.beta1, hyper.learning_rate
    params, moments = [], []
    for first, R, C in hyper.matrices:
        part = slice(first, first + R * C)
        fresh_N = grad_N[part] * (1 - beta1)
        moment_N = (moment1_N[part] * beta1).add_(fresh_N)
        nesterov_RC = (moment_N * beta1).add_(fresh_N).view(R, C)
        change_N = orthogonal(nesterov_RC).view(-1).mul_(-learning_rate * _length(R, C))
        params.append((param_N[part] * (1 - learning_rate * hyper.weight_decay)).add_(change_N))
        moments.append(moment_N)
    return torch.cat((*params, rest[0])), torch.cat((*moments, rest[1])), rest[2]


def muon_predict(
    param_N: Tensor, moment1_N: Tensor, moment2_N: Tensor, hyper: Hyperparameters, staleness_steps: int
) -> Tensor:
    """Predict `param_N`, float32 [N], after `staleness_steps` > 0 more steps of `muon_step`: each hidden matrix moves
    along the orthogonal matrix of its first moment.

    If the gradient stays the same, the first moment is a multiple of it, and only its direction matters: the prediction
    is then exact from the first step on, as AdamW's is.
    """
    H = hidden_numel(hyper.matrices)
    rest_N = adamw_predict(param_N[H:], moment1_N[H:], moment2_N, _of_the_rest(hyper, H), staleness_steps)
    keep = 1 - hyper.learning_rate * hyper.weight_decay
    # The change of a step is decayed by each step after it.
    way = hyper.learning_rate * sum(keep**j for j in range(staleness_steps))
    predicted_N = torch.cat((param_N[:H] * keep**staleness_steps, rest_N))
    for first, R, C in hyper.matrices:
        part = slice(first, first + R * C)
        direction_N = orthogonal_nearby(moment1_N[part].reshape(R, C)).view(-1)
        predicted_N[part].add_(direction_N, alpha=-way * _length(R, C))
    return predicted_N


def _of_the_rest(hyper: Hyperparameters, H: int) -> Hyperparameters:
    return replace(hyper, num_decayed=hyper.num_decayed - H, matrices=())


def hidden_numel(matrices: Matrices) -> int:
    """Return the number of elements of the hidden matrices. Raises: ValueError: a gap is before or between them."""
    end = 0
    for first, R, C in matrices:
        if first != end:
            raise ValueError(f"Muon wants a layer's matrices first and without gaps; one begins at {first}, not {end}")
        end += R * C
    return end


def _length(R: int, C: int) -> float:
    """Return the factor that gives a step's orthogonal matrix a root mean square of 0.2, like AdamW's steps."""
    return 0.2 * math.sqrt(max(R, C))
