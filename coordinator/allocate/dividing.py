"""Looks for another division of the model into stages: other boundaries, more stages or fewer. Pure.

Such a change has a price, and there are two ways to pay it (`Change`). Either way the run stands still at a version
(`Plan.ends_at`): the pipeline drains, state travels, and the pipeline fills again.

- *Ahead*: while training goes on, everybody fetches the layers that it does not hold. That takes several times as long
  as with the lines alone, steps that need the lines are slower meanwhile, and the gain comes later. What is left for
  the standstill are gradients, and layers that could not be followed.
- *At once*: the run stands still until everything has travelled. Who lacks the same layers gives the others what has
  come to it (`peer/handoff/relay.py`).

Whichever costs less work is taken, and what a search finds must gain more than that within the time for which a layout
is expected to last. The first way may turn out to be slower than was foreseen; what it costs then is compared again
(`Change.stands_still`).

**What a gain is worth.** A search takes the best of many layouts by figures that err, so it takes those whose figures
err upwards, and what comes is nearer to the live layout than what was foreseen. With s, by which promises of the plans
before have erred (`Snapshot.forecast_error`), and d, by which layouts that a search compares do differ, both in the
logarithm, the mean of the true gain is

    log(1 + gain) d^2 / (d^2 + s^2)

Source: regression to the mean, for normal errors; d is `FORECAST_ERROR`, as nobody knows better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.interface import FORECAST_ERROR, MeasuredPeer, Snapshot
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan, Stage
from shoal.protocol.topology import Floats, Topology

AGREED_S = 1.0
"""Seconds that a change of layout costs for coordination alone: one plan ends the old layout, another begins the new
one, and each is reported, made and voted for. With heartbeats of 2 s that was 0.7 s beyond a step
(`coordinator/MEASURED.md`)."""
FOLLOWED_PART = 0.5
"""A peer keeps up with the gradients of so many of the layers that it has fetched as travel in this part of a step; the
others it fetches in the standstill (`peer/MEASURED.md`)."""
AHEAD_PART = 0.2
"""The part of a line that state fetched ahead has at least, while training uses the line all the time. A holder that
sends state waits for a moment in which its line is quiet, but no more than four times as long as the state itself
takes (`peer/handoff/server.py`). Steps that are bound by their lines are therefore foreseen to be 20 % slower
meanwhile (17 % were seen in two-universities), others no slower (1 to 3 % were seen, `peer/MEASURED.md`)."""
FROM_ONE_TIMES = 1.6
"""State that several peers lack and one alone has leaves it in so many times the time that its line takes for it once:
what one of them is slow to pass on the others take from there again, and whoever is last has its own path alone (seen
once: 148 s for 90 s, `coordinator/MEASURED.md`)."""
WORTH_MIN = 0.05
"""What a gain in tokens/s must be worth (`expected_gain`), or nobody fetches anything for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The price of going from one layout to another, and the gain.

    The price is in seconds of the new layout: so long it takes for the work that is not done because of the change.
    """

    gain: float
    """The foreseen gain in tokens/s: 0.1 is 10 % more."""
    worth: float
    """The gain to be expected, since forecasts err (`expected_gain`)."""
    drain_s: float
    """How long the pipeline drains and fills: the way of a microbatch and the commit of either layout, with nothing
    beside them, and the votes."""
    travel_s: float
    """How long state travels while the run stands still for it."""
    ahead_s: float
    """How long it travels while training goes on."""
    meanwhile: float
    """The rate of the live layout while state travels ahead, over that of the new one."""
    left_s: float
    """How long the run stands still after that, for what is left."""

    @property
    def price_s(self) -> float:
        """What the cheaper way costs."""
        return self.drain_s + min(self.travel_s, self._fetched_ahead_s(self.ahead_s))

    def stands_still(self, ahead_s: float | None = None) -> bool:
        """Whether it costs less to stand still than to fetch ahead. Args: ahead_s: how long that is seen to take; None:
        as foreseen. What has come by then does not matter: each way has the same part left to do."""
        return self.travel_s <= self._fetched_ahead_s(self.ahead_s if ahead_s is None else ahead_s)

    def pays(self, horizon_s: float) -> bool:
        """Whether the expected gain is `WORTH_MIN` or more, and more is done within `horizon_s` than without it."""
        return self.worth >= WORTH_MIN and self.work(horizon_s) > horizon_s

    def work(self, horizon_s: float) -> float:
        """The work that is done within `horizon_s`, as the seconds that the live layout would take for it."""
        return (1.0 + self.worth) * (horizon_s - self.price_s)

    def _fetched_ahead_s(self, ahead_s: float) -> float:
        return self.left_s + (1.0 - self.meanwhile) * ahead_s


def placement_of(stages: Sequence[Stage], peers: tuple[MeasuredPeer, ...]) -> Placement:
    """A plan's layout, by the numbers of `peers`; peers that are not there are left out."""
    number = {peer.peer: device for device, peer in enumerate(peers)}
    return Placement(
        stages=tuple(tuple(sorted(number[p] for p in stage.peers if p in number)) for stage in stages),
        bounds=(0, *(stage.last_layer for stage in stages)),
    )


