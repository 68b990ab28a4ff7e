"""Decides how many microbatches a replica of stage 0 keeps in flight, and how many steps ahead of its version. Pure.

Theory of operation. `Window` keeps just enough microbatches in flight to keep the slowest stage busy: every further one
only waits in a queue, costs memory and comes back staler. It measures in the manner of BBR (Cardwell et al. 2016): the
pipeline's bottleneck rate is the largest recent delivery rate, and its empty round trip is the mean of recent round
trips without waiting times. The product of the two is what the pipeline holds when it is full and nothing queues. BBR
takes the minimum round trip; we take the mean, because microbatches take different routes: with replicas on several
continents the quickest route says little about all routes together. A gain above 1 keeps probing: if the pipeline was
not full, the rate rises and so does the window; if it was full, only the queues grow.

The time that a microbatch stood in queues, for a device or for a link, is subtracted from its round trip: each stage
measures this time and sends it with the gradient. A network cannot measure it, so BBR empties its queue now and then to
see an empty round trip. Without either, a full pipeline always measures rate x round trip = what is in flight, and the
window grows by its gain for ever: a model of this pipeline had 25 to 40 times too much in flight within minutes.
Emptying the pipeline would cost throughput, and several stage-0 replicas would have to do so at the same time.

`Control` chooses how many steps stage 0 runs ahead of its version, k, and the gain g for microbatches ahead. It feeds
the measurements of the window and of `CommitTimes` into the model in `protocol/running_ahead.py`. The choice does not
distort the measurement: g is at least 1, so the pipeline always holds enough to be full, and the rate is the largest
recent one, measured while the microbatches of a step that is not ahead may use the whole window. A step ends for all
replicas of stage 0 at once, so all of them follow the leader's choice, which it sends with its grants. Before that rule
near and far replicas chose differently (eight cities, thirty replicas): steps took 6.1 s where 4.6 s were planned.

`CommitTimes` measures how long commits take, from a replica's last contribution to a step until it has the next
version: waiting for the group, the reduction, the step. With every gradient, each stage tells the stage before the
longest commit time among itself and all later stages; so stage 0 knows the time of the slowest stage.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import mean, median

from shoal.peer.replica.router import Router
from shoal.protocol.running_ahead import Choice, Measured, choose
from shoal.protocol.spec import RunSpec
from shoal.protocol.staleness import Price, price_of

STEPS = 6
"""Measurements, such as the median commit time, cover this many last steps: one step with a dead peer is not
decisive."""
TOLD = 32
"""The longest of the commit times that came with this many last gradients counts: lost replicas are soon forgotten."""


@dataclass(slots=True)
class _Sent:
    at_s: float
    delivered: int
    delivered_at_s: float


@dataclass(kw_only=True, slots=True)
class Window:
    """Limits the microbatches in flight to `size`.

    Args:
        num_stages: K. The window starts at K + 1: one microbatch in each stage and one on the way. Each of the first K
            + 1 microbatches that come back adds one, as in TCP's slow start (RFC 5681), since between homes
            transmission takes as long as the jobs; after that the window follows the measurements.
        gain: size of the window divided by the measured rate x round trip, > 1. With equal stages, and jobs that take
            +-30 % of the mean, 1.25 keeps the slowest stage busy for 85 to 90 % of the time, 1.5 for 92 to 94 %.
        memory: number of recent microbatches that are measured. After a change of plan, the measurements are right once
            this many have come back.
    """

    num_stages: int
    gain: float = 1.5
    memory: int = 32
    size_max: int = 256
    size: int = field(init=False)
    _sent: dict[object, _Sent] = field(default_factory=dict)
    _delivered: int = 0
    _delivered_at_s: float = 0.0
    rate_per_s: float = field(init=False, default=0.0)
    """Largest recent rate at which microbatches come back; 0: not measured yet."""
    round_trip_s: float = field(init=False, default=0.0)
    """Mean of recent round trips without time in queues; 0: not measured yet."""
    _rates: deque[float] = field(init=False)
    _round_trips_s: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.num_stages + 1
        self._rates = deque(maxlen=self.memory)
        self._round_trips_s = deque(maxlen=self.memory)

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    @property
    def has_room(self) -> bool:
        return len(self._sent) < self.size

    def size_at(self, gain: float) -> int:
        """Return the size that the window would have with `gain`. Call this only after the first measurement."""
        return max(2, min(self.size_max, int(gain * self.rate_per_s * self.round_trip_s) + 1))

    def sent(self, key: object, *, now_s: float) -> None:
        if not self._sent:
            # Nothing was in flight: idle time must not count as a low rate.
            self._delivered_at_s = now_s
        self._sent[key] = _Sent(now_s, self._delivered, self._delivered_at_s)

    def returned(self, key: object, *, now_s: float, waited_s: float) -> None:
        """Sample the rate and the round trip when microbatch `key` comes back (BBR's delivery-rate estimator). Args:
        waited_s: the part of the round trip for which the microbatch stood in queues."""
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        self._delivered += 1
        self._delivered_at_s = now_s
        elapsed_s = now_s - sent.delivered_at_s
        if elapsed_s > 0:
            self._rates.append((self._delivered - sent.delivered) / elapsed_s)
            self.rate_per_s = max(self._rates)
        self._round_trips_s.append(max(0.0, now_s - sent.at_s - waited_s))
        self.round_trip_s = sum(self._round_trips_s) / len(self._round_trips_s)
        if self._delivered <= self.num_stages + 1:
            self.size = min(self.size_max, self.size + 1)
        elif len(self._round_trips_s) >= self.size or len(self._round_trips_s) == self.memory:
            self.size = self.size_at(self.gain)

    def forget(self, key: object) -> None:
        """Stop timing microbatch `key`, without a sample: it was lost, or did not pass through the whole pipeline."""
        self._sent.pop(key, None)


@dataclass(slots=True)
class CommitTimes:
    """Measures one replica's commit times, and keeps the longest commit time of the later stages, in seconds.

    A commit takes from a replica's last contribution to a step until the replica has the next version."""

    _contributed_s: dict[int, float] = field(default_factory=dict)
    """Step -> time at which our last microbatch of that step ended."""
    _stepped_s: float | None = None
    """The time at which our own step made the current version; None: the version was loaded."""
    _own_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _told_s: deque[float] = field(default_factory=lambda: deque(maxlen=TOLD))
    _median_s: float = 0.0
    longest_s: float = 0.0
    """The longest commit time here and in later stages; 0: not known yet."""

    def contributed(self, step: int, *, now_s: float) -> None:
        self._contributed_s[step] = now_s

    def told(self, longest_s: float) -> None:
        """Record the longest commit time of later stages, as a replica of the next stage reports it."""
        self._told_s.append(longest_s)
        self.longest_s = max(self._median_s, max(self._told_s))

    def stepped(self, version: int, *, now_s: float) -> None:
        """Record that our own step made `version`."""
        contributed_s = self._contributed_s.get(version - 1)
        if contributed_s is not None and self._stepped_s is not None:
            # If whole steps run ahead, a step's microbatches may be done before the previous step is committed.
            self._own_s.append(now_s - max(contributed_s, self._stepped_s))
            self._median_s = median(self._own_s)
            self.longest_s = max(self._median_s, max(self._told_s, default=0.0))
        self.loaded(version)
        self._stepped_s = now_s

    def loaded(self, version: int) -> None:
        """Record that a state of `version` was loaded from elsewhere."""
        self._stepped_s = None
        self._contributed_s = {step: at_s for step, at_s in self._contributed_s.items() if step >= version}


@dataclass(kw_only=True, slots=True)
class Control:
    """Chooses at each version how far microbatches run ahead. Without measurements it sets no limit.

    Args:
        s_max: limit on the steps ahead.
        price: cost of staleness (`protocol/staleness.py`).
        synchronous_steps: number of first steps in which nothing runs ahead and no rate is measured: if a step is
            shorter than a pass through all stages, the pipeline is never full.
    """

    s_max: int
    price: Price
    synchronous_steps: int = 0
    choice: Choice | None = None
    _led: tuple[int, float] | None = None
    _begun: dict[int, int] = field(default_factory=dict)
    _own: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))

    def begun(self, step: int) -> None:
        """Count a microbatch of `step` that we run for the first time."""
        self._begun[step] = self._begun.get(step, 0) + 1

    def reached(self, version: int, window: Window, *, commit_s: float) -> None:
        """Choose how far to run ahead from `version` on. Args: commit_s: longest commit of a stage; 0: unknown."""
        self._own.append(self._begun.get(version - 1, 0))
        self._begun = {step: count for step, count in self._begun.items() if step >= version}
        if version <= self.synchronous_steps:
            return
        if not (any(self._own) and window.rate_per_s > 0.0 and window.round_trip_s > 0.0 and commit_s > 0.0):
            return
        measured = Measured(
            rate_per_s=window.rate_per_s,
            round_trip_s=window.round_trip_s,
            commit_s=commit_s,
            microbatches=mean(self._own),
        )
        self.choice = choose(measured, s_max=self.s_max, price=self.price, gain_max=window.gain)

    def follow(self, steps_ahead: int, gain: float) -> None:
        """Follow the leader's choice; `steps_ahead` < 0: the leader has none yet. A step ends for all replicas at once:
        if only some ran ahead, the step would be as stale as if all did, and as late as if none did. Raises:
        ValueError: `gain` is below 1 or infinite."""
        if not 1.0 <= gain < math.inf:
            raise ValueError(f"wants {gain} times what the pipeline holds in flight")
        self._led = (steps_ahead, gain) if steps_ahead >= 0 else None

    def most_ahead(self, window: Window) -> float:
        """Return how many steps ahead of the version a microbatch may begin now; infinite before the first choice."""
        in_force = self.in_force
        if in_force is None:
            return math.inf
        most_ahead, gain = in_force
        fits = gain >= window.gain or window.in_flight < window.size_at(gain)
        return most_ahead if fits else 0

    @property
    def steps_ahead(self) -> int:
        """How many steps ahead of the current one members may be granted microbatches while others still have some of
        the current step to claim. It is 0 until a choice is made: all members wait for a layout's first step, so the
        whole first step is granted before the next one."""
        return self.in_force[0] if self.in_force is not None else 0

    @property
    def in_force(self) -> tuple[int, float] | None:
        """The (steps ahead, gain) that we follow: the leader's choice; before there is one, ours; else None."""
        if self._led is None and self.choice is not None:
            return self.choice.steps_ahead, self.choice.gain
        return self._led


class Traffic:
    """Makes the parts that control the traffic of a replica: `Router` (routes), `Window` (number in flight) and
    `Control` (steps ahead). A subclass makes other parts, for comparison. Each replica calls each method once."""

    def router(self) -> Router:
        return Router()

    def window(self, num_stages: int) -> Window:
        """Make the limit on a stage-0 replica's microbatches in flight."""
        return Window(num_stages=num_stages)

    def control(self, spec: RunSpec) -> Control | None:
        """Make a stage-0 replica's control of steps ahead. None: only s_max limits them."""
        training = spec.training
        if training.s_max == 0:
            return None
        price = price_of(training.compensation, optimizer=spec.optimizer.name)
        return Control(s_max=training.s_max, price=price, synchronous_steps=spec.synchronous_steps)
