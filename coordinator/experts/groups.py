"""Makes the expert groups of a plan: which members of a stage hold which expert, by measured load. Pure.

The placement stays while it is good enough (`replan.py`). A member that is new in a group fetches the expert's state
from the present holders, which stay in the group until then. If layers move to other stages, a member keeps its experts
of those layers that are in its new stage, and each layer takes its part of the measured loads along."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shoal.coordinator.experts.failure_records import FailureRecords
from shoal.coordinator.experts.replan import replan
from shoal.coordinator.experts.token_shares import token_shares
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.messages import Heartbeat
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage

Bounds = tuple[tuple[int, int], ...]
"""(first layer, layer after the last) of each stage."""

LOOK_STEPS = 50
"""The number of steps between two checks whether measured loads call for another placement."""
COUNT_MAX = 1 << 53
"""A heartbeat's token counts, or a stage's handed-over loads, are ignored if one of them is at least this."""
SHARE_MIN = 0.01
"""The least share of an expert's tokens that a plan gives to each holder, since a plan may not contain a share of 0."""
HANDED_OVER_MAX = 4096
"""The most loads (stages x experts) handed over: 36 KB of a message. If there are more, none goes."""


@dataclass(slots=True, kw_only=True)
class ExpertPlaces:
    """Places experts on the members of stages.

    Args:
        num_experts: the number of experts of each layer.
        slots: the number of experts that a member of a stage holds; 0: experts are not placed.
        min_replicas: the least number of holders of each expert, at most all members of the stage. Members hold more
            than `slots` experts if this is necessary.
        records: the failure records of the peers.
    """

    num_experts: int
    slots: int
    min_replicas: int = 2
    records: FailureRecords = field(default_factory=FailureRecords)
    _loads: dict[int, list[float]] = field(default_factory=dict)
    """{stage of `_bounds`: tokens sent to each expert}; each report from the stage takes a tenth off older tokens."""
    _bounds: Bounds = ()
    _told: dict[PeerID, tuple[int, ...]] = field(default_factory=dict)
    """{peer: the tokens that it has sent to each expert, by its last heartbeat}."""
    _looked: tuple[int, int] = (0, 0)
    """(era, version) of the last check of the loads."""

    def obey(self, plan: Plan) -> None:
        bounds = tuple(stage.layers for stage in plan.stages)
        if bounds != self._bounds:
            self._loads = self._loads_within(bounds)
            self._bounds = bounds
            self._told.clear()  # counts for a new stage begin at zero

    def hear(self, peer: PeerID, heartbeat: Heartbeat) -> None:
        """Add the tokens that a peer has sent to each expert since its last heartbeat; older tokens then count less."""
        if not self.slots or heartbeat.stage is None or not 0 <= heartbeat.stage < STAGES_MAX:
            return
        counts = heartbeat.loads
        if len(counts) != self.num_experts or not all(0 <= count < COUNT_MAX for count in counts):
            return
        before = self._told.get(peer, counts)  # a peer's first count adds nothing: it may be old
        if any(now < then for now, then in zip(counts, before, strict=True)):
            before = (0,) * self.num_experts  # the peer has restarted
        self._told[peer] = counts
        loads = self._loads.get(heartbeat.stage, [0.0] * self.num_experts)
        self._loads[heartbeat.stage] = [
            0.9 * load + now - then for load, now, then in zip(loads, counts, before, strict=True)
        ]

    def loads(self, num_stages: int) -> tuple[tuple[float, ...], ...]:
        """Return the loads by stage and expert, for the next coordinator; empty if there are too many to send."""
        if not self.slots or num_stages * self.num_experts > HANDED_OVER_MAX:
            return ()
        return tuple(tuple(self._loads.get(stage, ())) for stage in range(num_stages))

    def take_over(self, loads: Sequence[Sequence[float]]) -> None:
        """Take over the previous coordinator's loads, from which a plan computes each holder's share of its expert's
        tokens. Without them, a new coordinator could change these shares for no reason."""
        for stage, counts in enumerate(loads[:STAGES_MAX]):
            if len(counts) == self.num_experts and all(0.0 <= count < COUNT_MAX for count in counts):
                self._loads[stage] = list(counts)

    def rest(self) -> None:
        """Forget all counts when another peer becomes coordinator: they will be old when this peer leads again."""
        self._told.clear()
        self._loads.clear()

    def forget_strangers(self, members: Set[PeerID]) -> None:
        """Forget peers that are no longer members; a peer that returns starts anew."""
        self._told = {peer: counts for peer, counts in self._told.items() if peer in members}

    def load_shares(self, stage: int) -> list[float]:
        """Return each expert's share of the stage's recent tokens: float [E], sums to 1, or all 0 without reports."""
        loads = self._loads.get(stage, [0.0] * self.num_experts)
        total = sum(loads)
        return [load / total for load in loads] if total > 0.0 else [0.0] * self.num_experts

    def is_due(self, live: Plan, version: int) -> bool:
        """True if loads should be checked now: every `LOOK_STEPS` steps, and at each new era. Records the check."""
        era, looked = self._looked
        if not live.experts or (era == live.era and looked <= version < looked + LOOK_STEPS):
            return False
        self._looked = (live.era, version)
        return True

    def place(
        self, stages: Sequence[Stage], before: Plan | None, *, sequence: int, begins: bool = False
    ) -> tuple[ExpertGroup, ...]:
        """Return the groups of all stages.

        Args:
            before: the previous plan; None: there is none, or its expert holders have lost their state.
            sequence: the number of the new plan, with which new members join their groups.
            begins: True if an era begins with the new plan: then all members take their places at once, and the stages
                may be different ones.
        """
        if not self.slots:
            return ()
        loads = self._loads_within(tuple(stage.layers for stage in stages))
        placed = []
        for index, stage in enumerate(stages):
            held = self._held_within(stage, before)
            placed += self._place_stage(index, stage, held, loads.get(index), sequence, begins=begins)
        return tuple(placed)

    def _held_within(self, stage: Stage, before: Plan | None) -> list[dict[PeerID, Member]]:
        """Return for each expert {peer: member} of its holders in plan `before`, in stages that overlap `stage`."""
        held: list[dict[PeerID, Member]] = [{} for _ in range(self.num_experts)]
        if before is not None and before.experts:
            for entry in before.experts:
                former = before.stages[entry.stage]
                if former.first_layer < stage.last_layer and stage.first_layer < former.last_layer:
                    held[entry.expert] |= {member.peer: member for member in entry.members}
        return held

    def _place_stage(
        self,
        index: int,
        stage: Stage,
        held: Sequence[Mapping[PeerID, Member]],
        measured: Sequence[float] | None,
        sequence: int,
        *,
        begins: bool,
    ) -> list[ExpertGroup]:
        """Return the groups of one stage. Args: held: the previous holders of each expert. measured: the loads of the
        experts; None: no reports. sequence: the new plan's number. begins: True if an era begins with it."""
        min_replicas = min(self.min_replicas, len(stage.members))
        if measured is None or sum(measured) <= 0.0:
            is_whole = {*stage.peers} == {peer for peers in held for peer in peers} and min(
                map(len, held)
            ) >= min_replicas
            if is_whole and not begins:  # until loads are measured, the present groups are good enough
                return [ExpertGroup(index, expert, tuple(peers.values())) for expert, peers in enumerate(held)]
            measured = [float(len(peers)) or 1.0 for peers in held]  # loads for which the present placement is right
        slots = max(self.slots, -(-self.num_experts * min_replicas // len(stage.members)))
        slots = min(slots, self.num_experts)
        current: dict[PeerID, list[int]] = {}
        for expert, peers in enumerate(held):
            for peer in peers:
                if not begins or peer in stage.peers:  # else the peer has moved to another stage
                    current.setdefault(peer, []).append(expert)
        chances: dict[str, float] = dict(zip(stage.peers, self.records.probabilities(stage.peers), strict=True))
        filled = _filled(current, chances.keys(), slots, measured)
        chosen = replan(filled, measured, chances, slots=slots, min_replicas=min_replicas)
        placement = tuple(chosen[peer] for peer in stage.peers)
        shares = token_shares(placement, measured, [member.share for member in stage.members])

        def member_of(expert: int, node: int) -> Member:
            member = stage.members[node]
            former = held[expert].get(member.peer)
            since = sequence if begins or former is None else former.since
            return Member(member.peer, max(SHARE_MIN, shares[expert].get(node, 0.0)), member.bandwidth, since)

        return [
            ExpertGroup(
                index,
                expert,
                tuple(member_of(expert, node) for node, experts in enumerate(placement) if expert in experts),
            )
            for expert in range(self.num_experts)
        ]

    def _loads_within(self, bounds: Bounds) -> dict[int, list[float]]:
        """Return the loads by stage of the new `bounds`; a layer takes an equal part of its old stage's load along."""
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


def _filled(
    current: Mapping[PeerID, Sequence[int]], live: Set[str], slots: int, loads: Sequence[float]
) -> dict[str, list[int]]:
    """Guess which experts a member has in several slots: a plan names only holders. Free slots go to the expert with
    most load per slot, as in `replica_counts`. (Rejected: to all experts in turn; it moved experts without need.)"""
    filled: dict[str, list[int]] = {peer: list(experts) for peer, experts in current.items()}
    holders: dict[int, list[PeerID]] = {}
    for peer in sorted(current.keys() & live):
        for expert in current[peer]:
            holders.setdefault(expert, []).append(peer)
    replicas = {expert: len(peers) for expert, peers in holders.items()}
    busiest = [(-loads[expert] / count, expert) for expert, count in replicas.items()]
    heapify(busiest)
    while busiest:
        _, expert = heappop(busiest)
        peer = min(holders[expert], key=lambda peer: len(filled[peer]))
        if len(filled[peer]) < slots:
            filled[peer].append(expert)
            replicas[expert] += 1
            heappush(busiest, (-loads[expert] / replicas[expert], expert))
    return filled
