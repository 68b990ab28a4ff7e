"""Prints a layout, its predicted speed and costs, and a comparison with other layouts (`shoal plan`)."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.coordinator.allocate.dtfm_search import DtfmObjective
from shoal.coordinator.cost.format_choice import formats_of
from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, Workload, experts_held
from shoal.deploy.base.words import counted, digits, printable
from shoal.deploy.commands.options import PlanOptions
from shoal.deploy.planning.figures import (
    Figures,
    Goal,
    Wishes,
    figures_of,
    goal_of,
    lines_of,
    parse_tokens,
    said_gigabytes,
    said_regions,
    said_tokens,
)
from shoal.deploy.planning.layouts import LAYOUT_NAMES, LayoutName, LayoutRequest, layout
from shoal.deploy.planning.left_out import GAIN_MIN, LeftOut, left_out, said_of_needs
from shoal.deploy.planning.rows import Column, Rows
from shoal.deploy.simulate.reached import read_simulated, said_of_live, said_of_none
from shoal.deploy.simulate.scenario import Scenario, find_scenario
from shoal.deploy.terminal.plain import say_json
from shoal.deploy.terminal.progress import sign_of_life
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import load_spec
from shoal.protocol.topology import Topology

ObjectiveName = Literal["throughput", "dtfm"]
WORLD = "Every figure is the planner's arithmetic: nothing was run. `shoal simulate` plays a plan in virtual time."
_SEARCHING = "searching (the first search on a machine compiles for half a minute)"
_LEGEND = (
    "step and tokens/s: predicted; x first: the step divided by that of the first row; took: seconds of one core, "
    "compiling included"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """One layout with its cost."""

    name: LayoutName
    placement: Placement | None
    """The layout; None: impossible, see `cost.why`."""
    cost: Cost
    seconds: float
    """Seconds of one core spent, loading the compiled kernels included."""


class StageLine(msgspec.Struct, frozen=True, kw_only=True):
    stage: int
    first_layer: int
    last_layer: int
    """The first layer after the stage."""
    devices: tuple[int, ...]
    needs_gb: float | None = None
    """GB that a peer needs with all state on its card, for the member with the least room; null: not computed."""
    least_gb: float | None = None
    """GB that it needs when the card is full and the moments are in the machine's memory."""
    has_gb: float | None = None
    """GB of this member's card."""


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The `--json` output for one layout."""

    layout: str
    notes: tuple[str, ...] = ()
    """Notes on what was ignored in the network file, and what was assumed."""
    objective: str
    seed: int
    stages: tuple[StageLine, ...]
    spares: tuple[int, ...]
    cost_s: float | None
    """Seconds per step according to the objective; None: impossible."""
    parts: dict[str, float]
    why: str
    took_s: float
    same_as: str = ""
    """The earlier layout in a comparison that is equal; empty: none."""
    figures: Figures | None = None
    """Costs for the participants; null in a comparison."""
    left_out: tuple[LeftOut, ...] = ()
    """Each kind of device without a place, with the reason; empty in a comparison."""
    formats: str = ""
    """The wire formats, and the speed with them; empty in a comparison, and if the run leaves no choice."""


def propose(name: LayoutName, request: LayoutRequest, objective: Objective) -> Proposal:
    """Make and score a layout. An impossible one is a proposal too, with the reason as its cost."""
    begun_s = time.process_time()
    placement, why = None, ""
    try:
        placement = layout(name, request)
    except ShoalError as error:
        why = str(error)
    seconds = time.process_time() - begun_s
    cost = objective.cost(placement) if placement is not None else Cost.impossible(why)
    return Proposal(name=name, placement=placement, cost=cost, seconds=seconds)


def own_layout(objective: ObjectiveName) -> LayoutName:
    """Return the layout with the search that minimises `objective`."""
    return "ours" if objective == "throughput" else "dtfm"


def shown_name(name: str) -> str:
    return "ours, at once" if name == "at-once" else name


def report_of(proposal: Proposal, request: LayoutRequest, *, objective: str) -> PlanReport:
    placement, cost = proposal.placement, proposal.cost
    return PlanReport(
        layout=proposal.name,
        objective=objective,
        seed=request.seed,
        stages=_stage_lines(placement) if placement is not None else (),
        spares=placement.spares(request.topology.num_devices) if placement is not None else (),
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


def _stage_lines_with_memory(placement: Placement, request: LayoutRequest, spec: RunSpec) -> tuple[StageLine, ...]:
    """Return the stages with the memory needed on a member's card (`coordinator/cost/memory.py`)."""
    stages = _stage_lines(placement)
    objective = ThroughputObjective(request.topology, request.workload)
    needed, least = (
        objective.needed_bytes(placement, StageMemory.on_card(spec, experts_held=experts_held(spec), is_full=is_full))
        for is_full in (False, True)
    )
    if needed is None or least is None:
        return stages
    present = request.topology.memory_bytes
    lines = []
    for line, needs, leasts in zip(stages, needed, least, strict=True):
        member = max(range(len(needs)), key=lambda member: needs[member] / present[line.devices[member]])
        has_gb = float(present[line.devices[member]]) / 1e9
        lines.append(
            msgspec.structs.replace(line, needs_gb=needs[member] / 1e9, least_gb=leasts[member] / 1e9, has_gb=has_gb)
        )
    return tuple(lines)


