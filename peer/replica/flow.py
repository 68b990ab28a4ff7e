"""Decides how many microbatches a replica of stage 0 keeps in flight, and how far they run ahead of its version. Pure.

Theory of operation. `Window` keeps just enough microbatches in flight to keep the slowest stage busy: every further one
only waits in a queue, costs memory and comes back staler. It measures in the manner of BBR (Cardwell et al. 2016): the
pipeline's bottleneck rate is the largest recent delivery rate, and its empty round trip is the mean recent one without
waiting times. Their product is what the pipeline holds when it is full and nothing queues. BBR takes the minimum; we
take the mean, because microbatches take different routes: with replicas on several continents the quickest route says
little of all of them together. A gain above 1 keeps probing: if the pipeline was not full, the rate rises and so does
the window; if it was, only the queues grow.

The time that a microbatch stood in queues, for a device or for a link, is subtracted from its round trip: each stage
knows it and says so with the gradient. A network cannot, so BBR empties its queue now and then to see an empty round
trip. Without either, a full pipeline always measures rate x round trip = what is in flight, and the window grows by
its gain for ever: a model of this pipeline had 25 to 40 times too much in flight within minutes. Draining would cost
throughput, and several stage-0 replicas would have to drain at the same time.

`Control` chooses how far stage 0 runs ahead of its version: it feeds the measurements of the window and of
`CommitTimes` into the model in `protocol/running_ahead.py`. The choice does not distort the measurement: g is at least
1, so the pipeline always holds enough to be full, and the rate is the largest recent one, measured while a step's own
microbatches have the whole window to themselves. A step ends for all replicas of stage 0 at once, so the leader sends
its choice with its grants and it holds for all. In eight cities with thirty replicas near and far ones chose
differently, and steps took 6.1 s where 4.6 were planned.

`CommitTimes` measures how long commits take, from a replica's last contribution to a step until it has the next
version: waiting for the group, the reduction, the step. Each stage tells the stage before, with every gradient, the
longest time of its own and all later stages; so stage 0 knows the time of the slowest stage.
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
"""Steps in a median: an occasional death must not count for all."""
TOLD = 32
"""Microbatches after which a replica that no longer answers is forgotten."""


@dataclass(slots=True)
class _Sent:
    at_s: float
    delivered: int
    delivered_at_s: float


@dataclass(kw_only=True, slots=True)
class Window:
    """`size` microbatches may be in flight.

    Args:
        num_stages: K. The window starts at K + 1: one microbatch in each stage and one on the way. Each of the first
            K + 1 that come back adds one, as in TCP's slow start (RFC 5681), since between homes transmission takes as
            long as the jobs; after that the window follows the measurements.
        gain: window over the measured product of rate and round trip, > 1. With equal stages whose jobs take +-30 %
            of the mean, 1.25 keeps the slowest one busy for 85 to 90 % of the time, 1.5 for 92 to 94 %.
        memory: number of recent microbatches that count, and after which a plan change is felt.
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
    """Largest recent rate at which microbatches come back; 0: not known yet."""
    round_trip_s: float = field(init=False, default=0.0)
    """Mean of recent round trips without waiting; 0: not known yet."""
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
        """Return the window for another gain, once something has been measured."""
        return max(2, min(self.size_max, int(gain * self.rate_per_s * self.round_trip_s) + 1))

    def sent(self, key: object, *, now_s: float) -> None:
        if not self._sent:
            # The pipe was empty: idle time does not make the pipeline slow.
            self._delivered_at_s = now_s
        self._sent[key] = _Sent(now_s, self._delivered, self._delivered_at_s)

    def returned(self, key: object, *, now_s: float, waited_s: float) -> None:
        """Sample rate and round trip from the gradient of `key` (BBR's delivery-rate estimator). Args: waited_s: time
        of the round trip that it stood in queues."""
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
        """Drop `key`, which says nothing about the pipeline: it was lost, or did not go all the way."""
        self._sent.pop(key, None)


