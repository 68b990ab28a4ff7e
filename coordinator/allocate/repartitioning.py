"""The price and the gain of another division of the model into stages: other boundaries, more stages or fewer. Pure.

The run halts at one version (`Plan.cutover_version`): the pipeline drains, state travels, and the pipeline fills again.
State travels in the way that costs less work (`Change`):

- *Ahead*: peers fetch the layers that they lack while training goes on. This takes several times as long as with the
  lines alone, and steps that need the lines are slower meanwhile. Only gradients, and layers whose updates a peer could
  not follow, are left for the halt.
- *At once*: the run halts until all state has travelled. Peers that lack the same layers pass received parts on to each
  other (`peer/handoff/relay.py`).

**The value of a gain.** A search takes the best of many layouts by figures with errors, so it prefers layouts whose
figures err upwards. Let s be the error of the promises of earlier plans (`SwarmSnapshot.forecast_error`), and d the
true spread of the layouts that a search compares, both in the logarithm. The mean of the true gain is

    log(1 + gain) d^2 / (d^2 + s^2)

Source: regression to the mean, for normal errors; d is assumed to be `FORECAST_ERROR`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.interface import FORECAST_ERROR, SwarmSnapshot
from shoal.coordinator.allocate.measured_topology import placement_of, topology_of
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan, Stage
from shoal.protocol.topology import Floats, Topology

AGREED_S = 1.0
"""The seconds that coordination costs alone: with heartbeats of 2 s, 0.7 s beyond a step
(`coordinator/MEASURED.md`)."""
FOLLOWED_PART = 0.5
"""A peer keeps up with the gradients of the fetched layers that travel in this part of a step (`peer/MEASURED.md`)."""
AHEAD_PART = 0.2
"""The least part of a line that state fetched ahead gets while training uses the line all the time: a holder waits for
a quiet moment, but no more than four times as long as the transfer takes (`peer/handoff/server.py`). So steps that are
bound by their lines are estimated to be 20 % slower meanwhile (17 % measured in two-universities), others no slower."""
FROM_ONE_TIMES = 1.6
"""The factor on the upload time of state with one holder and several peers that lack it: parts that one of them is slow
to pass on are fetched again (measured once: 148 s for 90 s)."""
WORTH_MIN = 0.05
"""The least expected gain in tokens/s (`expected_gain`) for which state is fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The price of going from one layout to another, in seconds of the new layout, and the gain."""

    gain: float
    """The estimated gain in tokens/s: 0.1 is 10 % more."""
    worth: float
    """The gain to expect after shrinking for forecast errors (`expected_gain`)."""
    drain_s: float
    """Seconds of draining and filling: a round trip and a commit in each layout, without load, plus `AGREED_S`."""
    stop_and_copy_s: float
    """Seconds of travel if the run halts for all of it."""
    precopy_s: float
    """Seconds of travel beside training."""
    meanwhile: float
    """The rate of the live layout while state travels ahead, divided by that of the new layout."""
    residual_s: float
    """Seconds of halt after fetching ahead, for the rest of the state."""

    @property
    def price_s(self) -> float:
        return self.drain_s + min(self.stop_and_copy_s, self._precopied_s(self.precopy_s))

    def stands_still(self, precopy_s: float | None = None) -> bool:
        """True if halting at once costs less than fetching ahead.
        Args: precopy_s: the seconds that fetching ahead is measured to take; None: as estimated."""
        return self.stop_and_copy_s <= self._precopied_s(self.precopy_s if precopy_s is None else precopy_s)

    def pays(self, horizon_s: float) -> bool:
        return self.worth >= WORTH_MIN and self.work(horizon_s) > horizon_s

    def work(self, horizon_s: float) -> float:
        """Return the work done within `horizon_s`, in seconds of the live layout."""
        return (1.0 + self.worth) * (horizon_s - self.price_s)

    def _precopied_s(self, precopy_s: float) -> float:
        return self.residual_s + (1.0 - self.meanwhile) * precopy_s


def change_to(
    snapshot: SwarmSnapshot, topology: Topology, current: Placement, found: Placement, *, worth_min: float = -math.inf
) -> Change | None:
    """Estimate the cost and the gain of changing the layout from `current` to `found`.

    Args:
        topology: of `snapshot.peers`, whose numbers the placements use.
        worth_min: below this expected gain the state transfer, which is slow to estimate, is skipped.
    Returns: the change; None if its expected gain is below `worth_min`, or either placement is infeasible."""
    workload = snapshot.workload
    assert workload is not None
    objective = ThroughputObjective(topology, workload)
    live, cost = objective.cost(current), objective.cost(found)
    if not math.isfinite(live.seconds) or not math.isfinite(cost.seconds):
        return None
    gain, before_s = _gain(snapshot, current, live, found, cost), seen_or_foreseen_s(snapshot, live)
    worth = expected_gain(gain, snapshot.forecast_error)
    if not worth >= worth_min:
        return None
    everywhere = np.full(topology.num_devices, 1.0 - AHEAD_PART)
    slowed = ThroughputObjective(_with_part(topology, everywhere), workload).cost(current)
    if not math.isfinite(slowed.seconds):
        return None
    stop_and_copy_s = fetch_s(topology, workload, current, found, together=True)
    left = np.ones(topology.num_devices)  # spares keep all of their lines for state
    trains = [device for stage in current.stages for device in stage]
    left[trains] = max(AHEAD_PART, 1.0 - _busy(objective, current, step_s=live.parts["foreseen_s"]))
    return Change(
        gain=gain,
        worth=worth,
        drain_s=AGREED_S + sum(each.parts["round_trip_s"] + each.parts["commit_s"] for each in (live, cost)),
        stop_and_copy_s=stop_and_copy_s,
        precopy_s=fetch_s(_with_part(topology, left), workload, current, found),
        meanwhile=live.parts["foreseen_s"] / slowed.parts["foreseen_s"] / (1.0 + worth),
        residual_s=residual_s(workload, stop_and_copy_s, step_s=before_s),
    )


def worth_its_standstill(
    snapshot: SwarmSnapshot, topology: Topology, current: Placement, found: Placement
) -> Change | None:
    """Return the change from `current` to `found` if the bounds differ and it pays within the horizon; else None."""
    if found.bounds == current.bounds or not all(current.stages):
        return None
    change = change_to(snapshot, topology, current, found, worth_min=WORTH_MIN)
    return change if change is not None and change.pays(snapshot.horizon_s) else None


def next_layout_change(snapshot: SwarmSnapshot, live: Plan, next_layout: Sequence[Stage]) -> Change | None:
    """Return the change to the `next_layout` stages; None if a stage has no known peer or a layout is infeasible."""
    current, found = (placement_of(stages, snapshot.peers) for stages in (live.stages, next_layout))
    if not all(current.stages) or not all(found.stages):
        return None
    return change_to(snapshot, topology_of(snapshot), current, found)


def lacking_bytes(workload: Workload, live: Plan, next_layout: Sequence[Stage]) -> dict[PeerID, float]:
    """Return for each member of `next_layout` the bytes of state that it does not hold in the live plan."""
    lacking = {}
    for stage in next_layout:
        for peer in stage.peers:
            now = live.stage_of(peer)
            held = range(*live.stages[now].layers) if now is not None else range(0)
            layers = (layer for layer in range(*stage.layers) if layer not in held)
            lacking[peer] = sum(workload.layer_state_bytes[layer] for layer in layers)
    return lacking


def foreseen_gain(snapshot: SwarmSnapshot, live: Cost, found: Cost) -> float:
    """Return the relative gain in tokens/s by the foreseen step time; -1 if `found` is infeasible, infinite if only
    `live` is. `Cost.seconds` would err differently for different numbers of stages."""
    if not math.isfinite(found.seconds):
        return -1.0
    if not math.isfinite(live.seconds):
        return math.inf
    seen = seen_or_foreseen_s(snapshot, live) / live.seconds
    return seen * live.parts["foreseen_s"] / found.parts["foreseen_s"] - 1.0


def _gain(snapshot: SwarmSnapshot, current: Placement, live: Cost, found: Placement, cost: Cost) -> float:
    """Return `foreseen_gain`, corrected by the objective's known bias for each number of stages, but never upwards: if
    a layout is faster than its figures say, a figure is wrong, which is no reason to move."""
    before, after = (min(1.0, snapshot.forecast_bias.factor(len(each.stages))) for each in (current, found))
    return (1.0 + foreseen_gain(snapshot, live, cost)) * after / before - 1.0


def expected_gain(gain: float, forecast_error: float) -> float:
    """Shrink a relative gain by the trust in its forecast. -1, the gain of an infeasible layout, stays -1."""
    if gain <= -1.0:
        return -1.0
    trust = FORECAST_ERROR**2 / (FORECAST_ERROR**2 + forecast_error**2)
    return math.expm1(trust * math.log1p(gain))


def seen_or_foreseen_s(snapshot: SwarmSnapshot, live: Cost) -> float:
    """Return the seconds of a step of the live layout, the lower of measurement and estimate: leaving a fast layout
    gains nothing, whatever its figures say."""
    if not snapshot.seen_tokens_per_s or not math.isfinite(live.seconds):
        return live.seconds
    return live.seconds * min(1.0, live.parts["tokens_per_s"] / snapshot.seen_tokens_per_s)


def fetch_s(
    topology: Topology, workload: Workload, current: Placement, found: Placement, *, together: bool = False
) -> float:
    """Return the seconds until all peers hold the layers of `found`, if the lines carry nothing else: the longest of
    the paths from all holders of a layer at once, the busiest card, and (if `together`) the upload of each stage's
    state.

    Args: together: peers that lack the same layers pass received parts on, and all other peers relay over their own
    paths (`peer/handoff/relay.py`), so that layers leave their holders once, over all paths from there."""
    layer_bytes = np.array(workload.layer_state_bytes)
    _, card = np.unique(topology.card, return_inverse=True)
    same_card = card[:, None] == card[None, :]
    ends = np.minimum(topology.up_bytes_per_s[:, None], topology.down_bytes_per_s[None, :])
    rate = np.maximum(np.minimum(topology.bytes_per_s, np.where(same_card, np.inf, ends)), 1.0)
    paths_s, into, out = np.zeros((3, topology.num_devices))
    leave_bytes, lacks = [0.0] * len(current.stages), [set[int]() for _ in current.stages]
    for devices, first, last in _ranges(found):
        for stage, (holders, held_first, held_last) in enumerate(_ranges(current)):
            num_bytes = float(layer_bytes[max(first, held_first) : min(last, held_last)].sum())
            lacking = [device for device in devices if device not in holders]
            if not num_bytes or not lacking:
                continue
            givers = np.array(holders)
            others = np.setdiff1d(np.arange(topology.num_devices), givers)
            leave_bytes[stage] += num_bytes
            lacks[stage].update(lacking)
            for device in lacking:
                mates = np.array([mate for mate in lacking if mate != device and together], dtype=np.int64)
                passed = len(mates) / len(lacking)
                carriers = others[others != device] if together else mates
                carried = np.minimum(rate[np.ix_(givers, carriers)].sum(axis=0), rate[carriers, device])
                paths_s[device] += num_bytes / (rate[givers, device].sum() + carried.sum())
                for sources, part in ((givers, 1.0 - passed), (mates, passed)):
                    parts = part * num_bytes * rate[sources, device] / max(rate[sources, device].sum(), 1.0)
                    away = ~same_card[sources, device]
                    np.add.at(out, card[sources[away]], parts[away])
                    into[card[device]] += parts[away].sum()
    cards_s = np.maximum(out[card] / topology.up_bytes_per_s, into[card] / topology.down_bytes_per_s)
    leave_s = [
        _leave_s(topology, rate, np.array(holders), num_bytes, peers)
        for holders, num_bytes, peers in zip(current.stages, leave_bytes, lacks, strict=True)
        if together and num_bytes
    ]
    return float(max(paths_s.max(), cards_s.max(), *leave_s))


def _leave_s(
    topology: Topology, rate: Floats, givers: npt.NDArray[np.int64], num_bytes: float, lacking: set[int]
) -> float:
    """Estimate the seconds in which `num_bytes` of state leave their holders over all paths and cards.

    Args: rate: bytes/s, [N, N], row = from. givers: the holders. lacking: the receivers."""
    others = np.setdiff1d(np.arange(topology.num_devices), givers)
    _, one_of_each = np.unique(np.array(topology.card)[givers], return_index=True)
    line = min(rate[np.ix_(givers, others)].sum(), topology.up_bytes_per_s[givers[one_of_each]].sum())
    times = FROM_ONE_TIMES if len(givers) == 1 and len(lacking) > 1 else 1.0
    return float(times * num_bytes / line)


def residual_s(workload: Workload, stop_and_copy_s: float, *, step_s: float) -> float:
    """Return the part that is left for the halt: one step's gradient of fetched layers, and other layers."""
    part = workload.reduced.bytes_per_parameter / workload.state_bytes_per_parameter
    gradients_s = part * stop_and_copy_s
    followed = min(1.0, FOLLOWED_PART * step_s / gradients_s) if gradients_s > 0.0 else 1.0
    return stop_and_copy_s * (1.0 - followed * (1.0 - part))