def _short_of_memory(stages: Sequence[StageLine]) -> str:
    """Return what real peers do where a card is too small; empty if all are large enough."""
    short = [line for line in stages if line.needs_gb and line.has_gb and line.needs_gb > line.has_gb]
    full = [line for line in short if line.least_gb and line.has_gb and line.least_gb <= line.has_gb]
    told = []
    if full:
        told.append(
            f"Cards of {_stages_said(full)} are too small for all of it: moments, and what corrects staleness, go to "
            "the machine's memory there, and layers run one at a time again. Steps are slower for that."
        )
    if less := [line for line in short if line not in full]:
        told.append(f"A member of {_stages_said(less)} has too little even so, and will get fewer layers.")
    return "\n".join(told)


def _stages_said(lines: Sequence[StageLine]) -> str:
    """Format stage numbers: `stages 0, 1 and 4`."""
    names = [str(line.stage) for line in lines]
    return f"stage {names[0]}" if len(names) == 1 else f"stages {', '.join(names[:-1])} and {names[-1]}"


def show_plan(what: str, asked: PlanOptions) -> None:
    """Make and print a plan. Raises: LocalError: no such network or objective, or no plan is possible."""
    wishes = Wishes(tokens=None if asked.tokens is None else parse_tokens(asked.tokens), price_kwh=asked.price_kwh)
    run = None if asked.run is None else load_spec(asked.run)
    if asked.objective not in get_args(ObjectiveName):
        raise LocalError(f"{asked.objective!r} is no objective: take {' or '.join(get_args(ObjectiveName))}")
    aim: ObjectiveName = "dtfm" if asked.objective == "dtfm" else "throughput"
    scenario = find_scenario(what)
    if run is not None:
        scenario = replace(scenario, spec=run, stages=run.swarm.stages_max)
    request = LayoutRequest(
        topology=scenario.topology,
        workload=Workload.of(scenario.spec),
        paper=scenario.paper if run is None else None,
        stages=asked.stages or scenario.stages,
        seed=asked.seed,
        seconds=asked.seconds,
    )
    reached = None
    if asked.simulated is not None:
        reached = read_simulated(
            asked.simulated,
            scenario=scenario.name,
            num_devices=scenario.topology.num_devices,
            tokens_per_step=request.workload.tokens_per_step,
        )
    if aim == "throughput":
        judge: Objective = ThroughputObjective(request.topology, request.workload)
    else:
        judge = DtfmObjective(request.topology, request.constants)
    console = open_console(quiet=asked.json)
    tell(console, scenario.title, style="bold")
    tell(
        console,
        f"{counted(scenario.topology.num_devices, 'device')}, {said_tokens(request.workload.num_parameters)} "
        f"parameters, {request.workload.tokens_per_step:,} tokens a step; "
        f"objective {aim}, seed {asked.seed}\n{WORLD}\n",
        style="dim",
    )
    print_notes(console, scenario)
    if asked.compare:
        reports = _show_comparison(console, aim, request, judge)
        tokens_per_s = {
            shown_name(report.layout): report.parts["tokens_per_s"]
            for report in reports
            if "tokens_per_s" in report.parts and not report.same_as
        }
        tell(console, said_of_none(what) if reached is None else said_of_live(reached, tokens_per_s))
    else:
        steps = None if run is None else run.training.steps  # a scenario's steps are only a simulation's length
        goal = goal_of(wishes, scenario.spec, parameters=request.workload.num_parameters, steps=steps)
        proposal = _searched(console, what, aim, request, judge)
        report = report_of(proposal, request, objective=aim)
        reports = [_show_one(console, proposal, report, request, scenario, goal, wishes.price_kwh)]
    if asked.json:
        reports = [msgspec.structs.replace(report, notes=scenario.notes) for report in reports]
        say_json(reports if asked.compare else reports[0])


