"""Plans: which peers hold which layers; each plan is one link of a signed chain. Pure.

A plan contains its leadership term, its sequence number and the hash of the plan before it, and is signed by the term's
coordinator. Peers store the highest plan that they have seen and refuse lower plans, such as replays and plans of a
deposed coordinator.

A plan becomes *live* by a majority of votes, or by a mandate: the owner's signed permission. A live plan travels with
its mandate, or with the votes of its predecessor's electors, the members that vote (`PlanProof`); plan and votes are a
*link*. `coordinator.chain` checks the votes, for which it needs the predecessor.
"""

import math
from collections.abc import Collection
from functools import cached_property
from typing import Literal

import msgspec
from blake3 import blake3

from shoal.protocol.certificate import Certified
from shoal.protocol.envelope import decoded, seal, unseal
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import (
    ELECTED_FROM_PEERS,
    ELECTORS,
    ERA_MAX,
    EXCLUSION_BYTES_MAX,
    EXCLUSIONS_MAX,
    OVERRIDE_EPOCH_MAX,
    PEER_ID_CHARS_MAX,
    PEERS_MAX,
    SEQUENCE_MAX,
    STAGES_MAX,
    TERM_MAX,
    VERSION_MAX,
)
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import Formats, WireFormat


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A member of a stage or expert group. `share` is its relative share of the group's microbatches, `bandwidth` its
    relative share of the reduction's work; both are > 0."""

    peer: PeerID
    share: float
    bandwidth: float
    since: int = 0
    """Sequence of the plan since which the member has held this place without a break. A peer that missed plans sees by
    it if it was removed meanwhile: its group then continued without it, so its state may differ."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, dict=True):
    """Decoder layers [first_layer, last_layer) and their holders; a member's position in `members` is its rank."""

    first_layer: int
    last_layer: int
    members: tuple[Member, ...]

    @property
    def layers(self) -> tuple[int, int]:
        return self.first_layer, self.last_layer

    @cached_property
    def peers(self) -> tuple[PeerID, ...]:
        return tuple(member.peer for member in self.members)


class ExpertGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, dict=True):
    """Expert `expert` of all layers of stage `stage`, and its holders; a member's position in `members` is its rank."""

    stage: int
    expert: int
    members: tuple[Member, ...]

    @cached_property
    def peers(self) -> tuple[PeerID, ...]:
        return tuple(member.peer for member in self.members)


Bound = Literal["compute", "card", "paths", "reduction", "round trip", "commit"]
"""The bottleneck of a step: a stage's devices, their network cards, the paths to the next stage, the reduction within a
stage, one microbatch's way to the end and back, or a stage's commit."""


FORESEEN_MAX = 1e15


