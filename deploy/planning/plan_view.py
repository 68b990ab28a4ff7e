"""Formats a plan for a terminal: its stages, its figures for the members, and the rows of a comparison."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Column as Head
from rich.table import Table
from rich.text import Text

from shoal.deploy.base.words import counted, digits, printable
from shoal.deploy.planning.figures import Figures, lines_of, said_gigabytes, said_regions
from shoal.deploy.planning.left_out import LeftOut
from shoal.deploy.planning.proposal import PlanReport, StageLine
from shoal.deploy.planning.rows import Column
from shoal.deploy.terminal.screen import tell
from shoal.protocol.topology import Topology

COMPARED = (
    Column("layout", 13, right=False),
    Column("stages", 6),
    Column("step", 10),
    Column("x first", 7),
    Column("tokens/s", 11),
    Column("took", 9),
)
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


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print the notes on a network file: the fields that were not read, and the values that are assumed."""
    for note in notes:
        tell(console, note, style="dim")
    if notes:
        console.print()


def shown_name(name: str) -> str:
    return "ours, at once" if name == "at-once" else name


def seconds(value: float) -> str:
    return f"{value:,.3f} s" if value >= 1.0 else f"{digits(value * 1e3)} ms"


def figures_view(figures: Figures) -> RenderableType:
    """Return a view of the plan's figures: those of the run, then those of each class of members."""
    run = Table(Head(no_wrap=True), Head(overflow="fold"), box=None, pad_edge=False, show_header=False)
    for what, how_much in lines_of(figures):
        run.add_row(what, how_much)
    headings = ("members", "GB a month up", "GB a month down", "watts")
    heads = [Head(heading, justify="right", overflow="fold") for heading in headings]
    members = Table(Head("each member in", overflow="fold"), *heads, box=None, pad_edge=False, header_style="dim")
    for each in figures.members:
        members.add_row(
            Text(printable(each.name)),
            str(each.members),
            said_gigabytes(each.up_gb_month),
            said_gigabytes(each.down_gb_month),
            f"{each.watts:,.0f}{' (assumed)' if each.watts_are_assumed else ''}",
        )
    return Group(run, Text(), members, Text())


def stages_table(stages: Sequence[StageLine], topology: Topology) -> Table:
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
        cells = [str(line.stage), f"{line.first_layer}-{line.last_layer - 1}", said_indexes(line.devices), needs]
        if any(topology.regions):
            cells.append(printable(said_regions(line.devices, topology)))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def cost_table(report: PlanReport) -> Table:
    table = Table(Head(), Head(justify="right", no_wrap=True), box=None, pad_edge=False, show_header=False)
    assert report.cost_s is not None
    table.add_row("minimised by the search: seconds a step", seconds(report.cost_s), style="bold")
    for name, value in report.parts.items():
        said = _PARTS.get(name) or name.removesuffix("_s").replace("_per", "/s").replace("_", " ")
        table.add_row(f"  {said}", _figure(name, value))
    return table


def _figure(name: str, value: float) -> str:
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    if name == "memory":
        return f"{value:.0%}"
    if name == "stale":
        return f"{value:.2f}"
    return seconds(value) if name.endswith("_s") else f"{value:g}"


def compared_cells(report: PlanReport, first_s: float) -> tuple[tuple[str, ...], str]:
    """Return (the cells of a row, by the columns `COMPARED`; why the layout is impossible, or "").
    Args: first_s: the seconds of a step in the first row."""
    name, stages, took = shown_name(report.layout), str(len(report.stages) or "none"), seconds(report.took_s)
    if report.cost_s is None:
        return (name, stages, "cannot be", "none", "none", took), printable(report.why)
    tokens = f"{report.parts['tokens_per_s']:,.0f}" if "tokens_per_s" in report.parts else "not counted"
    return (name, stages, seconds(report.step_s), f"{report.step_s / first_s:.2f}", tokens, took), ""


def in_a_line(report: PlanReport) -> str:
    tokens = f", {report.parts['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in report.parts else ""
    devices = sum(len(line.devices) for line in report.stages)
    held = f"{counted(devices, 'device')} in {counted(len(report.stages), 'stage')}"
    return f"{held}, {seconds(report.step_s)} a step{tokens}"


def said_device(group: LeftOut) -> str:
    """Return a device in words: `35 TFLOP/s, 24 GB, 50/500 Mbit/s`, with upload before download."""
    line = ""
    if group.up_mbps is not None or group.down_mbps is not None:
        up, down = ("?" if rate is None else f"{rate:,.0f}" for rate in (group.up_mbps, group.down_mbps))
        line = f", {up}/{down} Mbit/s"
    return f"{digits(group.tflops)} TFLOP/s, {digits(group.memory_gb)} GB{line}"


def said_indexes(devices: Sequence[int]) -> str:
    """Return device indexes as ranges: `0-7 12 14-15`."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
