"""J, the one objective of live layouts: the work that a swarm is expected to do within the horizon. Pure.

Let R(x) be the predicted rate of layout x in tokens/s, x0 the live layout, and H the time for which layouts are
expected to last (`SwarmSnapshot.horizon_s`). The value of x, in seconds of the live layout's work, is

    J(x)  = max over ways mu A / (1 + loss(x0)) + r (H - A - S) / (1 + loss(x)),    J(x0) = H / (1 + loss(x0))
    r     = (R(x) / max(R(x0), seen))^kappa,                         kappa = d^2 / (d^2 + tau^2 + v(x)); 1 for losses
    loss  = G / T * sum of p over the stages that one machine holds alone

- **The ways to move.** State travels for A seconds, in which the swarm works at mu times its present rate; then the run
  stands still for S seconds. *In place* (the boundaries stay): members that stay work meanwhile, and state takes a part
  of their lines; S is the cost of coordination. *Pre-copy* (other boundaries): all members work meanwhile, with the
  bandwidth that is left; S is the drain of the pipeline and the rest of the state. *Stop-and-copy*: A = 0, and S is the
  drain and the whole state, which peers that lack the same layers pass on to each other (`peer/handoff/relay.py`).
- **The gain is shrunk.** A search takes the best of many layouts by estimates with errors, so it prefers layouts with
  estimates that are too high. The expected true gain is therefore only kappa times the promised one. Here d is the
  true spread of the layouts that a search compares, tau the error of earlier predictions in this run
  (`SwarmSnapshot.forecast_error`), and v the variance of the measurements that limit x, plus that of the cost model's
  error between the two numbers of stages (`forecast_bias`); all are of the logarithm. The
  live layout was once the best of such a search, so d is small at first, and grows as measurements change after that
  and as peers come.
  Source: regression to the mean, for normal errors.
- **A sole holder.** The only machine that holds a stage fails within T seconds with probability p. The run then goes
  back to a snapshot, which costs G seconds. Peers of one machine fail together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shoal.coordinator.allocate.interface import FORECAST_ERROR, SwarmSnapshot
from shoal.coordinator.allocate.measured_topology import placement_of, rate_variance_of, topology_of
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.experts.failure_records import HORIZON_S
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LIGHT_STATE_S
from shoal.protocol.plan import Bound, Plan, Stage
from shoal.protocol.topology import Floats, Topology

AGREED_S = 5.0
"""The seconds that a change of plan costs by itself: with a small model, real peers take 4 to 6 s from a plan with new
boundaries to its first step (`tests/lab/MEASURED.md`)."""
FOLLOWED_PART = 0.5
"""A peer that fetches layers before a change must also receive each step's gradient of the layers that it has. It keeps
only so many layers up to date that their gradients travel within this part of a step (`peer/MEASURED.md`)."""
AHEAD_PART = 0.2
"""State fetched before a change gets at least this part of a line that steps keep busy: a holder waits for a quiet
moment to send, but at most four times as long as the transfer takes (`peer/handoff/server.py`). So steps limited by
lines are estimated to be 20 % slower meanwhile (17 % measured in two-universities), others no slower."""
STATE_PART = 0.5
"""The assumed part of the holders' lines that state takes if the boundaries stay."""
GAIN_LOG_MAX = 10.0
"""The logarithm of the largest gain that any layout can promise."""
FROM_ONE_TIMES = 1.6
"""If one peer holds state that several peers lack, its upload takes this many times as long: if a receiver is slow to
pass parts on, the others fetch these parts again (measured once: 148 s in place of 90 s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The gain and the cost of a move from the live layout to another. Work is in seconds of the live layout."""

    gain: float
    """The estimated relative gain in tokens/s: 0.1 is 10 % more."""
    trust: float
    """kappa in [0, 1], the factor on the logarithm of a predicted gain, since such predictions tend to be too high."""
    loss: float = 0.0
    """The time that failures of sole holders of a stage cost in the new layout, divided by the time of work."""
    loss_before: float = 0.0
    """The time that failures of sole holders of a stage cost in the live layout, divided by the time of work."""
    drain_s: float
    """`AGREED_S`, plus the seconds to drain and refill the pipeline (a round trip and a commit in each of both layouts)
    or, if the boundaries stay, to repeat the work of members that leave their stage."""
    stop_and_copy_s: float
    """Seconds in which all state travels while the run stands still; inf: a standstill is not considered."""
    precopy_s: float
    """Seconds in which state travels while the run trains."""
    meanwhile: float
    """The training rate during `precopy_s`, divided by the rate of the live layout."""
    residual_s: float
    """Seconds for which the run stands still after `precopy_s`, for the rest of the state."""

    @property
    def believed(self) -> float:
        """The expected true gain: the promised one shrunk by `trust`. A loss or an infinite gain is not shrunk."""
        if self.gain <= 0.0 or math.isinf(self.gain):
            return max(self.gain, -1.0)
        return math.expm1(self.trust * math.log1p(self.gain))

    def stands_still(self, precopy_s: float | None = None) -> bool:
        """True if stop-and-copy (the run waits while state travels) costs no more than pre-copy.
        Args: precopy_s: the measured seconds of the pre-copy; None: the estimate."""
        precopy_s = self.precopy_s if precopy_s is None else precopy_s
        return self.stop_and_copy_s <= self.residual_s + (1.0 - self.meanwhile / (1.0 + self.believed)) * precopy_s

    def work_s(self, horizon_s: float) -> float:
        """Return J, the work expected within `horizon_s`, in seconds of the live layout's work."""
        rate, copies_s = (1.0 + self.believed) / (1.0 + self.loss), min(self.precopy_s, horizon_s)
        before = self.meanwhile / (1.0 + self.loss_before)  # until the move, a failure costs what it costs now
        halted = rate * max(0.0, horizon_s - self.drain_s - self.stop_and_copy_s)
        ahead = before * copies_s + rate * max(0.0, horizon_s - copies_s - self.drain_s - self.residual_s)
        return max(halted, ahead)

    def pays(self, horizon_s: float) -> bool:
        return self.work_s(horizon_s) > horizon_s / (1.0 + self.loss_before)

    def gain_needed(self, horizon_s: float) -> float:
        """Return the least promised gain that would make this change worth its cost; inf: no gain is enough."""
        copies_s = min(self.precopy_s, horizon_s)
        ways = (
            (horizon_s, horizon_s - self.drain_s - self.stop_and_copy_s),
            (horizon_s - self.meanwhile * copies_s, horizon_s - copies_s - self.drain_s - self.residual_s),
        )
        rate = min((work_s / seconds for work_s, seconds in ways if seconds > 0.0), default=math.inf)
        rate *= (1.0 + self.loss) / (1.0 + self.loss_before)
        if rate <= 1.0:
            return 0.0
        needed = math.log(rate) / self.trust if self.trust > 0.0 else math.inf
        return math.expm1(needed) if needed < GAIN_LOG_MAX else math.inf


