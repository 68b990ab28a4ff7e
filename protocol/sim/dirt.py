"""Dirt: the ways in which real devices and internet lines deviate from their nominal speed. Pure: the caller passes the
random generators.

A dirty device's jobs take varying times. Its speed falls once a token bucket is empty, as with a CPU quota or heat. It
shares its machine's cores with other devices. A dirty line's rate varies over time, and other people's traffic takes a
part of it now and then. A device or line without dirt draws no random numbers, so traces without dirt do not change.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import msgspec

_Positive = Annotated[float, msgspec.Meta(gt=0.0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class Dirt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The dirt of one device and of both directions of its line: the table `dirt` in a scenario file."""

    compute_sd: _NotNegative = 0.0
    """Standard deviation of a job's seconds, which are lognormal, as a fraction of their mean."""
    throttled: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """The part of full speed that the device can keep up for ever. 0.25: a quarter of a core; 1: no quota."""
    burst_s: _NotNegative = 0.0
    """Seconds that a rested device works at full speed before it is throttled: 0.1 * `throttled` with a CPU quota (its
    period is 0.1 s), minutes with heat. A rest of `burst_s * (1 / throttled - 1)` seconds restores the whole burst."""
    probe_waits: bool = True
    """True: the measured time of a probe includes its waits for a core. False: it is processor time, which shows
    neither a quota nor a neighbour on the same cores."""
    wander_sd: _NotNegative = 0.0
    """Standard deviation of the logarithm of the line's rate, cut off at three deviations; the mean rate is kept."""
    wander_s: _Positive = 60.0
    """Time in which the autocorrelation of the logarithm of the line's rate falls to 1/e."""
    others_share: _Share = 0.0
    """The part of the line that other people's traffic takes while there is such traffic."""
    others_on_s: _Positive = 10.0
    """Mean seconds of a period with other people's traffic; the lengths are exponentially distributed."""
    others_off_s: _Positive = 20.0
    """Mean seconds of a period without other people's traffic; the lengths are exponentially distributed."""
    others_delay_s: _NotNegative = 0.0
    """Seconds that a frame or call waits in the line's queue while there is other people's traffic."""

    @property
    def is_on_device(self) -> bool:
        return self.compute_sd > 0.0 or self.throttled < 1.0

    @property
    def is_on_line(self) -> bool:
        return self.wander_sd > 0.0 or self.others_share > 0.0 or self.others_delay_s > 0.0


CLEAN = Dirt()


class Cores:
    """The `count` cores of a machine. If k devices work at once, each runs at min(1, count / k) of its speed."""

    def __init__(self, count: float = math.inf) -> None:
        self._count = count
        self._busy: list[DevicePace] = []

    @property
    def share(self) -> float:
        return min(1.0, self._count / max(1, len(self._busy)))

    def enter(self, pace: "DevicePace", now_s: float) -> None:
        self._settle(now_s)
        self._busy.append(pace)
        self._tell()

    def leave(self, pace: "DevicePace", now_s: float) -> None:
        self._settle(now_s)
        self._busy.remove(pace)
        self._tell()

    def _settle(self, now_s: float) -> None:
        for pace in self._busy:
            pace.advance(now_s)

    def _tell(self) -> None:
        for pace in tuple(self._busy):
            pace.on_change()


