"""Decides how many bytes may stand before the uplink of one peer. Pure: the caller says what time it is.

A home's uplink is the narrowest part of every way from it, and what is written faster than it sends stands in buffers:
the kernel's, the network daemon's, the router's. A heartbeat that is written then waits for all of it. So a writer
waits here instead, where lines have priorities, and only so much stands behind it as keeps the uplink busy:

    window = rate * (round trip + QUEUE_S)

The round trip is the least one seen; `rate` is what was delivered of late. The window bounds bytes and sets no pace: as
long as something stands in the queue the line sends as fast as it can, so a rate taken for too low does not hold it
back. `QUEUE_S` more is on the way than the old rate fills, and the next sample shows it: where the line has more, the
rate grows by (round trip + QUEUE_S) / round trip with each sample. Where it has less, some samples show that.

A line with nothing to send says nothing about its rate: a sample lowers it only if there was at least a round trip's
worth of bytes before the line all the time. Each connection has a window of its own by the same rule, from its own
rate: a receiver that takes little is sent little ahead, and in the window of the whole line it counts for no more. It
is half as wide again, so that where several share the line, the line's window is what holds them: by their own, each
would have for ever the share that it has now.

Source: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016: the windowed maximum of the
delivery rate, the least round trip, application-limited samples. We differ in that we neither pace nor probe: below us
is TCP, which does both, and we only bound what stands in its queue.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

QUEUE_S: Final = 0.1
"""What may stand before the line, in seconds of its rate: five looks at it, and little beside a heartbeat's time."""
WINDOW_BYTES_MIN: Final = 16 * 1024
"""TCP finds a loss by three packets that come after it, and begins with ten."""
WINDOW_BYTES_FIRST: Final = 64 * 1024
"""The window while nothing is known of a line: 0.1 s at 5 Mbit/s, and ten times that some samples later."""
_PATH_GAIN: Final = 1.5
"""How many times as wide a connection's own window is."""
_SAMPLE_S: Final = 0.1
_NUM_SAMPLES: Final = 6
"""A fall is believed after so many samples. Fewer, and the time in which TCP mends a loss counts as the line's rate."""
_NUM_PATH_SAMPLES: Final = 20
"""The rate of a connection is often low because others share the line. What it had alone is remembered for longer, so
that the next burst need not find it again."""
_UNSEEN_S: Final = 0.5
"""Bytes that the kernel has not seen after once to twice this time are not on their way to it: the daemon holds them
back for their receiver, or they went another way."""
_PAUSE_S: Final = 0.5
"""A sample begins anew after so long without a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What the kernel says of a connection's outgoing half."""

    delivered_bytes: int
    """Acknowledged since it is open, in whatever order."""
    queued_bytes: int
    """Written into the socket and not delivered: on the way, or not yet."""
    round_trip_s: float
    """The least one seen."""

    def __add__(self, other: "Connection") -> "Connection":
        """Two connections to one peer are as one."""
        return Connection(
            delivered_bytes=self.delivered_bytes + other.delivered_bytes,
            queued_bytes=self.queued_bytes + other.queued_bytes,
            round_trip_s=min(self.round_trip_s, other.round_trip_s),
        )


@dataclass(kw_only=True, slots=True)
class _Rate:
    """The most that was delivered in a sample of late."""

    num_samples: int = _NUM_SAMPLES
    bytes_per_s: float = 0.0
    _samples: deque[float] = field(default_factory=deque)
    _was_busy: bool = False
    _begun_s: float = -math.inf
    _looked_s: float = -math.inf
    _bytes: int = 0
    _is_busy: bool = False

    def look(self, delivered_bytes: int, *, is_busy: bool, now_s: float) -> None:
        """Args: delivered_bytes: since the last look. is_busy: whether the line cannot have been idle since then."""
        if now_s > self._looked_s + _PAUSE_S:
            self._begin(now_s, is_busy)
        else:
            self._bytes += delivered_bytes
            self._is_busy &= is_busy
            if now_s >= self._begun_s + _SAMPLE_S:
                self._take(self._bytes / (now_s - self._begun_s))
                self._begin(now_s, is_busy)
        self._looked_s = now_s

    def _begin(self, now_s: float, is_busy: bool) -> None:
        self._begun_s, self._bytes, self._is_busy = now_s, 0, is_busy

    def _take(self, sample: float) -> None:
        if self._is_busy or sample > self.bytes_per_s:
            self._samples.append(sample)
            if len(self._samples) > self.num_samples:
                self._samples.popleft()
            self.bytes_per_s = max(self._samples)
            self._was_busy |= self._is_busy

    def window_bytes(self, round_trip_s: float) -> float:
        return max(self._least_bytes, self.bytes_per_s * (round_trip_s + QUEUE_S))

    def queue_bytes(self, round_trip_s: float) -> float:
        """What of that stands before the line; nothing, where nothing is delivered."""
        queue_bytes = self.bytes_per_s * (round_trip_s + QUEUE_S)
        return queue_bytes if self._was_busy else max(WINDOW_BYTES_FIRST, queue_bytes)

    def fills(self, backlog_bytes: float, round_trip_s: float) -> bool:
        """Whether so much before the line keeps it busy for now."""
        return backlog_bytes >= max(self._least_bytes / 2, self.bytes_per_s * round_trip_s)

    @property
    def _least_bytes(self) -> int:
        return WINDOW_BYTES_MIN if self._was_busy else WINDOW_BYTES_FIRST


