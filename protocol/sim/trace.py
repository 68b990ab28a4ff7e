"""A running hash over all events of a world: equal hashes mean that two runs were equal, event for event."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import xxhash


class Kind(IntEnum):
    """Kinds of events. Their numbers are part of the hash: add new ones, never renumber."""

    JOINED = 1
    CLOSED = 2
    CRASHED = 3
    PAUSED = 4
    RESUMED = 5
    CUT = 6
    HEALED = 7
    FRAME_QUEUED = 10
    FRAME_STARTED = 11
    FRAME_ARRIVED = 12
    FRAME_HANDLED = 13
    STREAM_BROKEN = 14
    CALL_SENT = 20
    CALL_ARRIVED = 21
    REPLY_SENT = 22
    REPLY_ARRIVED = 23
    CALL_LOST = 24
    CALL_ABANDONED = 25
    RECORD_STORED = 30
    RECORD_READ = 31
    JOB_STARTED = 40
    DISTURBED = 50
    CALMED = 51
    DEVICE_SLOWED = 52
    CLOCK_JUMPED = 53
    DAEMON_DIED = 54
    DAEMON_RESTARTED = 55
    FRAME_DAMAGED = 60
    FRAME_REPEATED = 61
    CREDIT_DAMAGED = 62
    CALL_DAMAGED = 63
    CALL_REPEATED = 64
    DISK_LIMITED = 70
    DISK_FAILING = 71
    DISK_MENDED = 72
    POWER_FAILING = 73


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `source` and `destination` are numbers of peers in joining order; -1: no peer."""

    at_s: float
    kind: Kind
    source: int
    destination: int
    nbytes: int
    digest: int


_EVENT = struct.Struct("<dBiiQQ")


class Trace:
    """The running hash. `watch` is called with every event, to find the first difference between two runs."""

    def __init__(self, watch: Callable[[Event], None] | None = None) -> None:
        self._hash = xxhash.xxh3_128()
        self._watch = watch
        self.num_events = 0

    def add(self, at_s: float, kind: Kind, source: int, destination: int, nbytes: int = 0, digest: int = 0) -> None:
        self.num_events += 1
        self._hash.update(_EVENT.pack(at_s, kind, source, destination, nbytes, digest))
        if self._watch is not None:
            self._watch(Event(at_s, kind, source, destination, nbytes, digest))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
