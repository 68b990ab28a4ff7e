"""Models how far a pipeline should run ahead of its version, so that the time to a loss is shortest. Stage 0 decides by
this one model (`peer/replica/flow.py`), and plans are foreseen by it (`coordinator/cost/foresight.py`). Pure.

**The model.** A replica of stage 0 makes M microbatches of each step. They come back to it at r a second while its
pipeline is full, so a step's work takes W = M / r. From its last microbatch of a step to the next version go by the
pipeline's empty round trip R and the longest commit C of any stage (`CommitTimes`). For all this but one microbatch's
time the devices have nothing of that step to do:

    idle = R - 1 / r + C

Microbatches of later steps fill this time, up to k = s_max steps ahead, and are stale. How well they fill it depends on
how many are in flight: g times what an empty pipeline holds (r R) keep the slowest device busy for a part e(g) of the
time, since jobs take unequal times. So of each step the part x = min(1, idle / W) runs at e(g), and

    T(k, g) = max(W (1 - x + x / e(g)),  (W / e(g) + idle) / (k + 1))          [seconds a step]
    T(0)    = W + idle

The second is what follows from one another: a microbatch of step t begins when version t - k is there. What begins
while the version is on its way is stale: at stage 0 for C + g R of every T seconds, at the last stage for C, but by no
more than k steps. So the mean over a step's microbatches and over the stages is

    s(k, g) = mean over u in [0, 1] of min(k, (C + u g R) / T)                 [steps]

Of what is stale, the part gR / (C + gR) begins while microbatches of the open step are still in flight, and has not
seen what these bring, g r R / M of the step at most:

    seen(g) >= 1 - min(1, g r R / M) gR / (C + gR)

With the price of staleness (`protocol/staleness.py`), which may depend on that,

    time to a loss  ~  T (1 + price s^power)

**What comes of it.** With power 1, below a price of about 1 (2 without reductions) it pays to fill the idle time, above
it synchronous training is best. With a high power, and steps long compared to the idle time, staleness costs hardly
anything. What is chosen in between is g. Without reductions (C = 0) a g of 1.1 to 1.3 is best: what a window of 1.5 has
in flight beyond that waits in queues while the version that it could have had is on its way. Where reductions take long
compared to the round trip, staleness comes of them and not of queues, and the whole window is best.

Source: ours; e(g) is fitted to simulations (`BUSY_LACK`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.protocol.staleness import Price

BUSY_LACK = 0.1
"""e(g) = g^3 / (g^3 + 0.1). Six equal stages, jobs of +-30 %: with g = 1, 1.1, 1.25, 1.5, 2 the slowest is busy for 88,
92.5, 95, 97.5 and 99 % of the time; this gives 91, 93, 95, 97 and 99."""
GAIN_STEP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds what one replica of stage 0 sees of the swarm."""

    rate_per_s: float
    """Microbatches of its own that come back while the pipeline is full; > 0."""
    round_trip_s: float
    """The round trip of a microbatch that waits for nothing."""
    commit_s: float
    """The time from the last contribution to a step to the next version, where that takes longest."""
    microbatches: float
    """M, its own part of a step; > 0."""

    @property
    def work_s(self) -> float:
        return self.microbatches / self.rate_per_s

    def seen(self, gain: float) -> float:
        """The part of a step that is back here when a microbatch of a later one begins, at the least."""
        flying_s = gain * self.round_trip_s
        while_flying = flying_s / (self.commit_s + flying_s)
        return 1.0 - min(1.0, self.rate_per_s * flying_s / self.microbatches) * while_flying

    @property
    def idle_s(self) -> float:
        return max(0.0, self.round_trip_s - 1.0 / self.rate_per_s + self.commit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Says what stage 0 does about microbatches of later steps than its version, and what that is expected to give."""

    steps_ahead: int
    """k: how many steps ahead they may be. 0: none of them begins."""
    gain: float
    """g: one begins while no more than so many times what the empty pipeline holds are in flight."""
    step_s: float
    staleness_steps: float
    """Mean over a step's microbatches and the stages."""


def busy(gain: float) -> float:
    """e(g), in (0, 1): the part of the time that the slowest device is busy."""
    cube = gain * gain * gain
    return cube / (cube + BUSY_LACK)


def expected(measured: Measured, steps_ahead: int, gain: float) -> Choice:
    """Compute what the model expects of (k, g)."""
    work_s, idle_s = measured.work_s, measured.idle_s
    if steps_ahead == 0:
        return Choice(steps_ahead=0, gain=gain, step_s=work_s + idle_s, staleness_steps=0.0)
    part = min(1.0, idle_s / work_s)
    filled_s = work_s * (1.0 - part + part / busy(gain))
    chain_s = (work_s / busy(gain) + idle_s) / (steps_ahead + 1.0)
    step_s = max(filled_s, chain_s)
    last, first = measured.commit_s / step_s, (measured.commit_s + gain * measured.round_trip_s) / step_s
    return Choice(
        steps_ahead=steps_ahead, gain=gain, step_s=step_s, staleness_steps=_mean_below(steps_ahead, last, first)
    )


def _mean_below(most: float, low: float, high: float) -> float:
    """The mean of min(most, x) for x uniform in [low, high]."""
    if high <= most:
        return (low + high) / 2.0
    if low >= most:
        return most
    below = (most - low) / (high - low)
    return below * (low + most) / 2.0 + (1.0 - below) * most


def choose(measured: Measured, *, s_max: int, price: Price, gain_max: float) -> Choice:
    """Choose what makes the time to a loss shortest; of equals, more steps ahead: a version may come late for once.

    Args:
        s_max: steps that a microbatch may be ahead.
        price: of staleness (`protocol.staleness.price_of`).
        gain_max: the window's own, >= 1.
    """

    def time_to_loss(choice: Choice) -> tuple[float, int]:
        more_steps = price.more_steps(choice.staleness_steps, seen=measured.seen(choice.gain))
        return choice.step_s * more_steps, -choice.steps_ahead

    pairs = itertools.product(range(s_max + 1), _gains(gain_max))
    return min((expected(measured, steps_ahead, gain) for steps_ahead, gain in pairs), key=time_to_loss)


def _gains(gain_max: float) -> Iterator[float]:
    for step in range(round((gain_max - 1.0) / GAIN_STEP)):
        yield 1.0 + step * GAIN_STEP
    yield gain_max
