"""The live coordinator's allocator: it repairs at once, then searches in the background. Pure.

The greedy rules (`greedy.py`) answer a change within milliseconds: spares replace lost peers, no other peer moves, and
shares follow the throughput objective. A newcomer is a spare at first, since its links are unknown and its state
download takes its holders' uplinks from the step; only a stage with a single holder takes it at once, where that pays.
A search (`planner.py`) then looks for a better layout. Its moves must satisfy:

- The expected gain (`repartitioning.expected_gain`) is at least `MARGIN` of tokens/s, more than noise.
- The new layout should be faster than the live layout is measured to be.
- Over the expected life of a layout (`SwarmSnapshot.horizon_s`) it gains more than the swarm loses while peers fetch
  layers.
- Boundaries stay, since a stage with new boundaries has no holder from which its state could come.
- Only a peer that holds its stage's state moves or becomes a spare; at least half of each stage's holders stay.
- No peer moves while a peer drains, which has its own rules."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shoal.coordinator.allocate.adjustments import (
    best_with_stayers,
    loss_alone,
    with_device,
    with_fewest_moves,
    with_idle_devices,
    with_second_holders,
)
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
from shoal.coordinator.allocate.interface import MeasuredPeer, NoLayout, SwarmSnapshot
from shoal.coordinator.allocate.measured_topology import placement_of, predict_step_time, topology_of
from shoal.coordinator.allocate.plan_layout import Layout, places_of
from shoal.coordinator.allocate.planner import default_work, plan, plan_each
from shoal.coordinator.allocate.repartitioning import (
    expected_gain,
    fetch_s,
    foreseen_gain,
    seen_or_foreseen_s,
    worth_its_standstill,
)
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective, split
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LIGHT_STATE_S
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology, make_topology

MARGIN = 0.05
"""The least gain in tokens/s. Figures are averages over 16 reports, so noise of +-10 % in a report is 1.5 % in them."""
STAY = 0.5
"""A search keeps this part of a stage's holders, rounded up: a newcomer must be able to fetch the state."""
HOLDERS_MIN = 2
"""The fewest holders that a search of single moves leaves in a stage, if it had as many. A stage with fewer takes a
newcomer at once, if that slows the step by less than the expected loss of a single holder (`adjustments.py`)."""
STATE_PART = 0.5
"""The assumed part of its holders' lines that travelling state takes."""
SMALL_DEVICES = 32
"""A search over fewer devices gets proportionally less than the planner's own budget: there is less to find."""
FIRST_TIMES = 4
FIRST_WORK_MAX = 300_000_000
"""The search for a first layout gets `FIRST_TIMES` the work of a later one, up to 3 s of one core: a bad first division
stays until a halt pays for a better one. A small swarm gets proportionally less again."""
FIRST_HORIZON_S = 3600.0
"""The time over which a first layout counts its steps if members must first fetch frozen weights."""
BASE_TIMES = 3.0
"""The factor on the line-limited time of fetching those weights, since at first only one peer has them. (16 homes: a
third of 4.8 GB took 456 s, 128 s by the lines.)"""


REPLACED_COST = 0.01
"""A peer that replaces a lost member may lengthen the foreseen step by this part: it frees another holder to move."""
SHARE_DRIFT = 1.5
SHARE_MIN = 0.02
"""Shares are set again once one is off by the factor `SHARE_DRIFT`; below `SHARE_MIN` the ratio means little."""
NEWCOMERS_MAX = 8
SPARES_TRIED = 8
"""Above these numbers newcomers are dealt by speed, and spares are not tried: each trial costs evaluations."""