def print_notes(console: Console, scenario: Scenario) -> None:
    for note in scenario.notes:
        tell(console, note, style="dim")
    if scenario.notes:
        console.print()


def _searched(console: Console, what: str, aim: ObjectiveName, request: LayoutRequest, judge: Objective) -> Proposal:
    """Print the layout by rule in a line, then the searched one. Raises: LocalError: none is possible."""
    first = propose("at-once", request, judge)
    if math.isfinite(first.cost.seconds):
        tell(console, f"at once, without a search: {_in_a_line(first)}\n")
    with sign_of_life(_SEARCHING):
        proposal = propose(own_layout(aim), request, judge)
    if not math.isfinite(proposal.cost.seconds) or proposal.placement is None:
        raise LocalError(f"no plan for {what}: {proposal.cost.why}")
    same = proposal.placement == first.placement
    tell(console, f"searched{', and nothing better was found' if same else ''}: {_in_a_line(proposal)}\n")
    return proposal


def _show_one(
    console: Console,
    proposal: Proposal,
    report: PlanReport,
    request: LayoutRequest,
    scenario: Scenario,
    goal: Goal,
    price_kwh: float | None,
) -> PlanReport:
    """Print a plan and its costs. Returns: `report` with them."""
    placement = proposal.placement
    assert placement is not None
    stages = _stage_lines_with_memory(placement, request, scenario.spec)
    console.print(_stages_table(stages, request.topology))
    console.print()
    if short := _short_of_memory(stages):
        tell(console, f"{short}\n")
    figures = _figures(placement, request, scenario, goal, price_kwh)
    console.print(figures_view(figures))
    formats = _said_of_formats(placement, request, scenario.spec)
    if formats:
        tell(console, f"{formats}\n")
    groups = _show_left_out(console, request, placement)
    console.print(_cost_table(proposal.cost))
    console.print()
    tell(console, f"found in {_seconds(proposal.seconds)} of one core", style="dim")
    return msgspec.structs.replace(report, stages=stages, figures=figures, left_out=tuple(groups), formats=formats)


def _said_of_formats(placement: Placement, request: LayoutRequest, spec: RunSpec) -> str:
    """Return a sentence about the wire formats that a plan with this layout would choose; empty if the run leaves no
    choice. All other figures assume the thinnest formats, which the search uses."""
    takes = FormatBytes.of(spec)
    if not takes.are_choices:
        return ""
    formats = formats_of(request.topology, request.workload, placement, takes)
    cost = ThroughputObjective(request.topology, request.workload).cost(placement, takes.under(formats))
    return f"{formats.sentence}: {cost.parts['tokens_per_s']:,.0f} tokens/s" if math.isfinite(cost.seconds) else ""


def _show_left_out(console: Console, request: LayoutRequest, placement: Placement) -> list[LeftOut]:
    groups: list[LeftOut] = []
    if not placement.spares(request.topology.num_devices):
        return groups
    rows = Rows(console, (Column("left out", 22, right=False), Column("each has", 32, right=False)), last="why")
    asking = left_out(request.topology, request.workload, placement)
    while True:
        with sign_of_life("finding what would help the devices left out"):
            group = next(asking, None)
        if group is None:
            break
        groups.append(group)
        rows.row(
            printable(f"{len(group.devices)} {group.name}"),
            _has_said(group),
            last=f"{group.why}; {said_of_needs(group)}",
        )
    tell(
        console,
        f"\nHelping is to make a step at least {GAIN_MIN:.1%} shorter, one device at a time, in the best place that "
        "this plan has for it. A line counts in both directions.\n",
        style="dim",
    )
    return groups


