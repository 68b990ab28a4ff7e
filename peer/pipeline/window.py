"""How many microbatches a stage-0 replica keeps in flight.

Just enough to keep the slowest stage busy: every further one only waits in a queue, costs memory and comes back
staler. Found by measuring, in the manner of BBR (Cardwell et al. 2016): the pipeline's bottleneck rate is the largest
recent delivery rate, its empty round trip the mean recent one without its waiting; their product is what the pipeline
holds when it is full and nothing queues. The mean, for microbatches go different ways: with replicas on several
continents the quickest says little of what all of them together hold. A gain above 1 keeps probing: if the pipeline
was not full, the rate rises and so does the window; if it was, only the queues grow.

The time that a microbatch stood in queues, for a device or for a link, is subtracted from its round trip: each stage
knows it and says so with the gradient. A network cannot, so BBR empties its queue now and then to see an empty round
trip. Without either, a full pipeline always measures rate x round trip = what is in flight, and the window grows by
its gain for ever: a model of this pipeline had 25 to 40 times too much in flight within minutes. Draining would cost
throughput, and several stage-0 replicas would have to drain at the same time.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Sent:
    at_s: float
    delivered: int
    delivered_at_s: float


@dataclass(kw_only=True, slots=True)
class Window:
    """`size` microbatches may be in flight.

    Args:
        num_stages: the window starts at `num_stages + 1`: one in each stage and one on the way.
        gain: window over the measured product of rate and round trip, > 1. With equal stages whose jobs take +-30 %
            of the mean, 1.25 keeps the slowest one busy for 85 to 90 % of the time, 1.5 for 92 to 94 %.
        memory: how many recent microbatches the largest rate and the mean round trip are taken over; the limit
            forgets a better past, so that a plan change is felt within `memory` microbatches.
    """

    num_stages: int
    gain: float = 1.5
    memory: int = 32
    size_max: int = 256
    size: int = field(init=False)
    _sent: dict[object, _Sent] = field(default_factory=dict)
    _delivered: int = 0
    _delivered_at_s: float = 0.0
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

    @property
    def rate_per_s(self) -> float:
        """At which microbatches come back of late, at most; 0: not known yet."""
        return max(self._rates, default=0.0)

    @property
    def round_trip_s(self) -> float:
        """The mean of late, without waiting; 0: not known yet."""
        return sum(self._round_trips_s) / max(1, len(self._round_trips_s))

    def size_at(self, gain: float) -> int:
        """What the window would be with another gain, once something has been measured."""
        return max(2, min(self.size_max, int(gain * self.rate_per_s * self.round_trip_s) + 1))

    def sent(self, key: object, *, now_s: float) -> None:
        if not self._sent:
            # The pipe was empty: time spent idle is no sign of a slow pipeline.
            self._delivered_at_s = now_s
        self._sent[key] = _Sent(now_s, self._delivered, self._delivered_at_s)

    def returned(self, key: object, *, now_s: float, waited_s: float) -> None:
        """The gradient of `key` is back: one sample of rate and round trip (BBR's delivery-rate estimator).

        `waited_s` of its round trip it stood in queues.
        """
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        self._delivered += 1
        self._delivered_at_s = now_s
        elapsed_s = now_s - sent.delivered_at_s
        if elapsed_s > 0:
            self._rates.append((self._delivered - sent.delivered) / elapsed_s)
        self._round_trips_s.append(max(0.0, now_s - sent.at_s - waited_s))
        if len(self._round_trips_s) >= self.size or len(self._round_trips_s) == self.memory:
            self.size = self.size_at(self.gain)

    def forget(self, key: object) -> None:
        """`key` says nothing about the pipeline: it was lost, or did not go all the way."""
        self._sent.pop(key, None)
