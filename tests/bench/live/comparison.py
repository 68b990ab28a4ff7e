"""One case: a planned layout that is pinned, the best of the simple ones, and the live swarm beside them."""

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
from live.cases import with_steps

from shoal.deploy.planning.layouts import LayoutName
from shoal.deploy.simulate.outcome import Outcome
from shoal.deploy.simulate.reached import WORK_S
from shoal.deploy.simulate.result import SETTLED_S, SimResult
from shoal.deploy.simulate.scenario import STEPS, STEPS_MAX, Scenario
from shoal.deploy.simulate.strategies import StrategyOptions, StrategyPatience, play, prepare
from shoal.deploy.simulate.strategy import Strategy

PINNED_S = 20.0
"""A pinned layout is played so long at least, and `STEPS` steps."""
BIN_S = 50.0
OTHERS: tuple[LayoutName, ...] = ("random", "mod", "greedy", "dtfm")


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was held from beginning to end."""

    layout: str
    bounds: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    key: str = ""
    tokens_per_s: float | None = None
    below: bool = False
    """`tokens_per_s` is a bound: the run was cut off."""
    predicted: float | None = None
    why: str = ""
    wall_s: float = 0.0


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """A swarm that decided by itself."""

    seconds: float
    tokens_per_s: float | None
    """From `SETTLED_S` on, or from half of a shorter run on."""
    from_s: float
    tokens: float
    """By `WORK_S`, or by the end of a shorter run."""
    tokens_by_s: float
    steps: int
    first_step_s: float | None
    standstill_s: float
    plans: int
    divisions: int
    eras: int
    given_up: int
    duplicates: int
    failures: tuple[str, ...]
    rates: tuple[int, ...]
    """Tokens/s of each `BIN_S`."""
    said: tuple[tuple[float, str, str], ...]
    """Plans, divisions and roll-backs."""
    why: str
    wall_s: float
    num_events: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One case and seed."""

    case: str
    seed: int
    commit: str
    planned: Pinned
    best_other: Pinned | None = None
    live: Live

    @property
    def share(self) -> float:
        """The part of the planned pace that the live swarm reaches."""
        return over(self.live.tokens_per_s, self.planned.tokens_per_s)

    @property
    def work(self) -> float:
        return over(self.live.tokens, (self.planned.tokens_per_s or math.nan) * self.live.tokens_by_s)


def over(value: float | None, reference: float | None) -> float:
    return value / reference if value is not None and reference else math.nan


def compared(scenario: Scenario, seed: int, seconds: float, known: dict[str, Pinned], *, with_other: bool) -> Line:
    """Play the planned layout, the best other one and the live swarm."""
    first = pinned(scenario, "ours", seed, known, None)
    patience = None
    if first.tokens_per_s:
        step_s = scenario.spec.tokens_per_step / first.tokens_per_s
        patience = StrategyPatience(name="ours", virtual_s=4.0 * (STEPS + 3) * step_s, step_s=step_s, real_s=60.0)
    return Line(
        case=scenario.name,
        seed=seed,
        commit=commit(),
        planned=first,
        best_other=best_other(scenario, seed, known, patience) if with_other else None,
        live=live(scenario, seed, seconds),
    )


def best_other(
    scenario: Scenario, seed: int, known: dict[str, Pinned], patience: StrategyPatience | None
) -> Pinned | None:
    """The quickest of `OTHERS` by arithmetic, played; None: none of them can be."""
    options = StrategyOptions(seed=seed, timeline=False)
    found = [(name, prepare(scenario, Strategy(name=name, layout=name), (), options)) for name in OTHERS]
    able = [(name, prepared) for name, prepared in found if not prepared.problem]
    if not able:
        return None
    name, _ = max(able, key=lambda each: _predicted(each[1]))
    return pinned(scenario, name, seed, known, patience)


def _predicted(prepared: Outcome) -> float:
    return prepared.predicted.parts.get("tokens_per_s", 0.0) if prepared.predicted is not None else 0.0


def pinned(
    scenario: Scenario, name: LayoutName, seed: int, known: dict[str, Pinned], patience: StrategyPatience | None
) -> Pinned:
    """Lay it out, and play some steps of it unless `known` has them."""
    options = StrategyOptions(seed=seed, timeline=False)
    prepared = prepare(scenario, Strategy(name=name, layout=name), (), options)
    if prepared.placement is None or prepared.predicted is None or prepared.problem:
        return Pinned(layout=name, why=prepared.problem)
    foreseen_s = prepared.predicted.parts.get("foreseen_s", math.inf)
    steps = max(STEPS, math.ceil(PINNED_S / foreseen_s))
    scenario = with_steps(scenario, steps)
    prepared = replace(prepared, spec=scenario.spec)
    placement = prepared.placement
    key = f"{scenario.name}/{seed}/{placement.bounds}/{placement.stages}"
    if key in known:
        return msgspec.structs.replace(known[key], layout=name)
    outcome = play(scenario, prepared, options, patience=patience)
    found = Pinned(
        layout=name,
        bounds=placement.bounds,
        sizes=tuple(len(stage) for stage in placement.stages),
        key=key,
        predicted=prepared.predicted.parts.get("tokens_per_s") if prepared.predicted is not None else None,
        why=outcome.problem,
    )
    if outcome.result is not None:
        found = _with_pace(found, outcome.result)
    known[key] = found
    return found


