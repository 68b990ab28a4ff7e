"""Plans a network and prints the plan, or a comparison with other layouts (`shoal plan`)."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec
from rich.console import Console

from shoal.coordinator.allocate.dtfm_search import DtfmObjective
from shoal.coordinator.cost.placement import Objective, Placement
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.base.words import counted, printable
from shoal.deploy.commands.options import PlanOptions
from shoal.deploy.planning.figures import Wishes, parse_tokens, said_tokens
from shoal.deploy.planning.layouts import LAYOUT_NAMES, LayoutName, LayoutRequest
from shoal.deploy.planning.left_out import GAIN_MIN, LeftOut, left_out, said_of_needs
from shoal.deploy.planning.plan_view import (
    COMPARED,
    compared_cells,
    cost_table,
    figures_view,
    in_a_line,
    print_notes,
    said_device,
    seconds,
    shown_name,
    stages_table,
)
from shoal.deploy.planning.proposal import (
    PlanReport,
    StageLine,
    predicted_figures,
    propose,
    said_of_formats,
    said_of_memory,
    stages_with_memory,
)
from shoal.deploy.planning.rows import Column, Rows
from shoal.deploy.simulate.reached import how_to_compare
from shoal.deploy.simulate.scenario import Scenario, find_scenario
from shoal.deploy.terminal.plain import say_json
from shoal.deploy.terminal.progress import sign_of_life
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.errors import LocalError
from shoal.protocol.toml.spec_file import load_spec

ObjectiveName = Literal["throughput", "dtfm"]
WORLD = "Every figure is the planner's arithmetic: nothing was run. `shoal simulate` plays a plan in virtual time."
_SEARCHING = "searching (the first search on a machine compiles for half a minute)"
_LEGEND = (
    "step and tokens/s: predicted; x first: the step divided by that of the first row; took: seconds of one core, "
    "compiling included"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Planning:
    """The network to plan, the objective that judges layouts, and the console."""

    what: str
    scenario: Scenario
    request: LayoutRequest
    aim: ObjectiveName
    judge: Objective
    console: Console

    @property
    def searched(self) -> LayoutName:
        """The name of the layout to search: `ours` for the throughput objective, `dtfm` for the DT-FM objective."""
        return "ours" if self.aim == "throughput" else "dtfm"

    def propose(self, name: LayoutName) -> PlanReport:
        return propose(name, self.request, self.judge, objective=self.aim)


def show_plan(what: str, asked: PlanOptions) -> None:
    """Plan the network `what`, and print the plan or a comparison of layouts.

    Raises: LocalError: there is no such network or objective, or no plan is possible.
    """
    tokens = None if asked.tokens is None else parse_tokens(asked.tokens)
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
    judge = request.objective if aim == "throughput" else DtfmObjective(request.topology, request.constants)
    console = open_console(quiet=asked.json)
    tell(console, scenario.title, style="bold")
    tell(
        console,
        f"{counted(scenario.topology.num_devices, 'device')}, {said_tokens(request.workload.num_parameters)} "
        f"parameters, {request.workload.tokens_per_step:,} tokens a step; "
        f"objective {aim}, seed {asked.seed}\n{WORLD}\n",
        style="dim",
    )
    print_notes(console, scenario.notes)
    planning = _Planning(what=what, scenario=scenario, request=request, aim=aim, judge=judge, console=console)
    if asked.compare:
        reports = _show_comparison(planning)
        tell(console, how_to_compare(what))
    else:
        steps = None if run is None else run.training.steps  # a scenario's steps are only a simulation's length
        reports = [_show_one(planning, Wishes(tokens=tokens, steps=steps, price_kwh=asked.price_kwh))]
    if asked.json:
        reports = [msgspec.structs.replace(report, notes=scenario.notes) for report in reports]
        say_json(reports if asked.compare else reports[0])


def _show_one(planning: _Planning, wishes: Wishes) -> PlanReport:
    """Print a line on the layout by a rule, then the searched layout. Raises: LocalError: no layout is possible."""
    request, scenario, console = planning.request, planning.scenario, planning.console
    first = planning.propose("at-once")
    if first.cost_s is not None:
        tell(console, f"at once, without a search: {in_a_line(first)}\n")
    with sign_of_life(_SEARCHING):
        report = planning.propose(planning.searched)
    if report.cost_s is None:
        raise LocalError(f"no plan for {planning.what}: {report.why}")
    same = report.stages == first.stages
    tell(console, f"searched{', and nothing better was found' if same else ''}: {in_a_line(report)}\n")
    stages, placement = stages_with_memory(report, request, scenario.spec), report.placement
    console.print(stages_table(stages, request.topology))
    console.print()
    if short := said_of_memory(stages):
        tell(console, f"{short}\n")
    figures = predicted_figures(placement, request, scenario.watts, wishes, scenario.spec)
    console.print(figures_view(figures))
    if formats := said_of_formats(placement, request, scenario.spec):
        tell(console, f"{formats}\n")
    groups = _show_left_out(planning, placement)
    console.print(cost_table(report))
    console.print()
    tell(console, f"found in {seconds(report.took_s)} of one core", style="dim")
    return msgspec.structs.replace(report, stages=stages, figures=figures, left_out=tuple(groups), formats=formats)


def _show_left_out(planning: _Planning, placement: Placement) -> list[LeftOut]:
    request, groups = planning.request, list[LeftOut]()
    if not placement.spares(request.topology.num_devices):
        return groups
    columns = (Column("left out", 22, right=False), Column("each has", 32, right=False))
    rows = Rows(planning.console, columns, last="why")
    asking = left_out(request.topology, request.workload, placement)
    while True:
        with sign_of_life("finding what would help the devices left out"):
            group = next(asking, None)
        if group is None:
            break
        groups.append(group)
        name, why = printable(f"{len(group.devices)} {group.name}"), f"{group.why}; {said_of_needs(group)}"
        rows.row(name, said_device(group), last=why)
    tell(
        planning.console,
        f"\nHelping is to make a step at least {GAIN_MIN:.1%} shorter, one device at a time, in the best place that "
        "this plan has for it. A line counts in both directions.\n",
        style="dim",
    )
    return groups


def _show_comparison(planning: _Planning) -> list[PlanReport]:
    """Print the layouts row by row as they are found; equal ones are listed at the end."""
    rows = Rows(planning.console, COMPARED)
    seen: dict[tuple[StageLine, ...], str] = {}
    same: dict[str, list[str]] = {}
    first_s: float | None = None
    reports: list[PlanReport] = []
    for name in ("at-once", planning.searched, *(n for n in LAYOUT_NAMES if n not in ("ours", "at-once", "dtfm"))):
        with sign_of_life(_SEARCHING if name in ("ours", "dtfm") else f"laying out {name}"):
            report = planning.propose(name)
        twin = seen.setdefault(report.stages, name) if report.stages else name
        if twin != name:
            same.setdefault(twin, []).append(name)
            reports.append(msgspec.structs.replace(report, same_as=twin))
            continue
        reports.append(report)
        if first_s is None and report.cost_s is not None:
            first_s = report.step_s
        cells, why = compared_cells(report, first_s or math.nan)
        rows.row(*cells, last=why)
    planning.console.print()
    for first, twins in same.items():
        twin_names = ", ".join(shown_name(each) for each in twins)
        tell(planning.console, f"{twin_names}: the same layout as {shown_name(first)}")
    tell(planning.console, _LEGEND, style="dim")
    return reports
