"""The live coordinator's allocator: it repairs at once, then searches in the background. Pure.

The greedy rules (`greedy.py`) answer a change within milliseconds: spares replace lost peers, no other peer moves, and
shares follow the throughput objective. A newcomer is a spare at first: its links are unknown, and a download of the
state takes bandwidth that the holders need for steps. Only a stage that lost a member or has a sole holder takes a
newcomer at once, and only if the step gets no longer. A search (`planner.py`) then looks for better layouts, with the
same and with other boundaries. The layout with the highest J (`objective.py`) is taken, if its J exceeds that of the
live layout. Three rules of the search are about safety:

- A peer that does not hold its stage's state yet keeps its place.
- At least half of each stage's holders stay, since newcomers fetch the state from them.
- No peer moves while another one drains: the greedy rules handle that."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shoal.coordinator.allocate.adjustments import TRIED, backed, filled, with_fewest_moves
from shoal.coordinator.allocate.at_once import plan_at_once
from shoal.coordinator.allocate.greedy import (
    Choose,
    Slot,
    arrange,
    first_reason,
    may_serve,
    poorest,
    slots_of,
    stage_of,
)
from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, NoLayout, SwarmSnapshot
from shoal.coordinator.allocate.measured_topology import placement_of, topology_of
from shoal.coordinator.allocate.objective import Change, LayoutObjective, SoleHolders
from shoal.coordinator.allocate.planner import default_work, plan, plan_each
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective, split
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology, make_topology

STAY = 0.5
"""A search lets at least this share of each stage's holders stay, so that newcomers can fetch the state from them."""
HOME_TIMES = 1.05
"""A home (a stage where a newcomer starts sooner) may give a step that is 5 % longer than another stage's."""
FIRST_TIMES = 4
FIRST_WORK_MAX = 300_000_000
"""The search for a first layout gets `FIRST_TIMES` times the work of a later one, at most 3 s of one core: a bad first
division into stages stays until a better one is worth a halt."""
FIRST_HORIZON_S = 3600.0
"""First layouts are compared by the steps made in this time, since members may have to fetch frozen weights first."""
BASE_TIMES = 3.0
"""Fetching frozen weights takes this many times as long as line rates say, since at first only one peer has them. (16
homes: a third of 4.8 GB took 456 s; the lines alone would take 128 s.)"""
SHARE_DRIFT = 1.5
SHARE_MIN = 0.02
"""The live layout gets new shares when one would change by the factor `SHARE_DRIFT`; less than 2 % counts as 2 %."""


