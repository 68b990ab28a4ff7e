"""Decides how many bytes may be queued before a peer's uplink. Pure: the caller passes the time.

A home's uplink is the bottleneck of every path from that home. Bytes written faster than the uplink sends them queue in
the kernel, the network daemon and the router, and a later heartbeat waits behind all of them. So writers wait in this
process instead, in a queue with priorities, and only as many bytes are in flight as keep the uplink busy:

    window = rate * (round trip + QUEUE_S)

The round trip is the least one seen, `rate` the recent delivery rate. The window is no rate limit: while any bytes are
queued the line sends at full speed, so a low estimate does not slow the line down. Because of `QUEUE_S` more bytes are
in flight than the estimate needs: on a faster line each sample raises the estimate by (round trip + QUEUE_S) / round
trip.

An idle line shows nothing about its rate: a sample lowers the estimate only if at least a round trip's worth of bytes
was queued all the time. Each connection also has a window, by the same rule with its own rate, so that a slow receiver
takes little of the line's window. A connection's window is 1.5 times as wide as the rule says, so that connections that
share the line are limited by the line's window: under their own windows they would keep their present shares.

Source: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016: the windowed maximum of the
delivery rate, the least round trip, application-limited samples. We neither pace nor probe: TCP below us does both.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

QUEUE_S: Final = 0.1
"""Size of the queue to keep before the line, in seconds that the line takes to send it: long enough for five looks at
the queue, and short against a heartbeat's interval."""
WINDOW_BYTES_MIN: Final = 16 * 1024
"""Least window, about ten packets: TCP begins with as many, and detects a loss by three later packets."""
WINDOW_BYTES_FIRST: Final = 64 * 1024
"""First window: 0.1 s at 5 Mbit/s. The window can grow tenfold within some samples."""
_PATH_GAIN: Final = 1.5
_SAMPLE_S: Final = 0.1
_NUM_SAMPLES: Final = 6
"""The line's rate is the maximum of this many samples. With fewer, TCP's recovery from a loss would lower the rate."""
_NUM_PATH_SAMPLES: Final = 20
"""A connection's rate is the maximum of this many samples. It often falls because others share the line; with many
samples the rate that the connection had alone is remembered until its next burst."""
_UNSEEN_S: Final = 0.5
"""Bytes that we have written and the kernel does not show count as queued for one to two times this time. Later we
assume that they wait in the daemon, or have used another path."""
_PAUSE_S: Final = 0.5
"""A pause between two looks that is longer than this starts a new sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkConnection:
    """The kernel's figures of a connection's outgoing half."""

    delivered_bytes: int
    """Bytes that the other end has acknowledged since the connection opened, in order or not."""
    queued_bytes: int
    """Bytes written into the socket and not acknowledged, whether sent or not."""
    round_trip_s: float

    def __add__(self, other: "UplinkConnection") -> "UplinkConnection":
        """Add up the figures of two connections to one peer."""
        return UplinkConnection(
            delivered_bytes=self.delivered_bytes + other.delivered_bytes,
            queued_bytes=self.queued_bytes + other.queued_bytes,
            round_trip_s=min(self.round_trip_s, other.round_trip_s),
        )


@dataclass(kw_only=True, slots=True)
class _Rate:
    """The highest recent delivery rate of the line or of one connection."""

    num_samples: int = _NUM_SAMPLES
    bytes_per_s: float = 0.0
    _samples: deque[float] = field(default_factory=deque)
    _was_busy: bool = False
    _begun_s: float = -math.inf
    _looked_s: float = -math.inf
    _bytes: int = 0
    _is_busy: bool = False

    def look(self, delivered_bytes: int, *, is_busy: bool, now_s: float) -> None:
        """Record `delivered_bytes` since the last call. Args: is_busy: the line was certainly busy since then."""
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
        """Return how many of a connection's queued bytes count at most towards the line's window: rate x (round trip +
        `QUEUE_S`), and at least `WINDOW_BYTES_FIRST` until the connection was busy."""
        queue_bytes = self.bytes_per_s * (round_trip_s + QUEUE_S)
        return queue_bytes if self._was_busy else max(WINDOW_BYTES_FIRST, queue_bytes)

    def fills(self, backlog_bytes: float, round_trip_s: float) -> bool:
        """True if so many queued bytes keep the line busy: a round trip's worth at the recent rate, or more."""
        return backlog_bytes >= max(self._least_bytes / 2, self.bytes_per_s * round_trip_s)

    @property
    def _least_bytes(self) -> int:
        return WINDOW_BYTES_MIN if self._was_busy else WINDOW_BYTES_FIRST