class LayoutObjective:
    """Computes the value of a change from the live layout to another.

    Args:
        topology: contains all or some of `snapshot.peers`; all placements here use its device numbers.
        workload: the workload of the run, possibly with the layers of each stage merged into one.
        current: the live layout."""

    def __init__(self, snapshot: SwarmSnapshot, topology: Topology, workload: Workload, current: Placement) -> None:
        self.throughput = ThroughputObjective(topology, workload)
        self._snapshot, self._topology, self._workload, self._current = snapshot, topology, workload, current
        self.live = self.throughput.cost(current)
        self._losses = SoleHolders(snapshot, topology)
        self._changed = 0.0
        """log(tokens/s of the live layout as predicted when it was chosen / as predicted from today's figures)."""
        chosen = snapshot.chosen
        if chosen.tokens_per_s > 0.0 and math.isfinite(self.live.seconds):
            factor = snapshot.forecast_bias.factor(len(current.stages))
            self._changed = math.log(chosen.tokens_per_s / (factor * self.live.parts["tokens_per_s"]))
        self._grown = math.log(max(len(snapshot.peers) / (chosen.peers or math.inf), 1.0)) / math.sqrt(3.0)
        """The log of the gain that newcomers allow: the root mean square from none to one in proportion to peers."""

    def change_to(self, found: Placement) -> Change | None:
        """Estimate the gain and the cost of a move to `found`. Returns None if `found` is infeasible. Returns None also
        if the live layout is infeasible and `found` has other boundaries: the cost cannot be computed."""
        cost = self.throughput.cost(found)
        if not math.isfinite(cost.seconds):
            return None
        in_place = found.bounds == self._current.bounds
        if not in_place and not math.isfinite(self.live.seconds):
            return None
        gain = self._gain(found, cost)
        trust = trust_in(
            spread=math.hypot(FORECAST_ERROR, self._changed, self._grown),
            error=self._snapshot.forecast_error,
            variance=figures_variance(self._snapshot, self._topology, found, cost.bound)
            + self._snapshot.forecast_bias.variance(len(self._current.stages), len(found.stages)),
        )
        price = self._in_place(found) if in_place else self._divided(found, cost)
        loss_before = self._losses.of(self._current)
        return Change(gain=gain, trust=trust, loss=self._losses.of(found), loss_before=loss_before, **price)

    def _gain(self, found: Placement, cost: Cost) -> float:
        """Return the relative gain in tokens/s by the predicted step; infinite if the live layout is impossible.

        The live layout counts with its measured or its predicted speed, whichever is higher: leaving a fast layout
        gains nothing, whatever the prediction says. The objective's known bias by number of stages may lower either
        prediction, but never raises one: a layout that is faster than predicted only shows that a figure is wrong."""
        if not math.isfinite(self.live.seconds):
            return math.inf
        before, after = (
            min(1.0, self._snapshot.forecast_bias.factor(len(each.stages))) for each in (self._current, found)
        )
        return self._before_s / cost.parts["foreseen_s"] * after / before - 1.0

    @property
    def _before_s(self) -> float:
        """The seconds of a step of the live layout, measured or predicted, whichever are fewer."""
        seen = self._snapshot.seen_tokens_per_s
        return self.live.parts["foreseen_s"] * (min(1.0, self.live.parts["tokens_per_s"] / seen) if seen else 1.0)

    def _in_place(self, found: Placement) -> dict[str, float]:
        """Price a move that keeps the boundaries. Returns: fields of `Change` by name. Only members that stay work
        until the others have their state. If that takes long and the run has learners, these work once they have the
        weights. The others of a stage repeat what a member that leaves has contributed to the open step, on average
        half of its share."""
        copies_s = fetch_s(self._topology, self._workload, self._current, found) / STATE_PART
        if copies_s > LIGHT_STATE_S:
            copies_s *= self._workload.needed_first
        stay = tuple(tuple(sorted({*a} & {*b})) for a, b in zip(self._current.stages, found.stages, strict=True))
        meanwhile = 0.0
        if all(stay) and math.isfinite(self.live.seconds):
            giving = ThroughputObjective(_giving(self._topology, stay, found), self._workload)
            cost = giving.cost(replace(found, stages=stay))
            meanwhile = self._before_s / cost.parts["foreseen_s"] if math.isfinite(cost.seconds) else 0.0
        stays = min(len(left) / len(members) for left, members in zip(stay, self._current.stages, strict=True))
        repeats_s = 0.5 * (1.0 - stays) * self._before_s if math.isfinite(self.live.seconds) else 0.0
        return {
            "drain_s": AGREED_S + repeats_s,
            "stop_and_copy_s": math.inf,
            "precopy_s": copies_s,
            "meanwhile": meanwhile,
            "residual_s": 0.0,
        }

    def _divided(self, found: Placement, cost: Cost) -> dict[str, float]:
        """Price a move to other boundaries. Returns: fields of `Change` by name."""
        topology, workload, current, live = self._topology, self._workload, self._current, self.live
        everywhere = np.full(topology.num_devices, 1.0 - AHEAD_PART)
        slowed = ThroughputObjective(_with_part(topology, everywhere), workload).cost(current)
        assert math.isfinite(slowed.seconds), "slower lines take no memory"
        stop_and_copy_s = fetch_s(topology, workload, current, found, together=True)
        left = np.ones(topology.num_devices)  # spares keep all of their lines for state
        trains = [device for stage in current.stages for device in stage]
        left[trains] = max(AHEAD_PART, 1.0 - _busy(self.throughput, current, step_s=live.parts["foreseen_s"]))
        return {
            "drain_s": AGREED_S + sum(each.parts["round_trip_s"] + each.parts["commit_s"] for each in (live, cost)),
            "stop_and_copy_s": stop_and_copy_s,
            "precopy_s": fetch_s(_with_part(topology, left), workload, current, found),
            "meanwhile": live.parts["foreseen_s"] / slowed.parts["foreseen_s"]
            if math.isfinite(slowed.seconds)
            else 0.0,
            "residual_s": residual_s(workload, stop_and_copy_s, step_s=self._before_s),
        }