class EvolutionaryAllocator:
    """Implements `Searching` by the greedy rules and a search."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        if snapshot.network is None or snapshot.workload is None:
            return _arranged(snapshot, previous, seed, _standby(snapshot, previous, None), None)
        topology = topology_of(snapshot)
        if previous is None and snapshot.num_stages is None:
            placement, _ = plan_at_once(_first_topology(snapshot), snapshot.workload)
            stages, spares = _stages_of(snapshot, topology, snapshot.workload, placement)
            return Layout(stages=stages, spares=spares, reason=first_reason(len(snapshot.peers), len(stages)))
        place = _Place(snapshot, topology, snapshot.workload)
        standby = _standby(snapshot, previous, place)
        layout = _arranged(snapshot, previous, seed, standby, place.choose if previous else None)
        return replace(layout, stages=_shared(topology, snapshot.workload, layout.stages))

    def prepare(self) -> None:
        pair = make_topology(np.full((2, 2), 0.01), np.full((2, 2), 1e6))
        plan(pair, Workload.of(RunSpec()), num_stages=2, work=1)

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if any(peer.draining for peer in snapshot.peers):
            return None, "a peer is leaving"
        try:
            return _first(snapshot, seed) if previous is None else _better(snapshot, previous, seed)
        except NoLayout as flaw:
            return None, f"a search found no layout: {flaw}"


def _arranged(
    snapshot: SwarmSnapshot, previous: Plan | None, seed: int, standby: tuple[PeerID, ...], choose: Choose | None
) -> Layout:
    try:
        return arrange(snapshot, previous, seed=seed, standby=standby, choose=choose)
    except NoLayout:
        return arrange(snapshot, previous, seed=seed, choose=choose)


class _Place:
    """Finds the stage where a newcomer helps most, by the predicted step and the cost of failures of sole holders."""

    def __init__(self, snapshot: SwarmSnapshot, topology: Topology, workload: Workload) -> None:
        self._throughput, self._losses = ThroughputObjective(topology, workload), SoleHolders(snapshot, topology)
        self._number = {name: device for device, name in enumerate(topology.names)}

    def choose(self, slots: Sequence[Slot], fitting: Sequence[Slot], peer: MeasuredPeer) -> Slot:
        """Return the stage of `fitting` that gives the shortest step with `peer`; a home if about equal."""
        seconds = self.seconds(slots, fitting, peer)
        if not math.isfinite(min(seconds.values())):
            return poorest(slots, fitting, peer)
        away = {slot.index: 1.0 if slot.index in peer.homes else HOME_TIMES for slot in fitting}
        return min(fitting, key=lambda slot: (away[slot.index] * seconds[slot.index], slot.index))

    def seconds(self, slots: Sequence[Slot], fitting: Sequence[Slot], peer: MeasuredPeer) -> dict[int, float]:
        """Return {stage: seconds of a step if `peer` joins that stage; inf if impossible}."""
        now, device = self._placement(slots), self._number[peer.peer]
        return {slot.index: self._step_s(now.with_moves({device: slot.index})) for slot in fitting}

    def seconds_now(self, slots: Sequence[Slot]) -> float:
        return self._step_s(self._placement(slots))

    def _placement(self, slots: Sequence[Slot]) -> Placement:
        stages = tuple(tuple(sorted(self._number[p.peer] for p in slot.stayers)) for slot in slots)
        return Placement(stages=stages, bounds=(*(slot.first_layer for slot in slots), slots[-1].last_layer))

    def _step_s(self, placement: Placement) -> float:
        return self._losses.step_s(self._throughput, placement)


def _standby(snapshot: SwarmSnapshot, previous: Plan | None, place: _Place | None) -> tuple[PeerID, ...]:
    """Choose the spares and newcomers that replace lost members or return to a stage with a sole holder, and return the
    others. They are those that help most, but none that lengthens the step. A search finds places for more. A peer that
    lost its place because it cannot reach others counts as a spare."""
    if previous is None:
        return ()
    by_id = {peer.peer: peer for peer in snapshot.peers}
    slots = slots_of(snapshot, previous)
    known = {*previous.spares, *(peer for stage in previous.stages for peer in stage.peers)}
    newcomers = [p.peer for p in snapshot.peers if p.peer not in known and not p.draining]
    holding = {peer.peer for slot in slots for peer in slot.holders}
    leaving = [
        peer.peer
        for stage in previous.stages
        for p in stage.peers
        if (peer := by_id.get(p)) is not None and p not in holding and snapshot.unreachable and not peer.draining
    ]
    free = [*(p for p in previous.spares if p in by_id), *leaving, *newcomers]
    num_needed = sum(len(stage.peers) for stage in previous.stages) - sum(len(slot.stayers) for slot in slots)
    alone = {slot.index for slot in slots if len(slot.stayers) == 1}
    back = [peer for peer in free if alone.intersection(by_id[peer].homes)]
    waiting = {*free}
    free, num_needed = back if len(back) > num_needed else free, max(num_needed, len(back))
    free.sort(key=lambda peer: (-by_id[peer].flop_per_s, peer))
    if place is not None and num_needed > 0 and free:
        best: dict[PeerID, float] = {}
        for peer in (by_id[p] for p in free[:TRIED]):
            able = [slot for slot in slots if may_serve(slots, slot, peer)]
            best[peer.peer] = min(place.seconds(slots, able, peer).values(), default=math.inf)
        free.sort(key=lambda peer: best.get(peer, math.inf))
        if math.isfinite(now_s := place.seconds_now(slots)):
            num_needed = min(num_needed, sum(best.get(peer, math.inf) <= now_s for peer in free))
    return tuple(sorted(waiting.difference(free[:num_needed])))


def _first(snapshot: SwarmSnapshot, seed: int) -> tuple[Layout, str]:
    topology, workload = _first_topology(snapshot), snapshot.workload
    assert workload is not None
    usual = default_work(topology.num_devices)
    work = max(usual, min(FIRST_TIMES * usual, FIRST_WORK_MAX))
    throughput, losses = ThroughputObjective(topology, workload), SoleHolders(snapshot, topology)
    each = plan_each(topology, workload, num_stages=snapshot.num_stages, seed=seed, work=work)
    each = [backed(throughput, losses, filled(throughput, losses, searched)) for searched in each]
    placement = min(each, key=lambda found: _mean_step_s(throughput, losses, found))
    stages, spares = _stages_of(snapshot, topology, workload, placement)
    reason = first_reason(len(snapshot.peers), len(stages))
    return Layout(stages=stages, spares=spares, reason=reason), reason


def _first_topology(snapshot: SwarmSnapshot) -> Topology:
    """Return the topology for a first layout, in which each device is half a standard deviation slower than measured.
    At that time hardly more than probes is known, and work is slower than a probe (quota, heat, other programs, the
    peer's own networking). If speeds are underestimated, the layout uses more devices than needed; if overestimated, it
    leaves useful devices idle."""
    topology = topology_of(snapshot)
    slower = np.array([math.exp(-0.5 * math.sqrt(peer.speed_variance)) for peer in snapshot.peers])
    return replace(topology, flop_per_s=topology.flop_per_s * slower)


def _mean_step_s(throughput: ThroughputObjective, losses: SoleHolders, placement: Placement) -> float:
    """Return the mean seconds of a step over `FIRST_HORIZON_S`; inf if no step ends by then. In a run with adapters,
    steps begin when every member has fetched the frozen base, over the slowest downlink or all uplinks together."""
    topology, base = throughput.topology, throughput.workload.memory.base
    step_s, base_s = losses.step_s(throughput, placement), 0.0
    if base is not None and base.travels:
        into_s, total_bytes, up_bytes_per_s = 0.0, 0.0, 0.0
        for stage, (first, last) in zip(placement.stages, pairwise(placement.bounds), strict=True):
            stage_bytes = sum(base.layer_bytes[first:last])
            into_s = max(into_s, stage_bytes / float(topology.down_bytes_per_s[list(stage)].min()))
            total_bytes += stage_bytes * len(stage)
            up_bytes_per_s += float(topology.up_bytes_per_s[list(stage)].sum())
        base_s = BASE_TIMES * max(into_s, total_bytes / up_bytes_per_s)
    steps = max(FIRST_HORIZON_S - base_s, 0.0) / step_s
    return FIRST_HORIZON_S / steps if steps > 0.0 else math.inf


def _better(snapshot: SwarmSnapshot, previous: Plan, seed: int) -> tuple[Layout | None, str]:
    """Return (the layout with the highest J, its reason), or (None, why the live layout stays) if the live layout has
    the highest J. If the run asks for another number of stages than the live plan has, return the best layout with that
    number, whatever it costs."""
    horizon_s = snapshot.horizon_s
    if snapshot.num_stages not in (None, len(previous.stages)):
        ((change, layout),) = _divided(snapshot, previous, seed)
        if change is None or not change.pays(horizon_s):
            layout = replace(layout, reason=f"search: {_in_place_of(layout, previous)} as the run asks for")
        return layout, layout.reason
    moved, why_not = _moved(snapshot, previous, seed)
    found = [(change, layout) for change, layout in (*_divided(snapshot, previous, seed), *moved) if change is not None]
    best = max(found, key=lambda one: one[0].work_s(horizon_s), default=None)
    if best is not None and best[0].pays(horizon_s):
        return best[1], best[1].reason
    if why_not:
        return None, why_not
    if (shared := _shared_anew(snapshot, previous)) is not None:
        return shared, shared.reason
    return None, _stays(best[0] if best is not None else None, horizon_s)


def _stays(change: Change | None, horizon_s: float) -> str:
    """Return why the best other layout is not worth its cost. Args: change: the move to it; None: there is none."""
    if change is None or change.gain <= 0.0:
        return "stays: no better layout was found"
    needed = change.gain_needed(horizon_s)
    told = f"the best other layout promises {100 * change.gain:.0f} % more, {100 * change.believed:.0f} % is believed"
    return f"stays: {told}" + (f", and it would have to promise {100 * needed:.0f} %" if needed < math.inf else "")


def _moved(snapshot: SwarmSnapshot, previous: Plan, seed: int) -> tuple[list[tuple[Change | None, Layout]], str]:
    """Search for a layout with the live boundaries. Returns: (a list, reason). The list has the best (change, layout),
    or is empty if there is none. `reason` says why the live layout must stay for now; empty: it need not."""
    slots = slots_of(snapshot, previous)
    for slot in slots:
        if not any(peer.synced_stage == slot.index for peer in slot.holders):
            return [], f"no member of stage {slot.index} has its state yet"
    assert snapshot.workload is not None
    topology = topology_of(snapshot)
    workload = _by_stage(snapshot.workload, previous.stages)
    number = {name: device for device, name in enumerate(topology.names)}
    current = Placement(
        stages=tuple(tuple(sorted(number[peer.peer] for peer in slot.holders)) for slot in slots),
        bounds=tuple(range(len(slots) + 1)),
    )
    found, _ = plan(
        topology,
        workload,
        num_stages=len(slots),
        seed=seed,
        work=default_work(topology.num_devices),
        current=current,
        horizon_s=snapshot.horizon_s,
        stayers=tuple(math.ceil(STAY * len(held)) for held in current.stages),
    )
    objective, losses = LayoutObjective(snapshot, topology, workload, current), SoleHolders(snapshot, topology)
    options = {filled(objective.throughput, losses, placement) for placement in (found, current)} - {current}
    changes = [(change, option) for option in options if (change := objective.change_to(option)) is not None]
    if not changes:
        return [], ""
    change, found = max(changes, key=lambda one: one[0].work_s(snapshot.horizon_s))
    num_moved = sum(current.stage_of().get(d) != found.stage_of().get(d) for d in range(topology.num_devices))
    for slot, stage in zip(slots, found.stages, strict=True):
        members = [snapshot.peers[device] for device in stage]
        stay = [peer for peer in slot.holders if peer in members]
        slot.holders = stay + [peer for peer in members if peer not in stay]
    holding = {peer.peer for slot in slots for peer in slot.holders}
    spares = tuple(peer.peer for peer in snapshot.peers if peer.peer not in holding)
    stages = _shared(topology, snapshot.workload, tuple(stage_of(slot) for slot in slots))
    why = _purpose(change) if math.isfinite(change.gain) else f"since {objective.live.why}"
    reason = f"search: {num_moved} {'peer moves' if num_moved == 1 else 'peers move'} {why}"
    layout = Layout(stages=stages, spares=spares, reason=reason)
    return [(change, layout)], ""


def _divided(snapshot: SwarmSnapshot, previous: Plan, seed: int) -> list[tuple[Change | None, Layout]]:
    """Search for other boundaries. Returns: (change, best layout) for each number of stages; the change is None if the
    live layout cannot be compared. Raises: NoLayout: no layout exists. LocalError: the snapshot is impossible."""
    topology, workload = topology_of(snapshot), snapshot.workload
    assert workload is not None
    current = placement_of(previous.stages, snapshot.peers)
    objective, losses = LayoutObjective(snapshot, topology, workload, current), SoleHolders(snapshot, topology)
    each = plan_each(
        topology,
        workload,
        num_stages=snapshot.num_stages,
        seed=seed,
        work=default_work(topology.num_devices),
        bias=snapshot.forecast_bias,
    )
    found = []
    for searched in each:
        full = backed(objective.throughput, losses, filled(objective.throughput, losses, searched))
        placement = with_fewest_moves(objective.throughput, current, full)
        if placement.bounds == current.bounds:
            continue
        change = objective.change_to(placement) if all(current.stages) else None
        stages, spares = _stages_of(snapshot, topology, workload, placement)
        layout = Layout(stages=stages, spares=spares, reason="")
        why = _purpose(change) if change is not None else ""
        found.append((change, replace(layout, reason=f"search: {_in_place_of(layout, previous)} {why}")))
    return found


def _purpose(change: Change) -> str:
    return f"for {100 * change.gain:.0f} % more" if change.gain >= 0.005 else "so that fewer stages have a sole holder"


def _in_place_of(layout: Layout, previous: Plan) -> str:
    noun = "stage" if len(layout.stages) == 1 else "stages"
    return f"{len(layout.stages)} {noun} in place of {len(previous.stages)}"


def _shared_anew(snapshot: SwarmSnapshot, previous: Plan) -> Layout | None:
    """Return the live layout with newly computed shares; None: a member is gone, or no share would change much."""
    assert snapshot.workload is not None
    topology = topology_of(snapshot)
    if not {peer for stage in previous.stages for peer in stage.peers}.issubset(topology.names):
        return None
    stages = _shared(topology, snapshot.workload, previous.stages)
    now, then = ([max(m.share, SHARE_MIN) for stage in one for m in stage.members] for one in (previous.stages, stages))
    if all(max(pair) < SHARE_DRIFT * min(pair) for pair in zip(now, then, strict=True)):
        return None
    return Layout(stages=stages, spares=previous.spares, reason="search: shares follow what is measured now")


def _stages_of(
    snapshot: SwarmSnapshot, topology: Topology, workload: Workload, placement: Placement
) -> tuple[tuple[Stage, ...], tuple[PeerID, ...]]:
    slots = [
        Slot(index, first, last, 1.0, [snapshot.peers[device] for device in stage])
        for index, (stage, (first, last)) in enumerate(zip(placement.stages, pairwise(placement.bounds), strict=True))
    ]
    spares = tuple(snapshot.peers[device].peer for device in placement.spares(topology.num_devices))
    return _shared(topology, workload, tuple(stage_of(slot) for slot in slots)), spares


def _by_stage(workload: Workload, stages: Sequence[Stage]) -> Workload:
    """Return the workload with all layers of each stage merged into one, so that no planner can move a boundary."""

    def sums(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[stage.first_layer : stage.last_layer]) for stage in stages)

    experts = workload.experts
    return replace(
        workload,
        layer_flop=sums(workload.layer_flop),
        layer_parameters=sums(workload.layer_parameters),
        memory=workload.memory.by_stage(sums),
        experts=experts and replace(experts, parameters=sums(experts.parameters)),
    )


def _shared(topology: Topology, workload: Workload, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages with the objective's shares of work and reduction; unchanged unless all shares are positive."""
    number = {name: device for device, name in enumerate(topology.names)}
    ordered = [sorted(stage.members, key=lambda member: number[member.peer]) for stage in stages]
    placement = Placement(
        stages=tuple(tuple(number[member.peer] for member in members) for members in ordered),
        bounds=(*(stage.first_layer for stage in stages), stages[-1].last_layer),
    )
    shares = split(topology, workload, placement)
    if not all(
        math.isfinite(value) and value > 0.0 for part in (shares.shares, shares.parts) for g in part for value in g
    ):
        return stages
    told = {
        member.peer: (share, part)
        for members, of_stage, parts in zip(ordered, shares.shares, shares.parts, strict=True)
        for member, share, part in zip(members, of_stage, parts, strict=True)
    }
    return tuple(
        Stage(
            first_layer=stage.first_layer,
            last_layer=stage.last_layer,
            members=tuple(Member(peer=m.peer, share=told[m.peer][0], bandwidth=told[m.peer][1]) for m in stage.members),
        )
        for stage in stages
    )