@dataclass(kw_only=True, slots=True)
class _Path:
    seen: UplinkConnection
    rate: _Rate = field(default_factory=lambda: _Rate(num_samples=_NUM_PATH_SAMPLES))
    unseen_bytes: float = 0.0
    """Bytes written by us that are not in the kernel's queue yet: they are in the daemon, or on the way to it."""
    _written: tuple[float, float] = (0.0, 0.0)
    _span_s: float = -math.inf

    @property
    def backlog_bytes(self) -> float:
        return self.seen.queued_bytes + self.unseen_bytes

    @property
    def window_bytes(self) -> float:
        return _PATH_GAIN * self.rate.window_bytes(self.seen.round_trip_s)

    @property
    def counted_bytes(self) -> float:
        """The queued bytes that count towards the line's window. Further ones are taken to wait for a slow receiver."""
        return min(self.backlog_bytes, _PATH_GAIN * self.rate.queue_bytes(self.seen.round_trip_s))

    def wrote(self, nbytes: float) -> None:
        self.unseen_bytes += nbytes
        self._written = (self._written[0] + nbytes, self._written[1])

    def look(self, now: UplinkConnection, now_s: float) -> int:
        """Return the bytes delivered since the last call; 0 if no byte was queued when that call was made."""
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
    """The windows of one peer's uplink and of each connection over the uplink; the caller names the connections."""

    def __init__(self) -> None:
        self._paths: dict[str, _Path] = {}
        self._rate = _Rate()
        self._window_bytes = float(WINDOW_BYTES_FIRST)
        self._counted_bytes = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The line's highest recent delivery rate; 0: none was measured yet."""
        return self._rate.bytes_per_s

    @property
    def busy(self) -> list[str]:
        """Names of the connections with bytes that are written and not acknowledged."""
        return [name for name, path in self._paths.items() if path.backlog_bytes]

    def is_busy(self, name: str) -> bool:
        return self._paths[name].backlog_bytes > 0.0

    def forget(self, name: str) -> None:
        self._paths.pop(name, None)

    def look(self, connections: Mapping[str, UplinkConnection], *, now_s: float) -> None:
        """Update the windows. Args: connections: name -> the kernel's figures, of all busy and all new connections."""
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
        """Return the round trip of a known connection, in seconds, by the kernel's latest figures."""
        return self._paths[name].seen.round_trip_s

    def wrote(self, name: str, nbytes: float) -> None:
        """Record bytes written to a known connection."""
        path = self._paths[name]
        before = path.counted_bytes
        path.wrote(nbytes)
        self._counted_bytes += path.counted_bytes - before

    def admits(self, name: str) -> bool:
        """True if a piece of a frame may be written to the connection now, whatever its size: only the next waits."""
        path = self._paths[name]
        return self._counted_bytes < self._window_bytes and path.backlog_bytes < path.window_bytes

    def _round_trip_s(self) -> float:
        """Return the connections' mean round trip, weighted by queued bytes; without queued bytes, the shortest one."""
        paths = self._paths.values()
        counted = sum(path.counted_bytes for path in paths)
        if counted <= 0.0:
            return min((path.seen.round_trip_s for path in paths), default=0.0)
        return sum(path.counted_bytes * path.seen.round_trip_s for path in paths) / counted
