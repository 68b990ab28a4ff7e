"""The plan: who holds which layers, one link of a signed chain.

Each plan names its term, its sequence and the hash of the plan before it, and is signed by the term's coordinator.
Peers persist the highest they have seen and refuse anything lower, so a coordinator that wakes up after its term
(or a replayed plan) is obeyed by nobody.
"""

from functools import cached_property

import msgspec
from blake3 import blake3

from shoal.protocol.envelope import seal, unseal
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import PEERS_MAX, STAGES_MAX


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A replica: `share` of its stage's traffic and `bandwidth`, its share of the reduction (both > 0, relative)."""

    peer: PeerID
    share: float
    bandwidth: float
    since: int = 0
    """Sequence of the plan that gave it this place, without a break until now. Who has missed plans sees by this
    whether it was counted out meanwhile: its mates went on without it, so its state may be another than theirs."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, dict=True):
    """Decoder layers [first_layer, last_layer) and who holds them; the member's position is its rank."""

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
    """Expert `expert` of all layers of stage `stage`, and who holds it; the member's position is its rank."""

    stage: int
    expert: int
    members: tuple[Member, ...]

    @cached_property
    def peers(self) -> tuple[PeerID, ...]:
        return tuple(member.peer for member in self.members)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Stages in pipeline order. `sequence` counts plans of the run, over all terms, from 1."""

    run: str
    term: int
    sequence: int
    previous: str
    """Hash of the plan before; empty for the first."""
    coordinator: PeerID
    stages: tuple[Stage, ...]
    spares: tuple[PeerID, ...] = ()
    era: int = 0
    """How often the run has gone back to a snapshot. Versions grow within an era only."""
    restore_version: int = 0
    """The version at which this era began; 0: from the run's seed."""
    restore_era: int = 0
    """The era of the snapshots that it began from."""
    fresh: bool = False
    """No version had been committed in this era when it was made: members without state begin from its beginning."""
    seed: int = 0
    reason: str = ""
    mandate: bytes = b""
    """The owner's leave to the coordinator to make this plan without votes (`sign_mandate`): the plan before it has
    lost its majority. Empty in every other plan."""
    experts: tuple[ExpertGroup, ...] = ()
    """By stage, then expert: all of them, and stages hold the rest of their layers; or none, and stages hold whole
    layers. Holders are members of the plan already, of that stage or not.

    Who holds one thing is a *group*, and has a number: stages come first, expert j of stage s is K + s E + j."""

    @cached_property
    def members(self) -> tuple[PeerID, ...]:
        """Everyone who votes on the next plan: holders in stage order, then spares."""
        return tuple(peer for stage in self.stages for peer in stage.peers) + self.spares

    def has(self, peer: PeerID) -> bool:
        """Whether it is a member; `members` would be searched from end to end."""
        return peer in self._everybody

    def dropped_since(self, before: "Plan") -> list[PeerID]:
        """Members of `before` whom it, or a plan in between, has counted out, though they may be back in their place.

        Of spares nobody can tell whether they were away, unless they hold experts, so they count as such.
        """
        back = {
            peer
            for peer, (stage, since) in self._places.items()
            if since > before.sequence and before.stage_of(peer) == stage
        }
        back.update(p for p in set(self.spares).intersection(before.spares) if not self._has_stayed(p, before))
        return sorted((before._everybody - self._everybody) | back)

    def _has_stayed(self, peer: PeerID, before: "Plan") -> bool:
        """One of its places shows that it was in every plan since."""
        seats = self._seats.get(peer, {})
        return any(since <= before.sequence and group in before._seats.get(peer, {}) for group, since in seats.items())

    @cached_property
    def _everybody(self) -> frozenset[PeerID]:
        return frozenset(self.members)

    def stage_of(self, peer: PeerID) -> int | None:
        place = self._places.get(peer)
        return place[0] if place else None

    def since_of(self, peer: PeerID) -> int:
        """Since which plan it holds its place; this one's sequence if it holds none."""
        place = self._places.get(peer)
        return place[1] if place else self.sequence

    @cached_property
    def _places(self) -> dict[PeerID, tuple[int, int]]:
        """Who holds a stage -> (which, since which plan)."""
        return {m.peer: (index, m.since) for index, stage in enumerate(self.stages) for m in stage.members}

    # --- groups ---

    @property
    def num_experts(self) -> int:
        """Of each layer, that are placed; 0: none are."""
        return len(self.experts) // len(self.stages)

    def expert_group(self, stage: int, expert: int) -> int:
        """Its number."""
        return len(self.stages) + stage * self.num_experts + expert

    def group_members(self, group: int) -> tuple[Member, ...]:
        """None of a group that the plan has not."""
        stages = len(self.stages)
        if group < stages:
            return self.stages[group].members
        return self.experts[group - stages].members if group < stages + len(self.experts) else ()

    def groups_of(self, peer: PeerID) -> tuple[int, ...]:
        """Those that it is a member of, in order."""
        return tuple(self._seats.get(peer, ()))

    def since_in(self, peer: PeerID, group: int) -> int:
        """Since which plan it is a member of the group; this one's sequence if it is none."""
        return self._seats.get(peer, {}).get(group, self.sequence)

    @cached_property
    def _seats(self) -> dict[PeerID, dict[int, int]]:
        """Who is a member of a group -> which, and since which plan."""
        seats: dict[PeerID, dict[int, int]] = {}
        holders = [entry.members for entry in self.stages] + [entry.members for entry in self.experts]
        for group, members in enumerate(holders):
            for member in members:
                seats.setdefault(member.peer, {})[group] = member.since
        return seats

    @property
    def order(self) -> tuple[int, int]:
        """Fencing: a peer obeys only plans of a higher order than all it has obeyed."""
        return (self.term, self.sequence)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Plan)