class EvolutionaryAllocator:
    """Implements `Searching`."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        if snapshot.network is None or snapshot.workload is None:
            return _arranged(snapshot, previous, seed, _standby(snapshot, previous, None), None)
        topology = topology_of(snapshot)
        if previous is None and snapshot.num_stages is None:
            placement, _ = plan_at_once(topology, snapshot.workload)
            stages, spares = _stages_of(snapshot, topology, snapshot.workload, placement)
            return Layout(stages=stages, spares=spares, reason=first_reason(len(snapshot.peers), len(stages)))
        place = _Place(topology, snapshot.workload)
        standby = _standby(snapshot, previous, place)
        known = {*standby, *(peer for stage in previous.stages for peer in stage.peers)} if previous else set()
        few = sum(peer.peer not in known for peer in snapshot.peers) <= NEWCOMERS_MAX
        choose = place.choose if previous and few else None
        layout = _arranged(snapshot, previous, seed, standby, choose)
        return replace(layout, stages=_shared(topology, snapshot.workload, layout.stages))

    def prepare(self) -> None:
        pair = make_topology(np.full((2, 2), 0.01), np.full((2, 2), 1e6))
        plan(pair, Workload.of(RunSpec()), num_stages=2, work=1)

    def search(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        if any(peer.draining for peer in snapshot.peers):
            return None, "a peer is leaving"
        try:
            if previous is None:
                return _first(snapshot, seed)
            divided = _divided(snapshot, previous, seed)
            found = divided if divided is not None else _better(snapshot, previous, seed)
            return _unless_slower(snapshot, previous, found)
        except NoLayout as flaw:
            return None, f"a search found no layout: {flaw}"


def _arranged(
    snapshot: SwarmSnapshot, previous: Plan | None, seed: int, standby: tuple[PeerID, ...], choose: Choose | None
) -> Layout:
    try:
        return arrange(snapshot, previous, seed=seed, standby=standby, choose=choose)
    except NoLayout:
        return arrange(snapshot, previous, seed=seed, choose=choose)


def _unless_slower(
    snapshot: SwarmSnapshot, previous: Plan, found: tuple[Layout | None, str]
) -> tuple[Layout | None, str]:
    """Drop a layout that should be no faster than the live one is measured to be: its figures are wrong. A layout that
    moves no peer is never dropped, since new shares alone cost nothing."""
    layout, _ = found
    if layout is not None and layout.places() == places_of(previous):
        return found
    promised = predict_step_time(snapshot, layout.stages) if layout is not None else None
    if promised is None or promised.tokens_per_s > snapshot.seen_tokens_per_s:
        return found
    told = f"{promised.tokens_per_s:,.0f} tokens/s, and the live one makes {snapshot.seen_tokens_per_s:,.0f}"
    return None, f"stays: the layout found should make {told}"


class _Place:
    """Finds where a newcomer helps most by the throughput objective, which includes its network."""

    def __init__(self, topology: Topology, workload: Workload) -> None:
        self._workload, self._topology = workload, topology
        self._number = {name: device for device, name in enumerate(topology.names)}

    def choose(self, slots: Sequence[Slot], fitting: Sequence[Slot], peer: MeasuredPeer) -> Slot:
        """Return the best stage, or the best home within `MARGIN` of it. Stages with too few holders come first."""
        fitting = [slot for slot in fitting if len(slot.stayers) < HOLDERS_MIN] or fitting
        seconds = self.seconds(slots, fitting, peer)
        best = min(seconds.values())
        if not math.isfinite(best):
            return poorest(slots, fitting, peer)
        near = [slot for slot in fitting if slot.index in peer.homes and seconds[slot.index] <= (1 + MARGIN) * best]
        return min(near or fitting, key=lambda slot: (seconds[slot.index], slot.index))

    def seconds(self, slots: Sequence[Slot], fitting: Sequence[Slot], peer: MeasuredPeer) -> dict[int, float]:
        """Return the seconds of a step with `peer` in a stage, for each stage; inf if impossible."""
        stages, device = self._stages(slots), self._number[peer.peer]
        return {slot.index: self._cost(slots, with_device(stages, slot.index, device)) for slot in fitting}

    def seconds_now(self, slots: Sequence[Slot]) -> float:
        return self._cost(slots, self._stages(slots))

    def _stages(self, slots: Sequence[Slot]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(self._number[p.peer] for p in slot.stayers)) for slot in slots)

    def _cost(self, slots: Sequence[Slot], stages: tuple[tuple[int, ...], ...]) -> float:
        bounds = (*(slot.first_layer for slot in slots), slots[-1].last_layer)
        return ThroughputObjective(self._topology, self._workload).cost(Placement(stages=stages, bounds=bounds)).seconds


def _standby(snapshot: SwarmSnapshot, previous: Plan | None, place: _Place | None) -> tuple[PeerID, ...]:
    """Return the spares and newcomers that take no part. As many take part as members were lost, or as single-holder
    stages profit from a second holder: those that help most, and none that lengthens the step by more than
    `REPLACED_COST`. A peer that lost its place because it cannot reach others counts as a spare."""
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
    num_lost = sum(len(stage.peers) for stage in previous.stages) - sum(len(slot.stayers) for slot in slots)
    free.sort(key=lambda peer: (-by_id[peer].flop_per_s, peer))
    tried = [by_id[peer] for peer in free[:SPARES_TRIED]]
    num_lacking = _num_lacking(snapshot, slots, tried, place)
    num_needed = max(num_lost, num_lacking)
    if place is not None and num_needed > 0 and free:
        best: dict[PeerID, float] = {}
        for peer in tried:
            fitting = [slot for slot in slots if may_serve(slots, slot, peer)]
            best[peer.peer] = min(place.seconds(slots, fitting, peer).values(), default=math.inf)
        free.sort(key=lambda peer: best.get(peer, math.inf))
        if num_lacking == 0 and math.isfinite(now_s := place.seconds_now(slots)):
            most_s = (1.0 + REPLACED_COST) * now_s
            num_needed = min(num_needed, sum(best.get(peer, math.inf) <= most_s for peer in free))
    return tuple(sorted(free[num_needed:]))


def _num_lacking(
    snapshot: SwarmSnapshot, slots: Sequence[Slot], free: Sequence[MeasuredPeer], place: _Place | None
) -> int:
    """Count the stages without a stayer, or with a single one if adding a peer of `free` pays."""
    lacking = [slot for slot in slots if len(slot.stayers) < HOLDERS_MIN]
    if place is None or any(not slot.stayers for slot in slots):
        return len(lacking)
    now_s = place.seconds_now(slots)
    count = 0
    for slot in lacking:
        seconds = [place.seconds(slots, [slot], peer)[slot.index] for peer in free if slot.admits(peer)]
        allowed = 1.0 + loss_alone(snapshot, slot.stayers[0])
        count += bool(seconds) and (not math.isfinite(now_s) or min(seconds) <= allowed * now_s)
    return count


def _first(snapshot: SwarmSnapshot, seed: int) -> tuple[Layout, str]:

    topology, workload = topology_of(snapshot), snapshot.workload
    assert workload is not None
    work = _first_work(topology.num_devices)
    objective = ThroughputObjective(topology, workload)
    if workload.memory.base is not None and workload.memory.base.travels:
        each = plan_each(topology, workload, num_stages=snapshot.num_stages, seed=seed, work=work)
        searched = min(each, key=lambda found: _mean_step_s(objective, found))
    else:
        searched, _ = plan(topology, workload, num_stages=snapshot.num_stages, seed=seed, work=work)
    placement = with_idle_devices(objective, with_second_holders(objective, searched, snapshot))
    stages, spares = _stages_of(snapshot, topology, workload, placement)
    reason = first_reason(len(snapshot.peers), len(stages))
    return Layout(stages=stages, spares=spares, reason=reason), reason


def _mean_step_s(objective: ThroughputObjective, placement: Placement) -> float:
    """Return the mean seconds of a step over `FIRST_HORIZON_S`; inf if no step ends by then. Steps begin when every
    member has fetched the adapters' base; the slowest downlink or the sum of all uplinks bounds that."""
    topology, base = objective.topology, objective.workload.memory.base
    assert base is not None
    into_s, total_bytes, up_bytes_per_s = 0.0, 0.0, 0.0
    for stage, (first, last) in zip(placement.stages, pairwise(placement.bounds), strict=True):
        stage_bytes = sum(base.layer_bytes[first:last])
        into_s = max(into_s, stage_bytes / float(topology.down_bytes_per_s[list(stage)].min()))
        total_bytes += stage_bytes * len(stage)
        up_bytes_per_s += float(topology.up_bytes_per_s[list(stage)].sum())
    base_s = BASE_TIMES * max(into_s, total_bytes / up_bytes_per_s)
    steps = max(FIRST_HORIZON_S - base_s, 0.0) / objective.cost(placement).parts["foreseen_s"]
    return FIRST_HORIZON_S / steps if steps > 0.0 else math.inf


