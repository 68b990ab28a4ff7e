"""Step and prediction together, in plain torch: one after the other, so bit-equal to both, and the test reference of
the fast twins. `rules.Advance` describes arguments and results.

N elements of one layer
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.optimizer.muon import muon_predict, muon_step
from shoal.kernels.optimizer.reference import (
    adamw_predict,
    adamw_step,
    nadam_predict,
    nadam_step,
    sgd_predict,
    sgd_step,
)
from shoal.kernels.optimizer.rules import Advance, Ahead, Matrices, Predict, Step, check_compute_dtype


def _of(step_rule: Step, predict_rule: Predict) -> Advance:
    def advance(
        param_N: Tensor,
        grad_N: Tensor,
        moment1_N: Tensor,
        moment2_N: Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        num_decayed: int,
        step: int,
        matrices: Matrices = (),
        ahead: Sequence[Ahead],
        ahead_learning_rate: float,
        compute_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        check_compute_dtype(compute_dtype)
        param_N, moment1_N, moment2_N = step_rule(
            param_N,
            grad_N,
            moment1_N,
            moment2_N,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            num_decayed=num_decayed,
            step=step,
            matrices=matrices,
        )
        copies = []
        for staleness_steps, gain in ahead:
            ahead_N = predict_rule(
                param_N,
                moment1_N,
                moment2_N,
                learning_rate=ahead_learning_rate,
                beta1=beta1,
                beta2=beta2,
                epsilon=epsilon,
                weight_decay=weight_decay,
                num_decayed=num_decayed,
                step=step + 1,
                staleness_steps=staleness_steps,
                matrices=matrices,
            )
            if staleness_steps and gain != 1:
                ahead_N = param_N.lerp(ahead_N, gain)
            copies.append(ahead_N.to(compute_dtype))
        return param_N, moment1_N, moment2_N, tuple(copies)

    return advance


sgd_advance = _of(sgd_step, sgd_predict)
adamw_advance = _of(adamw_step, adamw_predict)
nadam_advance = _of(nadam_step, nadam_predict)
muon_advance = _of(muon_step, muon_predict)