def _show_comparison(
    console: Console, aim: ObjectiveName, request: LayoutRequest, judge: Objective
) -> list[PlanReport]:
    """Print the layouts row by row as they are found; equal ones are listed at the end."""
    rows = Rows(console, _COLUMNS)
    seen: dict[Placement, LayoutName] = {}
    same: dict[LayoutName, list[LayoutName]] = {}
    first_s = math.nan
    reports: list[PlanReport] = []
    for name in ("at-once", own_layout(aim), *(n for n in LAYOUT_NAMES if n not in ("ours", "at-once", "dtfm"))):
        with sign_of_life(_SEARCHING if name in ("ours", "dtfm") else f"laying out {name}"):
            proposal = propose(name, request, judge)
        report = report_of(proposal, request, objective=aim)
        twin = seen.get(proposal.placement) if proposal.placement is not None else None
        if twin is not None:
            same.setdefault(twin, []).append(name)
            reports.append(msgspec.structs.replace(report, same_as=twin))
            continue
        if proposal.placement is not None:
            seen[proposal.placement] = name
        reports.append(report)
        if math.isnan(first_s) and math.isfinite(proposal.cost.seconds):
            first_s = shown_s(proposal.cost)
        cells, why = compared_cells(proposal, first_s)
        rows.row(*cells, last=why)
    console.print()
    for name, twins in same.items():
        twin_names = ", ".join(shown_name(each) for each in twins)
        tell(console, f"{twin_names}: the same layout as {shown_name(name)}")
    tell(console, _LEGEND, style="dim")
    return reports


def _figures(
    placement: Placement, request: LayoutRequest, scenario: Scenario, goal: Goal, price_kwh: float | None
) -> Figures:
    """Return the costs by the throughput objective, whichever the search used. Raises: LocalError: impossible."""
    objective = ThroughputObjective(request.topology, request.workload)
    cost = objective.cost(placement)
    if not math.isfinite(cost.seconds):
        raise LocalError(f"this plan cannot run: {cost.why}")
    sent = {
        device: sent_bytes
        for stage, each in zip(placement.stages, objective.sent_bytes(placement), strict=True)
        for device, sent_bytes in zip(stage, each, strict=True)
    }
    return figures_of(
        request.topology,
        scenario.watts,
        tokens_per_s=cost.parts["tokens_per_s"],
        step_s=cost.parts["foreseen_s"],
        sent_bytes=sent,
        received_bytes=sent,
        goal=goal,
        price_kwh=price_kwh,
    )


# --- for people ---

_COLUMNS = (
    Column("layout", 13, right=False),
    Column("stages", 6),
    Column("step", 10),
    Column("x first", 7),
    Column("tokens/s", 11),
    Column("took", 9),
)


def figures_view(figures: Figures) -> RenderableType:
    """Return the costs of the plan: for the run, then for each class of members."""
    run = Table(box=None, pad_edge=False, show_header=False)
    run.add_column(no_wrap=True)
    run.add_column(overflow="fold")
    for what, how_much in lines_of(figures):
        run.add_row(what, how_much)
    members = Table(box=None, pad_edge=False, header_style="dim")
    members.add_column("each member in", overflow="fold")
    for heading in ("members", "GB a month up", "GB a month down", "watts"):
        members.add_column(heading, justify="right", overflow="fold")
    for each in figures.members:
        members.add_row(
            Text(printable(each.name)),
            str(each.members),
            said_gigabytes(each.up_gb_month),
            said_gigabytes(each.down_gb_month),
            f"{each.watts:,.0f}{' (assumed)' if each.watts_are_assumed else ''}",
        )
    return Group(run, Text(), members, Text())