class Foreseen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Speed of a layout, as predicted by the coordinator that made the plan."""

    tokens_per_s: float
    bound: Bound
    stage: int


class Plan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    dict=True,
    rename={
        "not_started": "fresh",
        "override_epoch": "reign",
        "cutover_version": "ends_at",
        "next_layout": "following",
    },
):
    """Which peers hold which layers. `stages` are in pipeline order; `sequence` counts the run's plans from 1, over all
    terms."""

    run: str
    term: int
    sequence: int
    previous: str
    """Hash of the plan before this one; empty for the first plan."""
    coordinator: PeerID
    stages: tuple[Stage, ...]
    spares: tuple[PeerID, ...] = ()
    era: int = 0
    """Training generation: the number of restarts, either from a snapshot after a loss, or with a new layout from the
    version at which the old one ended. Versions grow within one era only."""
    rollbacks: int = 0
    """Number of eras that began at a snapshot, or at the seed, because state was lost."""
    restore_version: int = 0
    """The version with which this era began; 0: it began with the run's first weights."""
    restore_era: int = 0
    not_started: bool = False
    """No step of this era was committed when the plan was made: members without state start with the era's first
    version."""
    seed: int = 0
    reason: str = ""
    mandate: bytes = b""
    """The owner's permission to make this plan without votes (`sign_mandate`) once a majority is lost; or empty."""
    override_epoch: int = 0
    """Number of mandates so far. Plans are compared by it before term and sequence, so that a mandate overrides every
    plan that peers hold."""
    exclusions: tuple[bytes, ...] = ()
    """Exclusion orders in force. The next plan keeps these, or has orders that name at least as many keys."""
    cutover_version: int = 0
    """The version at which `next_layout` replaces this layout; 0: not set. Under this plan no step from that version on
    is committed. Each member keeps its state of that version for the next holders, and if a step had begun, the next
    layout computes it again."""
    next_layout: tuple[Stage, ...] = ()
    """The next layout's stages; their number and boundaries may differ from `stages`. Their members are members of this
    plan, and all other members become spares. Until `cutover_version` is set, members prefetch, while they train, the
    state that they will need."""
    experts: tuple[ExpertGroup, ...] = ()
    """Expert holders, by stage, then expert. Either all experts are listed, and stages hold the rest of their layers;
    or none is, and stages hold whole layers. Each holder is also a member of some stage, or a spare.

    The holders of one stage, or of one expert of a stage, are a *group*. Groups have numbers: first the K stages; then
    expert j of stage s, of E experts, is group K + s E + j.
    """
    foreseen: Foreseen | None = None
    """Predicted speed of `stages`; None: unknown. It binds nobody; coordinators compare it with the measured speed."""
    formats: Formats | None = None
    """Format of the activations at each cut between stages, one of `WireSpec.forward`, and of each stage's reductions,
    one of `WireSpec.sums`. None: the first format of each of the two lists."""
    certified: tuple[Certified, ...] = ()
    """Versions that the run may restore, each for one group's layers. Members of the previous plan sign new entries."""
    roll: tuple[tuple[int, ...], ...] = ()
    """The voting members' positions in `members`, a tuple for each invite. Empty: all vote, each as its own group."""

    @cached_property
    def members(self) -> tuple[PeerID, ...]:
        """All peers of the plan: holders in stage order, then spares."""
        return tuple(peer for stage in self.stages for peer in stage.peers) + self.spares

    @cached_property
    def groups_on_roll(self) -> tuple[tuple[PeerID, ...], ...]:
        """The members that have a vote (`roll`), grouped by invite."""
        members = self.members
        return tuple(tuple(members[at] for at in group) for group in self.roll) or tuple((peer,) for peer in members)

    @cached_property
    def electors(self) -> tuple[PeerID, ...]:
        """The members that vote on the next plan, in the order of `members`: all on the roll; in a large swarm a part,
        drawn by lot, so that the signatures fit into a message.

        The lot depends on `previous` alone, which neither this plan's nor the next coordinator can choose. With a new
        draw for each ballot, two majorities might have no elector in common.
        """
        on_roll = {peer for group in self.groups_on_roll for peer in group}
        electors = tuple(peer for peer in self.members if peer in on_roll)
        if len(electors) <= ELECTED_FROM_PEERS:
            return electors
        drawn = sorted(electors, key=lambda peer: blake3(f"{self.previous}/{peer}".encode()).digest())
        return tuple(drawn[:ELECTORS])

    @cached_property
    def weights(self) -> dict[PeerID, int]:
        """Elector -> relative weight of its vote.

        Electors of one invite are a group. A group's weight is its number of electors, but with three groups or more at
        most a third of all weight. With two groups there is no cap, so that the run survives the loss of its owner.
        """
        electors = frozenset(self.electors)
        groups = [found for group in self.groups_on_roll if (found := [peer for peer in group if peer in electors])]
        sizes = sorted(map(len, groups), reverse=True)
        if len(sizes) < 3:  # with two groups, a cap would only give each of them a veto
            return dict.fromkeys(electors, 1)
        # Only the two largest groups can exceed a third of the weight. Cap the largest at half the weight of all the
        # others; if the second then also exceeds a third, cap each of the two at the weight of the rest.
        rest = sum(sizes[2:])
        twice_cap = min(sizes[1] + rest, 2 * rest)
        unit = math.lcm(*sizes)
        return {peer: unit * min(2 * len(group), twice_cap) // len(group) for group in groups for peer in group}

    def has(self, peer: PeerID) -> bool:
        """True if `peer` is a member; faster than a search of `members`."""
        return peer in self._everybody

    def dropped_since(self, before: "Plan") -> list[PeerID]:
        """Return the members of the older plan `before` that a plan since then removed, even if they are back.

        A spare without experts counts as removed, since no field of a plan shows if that spare was away.
        """
        back = {
            peer
            for peer, (stage, since) in self._places.items()
            if since > before.sequence and before.stage_of(peer) == stage
        }
        back.update(p for p in set(self.spares).intersection(before.spares) if not self._has_stayed(p, before))
        return sorted((before._everybody - self._everybody) | back)

    def _has_stayed(self, peer: PeerID, before: "Plan") -> bool:
        """True if the peer's entry in one of its groups shows that the peer was in every plan since `before`."""
        seats = self._seats.get(peer, {})
        return any(since <= before.sequence and group in before._seats.get(peer, {}) for group, since in seats.items())

    @cached_property
    def _everybody(self) -> frozenset[PeerID]:
        return frozenset(self.members)

    def stage_of(self, peer: PeerID) -> int | None:
        place = self._places.get(peer)
        return place[0] if place else None

    def since_of(self, peer: PeerID) -> int:
        """Return the sequence of the plan since which `peer` has held its stage; without a stage, this plan's."""
        place = self._places.get(peer)
        return place[1] if place else self.sequence

    @cached_property
    def _places(self) -> dict[PeerID, tuple[int, int]]:
        """Stage member -> (stage, sequence of the plan since which the member holds that stage without a break)."""
        return {m.peer: (index, m.since) for index, stage in enumerate(self.stages) for m in stage.members}

    # --- groups ---

    @property
    def num_experts(self) -> int:
        """Number of placed experts of each layer; 0: none are placed."""
        return len(self.experts) // len(self.stages)

    def expert_group(self, stage: int, expert: int) -> int:
        """Return the group number of an expert of a stage."""
        return len(self.stages) + stage * self.num_experts + expert

    def group_members(self, group: int) -> tuple[Member, ...]:
        """Return the group's members; none if the plan has no such group."""
        stages = len(self.stages)
        if group < stages:
            return self.stages[group].members
        return self.experts[group - stages].members if group < stages + len(self.experts) else ()

    def sums_of(self, group: int) -> WireFormat | None:
        """Return the wire format of the reductions in a group's stage; None: the plan names no formats."""
        stages = len(self.stages)
        if self.formats is None or group >= stages + len(self.experts):
            return None
        return self.formats.sums[group if group < stages else self.experts[group - stages].stage]

    def groups_of(self, peer: PeerID) -> tuple[int, ...]:
        """Return the numbers of the groups of `peer`, in order."""
        return tuple(self._seats.get(peer, ()))

    def since_in(self, peer: PeerID, group: int) -> int:
        """Return the sequence of the plan since which `peer` has been in `group`; if it is not in it, this plan's."""
        return self._seats.get(peer, {}).get(group, self.sequence)

    @cached_property
    def _seats(self) -> dict[PeerID, dict[int, int]]:
        """Member -> number of each of its groups -> sequence of the plan since which the member is in that group."""
        seats: dict[PeerID, dict[int, int]] = {}
        holders = [entry.members for entry in self.stages] + [entry.members for entry in self.experts]
        for group, members in enumerate(holders):
            for member in members:
                seats.setdefault(member.peer, {})[group] = member.since
        return seats

    @property
    def order(self) -> tuple[int, int]:
        """(term, sequence), by which messages to people name a plan; it orders plans of the same `override_epoch`."""
        return (self.term, self.sequence)

    @property
    def height(self) -> tuple[int, int, int]:
        """(override_epoch, term, sequence), a fencing token: a peer obeys only plans higher than all earlier ones."""
        return (self.override_epoch, self.term, self.sequence)


def is_quorum(voters: Collection[PeerID], plan: Plan, owner: PeerID) -> bool:
    """True if `voters` have more than half of the weight of the electors of `plan`.

    With exactly half, the side with the owner wins if there are at most four electors. So any two quorums share an
    elector, as Paxos requires (Gifford, "Weighted voting for replicated data", 1979).
    """
    weights = plan.weights
    twice, total = 2 * sum(weight for peer, weight in weights.items() if peer in voters), sum(weights.values())
    if twice == total and len(weights) <= 4:  # so that one of two peers, the owner, can go on alone
        return owner in voters and owner in weights
    return twice > total


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Plan)


class PlanProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The votes by which a plan became live, all for the same offer."""

    ballot: int
    """The term of the offer: the plan's own, or a later one if another coordinator finished the plan."""
    votes: tuple[tuple[int, bytes], ...]
    """(voter's position among the predecessor's electors, the voter's signature of `vote_body`) for each vote."""


class SignedPlan(msgspec.Struct, frozen=True, dict=True):
    """A plan with its signed bytes; `digest` is the hash by which the next plan names it."""

    plan: Plan
    envelope: bytes
    digest: str
    proof: PlanProof | None = None
    """The plan's votes; None: the plan is not known to be live, or needs no votes."""

    @cached_property
    def link(self) -> bytes:
        """The plan's envelope with its votes, if any: the bytes (a link) in which a live plan travels and is stored."""
        return _ENCODER.encode((self.envelope, self.proof))


_LINK_DECODER = msgspec.msgpack.Decoder(tuple[bytes, PlanProof | None])


def open_link(data: bytes, *, source: PeerID) -> tuple[bytes, PlanProof | None]:
    """Split a link into (plan's envelope, votes or None), both unchecked. Raises: RemoteError: `data` is unreadable."""
    return decoded(_LINK_DECODER, data, source, "an unreadable link of the chain")


def vote_body(ballot: int, digest: str) -> bytes:
    """Return the bytes that an elector signs, as a `vote` statement, to vote for a plan."""
    return _ENCODER.encode((ballot, digest))