def _better(snapshot: SwarmSnapshot, previous: Plan, seed: int) -> tuple[Layout | None, str]:

    by_id = {peer.peer: peer for peer in snapshot.peers}
    slots = slots_of(snapshot, previous)
    placed = {peer.peer: slot.index for slot in slots for peer in slot.holders}
    free = [
        number
        for number, peer in enumerate(snapshot.peers)
        if peer.peer not in placed or peer.synced_stage == placed[peer.peer]
    ]
    assert snapshot.workload is not None
    topology = topology_of(snapshot).take(free)
    workload = _by_stage(snapshot.workload, previous.stages)
    number = {name: device for device, name in enumerate(topology.names)}
    current = Placement(
        stages=tuple(tuple(sorted(number[p.peer] for p in slot.holders if p.peer in number)) for slot in slots),
        bounds=tuple(range(len(slots) + 1)),
    )
    if not all(current.stages):
        return None, f"no member of stage {current.stages.index(())} has its state yet"
    searched, _ = plan(
        topology,
        workload,
        num_stages=len(slots),
        seed=seed,
        work=_work(len(free)),
        current=current,
        horizon_s=snapshot.horizon_s,
        gain_min=MARGIN,
    )
    evaluator = ThroughputEvaluator(topology, workload, len(slots), current=current, horizon_s=snapshot.horizon_s)
    found, with_moves_s = best_with_stayers(evaluator, current, searched, stay=STAY, holders_min=HOLDERS_MIN)
    objective = ThroughputObjective(topology, workload)
    before, after = objective.cost(current), objective.cost(found)
    before_s = seen_or_foreseen_s(snapshot, before)
    by_figures = foreseen_gain(replace(snapshot, seen_tokens_per_s=0.0), before, after)
    gain = min(before_s / after.seconds - 1.0, by_figures) if math.isfinite(after.seconds) else -1.0
    worth = min(gain, expected_gain(by_figures, snapshot.forecast_error))
    num_moved = sum(current.stage_of().get(d) != found.stage_of().get(d) for d in range(topology.num_devices))
    pays = with_moves_s < before_s and _pays(objective, current, found, before_s, snapshot.horizon_s)
    if num_moved == 0 or not worth >= MARGIN or not pays:
        if (shared := _shared_anew(snapshot, previous)) is not None:
            return shared, shared.reason
        return None, f"stays: no layout was found that is {100 * MARGIN:.0f} % better and worth its moves"
    _refill(slots, found, topology, by_id)
    holding = {peer.peer for slot in slots for peer in slot.holders}
    spares = tuple(peer.peer for peer in snapshot.peers if peer.peer not in holding)
    stages = _shared(topology_of(snapshot), snapshot.workload, tuple(stage_of(slot) for slot in slots))
    why = f"for {100 * gain:.0f} % more tokens/s" if math.isfinite(gain) else f"since {before.why}"
    reason = f"search: {num_moved} {'peer moves' if num_moved == 1 else 'peers move'} {why}"
    return Layout(stages=stages, spares=spares, reason=reason), reason