class SoleHolders:
    """Computes the cost of sole holders: a machine that holds a stage alone may fail."""

    def __init__(self, snapshot: SwarmSnapshot, topology: Topology) -> None:
        chance = {peer.peer: peer.failure_probability for peer in snapshot.peers}
        self._card = topology.card  # peers of one machine share its network card, and fail together
        self._chances = [chance[PeerID(name)] for name in topology.names]
        self._going_back_s = snapshot.going_back_s

    def of(self, placement: Placement) -> float:
        """Return the time that failures of sole holders cost, divided by the time of work."""
        return self._going_back_s / HORIZON_S * sum(map(self._lost, placement.stages))

    def step_s(self, throughput: ThroughputObjective, placement: Placement) -> float:
        """Return the predicted seconds of a step plus the time that failures cost per step; inf if infeasible."""
        cost = throughput.cost(placement)
        return cost.parts["foreseen_s"] * (1.0 + self.of(placement)) if math.isfinite(cost.seconds) else math.inf

    def _lost(self, stage: Sequence[int]) -> float:
        """Return the chance that the run loses this stage. It is 0 with at least two machines: if one fails, the stage
        gets a new copy before the last one fails."""
        machines = {int(self._card[device]) for device in stage}
        return max(self._chances[device] for device in stage) if len(machines) == 1 else 0.0