def plan_digest(plan: Plan) -> str:
    return _digest(_ENCODER.encode(plan))


def _digest(body: bytes) -> str:
    return blake3(body).hexdigest(length=16)


def sign_plan(identity: Identity, plan: Plan) -> SignedPlan:
    body = _ENCODER.encode(plan)
    envelope = seal(identity, "plan", run=plan.run, term=plan.term, sequence=plan.sequence, body=body)
    return SignedPlan(plan, envelope, _digest(body))


class Mandate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The owner's permission for `coordinator` to make one plan, with this `override_epoch` and `term`, that is live
    without votes.

    The plan follows the one with digest `previous`. If `era` is above 0, the plan begins that era from the snapshots of
    (`restore_era`, `restore_version`); if it is 0, the plan continues the present era.
    """

    override_epoch: int
    term: int
    coordinator: PeerID
    previous: str
    era: int = 0
    restore_era: int = 0
    restore_version: int = 0

    def flaw(self, plan: Plan) -> str:
        """Return why this mandate does not permit `plan`; empty: it permits `plan`."""
        named = (plan.override_epoch, plan.term, plan.coordinator, plan.previous)
        if named != (self.override_epoch, self.term, self.coordinator, self.previous):
            return "has the mandate for another plan"
        beginning = (plan.era, plan.restore_era, plan.restore_version)
        if self.era and beginning != (self.era, self.restore_era, self.restore_version):
            return "does not begin where the owner wants it to"
        return ""


_MANDATE_DECODER = msgspec.msgpack.Decoder(Mandate)


def sign_mandate(owner: Identity, mandate: Mandate, *, run: str) -> bytes:
    return seal(owner, "mandate", run=run, term=mandate.term, sequence=0, body=_ENCODER.encode(mandate))


def open_mandate(data: bytes, *, run: str, owner: PeerID, source: PeerID) -> Mandate:
    """Verify a mandate that `source` sent. Raises: RemoteError: it is unreadable, or the owner did not sign it."""
    envelope = unseal(data, "mandate", run=run, source=source, relayed=True)
    if envelope.sender != owner:
        raise RemoteError(source, "sent a mandate that the run's owner did not sign")
    mandate = decoded(_MANDATE_DECODER, envelope.body, source, "an unreadable mandate")
    if not 0 < mandate.override_epoch <= OVERRIDE_EPOCH_MAX:
        raise RemoteError(source, f"sent a mandate of override epoch {mandate.override_epoch}")
    return mandate


class PlanShape(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that the run spec fixes for every plan of the run."""

    num_layers: int
    num_experts: int = 0
    """Number of placed experts of each layer; 0: members hold whole layers."""
    activations: tuple[WireFormat, ...] = ()
    """`WireSpec.forward`, the formats that plans may use for activations; empty: plans name none."""
    sums: tuple[WireFormat, ...] = ()

    @classmethod
    def of(cls, spec: RunSpec) -> "PlanShape":
        return cls(
            num_layers=spec.model.num_layers,
            num_experts=spec.model.num_experts if spec.swarm.expert_slots else 0,
            activations=spec.wire.forward,
            sums=spec.wire.sums,
        )


