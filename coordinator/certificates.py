"""Decides to which versions a run may roll back: a majority of each layer group must have signed them. Pure.

A coordinator collects the attestations in its members' heartbeats, and its next plan contains what a majority of a
group has signed, from at least two invites if its members joined by several. Voters check the signatures.
`protocol/certificate.py` defines the signed bytes."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from shoal.protocol.certificate import Attested, Certified, Proofs, jury, layers_at
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys, held_keys
from shoal.protocol.plan import Plan
from shoal.protocol.spec import ModelSpec
from shoal.protocol.statement import VerifySignature

AreEnough = Callable[[Set[PeerID], Sequence[PeerID]], bool]
"""(members of a jury that have signed, the jury) -> whether this certifies a version (`Electorate.are_enough`)."""

KEPT = 2
"""Plans keep this many complete versions, as many as each peer keeps of each layer group on disk."""
ATTESTED_MAX = 4
"""Maximum number of versions of one layer group that one member may attest before one of them is certified."""


class Certificates:
    """Versions that the live plan certifies, or that the next plan can. Args: placed: plans assign experts to
    members."""

    def __init__(self, model: ModelSpec, *, placed: bool, are_enough: AreEnough) -> None:
        self._are_enough = are_enough
        self._model, self._wanted = model, frozenset(held_keys(model, placed=placed))
        self._plan: Plan | None = None
        self._said: dict[tuple[tuple[str, ...], PeerID], dict[tuple[int, int], Attested]] = {}
        """(layers of a group, member) -> (era, version) -> its attestation, with a valid signature."""
        self._known: frozenset[tuple[tuple[int, int], tuple[str, ...]]] = frozenset()
        """((era, version), layers) of all that the live plan certifies."""
        self._new: tuple[Certified, ...] = ()

    def obey(self, plan: Plan) -> None:
        """Record a live plan, and drop the attestations that it no longer needs."""
        self._plan = plan
        self._known = frozenset((entry.age, entry.keys) for entry in plan.certified)
        for (keys, peer), said in list(self._said.items()):
            self._said[keys, peer] = {age: word for age, word in said.items() if (age, keys) not in self._known}
            if not self._said[keys, peer]:
                del self._said[keys, peer]
        self._new = tuple(self._proven(plan))

    def hear(self, peer: PeerID, attested: Iterable[Attested], *, verify: VerifySignature) -> None:
        """Count the attestations of `peer` for its own layers. Ignore others, and invalid signatures."""
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
        """(era, version) of the newest completely certified version; (0, 0): none."""
        return _newest(self._all, self._wanted)

    @property
    def are_any(self) -> bool:
        return bool(self._all)

    def layers(self, age: tuple[int, int]) -> frozenset[str] | None:
        """Return the layers certified at (era, version); None before the first plan, when nothing can be."""
        return None if self._plan is None else frozenset(layers_at(self._all, age))

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
        """Yield what a majority of a group's jury has signed."""
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
    """Say what is wrong with the certificates of `plan`, the successor of `base`: one without proof, the newest
    missing, or an era that begins at an uncertified version; empty: nothing."""
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
    """Return the newest (era, version) of which `plan` certifies every layer, (0, 0) if none, and these layers."""
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
