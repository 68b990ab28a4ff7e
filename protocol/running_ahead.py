"""Models how many steps ahead of its weights' version a pipeline should begin microbatches, to reach a loss soonest.
Stage 0 decides by this model (`peer/replica/flow.py`), and the coordinator predicts step times by it
(`coordinator/cost/throughput.py`). Pure.

**The model.** A stage-0 replica makes M microbatches of each step. Its full pipeline returns them at r a second, so a
step's work takes W = M / r. After the replica's last microbatch of a step has begun, the next version takes another
R + C seconds: R is the empty pipeline's round trip, C the longest commit of any stage (`CommitTimes`). In this time,
less the 1 / r of one microbatch, the devices have no work of that step:

    idle = R - 1 / r + C

Microbatches of later steps, up to k <= s_max steps ahead, fill this time, and are stale. How well they fill it depends
on the number in flight. An empty pipeline needs r R microbatches in flight; as job times vary, g times this number keep
the slowest device busy for a fraction e(g) of the time. So of each step the fraction x = min(1, idle / W) runs at e(g):

    T(k, g) = max(W (1 - x + x / e(g)),  (W / e(g) + idle) / (k + 1))          [seconds a step]
    T(0)    = W + idle

The second term is the dependency chain: a microbatch of step t needs version t - k. Microbatches that begin while the
next version is on its way are stale: at stage 0 for C + g R of every T seconds, at the last stage for C, by at most k
steps. The mean over a step's microbatches and over the stages is

    s(k, g) = mean over u in [0, 1] of min(k, (C + u g R) / T)                 [steps]

Of the stale microbatches the fraction gR / (C + gR) begins while microbatches of the uncommitted step are in flight.
Their weights lack the gradients of these microbatches, which are at most g r R / M of the step:

    seen(g) >= 1 - min(1, g r R / M) gR / (C + gR)

With the price of staleness (`protocol/staleness.py`), which may depend on `seen`,

    time to a loss  ~  T (1 + price s^power)

**Results.** With power 1, filling the idle time pays if the price is below about 1 (2 without reductions); above that
synchronous training is best. With a high power, and steps much longer than the idle time, staleness costs hardly
anything, and only g matters. Without reductions (C = 0) a g of 1.1 to 1.3 is best: at 1.5 the surplus waits in queues
while a newer version arrives. If reductions take much longer than the round trip, they and not queues cause the
staleness, and the largest g is best.

Source: ours; e(g) is fitted to simulations (`BUSY_LACK`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.protocol.staleness import Price

BUSY_LACK = 0.1
"""The slowest device is busy for e(g) = g^3 / (g^3 + 0.1) of the time if g times as many microbatches are in flight as
fill the pipeline. Simulated (six equal stages, jobs of +-30 %): with g = 1, 1.1, 1.25, 1.5, 2 it is busy for 88, 92.5,
95, 97.5 and 99 % of the time; this formula gives 91, 93, 95, 97 and 99."""
GAIN_STEP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures that one stage-0 replica has measured."""

    rate_per_s: float
    """Microbatches of this replica that return per second while the pipeline is full, > 0."""
    round_trip_s: float
    """Round trip of a microbatch in an empty pipeline."""
    commit_s: float
    """Time from a step's last contribution to the next version, at the slowest stage."""
    microbatches: float
    """M: microbatches of a step that this replica makes, > 0."""

    @property
    def work_s(self) -> float:
        return self.microbatches / self.rate_per_s

    def seen(self, gain: float) -> float:
        """Return the least share of the uncommitted step's gradients that is back when a stale microbatch begins."""
        flying_s = gain * self.round_trip_s
        while_flying = flying_s / (self.commit_s + flying_s)
        return 1.0 - min(1.0, self.rate_per_s * flying_s / self.microbatches) * while_flying

    @property
    def idle_s(self) -> float:
        return max(0.0, self.round_trip_s - 1.0 / self.rate_per_s + self.commit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many steps stage 0 runs ahead, with the expected step time and staleness."""

    steps_ahead: int
    """k: the most steps that a microbatch may begin ahead of its weights' version; 0: synchronous."""
    gain: float
    """g: a later step's microbatches begin only while fewer than g r R are in flight; r R of them fill the pipeline."""
    step_s: float
    staleness_steps: float


def busy(gain: float) -> float:
    """Return e(g), in (0, 1): the fraction of time for which the slowest device is busy."""
    cube = gain * gain * gain
    return cube / (cube + BUSY_LACK)


def expected(measured: Measured, steps_ahead: int, gain: float) -> Choice:
    """Return the model's step time and staleness for k = `steps_ahead` and g = `gain`."""
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
    """Return the mean of min(most, x) for x uniform in [low, high]."""
    if high <= most:
        return (low + high) / 2.0
    if low >= most:
        return most
    below = (most - low) / (high - low)
    return below * (low + most) / 2.0 + (1.0 - below) * most


def choose(measured: Measured, *, s_max: int, price: Price, gain_max: float) -> Choice:
    """Return the k and g with the shortest time to a given loss; of equal choices, the one with more steps ahead.

    Args:
        s_max: the most steps that a microbatch may run ahead of its weights.
        price: the price of staleness (`protocol.staleness.price_of`).
        gain_max: largest g, >= 1.
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
