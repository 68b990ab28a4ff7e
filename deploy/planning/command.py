"""`shoal plan`: who should hold what, what that costs, and how other layouts compare."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.coordinator.cost.dtfm import DtfmObjective
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.live_view import printable
from shoal.deploy.planning.layouts import LAYOUT_NAMES, LayoutName, Request, layout
from shoal.deploy.simulate.scenario import find_scenario
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.topology import Topology

ObjectiveName = Literal["throughput", "dtfm"]
_FRACTIONS = ("stale", "memory")


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """One layout, scored."""

    name: LayoutName
    placement: Placement | None
    """None: it cannot be; `cost.why` says so."""
    cost: Cost
    seconds: float
    """It took, of one core, loading the compiled kernels included."""


class StageLine(msgspec.Struct, frozen=True, kw_only=True):
    stage: int
    first_layer: int
    last_layer: int
    """Exclusive."""
    devices: tuple[int, ...]


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints, for each layout."""

    layout: str
    objective: str
    seed: int
    stages: tuple[StageLine, ...]
    """In pipeline order."""
    spares: tuple[int, ...]
    cost_s: float | None
    """Seconds a step by the objective; None: impossible."""
    parts: dict[str, float]
    why: str
    took_s: float


def propose(name: LayoutName, request: Request, objective: Objective) -> Proposal:
    """A layout that cannot be is a proposal too, with the reason as its cost."""
    begun_s = time.process_time()
    try:
        placement = layout(name, request)
    except ShoalError as error:
        return Proposal(
            name=name, placement=None, cost=Cost.impossible(str(error)), seconds=time.process_time() - begun_s
        )
    seconds = time.process_time() - begun_s
    return Proposal(name=name, placement=placement, cost=objective.cost(placement), seconds=seconds)


def own_layout(objective: ObjectiveName) -> LayoutName:
    """The one that searches for what is cheap by `objective`."""
    return "ours" if objective == "throughput" else "dtfm"


def compared_layouts(objective: ObjectiveName) -> tuple[LayoutName, ...]:
    """The own one first; the other objective's is none of them."""
    own = own_layout(objective)
    return (own, *(name for name in LAYOUT_NAMES if name not in ("ours", "dtfm")))


def report_of(proposal: Proposal, *, objective: str, seed: int, num_devices: int) -> PlanReport:
    placement, cost = proposal.placement, proposal.cost
    return PlanReport(
        layout=proposal.name,
        objective=objective,
        seed=seed,
        stages=_stage_lines(placement) if placement is not None else (),
        spares=placement.spares(num_devices) if placement is not None else (),
        cost_s=cost.seconds if math.isfinite(cost.seconds) else None,
        parts={name: value for name, value in cost.parts.items() if math.isfinite(value)},
        why=cost.why,
        took_s=proposal.seconds,
    )


def _stage_lines(placement: Placement) -> tuple[StageLine, ...]:
    return tuple(
        StageLine(stage=k, first_layer=first, last_layer=last, devices=stage)
        for k, (stage, (first, last)) in enumerate(zip(placement.stages, pairwise(placement.bounds), strict=True))
    )


def show_plan(
    what: str, objective: str, *, seconds: float, seed: int, stages: int | None, compare: bool, as_json: bool
) -> None:
    """Print it. Raises: LocalError: no such network or objective, or no plan is possible."""
    if objective not in get_args(ObjectiveName):
        raise LocalError(f"{objective!r} is no objective: take {' or '.join(get_args(ObjectiveName))}")
    aim: ObjectiveName = "dtfm" if objective == "dtfm" else "throughput"
    scenario = find_scenario(what)
    request = Request(
        topology=scenario.topology,
        workload=Workload.of(scenario.spec),
        paper=scenario.paper,
        stages=stages or scenario.stages,
        seed=seed,
        seconds=seconds,
    )
    judge = objective_of(aim, request)
    names = compared_layouts(aim) if compare else (own_layout(aim),)
    proposals = [propose(name, request, judge) for name in names]
    if not math.isfinite(proposals[0].cost.seconds) and not compare:
        raise LocalError(f"no plan for {what}: {proposals[0].cost.why}")
    if as_json:
        reports = [report_of(p, objective=aim, seed=seed, num_devices=request.topology.num_devices) for p in proposals]
        print_json(reports if compare else reports[0])
        return
    console = Console(highlight=False)
    console.print(printable(scenario.title), markup=False, style="bold")
    console.print(f"objective {aim}, seed {seed}, {seconds:g} s of search\n", markup=False, style="dim")
    console.print(compare_view(proposals) if compare else plan_view(proposals[0], request.topology))


