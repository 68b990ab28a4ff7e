"""Decides when a stage has lost its state, where the next era begins, and to which versions a run may go back. Pure.

An era is a generation of the training state; versions grow within it. It ends when the layers are divided into other
stages, or when no peer holds a stage's state any more: at once if all its holders are dead, after three heartbeats if
one lives and may be downloading the state. After a loss the next era begins from the newest snapshot that is complete
on the disks of the remaining peers, or from the run's seed. An era number is never reused, because data on disks or in
flight under the old number belongs to another history.

The era's first plan is `not_started`: members without state start from the era's beginning. After the first commit
comes a plan without that flag, so that a peer that restarts or joins late downloads the state. If absent peers' disks
could complete a newer snapshot, the run waits for them: thirty heartbeats, or as long as training the same steps again
would take if that is longer. A swarm that was switched off as a whole recovers by the same rule.

A run may only go back to a version that a majority of each layer group has signed. A coordinator collects the
signatures (attestations) in its members' heartbeats. Its next plan contains each version that a majority of a group has
signed, from at least two invites if the group's members joined by several. Voters check the signatures.
`protocol/certificate.py` defines the signed bytes."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from shoal.coordinator.allocate.interface import Beginning, Layout
from shoal.coordinator.roster import Roster
from shoal.protocol.certificate import Attested, Certified, Proofs, jury, layers_at
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys, held_keys
from shoal.protocol.limits import ERA_JUMP_MAX, ERA_MAX
from shoal.protocol.messages import Holding
from shoal.protocol.plan import Plan
from shoal.protocol.spec import ModelSpec
from shoal.protocol.statement import VerifySignature

PATIENCE_HEARTBEATS = 3.0
"""State that no living member reports counts as lost after this time: a member may still be downloading it.
A coordinator that has waited in vain for disks keeps the role this much longer, to make the plan without them."""
MISSING_HEARTBEATS = 30.0
"""Minimum wait for absent peers' disks that would make a newer snapshot complete."""
SAFE_COPIES = 2
"""Each layer of a snapshot must be on this many disks before older snapshots may be deleted."""
AreEnough = Callable[[Set[PeerID], Sequence[PeerID]], bool]
"""(signers, all members that may sign) -> True if these signers can certify a version (`Electorate.are_enough`)."""

KEPT = 2
"""A plan lists this many complete versions, as many as each peer keeps of each layer group on disk."""
ATTESTED_MAX = 4
"""Maximum number of versions of one layer group that one member may attest before one of them is certified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCatalog:
    """The snapshots on disks. `parts`: (era, version) of a snapshot -> peer -> its layers on that peer's disk."""

    parts: Mapping[tuple[int, int], Mapping[PeerID, frozenset[str]]]

    @classmethod
    def of(cls, holdings: Iterable[tuple[PeerID, Sequence[Holding]]]) -> "CheckpointCatalog":
        """Collect the holdings that peers report. Skip version 0, which the seed can rebuild."""
        parts: dict[tuple[int, int], dict[PeerID, frozenset[str]]] = {}
        for peer, held in holdings:
            for holding in held:
                if holding.version > 0 and 0 <= holding.era < ERA_MAX:
                    by_peer = parts.setdefault((holding.era, holding.version), {})
                    by_peer[peer] = by_peer.get(peer, frozenset()) | frozenset(holding.layers)
        return cls(parts=parts)

    def only(self, certified: Callable[[tuple[int, int]], frozenset[str] | None]) -> "CheckpointCatalog":
        """Return only certified layers. Args: certified: (era, version) -> its certified layers; None: all layers."""
        parts: dict[tuple[int, int], dict[PeerID, frozenset[str]]] = {}
        for age, by_peer in self.parts.items():
            sound = certified(age)
            kept = {peer: held if sound is None else held & sound for peer, held in by_peer.items()}
            if kept := {peer: held for peer, held in kept.items() if held}:
                parts[age] = kept
        return CheckpointCatalog(parts=parts)

    @property
    def newest(self) -> tuple[int, int] | None:
        """The last (era, version) with any layer on a disk."""
        return max(self.parts, default=None)

    @property
    def era_max(self) -> int:
        return max((era for era, _ in self.parts), default=-1)

    def layers(self, snapshot: tuple[int, int]) -> frozenset[str]:
        """Return the layers of `snapshot` that are on any disk."""
        return frozenset().union(*self.parts.get(snapshot, {}).values())

    def covers(self, snapshot: tuple[int, int], layers: Iterable[str]) -> bool:
        """True if each of `layers` of `snapshot` is on some disk."""
        return self.layers(snapshot).issuperset(layers)

    def newest_whole(self, layers: Collection[str]) -> tuple[int, int] | None:
        """Return the last (era, version) with every layer on a disk."""
        return next((snapshot for snapshot in sorted(self.parts, reverse=True) if self.covers(snapshot, layers)), None)

    def newest_safe(self, layers: Collection[str]) -> tuple[int, int] | None:
        """Return the newest (era, version) with each layer on `SAFE_COPIES` disks or more; no older one is needed."""
        for snapshot in sorted(self.parts, reverse=True):
            copies = Counter(layer for held in self.parts[snapshot].values() for layer in held)
            if all(copies[layer] >= SAFE_COPIES for layer in layers):
                return snapshot
        return None


