"""The plan's groups of experts: which members hold which expert of each stage, by the load that is measured. Pure.

The members of a stage hold its experts. The placement stays while it will do (`replan.py`). A member that a plan names
anew takes the state from members that still have it, and these stay until then.
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
    """The recent tokens of each expert, for each stage."""
    _told: dict[PeerID, tuple[int, ...]] = field(default_factory=dict)
    _looked: tuple[int, int] = (0, 0)
    """(era, version) at the last look."""

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

    def place(self, stages: Sequence[Stage], before: Plan | None, *, sequence: int) -> tuple[ExpertGroup, ...]:
        """The groups of every stage. Args: before: the plan before, if it is of the same era."""
        if not self.slots:
            return ()
        placed = []
        for index, stage in enumerate(stages):
            same = before is not None and len(before.stages) == len(stages) and before.experts
            held = before.stages[index].layers == stage.layers if before is not None and same else False
            groups = before.experts[index * self.num_experts :][: self.num_experts] if before and held else ()
            placed += self._place_stage(index, stage, groups, sequence)
        return tuple(placed)

    def _place_stage(self, index: int, stage: Stage, groups: Sequence[ExpertGroup], sequence: int) -> list[ExpertGroup]:
        min_replicas = min(self.min_replicas, len(stage.members))
        if groups and not self._is_measured(index) and _is_whole(groups, stage, min_replicas):
            return list(groups)  # until somebody has measured where tokens go, what there is will do
        slots = max(self.slots, -(-self.num_experts * min_replicas // len(stage.members)))
        slots = min(slots, self.num_experts)
        current: dict[PeerID, list[int]] = {}
        since: dict[tuple[int, PeerID], int] = {}
        for entry in groups:
            for member in entry.members:
                current.setdefault(member.peer, []).append(entry.expert)
                since[entry.expert, member.peer] = member.since
        nodes: dict[str, Node] = {
            peer: Node(slots=slots, failure_probability=self.records.probability(peer)) for peer in stage.peers
        }
        loads = self._loads_of(index, groups)
        chosen = replan(
            _filled(current, nodes, slots, loads), loads, nodes, min_replicas=min_replicas, seed=sequence
        ).placement
        return _groups(index, stage, chosen, loads, since, sequence)

    def _is_measured(self, stage: int) -> bool:
        return sum(self._loads.get(stage, ())) > 0.0

    def _loads_of(self, stage: int, groups: Sequence[ExpertGroup]) -> list[float]:
        """The loads as measured; if there are none, those for which the placement in force would be right."""
        if self._is_measured(stage):
            return self._loads[stage]
        if groups:
            return [float(len(entry.members)) for entry in groups]
        return [1.0] * self.num_experts


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