def open_plan(data: bytes, *, run: str, owner: PeerID, source: PeerID, shape: PlanShape) -> SignedPlan:
    """Verify and decode a plan that `source` sent; `source` need not be its signer. Votes are not checked here.

    Raises: RemoteError: the plan is unreadable, is not signed by the coordinator that it names, is not of the run's
        `shape`, or has a mandate that `owner` did not sign for it.
    """
    envelope = unseal(data, "plan", run=run, source=source, relayed=True)
    plan = decoded(_DECODER, envelope.body, source, "an unreadable plan")
    if plan.coordinator != envelope.sender or plan.run != run or plan.order != (envelope.term, envelope.sequence):
        raise RemoteError(source, "sent a plan that its signer's envelope contradicts")
    if flaw := plan_flaw(plan, shape):
        raise RemoteError(source, f"sent an impossible plan: {flaw}")
    if plan.mandate and (flaw := open_mandate(plan.mandate, run=run, owner=owner, source=source).flaw(plan)):
        raise RemoteError(source, f"sent a plan that {flaw}")
    return SignedPlan(plan, data, _digest(envelope.body))


def plan_flaw(plan: Plan, shape: PlanShape) -> str | None:
    """Return why the plan is impossible; None: the plan is possible, and safe to obey whatever its numbers are."""
    return (
        _numbers_flaw(plan)
        or _peers_flaw(plan)
        or _stages_flaw(plan.stages, plan.sequence, shape)
        or _next_layout_flaw(plan, shape)
        or _roll_flaw(plan)
        or _foreseen_flaw(plan.foreseen, len(plan.stages))
        or _formats_flaw(plan.formats, len(plan.stages), shape)
        or _exclusions_flaw(plan)
        or _experts_flaw(plan, shape.num_experts)
    )


def _peers_flaw(plan: Plan) -> str | None:
    if len(plan.members) > PEERS_MAX or len(set(plan.members)) != len(plan.members):
        return "it names a peer twice, or too many peers"
    if not all(0 < len(peer) <= PEER_ID_CHARS_MAX for peer in plan.members):
        return "it names a member by an ID that is too long, or empty"
    return None


def _exclusions_flaw(plan: Plan) -> str | None:
    if len(plan.exclusions) > EXCLUSIONS_MAX or sum(map(len, plan.exclusions)) > EXCLUSION_BYTES_MAX:
        return f"{len(plan.exclusions)} exclusions, or too long ones"
    return None


def _formats_flaw(formats: Formats | None, num_stages: int, shape: PlanShape) -> str | None:
    if formats is None:
        return None
    activations, sums = formats
    if (len(activations), len(sums)) != (num_stages - 1, num_stages):
        return f"{len(activations)} cuts and {len(sums)} reductions have formats, of {num_stages} stages"
    for what, forms, allowed in (("activations", activations, shape.activations), ("reductions", sums, shape.sums)):
        other = next((form for form in forms if form not in allowed), None)
        if other is not None:
            return f"{what} travel in {other}, the run's in {' or '.join(allowed)}"
    return None