def trust_in(*, spread: float, error: float, variance: float) -> float:
    """Return kappa, the factor on a gain's logarithm (module's formula). Args: spread: d; error: tau; variance: v."""
    return spread**2 / (spread**2 + error**2 + variance)


def figures_variance(
    snapshot: SwarmSnapshot, topology: Topology, placement: Placement, bound: tuple[Bound, int] | None
) -> float:
    """Return v, the mean variance of the logarithms of the measurements that limit a layout: the speeds of the limiting
    stage's devices or, if lines limit, the rates of these devices' links within the stage and to neighbouring stages.
    Args: bound: (what limits the layout, at which stage); None: unknown, and v is 0."""
    if bound is None or snapshot.network is None:
        return 0.0
    what, k = bound
    number = {peer.peer: index for index, peer in enumerate(snapshot.peers)}
    rows = [number[PeerID(name)] for name in topology.names]
    stage = [rows[device] for device in placement.stages[k]]
    if what == "compute":
        return float(np.mean([snapshot.peers[index].speed_variance for index in stage]))
    near = [rows[device] for members in placement.stages[max(0, k - 1) : k + 2] for device in members]
    pairs = [(i, j) for i in stage for j in near if i != j]
    variance = rate_variance_of(snapshot, topology_of(snapshot))
    return float(np.mean([variance[pair] for pair in pairs])) if pairs else 0.0


