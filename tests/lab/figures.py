"""What a scenario came to in one of the two worlds, and both beside each other as a table. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from scenario import Scenario, World, spans

_PARTS_SHOWN_MAX = 12


class Step(NamedTuple):
    """A step that every stage has committed."""

    number: int
    at_s: float
    loss: float | None = None
    """The mean of its microbatches, in nats a token."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds are of that world, from its first step on unless something else is said."""

    world: World
    first_step_s: float | None
    """From the moment when the last peer that the run needs has joined to the first step; None: there was none."""
    works_s: dict[str, float] = {}
    """By host: from its invite until it said that it had computed a microbatch. Peers say so every second."""
    steps: int
    """How many were made; what a way back has undone does not count."""
    steps_per_s: float
    """Over the whole time but its warm-up, standstills included."""
    tokens_per_s: float = 0.0
    """From the first plan to the end."""
    step_at_s: tuple[float, ...] = ()
    """When each was committed, those included that were undone."""
    parts: tuple[float, ...]
    """Steps/s between one event and the next, the warm-up left out."""
    gap_s_max: float
    """The longest time without a step, to the end of the run."""
    false_deaths: tuple[str, ...] = ()
    """Who was counted out of the swarm, and when, though it was alive and in reach."""
    given_up: int = 0
    """Microbatches that commits went without."""
    duplicates: int = 0
    dissenting: int = 0
    """Members whose state was another than their group's at a commit."""
    rollbacks: int = 0
    up_mb: dict[str, float] = {}
    """By line: megabytes that went up it. The simulated ones are frames' alone, without calls and packets' headers."""
    layout: str = ""
    """The last one that was live."""
    layouts: int = 0
    """How many different ones there were."""
    gflops: dict[str, float] = {}
    """By host: how fast its device would be if it always worked, within its share; what the simulation was given."""
    probed: dict[str, float] = {}
    """By host: GFLOP/s, as its probe said; the first plan is made with them."""
    share_used: dict[str, float] = {}
    """By host: how much it had of the device's time that it may have; near 1: it is as fast as its share lets it."""
    machine_busy: float = 0.0
    """The part of this machine's processor time that was used from the first step on, whoever used it; real peers are
    only as quick as they should be where something is left."""
    problems: tuple[str, ...] = ()
    """What should not have happened: processes that ended by themselves, no first step."""
    wall_s: float = 0.0


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    title: str
    real: Figures | None = None
    virtual: Figures | None = None

    @property
    def ratio(self) -> float | None:
        """Simulated over real steps/s; None: one of them is missing or stood still."""
        if self.real is None or self.virtual is None or not self.real.steps_per_s:
            return None
        return self.virtual.steps_per_s / self.real.steps_per_s


def rate(times_s: Sequence[float], from_s: float, until_s: float) -> float:
    """Steps/s, a step that was under way counting for its part that was over. `times_s`: of steps, ascending."""
    if not times_s:
        return 0.0
    done = np.interp([from_s, until_s], times_s, np.arange(1, len(times_s) + 1), left=0.0)
    return float(done[1] - done[0]) / (until_s - from_s)


def kept(steps: Sequence[Step]) -> list[Step]:
    """The steps that no way back to an earlier version has undone: those before it that come again do not count."""
    kept_steps: list[Step] = []
    for step in steps:
        while kept_steps and kept_steps[-1].number >= step.number:
            kept_steps.pop()
        kept_steps.append(step)
    return kept_steps


def paces(scenario: Scenario, steps: Sequence[Step]) -> tuple[int, float, tuple[float, ...], float]:
    """(steps, steps/s, steps/s between events, longest gap in s). Steps that were undone end a gap all the same."""
    file = scenario.file
    if not steps:
        return 0, 0.0, tuple(0.0 for _ in spans(scenario)), file.seconds
    zero_s = steps[0].at_s
    until_s = zero_s + file.seconds
    steps = [step for step in steps if step.at_s <= until_s]
    gap_s = max(np.diff([*(step.at_s for step in steps), until_s]))
    times_s = [step.at_s - zero_s for step in kept(steps)]
    parts = tuple(rate(times_s, *span) for span in spans(scenario))
    return len(times_s), rate(times_s, file.warm_up_s, file.seconds), parts, float(gap_s)


def shown_layout(stages: Sequence[tuple[int, int]], members: Sequence[Sequence[str]], spares: Sequence[str]) -> str:
    """`0-2 a b | 2-6 c | spare d`: layers from and up to, and who has them."""
    shown = [f"{first}-{last} {' '.join(sorted(names))}" for (first, last), names in zip(stages, members, strict=True)]
    return " | ".join([*shown, *([f"spare {' '.join(sorted(spares))}"] if spares else [])])


def table(sides: Sides) -> str:
    """Both worlds beside each other, in lines for people."""
    rows = [("", "real", "simulated", "sim/real")]
    real, virtual = sides.real, sides.virtual

    def row(what: str, value_of: Callable[[Figures], float | None], unit: str = "", *, compares: bool = False) -> None:
        values = [None if figures is None else value_of(figures) for figures in (real, virtual)]
        if all(value is None for value in values):
            return
        texts = ["-" if value is None else f"{value:.3g}{unit}" for value in values]
        both = compares and all(values)
        rows.append((what, *texts, f"{values[1] / values[0]:.2f}" if both else ""))

    row("first step", lambda f: f.first_step_s, " s", compares=True)
    for host in sorted({*(real.works_s if real else ()), *(virtual.works_s if virtual else ())}):
        row(f"{host} works", lambda f, host=host: f.works_s.get(host), " s")
    row("steps", lambda f: f.steps)
    row("steps/s", lambda f: f.steps_per_s, compares=True)
    row("tokens/s", lambda f: f.tokens_per_s or None, compares=True)
    count = max(len(figures.parts) for figures in (real, virtual) if figures is not None)
    for part in range(count if 1 < count <= _PARTS_SHOWN_MAX else 0):
        row(f"  part {part + 1}", lambda f, part=part: f.parts[part], compares=True)
    row("longest gap", lambda f: f.gap_s_max, " s", compares=True)
    row("false deaths", lambda f: len(f.false_deaths))
    row("given up", lambda f: f.given_up)
    row("counted twice", lambda f: f.duplicates)
    row("dissenting", lambda f: f.dissenting)
    row("rollbacks", lambda f: f.rollbacks)
    row("layouts", lambda f: f.layouts)
    for line in sorted({*(real.up_mb if real else ()), *(virtual.up_mb if virtual else ())}):
        row(f"up {line}", lambda f, line=line: f.up_mb.get(line), " MB", compares=True)
    row("machine busy", lambda f: 100.0 * f.machine_busy if f.world == "real" else None, " %")
    row("took", lambda f: f.wall_s, " s")
    lines = [f"{sides.scenario}: {sides.title}"]
    lines += [f"  {what:<16}{a:>12}{b:>12}{ratio:>10}".rstrip() for what, a, b, ratio in rows]
    for figures in (real, virtual):
        if figures is None:
            continue
        lines.append(f"  {figures.world} layout: {figures.layout or 'none'}")
        if figures.gflops:
            said = ", ".join(f"{name} {speed:.3g}" for name, speed in figures.gflops.items())
            lines.append(f"  {figures.world} GFLOP/s at work: {said}")
        if figures.share_used:
            said = ", ".join(f"{name} {100.0 * used:.0f} %" for name, used in figures.share_used.items())
            lines.append(f"  {figures.world} share used: {said}")
        lines += [f"  {figures.world}: {what}" for what in (*figures.false_deaths, *figures.problems)]
    return "\n".join(lines)
