"""Recorded comings and goings, against a planner that knows each change at once and pays nothing for moves.

What that planner makes between two changes is what the best layout for those who are there makes: by arithmetic, and,
where it is asked for, played with that layout pinned.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from live.cases import coarser
from live.comparison import Live, Pinned, figure, over, pinned, told

from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.planning.layouts import LayoutRequest, layout
from shoal.deploy.simulate import strategies
from shoal.deploy.simulate.modelled import Churn, absent_at_first
from shoal.deploy.simulate.scenario import STEPS_MAX, Scenario, find_scenario
from shoal.deploy.simulate.strategies import StrategyOptions
from shoal.deploy.simulate.strategy import KNOWN
from shoal.protocol.errors import ShoalError

SEARCH_S = 0.3


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    trace: str
    seed: int
    changes: int
    ideal_tokens: float
    """By arithmetic."""
    played_tokens: float | None = None
    """With the same planner's layouts pinned and played."""
    live: Live

    @property
    def share(self) -> float:
        return over(self.live.tokens, self.ideal_tokens)

    @property
    def share_of_played(self) -> float:
        return over(self.live.tokens, self.played_tokens)


def traced(trace: Path | None, seed: int, seconds: float, *, coarse: int = 1, plays_ideal: bool = False) -> Traced:
    """`spot-fleet` lives through a trace, its own by default.

    Args:
        coarse: as of `coarser`.
        plays_ideal: play the layout of each set of peers, too.
    """
    options = StrategyOptions(seed=seed, seconds=seconds, trace=trace, timeline=False)
    scenario = strategies.with_options(coarser(find_scenario("spot-fleet"), coarse), options)
    churn = strategies.churn_of(scenario, seed)
    prepared = strategies.prepare(scenario, KNOWN["live"], churn, options)
    outcome = strategies.play(replace(scenario), prepared, replace(options, steps=STEPS_MAX))
    if outcome.result is None:
        raise SystemExit(f"the live swarm cannot run: {outcome.problem}")
    live = msgspec.structs.replace(
        told(outcome.result, seconds), tokens=outcome.result.tokens_by(seconds), tokens_by_s=seconds
    )
    return Traced(
        case=scenario.name,
        trace=trace.name if trace is not None else "its own",
        seed=seed,
        changes=sum(event.at_s < seconds for event in churn),
        ideal_tokens=ideal_tokens(scenario, churn, seconds, partial(_reckoned, seed=seed)),
        played_tokens=ideal_tokens(scenario, churn, seconds, partial(_played, seed=seed)) if plays_ideal else None,
        live=live,
    )


def ideal_tokens(
    scenario: Scenario, churn: Sequence[Churn], seconds: float, rate_of: Callable[[Scenario], float]
) -> float:
    here = set(range(scenario.topology.num_devices)) - absent_at_first(churn)
    rates: dict[tuple[tuple[float, ...], ...], float] = {}
    tokens, now_s = 0.0, 0.0
    for at_s, kind, device in (*sorted(churn), Churn(seconds, "add", -1)):
        until_s = min(at_s, seconds)
        if until_s > now_s:
            tokens += (until_s - now_s) * _rate(scenario, sorted(here), rates, rate_of)
            now_s = until_s
        if kind == "add":
            here.add(device)
        else:
            here.discard(device)
        here.discard(-1)
    return tokens


def _rate(
    scenario: Scenario,
    devices: Sequence[int],
    rates: dict[tuple[tuple[float, ...], ...], float],
    rate_of: Callable[[Scenario], float],
) -> float:
    """Tokens/s of the best layout; networks that are equal but for the names of their devices are planned once."""
    if not devices:
        return 0.0
    topology = scenario.topology.take(list(devices))
    key = (
        tuple(map(float, topology.flop_per_s)),
        tuple(map(float, topology.latency_s.ravel())),
        tuple(map(float, topology.bytes_per_s.ravel())),
        tuple(map(float, topology.up_bytes_per_s)),
        tuple(map(float, topology.memory_bytes)),
    )
    if key not in rates:
        watts = tuple(scenario.watts[device] for device in devices)
        rates[key] = rate_of(replace(scenario, topology=topology, watts=watts, trace=None, churn=None, seconds=None))
    return rates[key]


def _reckoned(scenario: Scenario, *, seed: int) -> float:
    workload = Workload.of(scenario.spec)
    try:
        found = layout(
            "ours", LayoutRequest(topology=scenario.topology, workload=workload, seed=seed, seconds=SEARCH_S)
        )
    except ShoalError:
        return 0.0
    return ThroughputObjective(scenario.topology, workload).cost(found).parts["tokens_per_s"]


def _played(scenario: Scenario, *, seed: int) -> float:
    known: dict[str, Pinned] = {}
    rate = pinned(scenario, "ours", seed, known, None).tokens_per_s or 0.0
    print(f"  {scenario.topology.num_devices} devices, pinned: {figure(rate)} tokens/s", file=sys.stderr, flush=True)
    return rate


HEADING = (
    f"{'trace':<40}{'changes':>8}{'ideal tokens':>15}{'played':>15}{'live':>15}{'live/ideal':>11}{'/played':>9}"
    f"{'plans':>6}{'div':>4}{'wall':>6}"
)


def row(found: Traced) -> str:
    live = found.live
    return (
        f"{found.trace:<40}{found.changes:>8}{figure(found.ideal_tokens):>15}{figure(found.played_tokens):>15}"
        f"{figure(live.tokens):>15}{found.share:>11.2f}{found.share_of_played:>9.2f}{live.plans:>6}{live.divisions:>4}{live.wall_s:>6.0f}"
    )