class HolderWatch:
    """Tracks, for each stage and each placed expert, since when no peer has held its state."""

    def __init__(self, heartbeat_s: float, now_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._begun_s = now_s
        self._held: dict[int, tuple[float, frozenset[PeerID]]] = {}
        self._lost_s: float | None = None
        self._wait_s = 0.0

    def lost(
        self,
        plan: Plan,
        holders: Sequence[frozenset[PeerID]],
        alive: Collection[PeerID],
        now_s: float,
        *,
        behind: Collection[int] = (),
    ) -> tuple[int, ...]:
        """Return the groups of `plan` with lost state, which only a roll-back can restore.

        Args:
            holders: for each group, the peers that hold its state now, or can rebuild it alone.
            behind: groups with state that a living peer reports, but so far at a version that is too old to count.
        """
        lost = []
        for index in range(len(plan.stages) + len(plan.experts)):
            if holders[index]:
                self._held[index] = now_s, holders[index]
                continue
            last_s, former = self._held.get(index, (self._begun_s, _members(plan, index)))
            # A restarted peer has lost the state in its memory.
            has_died = former.isdisjoint(alive) and index not in behind
            if now_s >= last_s + PATIENCE_HEARTBEATS * self._heartbeat_s or has_died:
                lost.append(index)
        if not lost:
            self._lost_s = None
        return tuple(lost)

    def is_hopeless(self, now_s: float, *, relearn_s: float = 0.0) -> bool:
        """True if the wait for absent disks is over, which lasts `MISSING_HEARTBEATS` or, if longer, `relearn_s`. Call
        only while a stage has lost its state. Args: relearn_s: the time to train the steps on absent disks again. So a
        vain wait costs about as much as a roll-back that waiting would have spared."""
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self._wait_s = max(MISSING_HEARTBEATS * self._heartbeat_s, relearn_s)
        return now_s >= self._lost_s + self._wait_s

    def is_waiting(self, now_s: float) -> bool:
        """True during the wait for absent disks, and for `PATIENCE_HEARTBEATS` after it."""
        if self._lost_s is None:
            return False
        return now_s < self._lost_s + self._wait_s + PATIENCE_HEARTBEATS * self._heartbeat_s


def disks_of(roster: Roster, now_s: float, *, among: Layout | None) -> CheckpointCatalog:
    """Return the snapshots on live peers' disks, and the last layout's state that they keep in memory for new holders.
    Args: among: only peers that a plan with this layout would reach; None: all."""
    peers = roster.alive(now_s)
    if among is not None:
        members = {*among.spares, *(peer for stage in among.stages for peer in stage.peers)}
        peers = tuple(peer for peer in peers if peer in members)
    beats = roster.beats(peers)
    carried = ((peer, (*beat.holdings, *([beat.carried] if beat.carried else ()))) for peer, beat in beats)
    return CheckpointCatalog.of(carried)


def holders(
    live: Plan, roster: Roster, catalog: CheckpointCatalog, model: ModelSpec, *, not_started: bool, now_s: float
) -> list[frozenset[PeerID]]:
    """Return, for each group, the peers that hold its state or, under a `not_started` plan, can rebuild it."""
    floor = _version_min(live, catalog, model)
    holding: dict[int, set[PeerID]] = {}
    for peer, group, version in _said(live, roster, now_s):
        if version >= floor:
            holding.setdefault(group, set()).add(peer)
    num_stages = len(live.stages)
    stored = catalog.layers((live.restore_era, live.restore_version)) if not_started else frozenset()
    found = []
    for index in range(num_stages + len(live.experts)):
        begins = not_started and (live.restore_version == 0 or stored.issuperset(group_keys(model, live, index)))
        found.append(_members(live, index) if begins else frozenset(holding.get(index, ())))
    return found


def behind(live: Plan, roster: Roster, catalog: CheckpointCatalog, model: ModelSpec, now_s: float) -> frozenset[int]:
    """Return the groups with state that a living peer reports, but at a version that is too old to count."""
    floor = _version_min(live, catalog, model)
    return frozenset(group for _, group, version in _said(live, roster, now_s) if version < floor)


def _version_min(live: Plan, catalog: CheckpointCatalog, model: ModelSpec) -> int:
    """Return the lowest version at which a group's state counts: one below the newest complete snapshot of the era, or
    the version at which the era began if that is higher. One commit behind is possible: a peer committed and crashed
    before it sent its sums. An older state shows that its peer has restarted the era on its own."""
    snapshot = catalog.newest_whole(held_keys(model, placed=bool(live.experts)))
    if snapshot is None or snapshot[0] != live.era:
        return live.restore_version
    return max(live.restore_version, snapshot[1] - 1)


def _said(live: Plan, roster: Roster, now_s: float) -> Iterator[tuple[PeerID, int, int]]:
    """Yield (peer, group, version) of all state that living peers report in this era."""
    num_stages = len(live.stages)
    # one pass: a loop over groups is too slow for a thousand peers with hundreds of groups
    for peer, beat in roster.beats(roster.alive(now_s)):
        if beat.era != live.era:
            continue
        if beat.synced and beat.stage is not None and beat.stage < num_stages:
            yield peer, beat.stage, beat.version
        for group, version in beat.held:
            if group >= num_stages:
                yield peer, group, version


def is_last_holder(peer: PeerID, plan: Plan, held: Sequence[frozenset[PeerID]]) -> bool:
    """True if only `peer` holds the state of some group. Args: held: for each group, its holders (`holders`)."""
    return any((now or _members(plan, group)) == {peer} for group, now in enumerate(held))


def group_name(plan: Plan, group: int) -> str:
    if group < len(plan.stages):
        return f"stage {group}"
    entry = plan.experts[group - len(plan.stages)]
    return f"expert {entry.expert} of stage {entry.stage}"


def _members(plan: Plan, group: int) -> frozenset[PeerID]:
    return frozenset(member.peer for member in plan.group_members(group))


def next_beginning(
    live: Plan | None, roster: Roster, catalog: CheckpointCatalog, model: ModelSpec, *, placed: bool
) -> Beginning:
    """Return the beginning of the next era: the newest complete snapshot in `catalog`, else version 0. The new era's
    number is above all reported ones."""
    heard = (beat.era for _, beat in roster.beats(roster.presences))
    last = live.era if live else 0
    # A later era is not believed: no peer would follow a plan with such a jump.
    era_max = (last + ERA_JUMP_MAX if live else ERA_MAX) - 1
    era = 1 + max(last, *(era for era in (*heard, *(era for era, _ in catalog.parts)) if era <= era_max), 0)
    from_era, version = catalog.newest_whole(held_keys(model, placed=placed)) or (0, 0)
    return Beginning(era=era, version=version, from_era=from_era)


# --- certificates ---


class Certificates:
    """Collects members' signatures of versions, and knows which versions the live plan certifies or the next plan can.
    Args: placed: True if plans assign experts to members."""

    def __init__(self, model: ModelSpec, *, placed: bool, are_enough: AreEnough) -> None:
        self._are_enough = are_enough
        self._model, self._wanted = model, frozenset(held_keys(model, placed=placed))
        self._plan: Plan | None = None
        self._said: dict[tuple[tuple[str, ...], PeerID], dict[tuple[int, int], Attested]] = {}
        """(layers of a group, member) -> {(era, version): what the member attests, with a valid signature}."""
        self._known: frozenset[tuple[tuple[int, int], tuple[str, ...]]] = frozenset()
        """((era, version), layers of a group) of each certificate in the live plan."""
        self._new: tuple[Certified, ...] = ()

    def obey(self, plan: Plan) -> None:
        """Record a live plan, and drop attestations that no later plan needs."""
        self._plan = plan
        self._known = frozenset((entry.age, entry.keys) for entry in plan.certified)
        for (keys, peer), said in list(self._said.items()):
            self._said[keys, peer] = {age: word for age, word in said.items() if (age, keys) not in self._known}
            if not self._said[keys, peer]:
                del self._said[keys, peer]
        self._new = tuple(self._proven(plan))

    def hear(self, peer: PeerID, attested: Iterable[Attested], *, verify: VerifySignature) -> None:
        """Count attestations of `peer` for its own layers. Ignore those for other layers, and invalid ones."""
        plan = self._plan
        if plan is None:
            return
        groups = {group_keys(self._model, plan, group) for group in plan.groups_of(peer)}
        is_news = False
        for word in attested:
            age, keys = (word.era, word.version), word.keys
            if keys not in groups or (age, keys) in self._known or word.era > plan.era or word.version <= 0:
                continue
            said = self._said.setdefault((keys, peer), {})
            if said.get(age) == word or not verify(peer, word.signature, word.body):
                continue
            said[age] = word
            if len(said) > ATTESTED_MAX:
                del said[min(said)]
            is_news = True
        if is_news:
            self._new = tuple(self._proven(plan))

    @property
    def is_due(self) -> bool:
        """True if a plan could certify a complete version that is newer than those of the live plan."""
        return self._plan is not None and self.newest > _newest(self._plan.certified, self._wanted)

    @property
    def newest(self) -> tuple[int, int]:
        """(era, version) of the newest version with all layers certified; (0, 0): none."""
        return _newest(self._all, self._wanted)

    @property
    def are_any(self) -> bool:
        return bool(self._all)

    def layers(self, age: tuple[int, int]) -> frozenset[str] | None:
        """Return the layers certified at (era, version); None before the first plan, when nothing can be certified."""
        return None if self._plan is None else frozenset(layers_at(self._all, age))

    def are_possible(self, held: Sequence[frozenset[PeerID]]) -> bool:
        """True if in every group enough members hold the state to certify its next version; a member that still
        downloads its state cannot sign. Args: held: for each group, the peers that hold its state (`holders`)."""
        plan = self._plan
        return plan is not None and all(
            self._are_enough(set(peers), jury([member.peer for member in plan.group_members(group)], plan.previous))
            for group, peers in enumerate(held)
        )

    def for_plan(self, restored: tuple[int, int]) -> tuple[Certified, ...]:
        """Return the certificates of the next plan: the newest complete versions, everything newer, and the version at
        which the plan's era began (`restored`)."""
        whole = sorted(_whole(self._all, self._wanted))[-KEPT:]
        oldest = min(whole, default=(-1, 0))
        kept = (entry for entry in self._all if entry.age >= oldest or entry.age == restored)
        return tuple(sorted(kept, key=lambda entry: (entry.age, entry.keys)))

    @property
    def _all(self) -> tuple[Certified, ...]:
        known = tuple(entry.bare for entry in self._plan.certified) if self._plan is not None else ()
        return known + self._new

    def _proven(self, plan: Plan) -> Iterator[Certified]:
        """Yield a certificate for each version that a majority of its group's jury (possible signers) has signed."""
        heard = {keys for keys, _ in self._said}
        for group in range(len(plan.stages) + len(plan.experts)):
            keys = group_keys(self._model, plan, group)
            if keys not in heard:
                continue
            signers = jury([member.peer for member in plan.group_members(group)], plan.previous)
            votes: dict[tuple[tuple[int, int], Proofs], list[tuple[int, bytes]]] = {}
            for at, peer in enumerate(signers):
                for age, word in self._said.get((keys, peer), {}).items():
                    votes.setdefault((age, word.proofs), []).append((at, word.signature))
            for ((era, version), proofs), signatures in votes.items():
                if self._are_enough({signers[at] for at, _ in signatures}, signers):
                    yield Certified(era, version, proofs, tuple(signatures))


def _whole(entries: Iterable[Certified], wanted: frozenset[str]) -> list[tuple[int, int]]:
    """Return each (era, version) at which all the wanted layers are certified."""
    found: dict[tuple[int, int], set[str]] = {}
    for entry in entries:
        found.setdefault(entry.age, set()).update(entry.keys)
    return [age for age, keys in found.items() if keys >= wanted]


def _newest(entries: Iterable[Certified], wanted: frozenset[str]) -> tuple[int, int]:
    return max(_whole(entries, wanted), default=(0, 0))


def certified_flaw(plan: Plan, base: Plan, model: ModelSpec, *, verify: VerifySignature, are_enough: AreEnough) -> str:
    """Say what is wrong with the certificates of `plan`, the successor of `base`; empty: nothing. A certificate may
    lack signatures, the newest may be missing, or the era may begin at an uncertified version."""
    newest, wanted = newest_whole(base, model)
    if _newest(plan.certified, wanted) < newest:
        return f"version {newest[1]} of era {newest[0]} is no longer certified"
    known = {entry.bare for entry in base.certified}
    for entry in plan.certified:
        if entry.bare not in known and (flaw := _signatures_flaw(entry, base, model, verify, are_enough)):
            return flaw
    at = plan.restore_era, plan.restore_version
    if plan.era == base.era or plan.mandate:
        return ""
    if plan.restore_version > 0 and not layers_at(plan.certified, at).keys() >= wanted:
        return f"era {plan.era} begins at version {at[1]} of era {at[0]}, which is not certified"
    return ""


def newest_whole(plan: Plan, model: ModelSpec) -> tuple[tuple[int, int], frozenset[str]]:
    """Return ((era, version), all layers): the newest version with every layer certified by `plan`; (0, 0): none."""
    wanted = frozenset(held_keys(model, placed=bool(plan.experts)))
    return _newest(plan.certified, wanted), wanted


def _signatures_flaw(
    entry: Certified, base: Plan, model: ModelSpec, verify: VerifySignature, are_enough: AreEnough
) -> str:
    groups = range(len(base.stages) + len(base.experts))
    group = next((group for group in groups if group_keys(model, base, group) == entry.keys), None)
    what = f"version {entry.version} of {entry.keys[0] if entry.keys else 'nothing'}"
    if group is None:
        return f"{what} is certified, but no group holds these layers"
    signers = jury([member.peer for member in base.group_members(group)], base.previous)
    places = ((signers[at], sign) for at, sign in entry.signatures if 0 <= at < len(signers))
    signed = {peer for peer, sign in places if verify(peer, sign, entry.body)}
    if not are_enough(signed, signers):
        return (
            f"{len(signed)} of {len(signers)} members have signed {what}, which is no majority, or of one invite alone"
        )
    return ""