def _pays(
    objective: ThroughputObjective, current: Placement, found: Placement, before_s: float, horizon_s: float
) -> bool:
    """True if moving to `found` pays: within `horizon_s` the swarm makes more steps, the move included, than with
    `current`, where a step takes `before_s` seconds. Until the movers compute, only the stayers work, and travelling
    state takes half of their lines. A mover computes once it has its state, or, if that takes long and the run has
    learners, its weights."""
    stop_and_copy_s = fetch_s(objective.topology, objective.workload, current, found) / STATE_PART
    if stop_and_copy_s > LIGHT_STATE_S:
        stop_and_copy_s *= objective.workload.needed_first
    stay = tuple(tuple(sorted({*a} & {*b})) for a, b in zip(current.stages, found.stages, strict=True))
    meanwhile = ThroughputObjective(_giving(objective.topology, stay, found), objective.workload)
    meanwhile_s = meanwhile.cost(replace(found, stages=stay)).seconds if all(stay) else math.inf
    steps = (
        max(0.0, horizon_s - stop_and_copy_s) / objective.cost(found).seconds
        + min(stop_and_copy_s, horizon_s) / meanwhile_s
    )
    return steps > horizon_s / before_s


def _giving(topology: Topology, stay: Sequence[tuple[int, ...]], found: Placement) -> Topology:
    """Return the line rates that remain for steps while members of `stay` send their stage's state to newcomers."""
    left = np.ones(topology.num_devices)
    for stayers, members in zip(stay, found.stages, strict=True):
        if len(members) > len(stayers):
            left[list(stayers)] = 1.0 - STATE_PART
    up = left * topology.up_bytes_per_s
    return replace(topology, bytes_per_s=left[:, None] * topology.bytes_per_s, up_bytes_per_s=up)