def _numbers_flaw(plan: Plan) -> str | None:
    if not (
        0 <= plan.override_epoch <= OVERRIDE_EPOCH_MAX
        and 0 < plan.term <= TERM_MAX
        and 0 < plan.sequence <= SEQUENCE_MAX
    ):
        return f"no run comes to term {plan.term} and sequence {plan.sequence} of override epoch {plan.override_epoch}"
    if not 0 <= plan.rollbacks <= plan.era:
        return f"no run goes back {plan.rollbacks} times by era {plan.era}"
    if not (0 <= plan.era <= ERA_MAX and 0 <= plan.restore_version <= VERSION_MAX and 0 <= plan.seed <= SEQUENCE_MAX):
        return f"no run comes to era {plan.era}, version {plan.restore_version} or seed {plan.seed}"
    if not 0 <= plan.restore_era <= max(0, plan.era - 1):
        return f"era {plan.era} does not begin at version {plan.restore_version} of era {plan.restore_era}"
    if plan.mandate and not plan.override_epoch:
        return "it has a mandate and no override epoch"
    return None


def _stages_flaw(stages: tuple[Stage, ...], sequence: int, shape: PlanShape) -> str | None:
    if not 0 < len(stages) <= STAGES_MAX:
        return f"{len(stages)} stages"
    at = 0
    for index, stage in enumerate(stages):
        if stage.first_layer != at or stage.last_layer <= at:
            return f"stage {index} does not begin where the one before ends"
        if flaw := _members_flaw(stage.members, sequence):
            return f"stage {index} {flaw}"
        at = stage.last_layer
    return f"it covers {at} of {shape.num_layers} layers" if at != shape.num_layers else None


def _next_layout_flaw(plan: Plan, shape: PlanShape) -> str | None:
    if not plan.next_layout:
        return "it has an end and no following layout" if plan.cutover_version else None
    if plan.cutover_version and not plan.restore_version <= plan.cutover_version <= VERSION_MAX:
        return f"it ends at version {plan.cutover_version}"
    peers = [peer for stage in plan.next_layout for peer in stage.peers]
    if len(set(peers)) != len(peers) or not all(plan.has(peer) for peer in peers):
        return "its following layout names a peer twice, or one that is no member"
    flaw = _stages_flaw(plan.next_layout, plan.sequence, shape)
    return f"its following layout is impossible: {flaw}" if flaw else None


def _roll_flaw(plan: Plan) -> str | None:
    named = [at for group in plan.roll for at in group]
    if not all(plan.roll) or len(set(named)) != len(named) or not all(0 <= at < len(plan.members) for at in named):
        return "its roll names a member twice, or a peer that is no member"
    return None


def _foreseen_flaw(foreseen: Foreseen | None, num_stages: int) -> str | None:
    if foreseen is None:
        return None
    if not 1.0 / FORESEEN_MAX <= foreseen.tokens_per_s <= FORESEEN_MAX:
        return f"it foresees {foreseen.tokens_per_s} tokens/s"
    return None if 0 <= foreseen.stage < num_stages else f"it foresees that stage {foreseen.stage} bounds it"


def _members_flaw(members: tuple[Member, ...], sequence: int) -> str | None:
    if not members:
        return "has no member"
    if not all(m.share > 0 and m.bandwidth > 0 and m.share + m.bandwidth < 1e18 for m in members):
        return "has a share that is not a positive number"
    if not all(0 <= m.since <= sequence for m in members):
        return "has a member with a place since a later plan"
    return None


def _experts_flaw(plan: Plan, num_experts: int) -> str | None:
    if len(plan.experts) != num_experts * len(plan.stages):
        return f"{len(plan.experts)} groups of experts for {len(plan.stages)} stages"
    for number, entry in enumerate(plan.experts):
        if (entry.stage, entry.expert) != divmod(number, plan.num_experts):
            return f"expert {entry.expert} of stage {entry.stage} is not in its place"
        if flaw := _members_flaw(entry.members, plan.sequence):
            return f"expert {entry.expert} of stage {entry.stage} {flaw}"
        if len(set(entry.peers)) != len(entry.peers) or not all(plan.has(peer) for peer in entry.peers):
            return f"expert {entry.expert} of stage {entry.stage} is held by a peer twice, or by one that is no member"
    return None
