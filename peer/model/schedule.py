"""The learning rate of a step."""

import math

from shoal.protocol.spec import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int, total_steps: int) -> float:
    """Rate of step `step` (from 0) in a run of `total_steps`: linear warm-up, then a half cosine.

    The warm-up starts from 0 before step 0 and reaches the peak at step `warmup_steps`; the cosine reaches
    `final_learning_rate_fraction` of the peak at the last step and stays there.
    """
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / (optimizer.warmup_steps + 1)
    last = total_steps - 1
    progress = min(1.0, (step - optimizer.warmup_steps) / max(1, last - optimizer.warmup_steps))
    final = optimizer.final_learning_rate_fraction
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
