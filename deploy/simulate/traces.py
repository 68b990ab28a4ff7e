"""Reads recorded churn of machines, and replays it in a simulated swarm.

A trace is a CSV file with a header and times in seconds. The header says which of three forms it has:

    time_s,event,node             each line is one `add` or `remove`
    down_start_s,down_end_s,node  each line is one absence of a node, which is up at all other times
    time_s,available              the number of available nodes; the seed draws which nodes go
"""

import csv
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from shoal.deploy.simulate.modelled import Churn
from shoal.protocol.errors import LocalError
from shoal.protocol.limits import TRACE_BYTES_MAX, TRACE_EVENTS_MAX, TRACE_REPLAYED_MAX
from shoal.protocol.toml_file import read_at_most

Kind = Literal["add", "remove"]
_Rows = Iterator[tuple[int, list[str]]]
"""The lines of a trace file, each as (line number, fields)."""


class TraceEvent(NamedTuple):
    at_s: float
    kind: Kind
    node: str


def load_trace(path: Path, *, seed: int = 0) -> tuple[TraceEvent, ...]:
    """Return the events of a trace by time. Each node is added and removed in turn, beginning with an `add`.

    Args: seed: draws the nodes that go, if the file gives only the number of available nodes.
    Raises: LocalError, in one line: there is no such file, or it has an unknown header or an invalid line.
    """
    try:
        lines = read_at_most(path, TRACE_BYTES_MAX).decode().splitlines()
    except OSError as error:
        raise LocalError(f"the trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LocalError(f"the trace {path} is not text") from error
    except msgspec.DecodeError as error:
        raise LocalError(f"{path} is not a trace: {error}") from error
    table = csv.reader(lines)
    try:
        header = tuple(field.strip() for field in next(table, []))
    except csv.Error as error:
        raise LocalError(f"{path} is not a trace: {error}") from error
    read = _READERS.get(header)
    if read is None:
        known = "; ".join(",".join(names) for names in _READERS)
        raise LocalError(f"{path} is not a trace: its first line is {','.join(header)[:80]!r}, not one of {known}")
    try:
        rows = ((number, fields) for number, fields in enumerate(table, start=2) if fields)
        happens = read(_checked(rows, len(header)), random.Random(f"trace/{seed}"))
        events = tuple(itertools.islice(happens, TRACE_EVENTS_MAX + 1))
    except (_BadLine, csv.Error) as error:
        raise LocalError(f"{path}: {error}") from error
    if len(events) > TRACE_EVENTS_MAX:
        raise LocalError(f"{path}: more than {TRACE_EVENTS_MAX:,} comings and goings")
    if not events:
        raise LocalError(f"{path} is not a trace: it has no events")
    return events


def replay(
    trace: Sequence[TraceEvent],
    *,
    num_devices: int,
    seconds: float,
    start_s: float | None = None,
    speedup: float = 1.0,
    copies_max: int | None = None,
) -> tuple[Churn, ...]:
    """Return the comings and goings of `num_devices` devices in `seconds` of a trace.

    A node that comes takes the free device with the lowest number, or none if all are taken. If there are more devices
    than nodes are ever up at once in the trace, several copies of the trace run side by side. Each has its own devices,
    and their starts are spread evenly over the trace.

    Args:
        seconds: the simulated seconds.
        start_s: the time of the trace at which the run starts. None: when half of the peak number of nodes is up for
            the first time.
        speedup: the seconds of the trace that pass in one simulated second.
        copies_max: the limit on copies; devices beyond all copies are always present. None: unlimited.
    Returns: events by time. Each device that is absent at the beginning has a later `add`, if need be after the end.
    Raises: LocalError: there would be too many events.
    """
    assert min(seconds, speedup, num_devices) > 0
    peak, half_s = _peak(trace)
    begin_s = half_s if start_s is None else start_s
    copies = min(math.ceil(num_devices / peak), copies_max or num_devices)
    if copies * len(trace) > TRACE_REPLAYED_MAX:
        raise LocalError(
            f"{num_devices} devices are {copies} copies of a trace of {peak} nodes and {len(trace):,} events, "
            f"more than {TRACE_REPLAYED_MAX:,} in all: take fewer devices, or a shorter trace"
        )
    spread_s = max(0.0, trace[-1].at_s - begin_s - seconds * speedup) / copies
    events: list[Churn] = []
    for copy in range(copies):
        devices = range(copy * peak, min(num_devices, (copy + 1) * peak))
        events += _replay_copy(trace, devices, begin_s + copy * spread_s, seconds, speedup)
    return tuple(sorted(events, key=lambda event: (event.at_s, event.kind, event.device)))


def _replay_copy(
    trace: Sequence[TraceEvent], devices: range, begin_s: float, seconds: float, speedup: float
) -> list[Churn]:
    free = list(devices)
    held: dict[str, int] = {}
    at_first: set[int] = set()
    events: list[Churn] = []
    for at_s, kind, node in trace:
        moment_s = (at_s - begin_s) / speedup
        if moment_s > seconds:
            break
        if kind == "add" and free:
            held[node] = device = min(free)
            free.remove(device)
        elif kind == "remove" and node in held:
            device = held.pop(node)
            free.append(device)
        else:
            continue
        if moment_s > 0.0:
            events.append(Churn(moment_s, kind, device))
        else:
            at_first = set(held.values())
    seen = at_first | {event.device for event in events}
    return events + [Churn(seconds + 1.0, "add", device) for device in devices if device not in seen]


def _peak(trace: Sequence[TraceEvent]) -> tuple[int, float]:
    up = peak = 0
    counts = []
    for at_s, kind, _ in trace:
        up += 1 if kind == "add" else -1
        peak = max(peak, up)
        counts.append((at_s, up))
    return peak, next(at_s for at_s, count in counts if 2 * count >= peak)


# --- the three forms ---


class _BadLine(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")


def _checked(rows: Iterable[tuple[int, list[str]]], width: int) -> _Rows:
    for number, fields in rows:
        if len(fields) != width:
            raise _BadLine(number, f"{len(fields)} fields, not {width}")
        yield number, [field.strip() for field in fields]


def _in_order(rows: _Rows) -> Iterator[tuple[int, float, list[str]]]:
    """Yield (number of the line, time, other fields). Raises: _BadLine: the times do not ascend."""
    last_s = 0.0
    for line, (time, *others) in rows:
        at_s = _seconds(line, time)
        if at_s < last_s:
            raise _BadLine(line, f"at {at_s:g} s, after {last_s:g} s")
        last_s = at_s
        yield line, at_s, others


def _comings_and_goings(rows: _Rows, rng: random.Random) -> Iterator[TraceEvent]:
    up: set[str] = set()
    for line, at_s, (event, node) in _in_order(rows):
        if event == "add" and node not in up:
            up.add(node)
            yield TraceEvent(at_s, "add", node)
        elif event == "remove" and node in up:
            up.discard(node)
            yield TraceEvent(at_s, "remove", node)
        elif event in ("add", "remove"):
            raise _BadLine(line, f"{node[:40]!r} is {'added twice' if event == 'add' else 'removed and not there'}")
        else:
            raise _BadLine(line, f"{event[:40]!r} is neither add nor remove")


def _down_times(rows: _Rows, rng: random.Random) -> Iterator[TraceEvent]:
    down: dict[str, list[tuple[float, float]]] = {}
    for line, (start, end, node) in rows:
        start_s, end_s = _seconds(line, start), _seconds(line, end)
        if end_s < start_s:
            raise _BadLine(line, f"{node[:40]!r} is up again before it is down")
        down.setdefault(node, []).append((start_s, end_s))
    events: list[TraceEvent] = []
    for node, intervals in down.items():
        merged = _merged(intervals)
        if merged[0][0] > 0.0:
            events.append(TraceEvent(0.0, "add", node))
        for start_s, end_s in merged:
            if start_s > 0.0:
                events.append(TraceEvent(start_s, "remove", node))
            events.append(TraceEvent(end_s, "add", node))
    yield from sorted(events, key=lambda event: (event.at_s, event.kind == "add", event.node))


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping absences (start, end) of a node: the file may list one absence twice, with two causes."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((start_s, end_s))
    return merged


def _counts(rows: _Rows, rng: random.Random) -> Iterator[TraceEvent]:
    up: list[str] = []
    named = 0
    for line, at_s, (available,) in _in_order(rows):
        if not available.isdecimal() or len(available) > 9 or int(available) > 100_000:
            raise _BadLine(line, f"{available[:40]!r} is not a number of nodes")
        wanted = int(available)
        while len(up) > wanted:
            yield TraceEvent(at_s, "remove", up.pop(rng.randrange(len(up))))
        while len(up) < wanted:
            up.append(f"node{named}")
            named += 1
            yield TraceEvent(at_s, "add", up[-1])


def _seconds(line: int, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise _BadLine(line, f"{text[:40]!r} is not a time") from None
    if not 0.0 <= seconds < math.inf:
        raise _BadLine(line, f"{text[:40]!r} is not a time")
    return seconds


_READERS: dict[tuple[str, ...], Callable[[_Rows, random.Random], Iterator[TraceEvent]]] = {
    ("time_s", "event", "node"): _comings_and_goings,
    ("down_start_s", "down_end_s", "node"): _down_times,
    ("time_s", "available"): _counts,
}