def _shared_anew(snapshot: SwarmSnapshot, previous: Plan) -> Layout | None:
    """Return the live layout with shares by the current figures, if these are far from the plan's; else None."""
    assert snapshot.workload is not None
    topology = topology_of(snapshot)
    if not {peer for stage in previous.stages for peer in stage.peers}.issubset(topology.names):
        return None
    stages = _shared(topology, snapshot.workload, previous.stages)
    shares = [
        (before.share, after.share)
        for old, new in zip(previous.stages, stages, strict=True)
        for before, after in zip(old.members, new.members, strict=True)
    ]
    if all(max(a, SHARE_MIN) < SHARE_DRIFT * max(b, SHARE_MIN) for pair in shares for a, b in (pair, pair[::-1])):
        return None
    return Layout(stages=stages, spares=previous.spares, reason="search: shares follow what is measured now")


def _divided(snapshot: SwarmSnapshot, previous: Plan, seed: int) -> tuple[Layout, str] | None:
    """Return the layout with other boundaries that is most worth its change; else the best of the number of stages that
    the run asks for, if the live plan has another; else None. Raises: NoLayout, LocalError."""

    topology, workload = topology_of(snapshot), snapshot.workload
    assert workload is not None
    current, objective = placement_of(previous.stages, snapshot.peers), ThroughputObjective(topology, workload)
    each = plan_each(
        topology,
        workload,
        num_stages=snapshot.num_stages,
        seed=seed,
        work=_work(topology.num_devices),
        bias=snapshot.forecast_bias,
    )
    each = [
        with_fewest_moves(objective, current, with_second_holders(objective, searched, snapshot)) for searched in each
    ]
    asked = snapshot.num_stages not in (None, len(previous.stages))
    changes = [(worth_its_standstill(snapshot, topology, current, found), found) for found in each]
    worthy = [(change, found) for change, found in changes if change is not None]
    if worthy:
        change, found = max(worthy, key=lambda one: one[0].work(snapshot.horizon_s))
        why = f"for {100 * change.gain:.0f} % more"
    elif asked:
        found, why = each[0], "as the run asks for"
    else:
        return None
    stages, spares = _stages_of(snapshot, topology, workload, found)
    noun = "stage" if len(stages) == 1 else "stages"
    reason = f"search: {len(stages)} {noun} in place of {len(previous.stages)} {why}"
    return Layout(stages=stages, spares=spares, reason=reason), reason


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
    """Return the workload with each stage as one layer, so that no planner can move a boundary."""

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


def _refill(slots: list[Slot], found: Placement, topology: Topology, by_id: dict[PeerID, MeasuredPeer]) -> None:
    """Put the devices of a placement into the stages. Peers that stay or could not move keep their rank."""
    free = set(topology.names)
    for slot, stage in zip(slots, found.stages, strict=True):
        members = [by_id[PeerID(topology.names[device])] for device in stage]
        stay = [peer for peer in slot.holders if peer in members or peer.peer not in free]
        slot.holders = stay + [peer for peer in members if peer not in stay]


def _shared(topology: Topology, workload: Workload, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Set the shares of traffic and reduction that the objective assumes."""
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


def _work(num_devices: int) -> int:

    return round(default_work(num_devices) * min(1.0, num_devices / SMALL_DEVICES))


def _first_work(num_devices: int) -> int:
    usual = _work(num_devices)
    times = FIRST_TIMES * min(1.0, num_devices / SMALL_DEVICES)
    return max(usual, min(round(times * usual), FIRST_WORK_MAX))