def change_to(
    snapshot: Snapshot, topology: Topology, current: Placement, found: Placement, *, worth_min: float = -math.inf
) -> Change | None:
    """Estimate the cost and the gain of changing the layout from `current` to `found`.

    Args:
        topology: of `snapshot.peers`, whose numbers the placements use.
        worth_min: the least expected gain, relative. For a change below it the transfer of state, which is slow to
            estimate, is not estimated.
    Returns: the change; None if its expected gain is below `worth_min`, or either placement is infeasible.
    """
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
    slowed = ThroughputObjective(_with_part(topology, 1.0 - AHEAD_PART), workload).cost(current)
    if not math.isfinite(slowed.seconds):
        return None
    travel_s = fetch_s(topology, workload, current, found, together=True)
    part = max(AHEAD_PART, 1.0 - _busy(objective, current, step_s=live.parts["foreseen_s"]))
    return Change(
        gain=gain,
        worth=worth,
        drain_s=AGREED_S + sum(each.parts["round_trip_s"] + each.parts["commit_s"] for each in (live, cost)),
        travel_s=travel_s,
        ahead_s=fetch_s(_beside_training(topology, current, part), workload, current, found),
        meanwhile=live.parts["foreseen_s"] / slowed.parts["foreseen_s"] / (1.0 + worth),
        left_s=left_s(workload, travel_s, step_s=before_s),
    )


def worth_its_standstill(snapshot: Snapshot, topology: Topology, current: Placement, found: Placement) -> Change | None:
    """The change from `current` to `found`, if it divides the layers otherwise and pays within the horizon."""
    if found.bounds == current.bounds or not all(current.stages):
        return None
    change = change_to(snapshot, topology, current, found, worth_min=WORTH_MIN)
    return change if change is not None and change.pays(snapshot.horizon_s) else None


def following_change(snapshot: Snapshot, live: Plan, following: Sequence[Stage]) -> Change | None:
    """The change from a live plan's stages to those that follow; None: that cannot be said."""
    current, found = (placement_of(stages, snapshot.peers) for stages in (live.stages, following))
    if not all(current.stages) or not all(found.stages):
        return None
    return change_to(snapshot, topology_of(snapshot), current, found)


def lacking_bytes(workload: Workload, live: Plan, following: Sequence[Stage]) -> dict[PeerID, float]:
    """The bytes of state that each member of `following` does not hold in the live plan."""
    lacking = {}
    for stage in following:
        for peer in stage.peers:
            now = live.stage_of(peer)
            held = range(*live.stages[now].layers) if now is not None else range(0)
            lacking[peer] = sum(
                workload.layer_state_bytes[layer] for layer in range(*stage.layers) if layer not in held
            )
    return lacking


def foreseen_gain(snapshot: Snapshot, live: Cost, found: Cost) -> float:
    """The gain in tokens/s, relative, by what is foreseen of a step. What a search goes by (`Cost.seconds`) errs
    differently for different numbers of stages (`cost/foresight.py`). It is -1 where `found` is impossible, and
    infinite where `live` alone is."""
    if not math.isfinite(found.seconds):
        return -1.0
    if not math.isfinite(live.seconds):
        return math.inf
    seen = seen_or_foreseen_s(snapshot, live) / live.seconds
    return seen * live.parts["foreseen_s"] / found.parts["foreseen_s"] - 1.0


def _gain(snapshot: Snapshot, current: Placement, live: Cost, found: Placement, cost: Cost) -> float:
    """`foreseen_gain`, corrected by how the objective errs for either number of stages. It is not corrected upwards: a
    layout that is quicker than its figures say has a figure that is wrong, which is no reason to move."""
    before, after = (min(1.0, snapshot.forecast_bias.factor(len(each.stages))) for each in (current, found))
    return (1.0 + foreseen_gain(snapshot, live, cost)) * after / before - 1.0


