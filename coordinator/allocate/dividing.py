"""Looks for another division of the model into stages: other boundaries, more stages or fewer. Pure.

Such a change has a price. While training goes on, everybody fetches the layers that it does not hold, and steps are
slower. Then the run stands still (`Plan.ends_at`): the pipeline drains, what is still missing travels, and the pipeline
fills again. What a search finds must gain more than that within the time for which a layout is expected to last.

**What a gain is worth.** A search takes the best of many layouts by figures that err, so it takes those whose figures
err upwards, and what comes is nearer to the live layout than what was foreseen. With s, by which promises of the plans
before have erred (`Snapshot.forecast_error`), and d, by which layouts that a search compares do differ, both in the
logarithm, the mean of the true gain is

    log(1 + gain) d^2 / (d^2 + s^2)

Source: regression to the mean, for normal errors; d is `FORECAST_ERROR`, as nobody knows better.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.interface import FORECAST_ERROR, MeasuredPeer, Snapshot
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import STATE_BYTES_PER_PARAMETER, Workload
from shoal.protocol.plan import Plan
from shoal.protocol.topology import Topology

DRAIN_STEPS = 2.0
"""How many steps the pipeline does without while it drains and fills, and the plans are agreed upon."""
FOLLOWED_PART = 0.5
"""A peer keeps up with the gradients of so many of the layers that it has fetched as travel in this part of a step; the
others it fetches in the standstill (`peer/MEASURED.md`)."""
AHEAD_PART = 0.2
"""State that is fetched ahead gets this part of a line while training uses it: it waits for a quiet moment, up to four
times as long as it takes itself (`peer/handoff/server.py`)."""
SLOWED = 0.17
"""Steps that need the same lines are slower by this part while state travels (two-universities: 132,500 tokens/s, then
110,000)."""
WORTH_MIN = 0.05
"""What a gain in tokens/s must be worth (`expected_gain`), or nobody fetches anything for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A placement that is worth its standstill."""

    placement: Placement
    gain: float
    """The gain in tokens/s, relative."""
    standstill_s: float


def placement_of(plan: Plan, peers: tuple[MeasuredPeer, ...]) -> Placement:
    """The live plan's layout, by the numbers of `peers`; peers that are not there are left out."""
    number = {peer.peer: device for device, peer in enumerate(peers)}
    return Placement(
        stages=tuple(tuple(sorted(number[p] for p in stage.peers if p in number)) for stage in plan.stages),
        bounds=(0, *(stage.last_layer for stage in plan.stages)),
    )


def worth_its_standstill(
    snapshot: Snapshot, topology: Topology, current: Placement, found: Placement, *, horizon_s: float
) -> Division | None:
    """`found`, if it gains enough over `current` and the standstill pays within `horizon_s`."""
    if found.bounds == current.bounds or not all(current.stages):
        return None
    workload = snapshot.workload
    assert workload is not None
    objective = ThroughputObjective(topology, workload)
    live, cost = objective.cost(current), objective.cost(found)
    gain, before_s = foreseen_gain(snapshot, live, cost), seen_or_foreseen_s(snapshot, live)
    travel_s = fetch_s(topology, workload, current, found)
    standstill_s = DRAIN_STEPS * before_s + left_s(workload, travel_s, step_s=before_s)
    price_s = standstill_s + SLOWED * travel_s / AHEAD_PART
    worth = expected_gain(gain, snapshot.forecast_error)
    saves = 1.0 - 1.0 / (1.0 + worth)
    if not worth >= WORTH_MIN or not saves * (horizon_s - travel_s / AHEAD_PART) > price_s:
        return None
    return Division(placement=found, gain=gain, standstill_s=standstill_s)


def foreseen_gain(snapshot: Snapshot, live: Cost, found: Cost) -> float:
    """The gain in tokens/s, relative, by what is foreseen of a step. What a search goes by (`Cost.seconds`) errs
    differently for different numbers of stages (`cost/foresight.py`)."""
    if not math.isfinite(live.seconds) or not math.isfinite(found.seconds):
        return live.seconds / found.seconds - 1.0
    seen = seen_or_foreseen_s(snapshot, live) / live.seconds
    return seen * live.parts["foreseen_s"] / found.parts["foreseen_s"] - 1.0


def expected_gain(gain: float, forecast_error: float) -> float:
    """What a foreseen gain is worth, relative as it is."""
    trust = FORECAST_ERROR**2 / (FORECAST_ERROR**2 + forecast_error**2)
    return math.expm1(trust * math.log1p(gain))


def seen_or_foreseen_s(snapshot: Snapshot, live: Cost) -> float:
    """What a step of the live layout is reckoned to take. Where it is seen to be quicker than the figures of its
    devices and links say, a figure is wrong, and nothing is gained by leaving what is quick."""
    if not snapshot.seen_tokens_per_s or not math.isfinite(live.seconds):
        return live.seconds
    return live.seconds * min(1.0, live.parts["tokens_per_s"] / snapshot.seen_tokens_per_s)


def fetch_s(topology: Topology, workload: Workload, current: Placement, found: Placement) -> float:
    """Seconds until everybody has what it is to hold, with the lines for that alone: over the paths from a layer's
    holders, from all of them at once, or over the busiest card, whichever takes longer."""
    layer_bytes = STATE_BYTES_PER_PARAMETER * np.array(workload.layer_parameters)
    _, card = np.unique(topology.card, return_inverse=True)
    same_card = card[:, None] == card[None, :]
    ends = np.minimum(topology.up_bytes_per_s[:, None], topology.down_bytes_per_s[None, :])
    rate = np.maximum(np.minimum(topology.bytes_per_s, np.where(same_card, np.inf, ends)), 1.0)
    paths_s, into, out = np.zeros((3, topology.num_devices))
    for devices, first, last in _ranges(found):
        for device in devices:
            for holders, held_first, held_last in _ranges(current):
                num_bytes = float(layer_bytes[max(first, held_first) : min(last, held_last)].sum())
                if device in holders or not num_bytes:
                    continue
                givers = np.array(holders)
                parts = num_bytes * rate[givers, device] / rate[givers, device].sum()
                paths_s[device] += num_bytes / rate[givers, device].sum()
                away = ~same_card[givers, device]
                np.add.at(out, card[givers[away]], parts[away])
                into[card[device]] += parts[away].sum()
    cards_s = np.maximum(out[card] / topology.up_bytes_per_s, into[card] / topology.down_bytes_per_s)
    return float(max(paths_s.max(), cards_s.max()))


def left_s(workload: Workload, travel_s: float, *, step_s: float) -> float:
    """How much of `travel_s` is left for the standstill: of layers that were fetched ahead the gradient of one step,
    the others whole."""
    part = workload.gradient_bytes_per_parameter / STATE_BYTES_PER_PARAMETER
    gradients_s = part * travel_s
    followed = min(1.0, FOLLOWED_PART * step_s / gradients_s) if gradients_s > 0.0 else 1.0
    return travel_s * (1.0 - followed * (1.0 - part))


def _ranges(placement: Placement) -> list[tuple[tuple[int, ...], int, int]]:
    return list(zip(placement.stages, placement.bounds, placement.bounds[1:], strict=False))