@dataclass(slots=True)
class CommitTimes:
    """Commit times of one replica and the stages after it."""

    _contributed_s: dict[int, float] = field(default_factory=dict)
    """Step -> end of our last microbatch of it."""
    _stepped_s: float | None = None
    """When our own step made the current version; None: it was loaded."""
    _own_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _told_s: deque[float] = field(default_factory=lambda: deque(maxlen=TOLD))
    _median_s: float = 0.0
    longest_s: float = 0.0
    """The longest here and in later stages; 0: not known yet."""

    def contributed(self, step: int, *, now_s: float) -> None:
        self._contributed_s[step] = now_s

    def told(self, longest_s: float) -> None:
        """Note the longest commit time that a replica of the next stage reports."""
        self._told_s.append(longest_s)
        self.longest_s = max(self._median_s, max(self._told_s))

    def stepped(self, version: int, *, now_s: float) -> None:
        """Note that our own step made `version`."""
        contributed_s = self._contributed_s.get(version - 1)
        if contributed_s is not None and self._stepped_s is not None:
            # With whole steps run ahead, a step's microbatches may be done before the round before it ends.
            self._own_s.append(now_s - max(contributed_s, self._stepped_s))
            self._median_s = median(self._own_s)
            self.longest_s = max(self._median_s, max(self._told_s, default=0.0))
        self.loaded(version)
        self._stepped_s = now_s

    def loaded(self, version: int) -> None:
        """Note that a state of `version` has come from elsewhere."""
        self._stepped_s = None
        self._contributed_s = {step: at_s for step, at_s in self._contributed_s.items() if step >= version}


@dataclass(kw_only=True, slots=True)
class Control:
    """Chooses anew at each version. Until it has measurements, it holds nothing back.

    Args:
        s_max, price: see `choose`.
        synchronous_steps: nothing runs ahead of these first steps, and no rate is measured in them: where a step is
            shorter than the way through all stages the pipeline is never full.
    """

    s_max: int
    price: Price
    synchronous_steps: int = 0
    choice: Choice | None = None
    _led: tuple[int, float] | None = None
    _begun: dict[int, int] = field(default_factory=dict)
    _own: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))

    def begun(self, step: int) -> None:
        """Count a microbatch of ours that runs for the first time."""
        self._begun[step] = self._begun.get(step, 0) + 1

    def reached(self, version: int, window: Window, *, commit_s: float) -> None:
        """Choose. `commit_s`: the longest of all stages; 0: not known yet."""
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
        """Follow the leader's choice; < 0: it has none yet. A step ends for all replicas at once: if only some ran
        ahead, it would be as stale as if all did, and as late as if none did. Raises: ValueError: no control chooses
        that."""
        if not 1.0 <= gain < math.inf:
            raise ValueError(f"wants {gain} times what the pipeline holds in flight")
        self._led = (steps_ahead, gain) if steps_ahead >= 0 else None

    def most_ahead(self, window: Window) -> float:
        """Return how many steps ahead of the version a microbatch may begin now. Infinite: nothing is chosen yet."""
        in_force = self.in_force
        if in_force is None:
            return math.inf
        most_ahead, gain = in_force
        fits = gain >= window.gain or window.in_flight < window.size_at(gain)
        return most_ahead if fits else 0

    @property
    def steps_ahead(self) -> int:
        """Steps ahead for which a member may be granted microbatches while others still have theirs of this step to
        take. 0 until a choice is made: all members wait for a layout's first step, so it is granted whole before the
        next."""
        return self.in_force[0] if self.in_force is not None else 0

    @property
    def in_force(self) -> tuple[int, float] | None:
        """(k, g) in force: the leader's choice, or ours while the leader has none."""
        if self._led is None and self.choice is not None:
            return self.choice.steps_ahead, self.choice.gain
        return self._led


class Traffic:
    """Makes the parts that decide the route of microbatches, their number in flight and how far they run ahead: by the
    plan's shares, and by what the pipeline is measured to need. Comparisons exchange them. Each replica of a peer asks
    once."""

    def router(self) -> Router:
        return Router()

    def window(self, num_stages: int) -> Window:
        """Make the window of a stage-0 replica."""
        return Window(num_stages=num_stages)

    def control(self, spec: RunSpec) -> Control | None:
        """Make the control of a stage-0 replica. None: admit all that s_max does."""
        training = spec.training
        if training.s_max == 0:
            return None
        price = price_of(training.compensation, optimizer=spec.optimizer.name)
        return Control(s_max=training.s_max, price=price, synchronous_steps=spec.synchronous_steps)