def expected_gain(gain: float, forecast_error: float) -> float:
    """Shrink a relative gain by how far its forecast is believed. A gain of -1, an impossible layout, stays -1."""
    if gain <= -1.0:
        return -1.0
    trust = FORECAST_ERROR**2 / (FORECAST_ERROR**2 + forecast_error**2)
    return math.expm1(trust * math.log1p(gain))


def seen_or_foreseen_s(snapshot: Snapshot, live: Cost) -> float:
    """What a step of the live layout is reckoned to take. Where it is seen to be quicker than the figures of its
    devices and links say, a figure is wrong, and nothing is gained by leaving what is quick."""
    if not snapshot.seen_tokens_per_s or not math.isfinite(live.seconds):
        return live.seconds
    return live.seconds * min(1.0, live.parts["tokens_per_s"] / snapshot.seen_tokens_per_s)


def fetch_s(
    topology: Topology, workload: Workload, current: Placement, found: Placement, *, together: bool = False
) -> float:
    """Seconds until everybody has what it is to hold, with the lines for that alone: over the paths from a layer's
    holders, from all of them at once, or over the busiest card, whichever takes longer.

    Args: together: who lacks the same layers gives the others what has come to it, and all others carry it over their
        own paths (`peer/handoff/relay.py`), so that layers leave their holders once, over all paths from there.
    """
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
                for who, part in ((givers, 1.0 - passed), (mates, passed)):
                    parts = part * num_bytes * rate[who, device] / max(rate[who, device].sum(), 1.0)
                    away = ~same_card[who, device]
                    np.add.at(out, card[who[away]], parts[away])
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
    """Estimate the seconds in which `num_bytes` of state leave the peers that hold them, over all of their paths and
    cards; `FROM_ONE_TIMES` as long where one peer gives to several.

    Args: rate: bytes/s, [N, N], row = from. givers: who holds the state. lacking: who is to get it.
    """
    others = np.setdiff1d(np.arange(topology.num_devices), givers)
    _, one_of_each = np.unique(np.array(topology.card)[givers], return_index=True)
    line = min(rate[np.ix_(givers, others)].sum(), topology.up_bytes_per_s[givers[one_of_each]].sum())
    times = FROM_ONE_TIMES if len(givers) == 1 and len(lacking) > 1 else 1.0
    return float(times * num_bytes / line)


def left_s(workload: Workload, travel_s: float, *, step_s: float) -> float:
    """How much of `travel_s` is left for the standstill: of layers that were fetched ahead the gradient of one step,
    the others whole."""
    part = workload.reduced.bytes_per_parameter / workload.state_bytes_per_parameter
    gradients_s = part * travel_s
    followed = min(1.0, FOLLOWED_PART * step_s / gradients_s) if gradients_s > 0.0 else 1.0
    return travel_s * (1.0 - followed * (1.0 - part))


def _busy(objective: ThroughputObjective, current: Placement, *, step_s: float) -> float:
    """The part of a step in which the busiest device is sending something, one after the other over its paths."""
    topology = objective.topology
    members = np.array([device for stage in current.stages for device in stage])
    if len(members) < 2:
        return 0.0
    sent_bytes = np.array([sent for stage in objective.sent_bytes(current) for sent in stage])
    paths = topology.bytes_per_s[np.ix_(members, members)].sum(axis=1) / (len(members) - 1)
    rates = np.maximum(np.minimum(paths, topology.up_bytes_per_s[members]), 1.0)
    return float((sent_bytes / rates).max()) / step_s


def _with_part(topology: Topology, part: float) -> Topology:
    """`topology` with so much of each line."""
    return replace(
        topology,
        bytes_per_s=part * topology.bytes_per_s,
        up_bytes_per_s=part * topology.up_bytes_per_s,
        down_bytes_per_s=part * topology.down_bytes_per_s,
    )


def _beside_training(topology: Topology, current: Placement, part: float) -> Topology:
    """`topology` with so much of the lines of those who train. Spares have all of theirs."""
    left = np.ones(topology.num_devices)
    left[[device for stage in current.stages for device in stage]] = part
    return replace(
        topology,
        bytes_per_s=np.maximum(left[:, None], left[None, :]) * topology.bytes_per_s,
        up_bytes_per_s=left * topology.up_bytes_per_s,
        down_bytes_per_s=left * topology.down_bytes_per_s,
    )


def _ranges(placement: Placement) -> list[tuple[tuple[int, ...], int, int]]:
    return list(zip(placement.stages, placement.bounds, placement.bounds[1:], strict=False))