def _busy(objective: ThroughputObjective, current: Placement, *, step_s: float) -> float:
    """Return the part of a step in which the busiest device sends, one transfer after the other over its paths."""
    topology = objective.topology
    members = np.array([device for stage in current.stages for device in stage])
    if len(members) < 2:
        return 0.0
    sent_bytes = np.array([sent for stage in objective.sent_bytes(current) for sent in stage])
    paths = topology.bytes_per_s[np.ix_(members, members)].sum(axis=1) / (len(members) - 1)
    rates = np.maximum(np.minimum(paths, topology.up_bytes_per_s[members]), 1.0)
    return float((sent_bytes / rates).max()) / step_s


def _with_part(topology: Topology, part_N: Floats) -> Topology:
    """Return `topology` with a part of each device's line rates. A path has the larger part of its two ends."""
    return replace(
        topology,
        bytes_per_s=np.maximum(part_N[:, None], part_N[None, :]) * topology.bytes_per_s,
        up_bytes_per_s=part_N * topology.up_bytes_per_s,
        down_bytes_per_s=part_N * topology.down_bytes_per_s,
    )


def _ranges(placement: Placement) -> list[tuple[tuple[int, ...], int, int]]:
    return list(zip(placement.stages, placement.bounds, placement.bounds[1:], strict=False))