def _with_pace(pinned: Pinned, result: SimResult) -> Pinned:
    pace, at_s = result.tokens_per_s, result.ending.at_s
    is_known = math.isfinite(pace)
    return msgspec.structs.replace(
        pinned,
        tokens_per_s=pace if is_known else (len(result.steps) + 1) * result.tokens_per_step / at_s,
        below=not is_known,
        why="; ".join(filter(None, (result.ending.cut_off, result.ending.standstill, *result.failures[:1]))),
        wall_s=result.ending.wall_s,
    )


def live(scenario: Scenario, seed: int, seconds: float) -> Live:
    begun_s = time.monotonic()
    told_s = 0.0

    def tell(share: float) -> None:
        nonlocal told_s
        if share * seconds >= told_s + BIN_S:
            told_s = share * seconds
            took_s = time.monotonic() - begun_s
            print(f"  {scenario.name}: {told_s:.0f} s of virtual time in {took_s:.0f} s", file=sys.stderr, flush=True)

    options = StrategyOptions(seed=seed, timeline=False, on_progress=tell)
    scenario = replace(with_steps(scenario, STEPS_MAX), seconds=seconds)
    prepared = prepare(scenario, Strategy(name="live", layout="live"), (), options)
    outcome = play(scenario, prepared, options)
    if outcome.result is None:
        raise SystemExit(f"the live swarm cannot run: {outcome.problem}")
    return told(outcome.result, seconds)


def told(result: SimResult, seconds: float) -> Live:
    from_s = SETTLED_S if seconds > SETTLED_S else seconds / 2.0
    by_s = min(WORK_S, seconds)
    rate = result.tokens_per_s_from(from_s)
    edges = [BIN_S * index for index in range(int(result.ending.at_s / BIN_S) + 1)]
    return Live(
        seconds=seconds,
        tokens_per_s=rate if math.isfinite(rate) else None,
        from_s=from_s,
        tokens=result.tokens_by(by_s),
        tokens_by_s=by_s,
        steps=len(result.steps),
        first_step_s=result.steps[0].committed_at_s if result.steps else None,
        standstill_s=result.standstill_s,
        plans=result.count("plan"),
        divisions=result.count("division"),
        eras=result.count("era"),
        given_up=result.given_up,
        duplicates=result.duplicates,
        failures=result.failures[:5],
        rates=tuple(round((result.tokens_by(at_s + BIN_S) - result.tokens_by(at_s)) / BIN_S) for at_s in edges),
        said=tuple((e.at_s, e.change, e.text[:300]) for e in result.events if e.change in ("plan", "division", "era")),
        why="; ".join(filter(None, (result.ending.cut_off, result.ending.standstill))),
        wall_s=result.ending.wall_s,
        num_events=result.ending.num_events,
    )


HEADING = (
    f"{'case':<18}{'seed':>4}{'planned':>10}{'live':>10}{'live/planned':>13}{'work':>6}{'best other':>18}"
    f"{'first step':>11}{'stood':>7}{'plans':>6}{'div':>4}{'eras':>5}{'lost':>5}{'wall':>6}"
)


def row(line: Line) -> str:
    live, other = line.live, line.best_other
    best = "none" if other is None else f"{other.layout} {'< ' if other.below else ''}{figure(other.tokens_per_s)}"
    first = "none" if live.first_step_s is None else f"{live.first_step_s:.0f} s"
    lost = live.given_up + live.duplicates
    return (
        f"{line.case:<18}{line.seed:>4}{figure(line.planned.tokens_per_s):>10}{figure(live.tokens_per_s):>10}"
        f"{line.share:>13.2f}{line.work:>6.2f}{best:>18}{first:>11}{live.standstill_s:>7.0f}{live.plans:>6}"
        f"{live.divisions:>4}{live.eras:>5}{lost:>5}{live.wall_s:>6.0f}"
        + (f"  {line.planned.why or ''} {live.failures[0]}" if live.failures else "")
    )


def figure(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f}"


def known_of(path: Path | None) -> dict[str, Pinned]:
    """The pinned layouts that were played before."""
    known: dict[str, Pinned] = {}
    if path is not None and path.exists():
        for text in path.read_bytes().splitlines():
            line = msgspec.json.decode(text, type=Line)
            known |= {each.key: each for each in (line.planned, line.best_other) if each is not None and each.key}
    return known


def commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip()