@dataclass(kw_only=True, slots=True)
class _Path:
    """One connection, and what was written towards it."""

    seen: Connection
    rate: _Rate = field(default_factory=lambda: _Rate(num_samples=_NUM_PATH_SAMPLES))
    unseen_bytes: float = 0.0
    """Written by us, and not yet in the kernel's queue: in the daemon, or on the way to it."""
    _written: tuple[float, float] = (0.0, 0.0)
    """What we wrote in this span of `_UNSEEN_S`, and in the one before."""
    _span_s: float = -math.inf

    @property
    def backlog_bytes(self) -> float:
        return self.seen.queued_bytes + self.unseen_bytes

    @property
    def window_bytes(self) -> float:
        return _PATH_GAIN * self.rate.window_bytes(self.seen.round_trip_s)

    @property
    def counted_bytes(self) -> float:
        """The part of the backlog that is before the line. The rest waits for its receiver, and all of it if that takes
        nothing."""
        return min(self.backlog_bytes, _PATH_GAIN * self.rate.queue_bytes(self.seen.round_trip_s))

    def wrote(self, nbytes: float) -> None:
        self.unseen_bytes += nbytes
        self._written = (self._written[0] + nbytes, self._written[1])

    def look(self, now: Connection, now_s: float) -> int:
        """Returns: the bytes delivered since the last look; 0, if there was nothing to look at: that was long ago."""
        was_busy = self.backlog_bytes > 0.0
        before, self.seen = self.seen, now
        delivered = max(0, now.delivered_bytes - before.delivered_bytes) if was_busy else 0
        entered = delivered + now.queued_bytes - before.queued_bytes
        if now_s > self._span_s + _UNSEEN_S:
            self._written, self._span_s = (0.0, self._written[0]), now_s
        self.unseen_bytes = min(max(0.0, self.unseen_bytes - entered), sum(self._written))
        is_busy = self.rate.fills(self.backlog_bytes, now.round_trip_s)
        self.rate.look(delivered, is_busy=is_busy, now_s=now_s)
        return delivered


class UplinkWindow:
    """The window of one peer's uplink, and of each connection over it. The caller names the connections."""

    def __init__(self) -> None:
        self._paths: dict[str, _Path] = {}
        self._rate = _Rate()
        self._window_bytes = float(WINDOW_BYTES_FIRST)
        self._counted_bytes = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The most that the line was seen to carry of late."""
        return self._rate.bytes_per_s

    @property
    def busy(self) -> list[str]:
        """Connections with something on its way."""
        return [name for name, path in self._paths.items() if path.backlog_bytes]

    def is_busy(self, name: str) -> bool:
        return self._paths[name].backlog_bytes > 0.0

    def forget(self, name: str) -> None:
        """That connection is gone."""
        self._paths.pop(name, None)

    def look(self, connections: Mapping[str, Connection], *, now_s: float) -> None:
        """Take what the kernel says of connections that pass the uplink: of new ones, and of all that are busy."""
        delivered = 0
        for name, connection in connections.items():
            path = self._paths.get(name)
            if path is None:
                path = self._paths[name] = _Path(seen=connection)
            delivered += path.look(connection, now_s)
        self._counted_bytes = sum(path.counted_bytes for path in self._paths.values())
        round_trip_s = self._round_trip_s()
        is_busy = self._rate.fills(self._counted_bytes, round_trip_s)
        self._rate.look(delivered, is_busy=is_busy, now_s=now_s)
        self._window_bytes = self._rate.window_bytes(round_trip_s)

    def knows(self, name: str) -> bool:
        return name in self._paths

    def round_trip_s(self, name: str) -> float:
        """The least one seen of a connection that was there at the last look."""
        return self._paths[name].seen.round_trip_s

    def wrote(self, name: str, nbytes: float) -> None:
        """Take note of what was written towards a connection that was there at the last look."""
        path = self._paths[name]
        before = path.counted_bytes
        path.wrote(nbytes)
        self._counted_bytes += path.counted_bytes - before

    def admits(self, name: str) -> bool:
        """Whether a slice may be written towards a connection now, and whole: the next one waits as much longer."""
        path = self._paths[name]
        return self._counted_bytes < self._window_bytes and path.backlog_bytes < path.window_bytes

    def _round_trip_s(self) -> float:
        """The mean of what the connections have whose bytes stand before the line; else the least of all."""
        paths = self._paths.values()
        counted = sum(path.counted_bytes for path in paths)
        if counted <= 0.0:
            return min((path.seen.round_trip_s for path in paths), default=0.0)
        return sum(path.counted_bytes * path.seen.round_trip_s for path in paths) / counted