def shown_s(cost: Cost) -> float:
    """Return the predicted seconds of a step for a table; the search compares a slightly different figure."""
    return cost.parts.get("foreseen_s", cost.seconds)


def compared_cells(proposal: Proposal, first_s: float) -> tuple[tuple[str, ...], str]:
    """Return (cells of `_COLUMNS`, why it is impossible). Args: first_s: the first row's step, as shown."""
    cost, placement = proposal.cost, proposal.placement
    stages = "none" if placement is None else str(len(placement.stages))
    took = _seconds(proposal.seconds)
    if not math.isfinite(cost.seconds):
        return (shown_name(proposal.name), stages, "cannot be", "none", "none", took), printable(cost.why)
    tokens = cost.parts.get("tokens_per_s")
    return (
        shown_name(proposal.name),
        stages,
        _seconds(shown_s(cost)),
        f"{shown_s(cost) / first_s:.2f}",
        "not counted" if tokens is None else f"{tokens:,.0f}",
        took,
    ), ""


def _stages_table(stages: Sequence[StageLine], topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage", justify="right")
    table.add_column("layers", justify="right")
    table.add_column("devices", overflow="fold")
    table.add_column("needs GB", justify="right")
    if any(topology.regions):
        table.add_column("where", overflow="fold")
    for line in stages:
        needs = ""
        if line.needs_gb is not None and line.has_gb is not None:
            needs = f"{digits(line.needs_gb)} of {digits(line.has_gb)}"
        cells = [str(line.stage), f"{line.first_layer}-{line.last_layer - 1}", _indexes(line.devices), needs]
        if any(topology.regions):
            cells.append(printable(said_regions(line.devices, topology)))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _cost_table(cost: Cost) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_row("minimised by the search: seconds a step", _seconds(cost.seconds), style="bold")
    for name, value in cost.parts.items():
        said = _PARTS.get(name) or name.removesuffix("_s").replace("_per", "/s").replace("_", " ")
        table.add_row(f"  {said}", _figure(name, value))
    return table


_PARTS = {
    "step_s": "of these the step itself",
    "flow_s": "what the busiest device or link needs, all else overlapping",
    "compute_s": "the slowest stage, computing only",
    "stage_s": "the slowest stage with its network cards",
    "pair_s": "the slowest paths between two stages",
    "reduce_s": "adding up gradients, in the slowest stage",
    "chain_s": "work that cannot overlap",
    "round_trip_s": "one microbatch there and back",
    "commit_s": "from the last gradient to the next weights",
    "stale": "steps that gradients are late, on average",
    "foreseen_s": "a step, predicted",
    "tokens_per_s": "tokens/s, predicted",
    "slowest_stage": "the slowest stage is stage",
    "memory": "the fullest memory",
}


def _figure(name: str, value: float) -> str:
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    if name == "memory":
        return f"{value:.0%}"
    if name == "stale":
        return f"{value:.2f}"
    return _seconds(value) if name.endswith("_s") else f"{value:g}"


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "infinite"
    return f"{value:,.3f} s" if value >= 1.0 else f"{digits(value * 1e3)} ms"


def _in_a_line(proposal: Proposal) -> str:
    assert proposal.placement is not None
    parts, stages = proposal.cost.parts, len(proposal.placement.stages)
    devices = sum(len(stage) for stage in proposal.placement.stages)
    tokens = f", {parts['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in parts else ""
    held = f"{counted(devices, 'device')} in {counted(stages, 'stage')}"
    return f"{held}, {_seconds(shown_s(proposal.cost))} a step{tokens}"


def _has_said(group: LeftOut) -> str:
    """Format a device: `35 TFLOP/s, 24 GB, 50/500 Mbit/s`, the line's upload first."""
    line = ""
    if group.up_mbps is not None or group.down_mbps is not None:
        up, down = ("?" if rate is None else f"{rate:,.0f}" for rate in (group.up_mbps, group.down_mbps))
        line = f", {up}/{down} Mbit/s"
    return f"{digits(group.tflops)} TFLOP/s, {digits(group.memory_gb)} GB{line}"


def _indexes(devices: Sequence[int]) -> str:
    """Format device indexes as ranges: `0-7 12 14-15`."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
