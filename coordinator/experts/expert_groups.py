"""The plan's groups of experts: which members hold which expert of each stage, by the load that is measured. Pure.

The members of a stage hold its experts. The placement stays while it will do (`replan.py`). A member that a plan names
anew takes the state from members that still have it, and these stay until then. Where layers come to other stages their
experts come with them: a member keeps the experts that it had of the layers of its new stage, and each layer takes its
part of the measured loads along.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shoal.coordinator.experts.failure_records import FailureRecords
from shoal.coordinator.experts.replan import Node, replan
from shoal.coordinator.experts.token_shares import token_shares
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.messages import Heartbeat
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage

Bounds = tuple[tuple[int, int], ...]
"""The layers of each stage."""

LOOK_STEPS = 50
"""Loads are looked at again after so many steps."""
COUNT_MAX = 1 << 53
"""No peer has sent more tokens than that."""
SHARE_MIN = 0.01
"""Every holder has at least this share of an expert's tokens, or it would be no member."""
HANDED_OVER_MAX = 4096
"""How many loads of all stages are handed over: 36 KB of a message."""
FADE = 0.9
"""An older load counts for so much a heartbeat later: a few dozen heartbeats are remembered."""


@dataclass(slots=True, kw_only=True)
class ExpertPlaces:
    """Places experts on the members of stages.

    Args:
        num_experts: of each layer.
        slots: experts that a member of a stage holds; 0: they are not placed.
        min_replicas: holders of each expert, where the stage has so many members. Members hold more than `slots` where
            that takes more.
    """

    num_experts: int
    slots: int
    min_replicas: int = 2
    records: FailureRecords = field(default_factory=FailureRecords)
    """How likely each member fails."""
    _loads: dict[int, list[float]] = field(default_factory=dict)
    """The recent tokens of each expert, for each stage of `_bounds`."""
    _bounds: Bounds = ()
    """The bounds of the live plan; empty: none has come."""
    _told: dict[PeerID, tuple[int, ...]] = field(default_factory=dict)
    _looked: tuple[int, int] = (0, 0)
    """(era, version) at the last look."""

    def obey(self, plan: Plan) -> None:
        """A plan is live: what is measured belongs to its stages from now on."""
        bounds = tuple(stage.layers for stage in plan.stages)
        if bounds != self._bounds:
            self._loads = self._loads_within(bounds)
            self._bounds = bounds
            self._told.clear()  # who counts for a new stage begins at zero

    def hear(self, peer: PeerID, heartbeat: Heartbeat) -> None:
        """Add up what a peer's microbatches have sent to each expert since it last said so."""
        if not self.slots or heartbeat.stage is None or not 0 <= heartbeat.stage < STAGES_MAX:
            return
        counts = heartbeat.loads
        if len(counts) != self.num_experts or not all(0 <= count < COUNT_MAX for count in counts):
            return
        before = self._told.get(peer, counts)  # what it has sent in the time of another coordinator says little of now
        if any(now < then for now, then in zip(counts, before, strict=True)):
            before = (0,) * self.num_experts  # it has begun anew
        self._told[peer] = counts
        loads = self._loads.get(heartbeat.stage, [0.0] * self.num_experts)
        self._loads[heartbeat.stage] = [
            FADE * load + now - then for load, now, then in zip(loads, counts, before, strict=True)
        ]

    def loads(self, num_stages: int) -> tuple[tuple[float, ...], ...]:
        """The loads by stage and expert, for the next coordinator; none for a model with more experts than a message
        takes."""
        if not self.slots or num_stages * self.num_experts > HANDED_OVER_MAX:
            return ()
        return tuple(tuple(self._loads.get(stage, ())) for stage in range(num_stages))

    def take_over(self, loads: Sequence[Sequence[float]]) -> None:
        """Take what the coordinator before us has measured: without it every share would change for nothing."""
        for stage, counts in enumerate(loads[:STAGES_MAX]):
            if len(counts) == self.num_experts and all(0.0 <= count < COUNT_MAX for count in counts):
                self._loads[stage] = list(counts)

    def rest(self) -> None:
        """The role is elsewhere: another peer counts what is sent from now on, and what we know is old when the role
        returns."""
        self._told.clear()
        self._loads.clear()

    def forget_strangers(self, members: Set[PeerID]) -> None:
        """Forget peers of which nothing is counted any more; a peer that comes back begins anew."""
        self._told = {peer: counts for peer, counts in self._told.items() if peer in members}

    def load_shares(self, stage: int) -> list[float]:
        """Each expert's share of the tokens that `stage` has sent of late: float [E] that sums to 1, or all 0 if nobody
        told."""
        loads = self._loads.get(stage, [0.0] * self.num_experts)
        total = sum(loads)
        return [load / total for load in loads] if total > 0.0 else [0.0] * self.num_experts

    def is_due(self, live: Plan, version: int) -> bool:
        """Whether it is time to look whether the load has moved, which is once every so many steps."""
        era, looked = self._looked
        if not live.experts or (era == live.era and looked <= version < looked + LOOK_STEPS):
            return False
        self._looked = (live.era, version)
        return True

    def place(
        self, stages: Sequence[Stage], before: Plan | None, *, sequence: int, begins: bool = False
    ) -> tuple[ExpertGroup, ...]:
        """The groups of every stage.

        Args:
            before: the plan before it, if those that hold experts by it still have their state.
            begins: an era begins with the plan, so that everybody takes its places with it. The stages may be others
                than those of `before`.
        """
        if not self.slots:
            return ()
        loads = self._loads_within(tuple(stage.layers for stage in stages))
        placed = []
        for index, stage in enumerate(stages):
            groups: Sequence[ExpertGroup] = ()
            if before is not None and before.experts and begins:
                groups = _held_within(before, index, stage)
            elif before is not None and before.experts and len(before.stages) == len(stages):
                held = before.stages[index].layers == stage.layers
                groups = before.experts[index * self.num_experts :][: self.num_experts] if held else ()
            placed += self._place_stage(index, stage, groups, loads.get(index), sequence, begins=begins)
        return tuple(placed)

    def _place_stage(
        self,
        index: int,
        stage: Stage,
        groups: Sequence[ExpertGroup],
        measured: Sequence[float] | None,
        sequence: int,
        *,
        begins: bool,
    ) -> list[ExpertGroup]:
        """Args: measured: the loads; None: nobody has told."""
        min_replicas = min(self.min_replicas, len(stage.members))
        is_measured = measured is not None and sum(measured) > 0.0
        if groups and not begins and not is_measured and _is_whole(groups, stage, min_replicas):
            return list(groups)  # until somebody has measured where tokens go, what there is will do
        slots = max(self.slots, -(-self.num_experts * min_replicas // len(stage.members)))
        slots = min(slots, self.num_experts)
        current: dict[PeerID, list[int]] = {}
        since: dict[tuple[int, PeerID], int] = {}
        for entry in groups:
            for member in entry.members:
                if begins and member.peer not in stage.peers:
                    continue  # it has gone to another stage, where it is of use
                current.setdefault(member.peer, []).append(entry.expert)
                since[entry.expert, member.peer] = sequence if begins else member.since
        nodes: dict[str, Node] = {
            peer: Node(slots=slots, failure_probability=self.records.probability(peer)) for peer in stage.peers
        }
        loads = list(measured) if measured is not None and is_measured else _loads_meant(groups, self.num_experts)
        chosen = replan(
            _filled(current, nodes, slots, loads), loads, nodes, min_replicas=min_replicas, seed=sequence
        ).placement
        return _groups(index, stage, chosen, loads, since, sequence)

    def _loads_within(self, bounds: Bounds) -> dict[int, list[float]]:
        """The measured loads by stage, for stages with these bounds: each layer takes its part along."""
        if not self._bounds or bounds == self._bounds:
            return self._loads
        moved: dict[int, list[float]] = {}
        for index, (first, last) in enumerate(bounds):
            for number, (begin, end) in enumerate(self._bounds):
                common = min(last, end) - max(first, begin)
                if common > 0 and number in self._loads:
                    loads = moved.setdefault(index, [0.0] * self.num_experts)
                    part = common / (end - begin)
                    moved[index] = [a + part * b for a, b in zip(loads, self._loads[number], strict=True)]
        return moved


def _held_within(before: Plan, index: int, stage: Stage) -> list[ExpertGroup]:
    """Who held each expert of any of the layers of `stage`, whoever has most of them first, as groups of that stage."""
    groups = []
    for expert in range(before.num_experts):
        held: Counter[PeerID] = Counter()
        members: dict[PeerID, Member] = {}
        for number, former in enumerate(before.stages):
            common = min(stage.last_layer, former.last_layer) - max(stage.first_layer, former.first_layer)
            if common > 0:
                for member in before.group_members(before.expert_group(number, expert)):
                    held[member.peer] += common
                    members[member.peer] = member
        ranked = sorted(members, key=lambda peer: (-held[peer], peer))
        groups.append(ExpertGroup(index, expert, tuple(members[peer] for peer in ranked)))
    return groups


def _loads_meant(groups: Sequence[ExpertGroup], num_experts: int) -> list[float]:
    """The loads for which the placement in force would be right."""
    return [float(len(entry.members)) for entry in groups] if groups else [1.0] * num_experts


def _is_whole(groups: Sequence[ExpertGroup], stage: Stage, min_replicas: int) -> bool:
    """Whether the groups' holders are the stage's members, all of them, and each expert is on as many as it should
    be."""
    holders = {peer for entry in groups for peer in entry.peers}
    return holders == {*stage.peers} and all(len(entry.members) >= min_replicas for entry in groups)


def _filled(
    current: Mapping[PeerID, Sequence[int]], nodes: Mapping[str, Node], slots: int, loads: Sequence[float]
) -> dict[str, tuple[int, ...]]:
    """Guess what fills each member's slots: a plan says who holds an expert, not in how many slots. A member with room
    has more of what is busiest, as when it was placed. (Lost: more of each in turn. The busiest replica seemed too
    busy, and quiet swarms moved on and on.)"""
    filled = {peer: list(experts) for peer, experts in current.items()}
    replicas: Counter[int] = Counter()
    holders: dict[int, list[PeerID]] = {}
    for peer in sorted(current.keys() & nodes.keys()):
        replicas.update(current[peer])
        for expert in current[peer]:
            holders.setdefault(expert, []).append(peer)
    busiest = [(-loads[expert] / replicas[expert], expert) for expert in holders]
    heapify(busiest)
    while busiest:
        _, expert = heappop(busiest)
        peer = min(holders[expert], key=lambda peer: len(filled[peer]))
        if len(filled[peer]) < slots:
            filled[peer].append(expert)
            replicas[expert] += 1
            heappush(busiest, (-loads[expert] / replicas[expert], expert))
    return {peer: tuple(experts) for peer, experts in filled.items()}


def _groups(
    index: int,
    stage: Stage,
    chosen: Mapping[str, Sequence[int]],
    loads: Sequence[float],
    since: Mapping[tuple[int, PeerID], int],
    sequence: int,
) -> list[ExpertGroup]:
    """The groups of one stage in the plan's words."""
    members = {member.peer: member for member in stage.members}
    placement = tuple(tuple(chosen.get(peer, ())) for peer in stage.peers)
    speeds = [member.share for member in stage.members]
    shares = token_shares(placement, loads, speeds)
    groups = []
    for expert in range(len(loads)):
        holders = [node for node, experts in enumerate(placement) if expert in experts]
        held = {stage.peers[node]: max(SHARE_MIN, shares[expert].get(node, 0.0)) for node in holders}
        groups.append(
            ExpertGroup(
                index,
                expert,
                tuple(
                    Member(peer, share, members[peer].bandwidth, since.get((expert, peer), sequence))
                    for peer, share in held.items()
                ),
            )
        )
    return groups
