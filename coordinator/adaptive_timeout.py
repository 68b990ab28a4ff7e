"""How long a silence may last before it means something. The timeout is measured, not guessed. Pure.

Theory of operation. Something comes again and again: heartbeats, or answers to pings. Three numbers describe the gaps
between them: the mean and the mean deviation (the estimator of TCP's retransmission timer, RFC 6298, with gains 1/8 and
1/4), and the worst gap of the last while (an envelope that halves every `memory_s`). A silence is suspicious beyond

    max(floor, mean + 4 deviations, 1.5 worst) + round trip

The worst gap counts beside the deviations because the gaps of a busy machine are not bell-shaped. Such a machine is on
time for a minute and then stands still for three heartbeats (garbage collection, a disk flush, another process). Two
samples later the deviations have forgotten that, and the next such pause, a minute on, would be taken for a death. The
phi accrual detector (Hayashibara 2004) fits a normal distribution to a window of gaps and forgets with the window,
unless that is so long that it learns nothing new; its phi is then the same function of mean and deviation.

The round trip is added where the silence is that of answers: what was asked last cannot have been answered yet.
"""

from dataclasses import dataclass, field

DEVIATIONS = 4.0
WORST_FACTOR = 1.5


@dataclass(slots=True)
class Arrivals:
    """Learns from the arrival times of a regular message how long that message may stay away before it is suspicious.

    Args:
        floor_s: no silence up to this is suspicious.
        memory_s: the worst gap counts half after this. No silence is borne for longer than half of this.
    """

    interval_s: float
    last_s: float
    floor_s: float
    memory_s: float
    mean_s: float = 0.0
    deviation_s: float = 0.0
    worst_s: float = 0.0
    _sign_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.mean_s = self.mean_s or self.interval_s
        self._sign_s = self.last_s

    def arrived(self, now_s: float) -> None:
        """What was expected has come."""
        # A gap beyond patience may be the link's or ours: it counts as no longer than that, so that one does not blunt
        # the measure for minutes, and a rhythm that is really slower is still learned. The worst may be twice that, or
        # it would be forgotten before the next.
        silent_s, patience_s = now_s - self.last_s, self.patience_s
        gap_s = min(silent_s, patience_s)
        self.deviation_s += (abs(gap_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (gap_s - self.mean_s) / 8
        worst_s = min(silent_s, 2 * patience_s)
        self.worst_s = max(worst_s, self.worst_s * 0.5 ** (silent_s / self.memory_s))
        self.last_s = self._sign_s = now_s

    def signed(self, now_s: float) -> None:
        """There was a sign of life that is not part of the rhythm."""
        self._sign_s = max(self._sign_s, now_s)

    def excuse(self, now_s: float) -> None:
        """Start waiting anew without learning from the gap: the gap was ours, not the sender's."""
        self.last_s = self._sign_s = now_s

    def age(self, silent_s: float, now_s: float) -> None:
        """Count the silence as if it had lasted for `silent_s`."""
        self.last_s = self._sign_s = now_s - silent_s

    @property
    def patience_s(self) -> float:
        """How long a silence may last."""
        measured_s = max(self.usual_s, WORST_FACTOR * self.worst_s)
        return min(max(self.floor_s, measured_s), self.memory_s / 2)

    @property
    def usual_s(self) -> float:
        """Nearly no gap is longer than this, if the machine is not busy."""
        return self.mean_s + DEVIATIONS * self.deviation_s

    @property
    def sign_s(self) -> float:
        """The time of the last sign of life."""
        return self._sign_s

    @property
    def suspect_at_s(self) -> float:
        """The time at which the silence, if it lasts until then, becomes suspicious."""
        return self._sign_s + self.patience_s


@dataclass(slots=True)
class RoundTrip:
    """The time from a question to its answer (RFC 6298); `unknown_s` before the first answer."""

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
        """Nearly every answer comes within this time."""
        return self.unknown_s if self._mean_s is None else self._mean_s + DEVIATIONS * self._deviation_s