class SignedPlan(msgspec.Struct, frozen=True):
    """A plan with the very bytes that were signed; `digest` is the hash that the next plan names."""

    plan: Plan
    envelope: bytes
    digest: str


def plan_digest(plan: Plan) -> str:
    return blake3(_ENCODER.encode(plan)).hexdigest(length=16)


def sign_plan(identity: Identity, plan: Plan) -> SignedPlan:
    body = _ENCODER.encode(plan)
    envelope = seal(identity, "plan", run=plan.run, term=plan.term, sequence=plan.sequence, body=body)
    return SignedPlan(plan, envelope, blake3(body).hexdigest(length=16))


class _Mandate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Run and term are in the envelope that it is signed with."""

    coordinator: PeerID


_MANDATE_DECODER = msgspec.msgpack.Decoder(_Mandate)


def sign_mandate(owner: Identity, *, run: str, term: int, coordinator: PeerID) -> bytes:
    """The run's owner lets `coordinator` make a plan of `term` that is live without votes."""
    return seal(owner, "mandate", run=run, term=term, sequence=0, body=_ENCODER.encode(_Mandate(coordinator)))


def open_mandate(data: bytes, *, run: str, owner: PeerID, source: PeerID) -> tuple[int, PeerID]:
    """Verify a mandate that `source` handed us.

    Returns: (term, coordinator).
    Raises: RemoteError: unreadable, or not signed by `owner` for this run.
    """
    envelope = unseal(data, "mandate", run=run, source=source, relayed=True)
    if envelope.sender != owner:
        raise RemoteError(source, "sent a mandate that the run's owner did not sign")
    try:
        return envelope.term, _MANDATE_DECODER.decode(envelope.body).coordinator
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(source, f"sent an unreadable mandate ({error})") from error


def open_plan(
    data: bytes, *, run: str, owner: PeerID, source: PeerID, num_layers: int, num_experts: int = 0
) -> SignedPlan:
    """Verify and decode a plan that `source` handed us (it need not be the signer).

    Raises: RemoteError: unreadable, not signed by the coordinator it names, not a partition of the layers, or with a
        mandate that `owner` did not sign for this term and coordinator.
    """
    envelope = unseal(data, "plan", run=run, source=source, relayed=True)
    try:
        plan = _DECODER.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(source, f"sent an unreadable plan ({error})") from error
    if plan.coordinator != envelope.sender or plan.run != run or plan.order != (envelope.term, envelope.sequence):
        raise RemoteError(source, "sent a plan that its signer's envelope contradicts")
    flaw = plan_flaw(plan, num_layers=num_layers, num_experts=num_experts)
    if flaw:
        raise RemoteError(source, f"sent an impossible plan: {flaw}")
    if plan.mandate:
        mandated = open_mandate(plan.mandate, run=run, owner=owner, source=source)
        if mandated != (plan.term, plan.coordinator):
            raise RemoteError(source, "sent a plan with the mandate for another")
    return SignedPlan(plan, data, blake3(envelope.body).hexdigest(length=16))


def plan_flaw(plan: Plan, *, num_layers: int, num_experts: int = 0) -> str | None:
    """Why the plan cannot be right, or None. `num_experts`: of a layer of the run's model."""
    if not 0 < len(plan.stages) <= STAGES_MAX:
        return f"{len(plan.stages)} stages"
    if len(plan.members) > PEERS_MAX or len(set(plan.members)) != len(plan.members):
        return "a peer stands in it twice, or too many peers"
    if not (0 <= plan.restore_era <= max(0, plan.era - 1) and plan.restore_version >= 0):
        return f"era {plan.era} does not begin at version {plan.restore_version} of era {plan.restore_era}"
    at = 0
    for index, stage in enumerate(plan.stages):
        if stage.first_layer != at or stage.last_layer <= at:
            return f"stage {index} does not begin where the one before ends"
        flaw = _members_flaw(stage.members, plan.sequence)
        if flaw:
            return f"stage {index} {flaw}"
        at = stage.last_layer
    return _experts_flaw(plan, num_experts) if at == num_layers else f"it covers {at} of {num_layers} layers"


def _members_flaw(members: tuple[Member, ...], sequence: int) -> str | None:
    if not members:
        return "has no member"
    if not all(m.share > 0 and m.bandwidth > 0 and m.share + m.bandwidth < 1e18 for m in members):
        return "has a share that is not a positive number"
    if not all(0 <= m.since <= sequence for m in members):
        return "has a member that holds its place since a plan to come"
    return None


def _experts_flaw(plan: Plan, num_experts: int) -> str | None:
    if len(plan.experts) not in (0, num_experts * len(plan.stages)):
        return f"{len(plan.experts)} groups of experts for {len(plan.stages)} stages"
    for number, entry in enumerate(plan.experts):
        if (entry.stage, entry.expert) != divmod(number, plan.num_experts):
            return f"expert {entry.expert} of stage {entry.stage} is not in its place"
        flaw = _members_flaw(entry.members, plan.sequence)
        if flaw:
            return f"expert {entry.expert} of stage {entry.stage} {flaw}"
        if len(set(entry.peers)) != len(entry.peers) or not all(plan.has(peer) for peer in entry.peers):
            return f"expert {entry.expert} of stage {entry.stage} is held by a peer twice, or by one that is no member"
    return None
