"""Makes the timelines of the HTML page: the jobs (forward, backward, …) of each device in the last steps of a run."""

from collections.abc import Sequence

import msgspec

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.result import JobSpan, SimResult
from shoal.protocol.topology import Topology

KINDS = ("forward", "backward", "step", "wait", "validate", "probe")
SAYS = ("forward", "backward", "optimizer step", "waits for the reduction", "validates", "probes")
"""The words that the page shows for `KINDS`, in the order of `KINDS`."""
SPANS_MAX = 40_000
"""The most jobs in a run's timelines, to keep the page small: fewer steps are shown if needed, but at least one."""
DEVICES_MAX = 128
STEPS_MAX = 4
_UNITS = 100_000
"""The number of equal units in the shown time. A `Chart` gives times as numbers of such units."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the timelines: the jobs (forward, backward, …) of one device."""

    label: str
    stage: int
    """The stage of the device; -1: unknown."""
    spans: tuple[int, ...]
    """Three numbers for each job: its start (units after the start of the job before it), its length in units, and
    the index of its kind in `KINDS`."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """The timelines of devices. `start` and `end` are in virtual seconds; `unit` is the seconds of one chart unit."""

    start: float = msgspec.field(name="from")
    end: float = msgspec.field(name="to")
    unit: float
    rows: tuple[Bar, ...]


def chart_of(result: SimResult, placement: Placement | None, topology: Topology) -> Chart:
    """Return the timelines of the last steps, as many as fit on the page. Devices are in the order of stages, without
    spares and devices that did nothing."""
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
    """Return (kind, start, end) of each job. A pause before an optimizer step is a `wait` for the reduction."""
    found: list[tuple[str, float, float]] = []
    ended_s = None
    for kind, start_s, end_s in spans:
        if kind == "step" and ended_s is not None and start_s > ended_s:
            found.append(("wait", ended_s, start_s))
        found.append((kind, start_s, end_s))
        ended_s = end_s
    return found


def _devices(result: SimResult, placement: Placement | None) -> list[int]:
    """Return at most `DEVICES_MAX` devices to show, chosen evenly from all that worked."""
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
    """Return (start, end) of the shown time: as many whole steps before the last commit as fit on the page, at least
    one. If a run has fewer than two commits, return its whole time."""
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
