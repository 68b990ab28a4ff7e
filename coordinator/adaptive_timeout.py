"""Learns from past gaps how long a peer may be silent before it is suspect. Pure.

Theory of operation. Three numbers describe the gaps between regular messages: the mean and the mean deviation (as for
TCP's retransmission timer, RFC 6298, with gains 1/8 and 1/4), and the worst recent gap (a maximum that halves every
`memory_s`). A silence is suspicious when it is longer than

    max(floor, mean + 4 deviations, 1.5 worst) + round trip

The worst gap is there because a busy machine is on time for a minute and then stands still for three heartbeats
(garbage collection, a disk flush, another process). The deviation forgets that pause after two samples, and so does the
phi accrual detector (Hayashibara 2004), unless its window is so long that it learns nothing new. The round trip is
added for answers to pings, because the last ping cannot have been answered yet."""

from dataclasses import dataclass, field

DEVIATIONS = 4.0


@dataclass(slots=True)
class Arrivals:
    """Learns how long a regular message may be late before its sender is suspect.

    Args:
        interval_s: the expected time between regular messages. last_s: the time of the last one.
        floor_s: a shorter silence is never suspicious.
        memory_s: half-life of the worst gap. The timeout is at most `memory_s` / 2.
    """

    interval_s: float
    last_s: float
    floor_s: float
    memory_s: float
    mean_s: float = 0.0
    deviation_s: float = 0.0
    worst_s: float = 0.0
    sign_s: float = field(init=False)
    """Time of the peer's newest message of any kind. `last_s` is the time of its newest regular message."""

    def __post_init__(self) -> None:
        self.mean_s = self.mean_s or self.interval_s
        self.sign_s = self.last_s

    def arrived(self, now_s: float) -> None:
        """Learn from the gap that ends with this arrival."""
        # A gap beyond the timeout may be a fault of the link or of our own machine: it enters the mean as at most the
        # timeout, and the worst gap as at most twice the timeout. Less would decay before the next such gap.
        silent_s, patience_s = now_s - self.last_s, self.patience_s
        gap_s = min(silent_s, patience_s)
        self.deviation_s += (abs(gap_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (gap_s - self.mean_s) / 8
        worst_s = min(silent_s, 2 * patience_s)
        self.worst_s = max(worst_s, self.worst_s * 0.5 ** (silent_s / self.memory_s))
        self.last_s = self.sign_s = now_s

    def signed(self, now_s: float) -> None:
        """Record a sign of life other than a regular message."""
        self.sign_s = max(self.sign_s, now_s)

    def excuse(self, now_s: float) -> None:
        """Restart the wait for a message, and learn nothing from the gap: our own machine stood still."""
        self.last_s = self.sign_s = now_s

    def age(self, silent_s: float, now_s: float) -> None:
        self.last_s = self.sign_s = now_s - silent_s

    @property
    def patience_s(self) -> float:
        """The longest silence that is not suspicious."""
        measured_s = max(self.usual_s, 1.5 * self.worst_s)
        return min(max(self.floor_s, measured_s), self.memory_s / 2)

    @property
    def usual_s(self) -> float:
        """The longest gap between messages that is usual for a sender on a machine that is not busy."""
        return self.mean_s + DEVIATIONS * self.deviation_s

    @property
    def suspect_at_s(self) -> float:
        return self.sign_s + self.patience_s


@dataclass(slots=True)
class RoundTrip:
    """Round-trip time estimator (RFC 6298); `unknown_s` is the timeout before the first answer."""

    unknown_s: float
    _mean_s: float | None = None
    _deviation_s: float = 0.0

    def took(self, seconds: float) -> None:
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
        else:
            self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (seconds - self._mean_s) / 8

    @property
    def patience_s(self) -> float:
        """The time within which nearly every answer arrives."""
        return self.unknown_s if self._mean_s is None else self._mean_s + DEVIATIONS * self._deviation_s