def next_layout_change(snapshot: SwarmSnapshot, live: Plan, next_layout: Sequence[Stage]) -> Change | None:
    """Return the change from `live` to `next_layout`; None if a stage has no known peer or a layout is infeasible."""
    current, found = (placement_of(stages, snapshot.peers) for stages in (live.stages, next_layout))
    if not all(current.stages) or not all(found.stages):
        return None
    assert snapshot.workload is not None
    return LayoutObjective(snapshot, topology_of(snapshot), snapshot.workload, current).change_to(found)


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


def fetch_s(
    topology: Topology, workload: Workload, current: Placement, found: Placement, *, together: bool = False
) -> float:
    """Return the seconds until all peers hold their layers of `found`, if the lines carry nothing else. The longest of
    three times counts: a receiver's download over its paths from all holders at once, the work of the busiest network
    card, and (if `together`) the upload of a stage's state.

    Args: together: peers that lack the same layers pass received parts on, and all other peers relay over their own
    paths (`peer/handoff/relay.py`); so each holder's layers are uploaded once, over all its paths."""
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
    """Estimate the seconds that holders of state take to send `num_bytes` over all their paths and network cards.

    Args: rate: bytes/s, [N, N], row = from. givers: the holders. lacking: the receivers."""
    others = np.setdiff1d(np.arange(topology.num_devices), givers)
    _, one_of_each = np.unique(np.array(topology.card)[givers], return_index=True)
    line = min(rate[np.ix_(givers, others)].sum(), topology.up_bytes_per_s[givers[one_of_each]].sum())
    times = FROM_ONE_TIMES if len(givers) == 1 and len(lacking) > 1 else 1.0
    return float(times * num_bytes / line)


def residual_s(workload: Workload, stop_and_copy_s: float, *, step_s: float) -> float:
    """Return the seconds for which the run stands still after a pre-copy (a transfer during training), to fetch the
    rest: one step's gradient of each layer that could be kept up to date, and all state of each other layer."""
    part = workload.reduced.bytes_per_parameter / workload.state_bytes_per_parameter
    gradients_s = part * stop_and_copy_s
    followed = min(1.0, FOLLOWED_PART * step_s / gradients_s) if gradients_s > 0.0 else 1.0
    return stop_and_copy_s * (1.0 - followed * (1.0 - part))


def _busy(objective: ThroughputObjective, current: Placement, *, step_s: float) -> float:
    """Return the share of a step in which the busiest device sends, if it sends over its paths one by one."""
    topology = objective.topology
    members = np.array([device for stage in current.stages for device in stage])
    if len(members) < 2:
        return 0.0
    sent_bytes = np.array([sent for stage in objective.sent_bytes(current) for sent in stage])
    paths = topology.bytes_per_s[np.ix_(members, members)].sum(axis=1) / (len(members) - 1)
    rates = np.maximum(np.minimum(paths, topology.up_bytes_per_s[members]), 1.0)
    return float((sent_bytes / rates).max()) / step_s


def _with_part(topology: Topology, part_N: Floats) -> Topology:
    """Return `topology` with device n's line rates times `part_N[n]`; a path gets the larger factor of its two ends."""
    return replace(
        topology,
        bytes_per_s=np.maximum(part_N[:, None], part_N[None, :]) * topology.bytes_per_s,
        up_bytes_per_s=part_N * topology.up_bytes_per_s,
        down_bytes_per_s=part_N * topology.down_bytes_per_s,
    )


def _ranges(placement: Placement) -> list[tuple[tuple[int, ...], int, int]]:
    return list(zip(placement.stages, placement.bounds, placement.bounds[1:], strict=False))


def _giving(topology: Topology, stay: Sequence[tuple[int, ...]], found: Placement) -> Topology:
    """Return `topology` with the send rates left for steps while members that stay (`stay`) send state to newcomers."""
    left = np.ones(topology.num_devices)
    for stayers, members in zip(stay, found.stages, strict=True):
        if len(members) > len(stayers):
            left[list(stayers)] = 1.0 - STATE_PART
    up = left * topology.up_bytes_per_s
    return replace(topology, bytes_per_s=left[:, None] * topology.bytes_per_s, up_bytes_per_s=up)
