"""Makes one HTML file that shows a comparison of strategies. It loads no other file, and escapes all names from users.

`page/` has the template, the style and the script; the script draws from one JSON object, `PageData`.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from shoal.deploy.base.words import printable
from shoal.deploy.planning.figures import lines_of, said_gigabytes, said_regions
from shoal.deploy.record.html_page import one_file
from shoal.deploy.simulate.gantt import DEVICES_MAX, KINDS, SAYS, STEPS_MAX, Chart, chart_of
from shoal.deploy.simulate.outcome import Outcome, OutcomeRow
from shoal.deploy.simulate.reached import reached, said_of
from shoal.deploy.simulate.result import SimResult
from shoal.deploy.simulate.scenario import Scenario
from shoal.deploy.simulate.table import LEGEND, cells, headings
from shoal.protocol.topology import Floats, Topology

PAGE = Path(__file__).parent / "page"
_LABELS_MAX = 80


class Map(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix of the bytes sent in a step. `bytes[i][j]` is what `labels[i]` sends to `labels[j]`."""

    title: str
    labels: tuple[str, ...]
    bytes: tuple[tuple[float, ...], ...]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The figures and charts that the page shows of one strategy."""

    name: str
    about: str
    pace: tuple[tuple[float, float, float], ...] = ()
    """The speed over time, as (from, to, tokens/s) with virtual seconds."""
    events: tuple[tuple[float, str, str], ...] = ()
    """The events of the run, each as (virtual time in seconds, kind, text)."""
    gantt: Chart = Chart(start=0.0, end=1.0, unit=1.0, rows=())
    maps: tuple[Map, ...] = ()
    layout: tuple[tuple[int, str, int, str], ...]
    """The stages of the layout, each as (stage, layers, number of devices, words on the devices)."""


class PageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the first strategy with a measured pace. All fields are empty if there is no such strategy."""

    strategy: str = ""
    lines: Sequence[tuple[str, str]] = ()
    members: Sequence[tuple[str, int, str, str, str]] = ()


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    subtitle: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: str
    window: str
    figures: PageFigures
    kinds: tuple[str, ...] = KINDS
    says: tuple[str, ...] = SAYS
    strategies: tuple[Shown, ...]


def render_html(scenario: Scenario, seed: int, outcomes: Sequence[Outcome], rows: Sequence[OutcomeRow]) -> str:
    spec, found = scenario.spec, reached(outcomes)
    same = " ".join(f"{row.strategy}: the same run as {row.same_as}." for row in rows if row.same_as)
    data = PageData(
        subtitle=f"{scenario.topology.num_devices} devices, {spec.model.num_layers} layers of {spec.model.dim}, "
        f"{spec.tokens_per_step:,} tokens a step; simulated by shoal in virtual time, seed {seed}.",
        headings=headings(),
        rows=tuple(cells(row) for row in rows if not row.same_as),
        legend=" ".join(filter(None, (same, said_of(found) if found else "", LEGEND))),
        window=f"At most the last {STEPS_MAX} steps and {DEVICES_MAX} devices.",
        figures=_figures(rows),
        strategies=tuple(_shown(scenario, outcome) for outcome in outcomes),
    )
    return one_file(PAGE, scenario.title, data)


def _figures(rows: Sequence[OutcomeRow]) -> PageFigures:
    row = next((row for row in rows if row.figures is not None), None)
    if row is None or row.figures is None:
        return PageFigures()
    members = [
        (
            printable(each.name),
            each.members,
            said_gigabytes(each.up_gb_month),
            said_gigabytes(each.down_gb_month),
            f"{each.watts:,.0f}{' (assumed)' if each.watts_are_assumed else ''}",
        )
        for each in row.figures.members
    ]
    return PageFigures(strategy=printable(row.strategy), lines=lines_of(row.figures), members=members)


def _shown(scenario: Scenario, outcome: Outcome) -> Shown:
    result, topology = outcome.result, scenario.topology
    shown = Shown(name=outcome.strategy.name, about=outcome.problem, layout=_layout(outcome, topology))
    if result is None:
        return shown
    return msgspec.structs.replace(
        shown,
        about=_about(outcome, result),
        pace=pace(result),
        events=tuple((e.at_s, e.change, e.text) for e in result.events[-2000:]),
        gantt=chart_of(result, outcome.placement, topology),
        maps=_maps(outcome, result, topology),
    )


def _about(outcome: Outcome, result: SimResult) -> str:
    failures = f" Failures: {'; '.join(result.failures[:3])}." if result.failures else ""
    ending = result.ending
    return (
        f"{len(result.steps)} steps in {ending.at_s:,.1f} s, which took {ending.wall_s:,.1f} s to simulate; "
        f"{result.duplicates} microbatches counted twice, {result.given_up} given up; trace {result.trace_hash[:16]}."
        f"{failures}"
    )


def pace(result: SimResult) -> tuple[tuple[float, float, float], ...]:
    """Return (from, to, tokens/s) of the time between commits; an interval of a run with many steps has several."""
    commits_s = [0.0, *(step.committed_at_s for step in result.steps)]
    every = max(1, len(commits_s) // 400)
    counted = [*range(0, len(commits_s) - 1, every), len(commits_s) - 1]
    return tuple(
        (commits_s[a], commits_s[b], (b - a) * result.tokens_per_step / (commits_s[b] - commits_s[a]))
        for a, b in pairwise(counted)
        if commits_s[b] > commits_s[a]
    )


def _maps(outcome: Outcome, result: SimResult, topology: Topology) -> tuple[Map, ...]:
    """Return a run's traffic by region, stage and device, each if it applies and has few enough rows to be shown."""
    moved: Floats = result.bytes_per_step if result.steps else result.traffic_bytes.astype(np.float64)
    maps = []
    if len(set(topology.regions)) > 1:
        maps.append(_map("regions", moved, [region or "elsewhere" for region in topology.regions]))
    if outcome.placement is not None:
        stage_of = outcome.placement.stage_of()
        names = [f"stage {stage_of[d]}" if d in stage_of else "spare" for d in range(topology.num_devices)]
        order = [f"stage {k}" for k in range(len(outcome.placement.stages))] + ["spare"]
        maps.append(_map("stages", moved, names, order=[name for name in order if name in names]))
    if topology.num_devices <= _LABELS_MAX:
        maps.append(_map("devices", moved, list(topology.names)))
    return tuple(found for found in maps if len(found.labels) <= _LABELS_MAX)


def _map(title: str, moved: Floats, names: Sequence[str], *, order: Sequence[str] | None = None) -> Map:
    labels = tuple(dict.fromkeys(names) if order is None else order)
    index = np.array([labels.index(name) for name in names])
    bytes_: Floats = np.zeros((len(labels), len(labels)))
    np.add.at(bytes_, (index[:, None], index[None, :]), moved)
    return Map(title=title, labels=labels, bytes=tuple(tuple(map(float, row)) for row in bytes_.round()))


def _layout(outcome: Outcome, topology: Topology) -> tuple[tuple[int, str, int, str], ...]:
    placement = outcome.placement
    if placement is None:
        return ()
    return tuple(
        (k, f"{first}-{last - 1}", len(stage), counted(stage, topology))
        for k, (stage, (first, last)) in enumerate(zip(placement.stages, pairwise(placement.bounds), strict=True))
    )


def counted(stage: Sequence[int], topology: Topology) -> str:
    """Say how many devices of a stage each region has; without regions, list the devices' names."""
    if any(topology.regions):
        return said_regions(stage, topology)
    return ", ".join(topology.names[device] for device in stage)
