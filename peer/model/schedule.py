"""The learning rate of each step, in a run that may have been continued.

Theory of operation. A run consists of legs (parts of its rate schedule). The first begins at step 0; each continuation
of the run begins another. In a leg the rate climbs to the leg's highest rate, unless it is there already, and then
follows the schedule to the leg's last step:

| schedule   | after the climb                                     | a leg that begins where a run had ended |
|------------|-----------------------------------------------------|-----------------------------------------|
| `cosine`   | half a cosine down to the final rate                | climbs to the peak and falls again      |
| `constant` | stays                                               | goes on at the same rate                |
| `wsd`      | stays, then falls over the last `decay_steps`,      | climbs to the peak, stays and falls     |
|            | as 1 - sqrt(progress)                               | again                                   |

The climb is as steep as the run's warm-up. A run that is continued before its rate has begun to fall has the same rates
as a run planned with the new length. A `cosine` rate falls right after the warm-up, so a continued run climbs and
decays again, which first costs some loss and then regains it (Ibrahim et al., 2024, arXiv 2403.08763, section 6);
stretching the cosine would jump from the final rate to about half of the peak. A run that is shortened gets no climb:
the rate falls from its present value.

Sources: cosine, Loshchilov & Hutter, 2017, arXiv 1608.03983, equation 5 without restarts; `wsd`, Hu et al., 2024, arXiv
2404.06395, section 4, with the decay of Hägele et al., 2024, arXiv 2405.18392, section 3: a decay over 10 to 20 % of
the steps reaches the loss of the cosine. Our schedules end at `final_learning_rate_fraction` of the peak, theirs at 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.protocol.spec import ContinuedSpec, OptimizerSpec, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """The part of a run from step `begins` to step `ends` - 1, with its learning-rate schedule."""

    begins: int
    ends: int
    schedule: str
    decay_steps: int | None
    climbs_from: float
    """The learning rate of the step before `begins`; 0 at the start of the run."""
    top: float
    """The highest rate of the leg, divided by the peak rate of the run."""
    top_at: int
    """The first step of the leg that has this highest rate."""

    @property
    def falls_at(self) -> int:
        """Return the last step before the rate falls; `ends` if the schedule is constant, so that it never falls."""
        if self.schedule == "constant":
            return self.ends
        if self.schedule == "cosine":
            return self.top_at
        decay_steps = self.decay_steps or max(1, round(0.2 * self.ends))
        return max(self.top_at, self.ends - 1 - decay_steps)

    def rate(self, step: int, optimizer: OptimizerSpec) -> float:
        peak, final = optimizer.learning_rate, optimizer.final_learning_rate_fraction
        if step < self.top_at:
            return self.climbs_from + peak * (step - self.begins + 1) / (optimizer.warmup_steps + 1)
        if step <= self.falls_at:
            return peak * self.top
        progress = min(1.0, (step - self.falls_at) / max(1, self.ends - 1 - self.falls_at))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - math.sqrt(progress)
        return peak * (final + (self.top - final) * left)


def legs(optimizer: OptimizerSpec, total_steps: int, continued: Sequence[ContinuedSpec] = ()) -> list[Leg]:
    """Return the parts (legs) of a run's rate schedule, in order, up to `total_steps`."""
    said = [(part.steps, part.schedule, part.decay_steps) for part in continued]
    said.append((total_steps, optimizer.schedule, optimizer.decay_steps))
    found: list[Leg] = []
    for begins, (ends, schedule, decay_steps) in zip((0, *(part.at for part in continued)), said, strict=True):
        before = found[-1] if found else None
        climbs_from = before.rate(begins - 1, optimizer) if before and begins else 0.0
        is_sooner = before is not None and ends <= before.ends and begins > before.top_at
        top = climbs_from / optimizer.learning_rate if is_sooner else 1.0
        missing = (top - climbs_from / optimizer.learning_rate) * (optimizer.warmup_steps + 1)
        found.append(
            Leg(
                begins=begins,
                ends=ends,
                schedule=schedule,
                decay_steps=decay_steps,
                climbs_from=climbs_from,
                top=top,
                top_at=begins + max(0, math.ceil(missing - 1 - 1e-9)),  # 1e-9: rounding must not add a step
            )
        )
    return found


def learning_rate(
    optimizer: OptimizerSpec, step: int, total_steps: int, continued: Sequence[ContinuedSpec] = ()
) -> float:
    """Return the learning rate of `step` (from 0) in a run of `total_steps`. It reaches the peak at step
    `warmup_steps`. Unless the schedule is `constant`, it ends at `final_learning_rate_fraction` of the peak."""
    leg = next(leg for leg in reversed(legs(optimizer, total_steps, continued)) if leg.begins <= step)
    return leg.rate(step, optimizer)


@lru_cache(maxsize=256)
def rate_of(spec: RunSpec, step: int) -> float:
    """Return the learning rate of `step`; cached, because each layer's step and each weight prediction asks for it."""
    return learning_rate(spec.optimizer, step, spec.training.steps, spec.continued)
