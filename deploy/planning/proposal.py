"""Makes and scores a layout, with the memory and the figures of its members, for the output of `shoal plan --json`."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from shoal.coordinator.cost.format_choice import formats_of
from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.placement import Cost, Objective, Placement
from shoal.coordinator.cost.workload import FormatBytes, experts_held
from shoal.deploy.planning.figures import Figures, Wishes, figures_of
from shoal.deploy.planning.layouts import LayoutName, LayoutRequest, layout
from shoal.deploy.planning.left_out import LeftOut
from shoal.protocol.errors import LocalError, ShoalError
from shoal.protocol.spec import RunSpec


class StageLine(msgspec.Struct, frozen=True, kw_only=True):
    stage: int
    first_layer: int
    last_layer: int
    """The number of the first layer after this stage: the stage has the layers from `first_layer` to the one before."""
    devices: tuple[int, ...]
    needs_gb: float | None = None
    """The GB of GPU memory that a real peer needs to keep all its state there. Given for the member with the least
    memory to spare (the tightest one); null: not computed."""
    least_gb: float | None = None
    """The GB that the tightest member's GPU needs if the optimizer's moments are in the machine's memory instead."""
    has_gb: float | None = None
    """The GB of memory that the tightest member's GPU has."""


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """One layout with its cost, as `--json` prints it."""

    layout: str
    notes: tuple[str, ...] = ()
    """Sentences on fields of the network file that were not read, and on assumed values."""
    objective: str
    seed: int
    stages: tuple[StageLine, ...]
    spares: tuple[int, ...]
    cost_s: float | None
    """The seconds of a step according to the objective; None: the layout is impossible."""
    parts: dict[str, float]
    """Name of a part of the cost -> its value; the objective's docstring explains the parts."""
    why: str
    """Why the layout is impossible (it may have stages all the same); empty: it is possible."""
    took_s: float
    """The CPU seconds spent on making the layout, the loading of compiled kernels included."""
    same_as: str = ""
    """The name of an equal layout earlier in the comparison; empty: there is none."""
    figures: Figures | None = None
    """The figures for the members; null in a comparison."""
    left_out: tuple[LeftOut, ...] = ()
    """The kinds of device that the layout leaves out (at most twelve), and why; empty in a comparison."""
    formats: str = ""
    """The chosen wire formats, and the speed with them; empty in a comparison, or if the run leaves no choice."""

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step, for people. Searches compare `cost_s` instead, which differs a little."""
        return self.parts.get("foreseen_s", math.inf if self.cost_s is None else self.cost_s)

    @property
    def placement(self) -> Placement:
        """The layout as a placement, without stages if no layout was found."""
        return Placement(
            stages=tuple(line.devices for line in self.stages), bounds=(0, *(line.last_layer for line in self.stages))
        )


def propose(name: LayoutName, request: LayoutRequest, judge: Objective, *, objective: str) -> PlanReport:
    """Make and score the layout `name`. An impossible layout is reported, too, with the reason.
    Args: judge: the objective that scores the layout. objective: the name of `judge`."""
    begun_s = time.process_time()
    placement, why = None, ""
    try:
        placement = layout(name, request)
    except ShoalError as error:
        why = str(error)
    took_s = time.process_time() - begun_s
    cost = judge.cost(placement) if placement is not None else Cost.impossible(why)
    held = zip(placement.stages, pairwise(placement.bounds), strict=True) if placement is not None else ()
    return PlanReport(
        layout=name,
        objective=objective,
        seed=request.seed,
        stages=tuple(
            StageLine(stage=k, first_layer=first, last_layer=last, devices=stage)
            for k, (stage, (first, last)) in enumerate(held)
        ),
        spares=placement.spares(request.topology.num_devices) if placement is not None else (),
        cost_s=cost.seconds if math.isfinite(cost.seconds) else None,
        parts={name: value for name, value in cost.parts.items() if math.isfinite(value)},
        why=cost.why,
        took_s=took_s,
    )


def stages_with_memory(report: PlanReport, request: LayoutRequest, spec: RunSpec) -> tuple[StageLine, ...]:
    """Return the stages of the report with `needs_gb`, `least_gb` and `has_gb` (`coordinator/cost/memory.py`)."""
    present = request.topology.memory_bytes
    needed, least = (
        request.objective.needed_bytes(
            report.placement, StageMemory.on_card(spec, experts_held=experts_held(spec), is_full=is_full)
        )
        for is_full in (False, True)
    )
    if needed is None or least is None:
        return report.stages
    lines = []
    for line, needs, leasts in zip(report.stages, needed, least, strict=True):
        fullest = max(range(len(needs)), key=lambda member: needs[member] / present[line.devices[member]])
        gigabytes = [bytes_ / 1e9 for bytes_ in (needs[fullest], leasts[fullest], present[line.devices[fullest]])]
        needs_gb, least_gb, has_gb = map(float, gigabytes)
        lines.append(msgspec.structs.replace(line, needs_gb=needs_gb, least_gb=least_gb, has_gb=has_gb))
    return tuple(lines)


def said_of_memory(stages: Sequence[StageLine]) -> str:
    """Return sentences on what peers would do in stages with a GPU that is too small; empty: all are large enough."""
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
    """Return stage numbers in words: `stages 0, 1 and 4`."""
    names = [str(line.stage) for line in lines]
    return f"stage {names[0]}" if len(names) == 1 else f"stages {', '.join(names[:-1])} and {names[-1]}"


def said_of_formats(placement: Placement, request: LayoutRequest, spec: RunSpec) -> str:
    """Return a sentence on the wire formats that a plan with this layout would choose; empty: the run leaves no choice.
    All other figures assume the narrowest formats, which the search uses."""
    takes = FormatBytes.of(spec)
    if not takes.are_choices:
        return ""
    formats = formats_of(request.topology, request.workload, placement, takes)
    cost = request.objective.cost(placement, takes.under(formats))
    return f"{formats.sentence}: {cost.parts['tokens_per_s']:,.0f} tokens/s" if math.isfinite(cost.seconds) else ""


def predicted_figures(
    placement: Placement, request: LayoutRequest, watts: Sequence[float | None], wishes: Wishes, spec: RunSpec
) -> Figures:
    """Return the figures of a placement by the throughput objective, even if the search used another objective.
    Raises: LocalError: the layout is impossible."""
    cost = request.objective.cost(placement)
    if not math.isfinite(cost.seconds):
        raise LocalError(f"this plan cannot run: {cost.why}")
    sent = {
        device: sent_bytes
        for stage, each in zip(placement.stages, request.objective.sent_bytes(placement), strict=True)
        for device, sent_bytes in zip(stage, each, strict=True)
    }
    return figures_of(
        request.topology,
        watts,
        wishes,
        spec,
        parameters=request.workload.num_parameters,
        tokens_per_s=cost.parts["tokens_per_s"],
        step_s=cost.parts["foreseen_s"],
        sent_bytes=sent,
        received_bytes=sent,
    )
