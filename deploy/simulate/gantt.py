"""Cut and pack timelines for a page: the jobs of each device in the last steps of a run."""

from collections.abc import Sequence

import msgspec

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.result import JobSpan, SimResult
from shoal.protocol.topology import Topology

KINDS = ("forward", "backward", "step", "wait", "validate", "probe")
SAYS = ("forward", "backward", "optimizer step", "waits for the reduction", "validates", "probes")
"""The page's words for `KINDS`."""
SPANS_MAX = 40_000
"""The limit on spans of a page. More would make many megabytes, so a window above it holds fewer steps."""
DEVICES_MAX = 128
STEPS_MAX = 4
_UNITS = 100_000
"""The number of units in the window: the time resolution."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One device."""

    label: str
    stage: int
    """-1: unknown."""
    spans: tuple[int, ...]
    """Triples of (start after the previous start, length, index into KINDS), in units."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A timeline. `unit` is in seconds; `start` and `end` are virtual times."""

    start: float = msgspec.field(name="from")
    end: float = msgspec.field(name="to")
    unit: float
    rows: tuple[Bar, ...]


def chart_of(result: SimResult, placement: Placement | None, topology: Topology) -> Chart:
    """Return as many of the last steps as fit, devices by stage, without spares and idle devices."""
    devices = _devices(result, placement)
    start_s, end_s = _window(result, devices)
    unit_s = max(end_s - start_s, 1e-9) / _UNITS
    stage_of = placement.stage_of() if placement is not None else {}
    rows = []
    for device in devices:
        spans = with_waits(result.timeline[device])
        name = topology.names[device]
        stage = stage_of.get(device, -1)
        label = f"{stage} · {name}" if stage >= 0 else name
        rows.append(Bar(label=label, stage=stage, spans=_packed(spans, start_s, end_s, unit_s)))
    return Chart(start=start_s, end=end_s, unit=unit_s, rows=tuple(rows))


def with_waits(spans: Sequence[JobSpan]) -> list[tuple[str, float, float]]:
    """Return (kind, start, end), with the pause before each optimizer step as a wait for the group's sum."""
    found: list[tuple[str, float, float]] = []
    ended_s = None
    for kind, start_s, end_s in spans:
        if kind == "step" and ended_s is not None and start_s > ended_s:
            found.append(("wait", ended_s, start_s))
        found.append((kind, start_s, end_s))
        ended_s = end_s
    return found


def _devices(result: SimResult, placement: Placement | None) -> list[int]:
    """Return the devices to show: at most `DEVICES_MAX`, spread evenly over all that worked."""
    if not result.timeline:
        return []
    if placement is not None:
        order = [device for stage in placement.stages for device in stage]
    else:
        order = list(range(len(result.timeline)))
    worked = [device for device in order if result.timeline[device]]
    if len(worked) <= DEVICES_MAX:
        return worked
    return [worked[len(worked) * k // DEVICES_MAX] for k in range(DEVICES_MAX)]


def _window(result: SimResult, devices: Sequence[int]) -> tuple[float, float]:
    """Return the time to show: from a commit to the last one; all of a run without two commits."""
    commits_s = [step.committed_at_s for step in result.steps]
    if len(commits_s) < 2:
        return 0.0, max(result.ending.at_s, 1e-9)
    end_s = commits_s[-1]
    for start_s in commits_s[-1 - min(STEPS_MAX, len(commits_s) - 1) : -1]:
        num_spans = sum(start_s < span.ended_s <= end_s for device in devices for span in result.timeline[device])
        if num_spans <= SPANS_MAX:
            return start_s, end_s
    return commits_s[-2], end_s


def _packed(spans: Sequence[tuple[str, float, float]], start_s: float, end_s: float, unit_s: float) -> tuple[int, ...]:
    packed: list[int] = []
    last = 0
    for kind, began_s, ended_s in spans:
        if ended_s <= start_s or began_s >= end_s:
            continue
        begin = round((max(began_s, start_s) - start_s) / unit_s)
        end = round((min(ended_s, end_s) - start_s) / unit_s)
        if end > begin:
            packed += (begin - last, end - begin, KINDS.index(kind))
            last = begin
    return tuple(packed)