def print_json(what: object) -> None:
    typer.echo(msgspec.json.encode(what).decode())


def objective_of(name: ObjectiveName, request: Request) -> Objective:
    if name == "throughput":
        return ThroughputObjective(request.topology, request.workload)
    return DtfmObjective(request.topology, request.constants)


# --- for people ---


def plan_view(proposal: Proposal, topology: Topology) -> RenderableType:
    """The stages, the cost in its parts, and the time it took."""
    placement = proposal.placement
    if placement is None or not math.isfinite(proposal.cost.seconds):
        return Text(f"no plan: {printable(proposal.cost.why)}")
    lines: list[RenderableType] = [_stages_table(placement, topology), Text()]
    if spares := placement.spares(topology.num_devices):
        lines += [Text(f"left out: {_who(spares, topology)} ({_indexes(spares)})"), Text()]
    lines += [_cost_table(proposal.cost), Text(), Text(f"took {_seconds(proposal.seconds)} of one core", style="dim")]
    return Group(*lines)


def compare_view(proposals: Sequence[Proposal]) -> Table:
    """One line a layout; the cheapest is 1.00. Steps are as foreseen, which is not quite what plans are compared by."""
    finite = [p.cost.seconds for p in proposals if math.isfinite(p.cost.seconds)]
    best = min(finite, default=math.nan)
    with_tokens = any("tokens_per_s" in p.cost.parts for p in proposals)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layout")
    for heading in ("stages", "step", "x best", *(["tokens/s"] if with_tokens else []), "took"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for proposal in proposals:
        cost, placement = proposal.cost, proposal.placement
        is_possible = math.isfinite(cost.seconds)
        figures = [
            "-" if placement is None else str(len(placement.stages)),
            _seconds(cost.parts.get("foreseen_s", cost.seconds)) if is_possible else "-",
            f"{cost.seconds / best:.2f}" if is_possible and best > 0.0 else "-",
        ]
        if with_tokens:
            figures.append(f"{cost.parts['tokens_per_s']:,.0f}" if is_possible else "-")
        table.add_row(proposal.name, *figures, _seconds(proposal.seconds), Text(printable(cost.why)))
    return table


def _stages_table(placement: Placement, topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage", justify="right")
    table.add_column("layers", justify="right")
    table.add_column("devices", overflow="fold")
    if any(topology.regions):
        table.add_column("where", overflow="fold")
    for line in _stage_lines(placement):
        cells = [str(line.stage), f"{line.first_layer}-{line.last_layer - 1}", _indexes(line.devices)]
        if any(topology.regions):
            cells.append(_who(line.devices, topology))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _cost_table(cost: Cost) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_row("cost", _seconds(cost.seconds), style="bold")
    for name, value in cost.parts.items():
        table.add_row(f"  {_said(name)}", _figure(name, value))
    return table


def _said(name: str) -> str:
    return name.removesuffix("_s").replace("_per", "/s").replace("_", " ")


def _figure(name: str, value: float) -> str:
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    if name in _FRACTIONS:
        return f"{value:.0%}"
    return _seconds(value) if name.endswith("_s") else f"{value:g}"


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.3f} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"


def _who(devices: Sequence[int], topology: Topology) -> str:
    """`4 Tokyo, 2 Seoul`."""
    regions = [topology.regions[device] or "elsewhere" for device in devices]
    return printable(", ".join(f"{regions.count(region)} {region}" for region in dict.fromkeys(regions)))


def _indexes(devices: Sequence[int]) -> str:
    """`0-7 12 14-15`; every device is in exactly one of the ranges."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