class DevicePace:
    """The progress of the job on a dirty device. It belongs to the machine, since heat and quota outlive a process.

    `begin` starts a job. From then on `on_change` is called when another device on the same cores begins or ends a job.
    `advance` updates the job's progress to the present. `lasts_s` returns how long the present speed holds; after that
    time the caller must call `advance` and `lasts_s` again.
    """

    def __init__(self, dirt: Dirt, cores: Cores, rng: random.Random) -> None:
        self.probe_waits = dirt.probe_waits
        self.on_change: Callable[[], None] = lambda: None
        # exp(N(-s²/2, s²)) has the mean 1 and the variance exp(s²) - 1.
        self._log_sd = math.sqrt(math.log1p(dirt.compute_sd**2))
        self._rng = rng
        self._cores = cores
        self._throttled = dirt.throttled
        self._full_s = dirt.burst_s * (1.0 - dirt.throttled)
        """Size of the token bucket, in seconds of full-speed work. Each second adds `throttled` seconds to it."""
        self._bucket_s = self._full_s
        self._left_s = 0.0
        self._speed = 0.0
        self._at_s = 0.0

    def factor(self) -> float:
        """Draw a job's duration at full speed, as a multiple of its nominal one (mean 1)."""
        return math.exp(self._rng.gauss(-(self._log_sd**2) / 2.0, self._log_sd)) if self._log_sd else 1.0

    def begin(self, seconds: float, now_s: float) -> None:
        """Start a job that takes `seconds` at full speed. This calls `on_change` of all devices on these cores."""
        self.advance(now_s)
        self._left_s = seconds
        self._cores.enter(self, now_s)

    def end(self, now_s: float) -> None:
        """End the job, which is done or dropped; the device then rests."""
        self._cores.leave(self, now_s)
        self._speed = self._left_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._left_s <= 1e-9  # less work than this is the clock's rounding

    def advance(self, now_s: float) -> None:
        """Update the job and the token bucket for the time since the last call, in which the speed was constant."""
        past_s, self._at_s = now_s - self._at_s, now_s
        self._left_s -= self._speed * past_s
        self._bucket_s = min(self._full_s, self._bucket_s + (self._throttled - self._speed) * past_s)
        if self._bucket_s <= 1e-9:
            self._bucket_s = 0.0

    def lasts_s(self) -> float:
        """Set the present speed. Returns: the seconds until, at this speed, the job is done or the token bucket
        empty."""
        share = self._cores.share
        self._speed = share if self._bucket_s else min(share, self._throttled)
        drains = self._speed - self._throttled
        empty_s = self._bucket_s / drains if self._bucket_s and drains > 0.0 else math.inf
        return max(0.0, min(self._left_s / self._speed, empty_s))


class _Piece(NamedTuple):
    until_s: float
    factor: float
    """The line's rate as a multiple of its nominal rate, until `until_s`."""
    delay_s: float


class LineDirt:
    """The varying rate of one direction of a line, as a series of pieces (periods of one rate), drawn when needed."""

    def __init__(self, dirt: Dirt, rng: random.Random) -> None:
        self._dirt, self._rng = dirt, rng
        self._pieces: deque[_Piece] = deque()
        self._log = rng.gauss(0.0, dirt.wander_sd)
        self._others = rng.random() < dirt.others_on_s / (dirt.others_on_s + dirt.others_off_s)
        self._wanders_s = dirt.wander_s / 8 if dirt.wander_sd else math.inf
        self._toggles_s = self._period_s() if dirt.others_share or dirt.others_delay_s else math.inf
        self._clamp()

    def takes_s(self, from_s: float, seconds: float) -> float:
        """Return the duration of a transfer that begins at `from_s` and would take `seconds` at the nominal rate."""
        left_s, at_s = seconds, from_s
        for piece in self._ahead(from_s):
            in_piece_s = left_s / piece.factor
            if at_s + in_piece_s <= piece.until_s:
                return at_s + in_piece_s - from_s
            left_s -= (piece.until_s - at_s) * piece.factor
            at_s = piece.until_s
        raise AssertionError("pieces never end")

    def now(self, now_s: float) -> _Piece:
        """Return the piece (a period of one rate factor) at `now_s`, and forget earlier pieces."""
        while self._pieces and self._pieces[0].until_s <= now_s:
            self._pieces.popleft()
        return next(self._ahead(now_s))

    def _ahead(self, from_s: float) -> Iterator[_Piece]:
        index = 0
        while True:
            if index == len(self._pieces):
                self._draw()
            if self._pieces[index].until_s > from_s:
                yield self._pieces[index]
            index += 1

    def _draw(self) -> None:
        dirt = self._dirt
        until_s = min(self._wanders_s, self._toggles_s)
        free = 1.0 - dirt.others_share if self._others else 1.0
        # E exp(N(0, s²)) is exp(s²/2).
        wandered = math.exp(self._log - dirt.wander_sd**2 / 2.0)
        self._pieces.append(_Piece(until_s, wandered * free, dirt.others_delay_s if self._others else 0.0))
        if until_s == self._wanders_s:
            keeps = math.exp(-1.0 / 8)  # eight steps in the correlation time: next values differ by half a deviation
            self._log = keeps * self._log + self._rng.gauss(0.0, dirt.wander_sd * math.sqrt(1.0 - keeps**2))
            self._clamp()
            self._wanders_s += dirt.wander_s / 8
        else:
            self._others = not self._others
            self._toggles_s += self._period_s()

    def _period_s(self) -> float:
        mean_s = self._dirt.others_on_s if self._others else self._dirt.others_off_s
        return max(1e-9, self._rng.expovariate(1.0 / mean_s))

    def _clamp(self) -> None:
        bound = 3.0 * self._dirt.wander_sd
        self._log = min(bound, max(-bound, self._log))
