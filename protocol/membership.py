"""Decides who is a member of a run, provable offline: the owner's key delegates to an invite's, which certifies
members.

    owner's key --Delegation--> invite's key --Certificate--> member's key

An invite carries its delegation and the seed of its key, so whoever has the invite certifies itself, while the host and
every coordinator may be dead; and whoever is shown a certificate checks two signatures and asks nobody. The same chain
is known from SPKI certificates (RFC 2693, section 3) and from capability tokens.

A certificate ends with its invite, and a peer whose certificate has ended is a stranger. There is one exception: a
peer that is in stays in, as long as a plan that we obey or obeyed of late has it as a member. For the time after that
the owner renews: it signs a certificate of its own for each member that is in a plan and asks (`Members.renew`).

What a certificate cannot prove offline is how many others were made with the same invite. So a coordinator applies the
number of seats to newcomers (`Members.why_not_enter`).
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec
from blake3 import blake3

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID, peer_id_of, public_key_of
from shoal.protocol.limits import CERTIFICATE_BYTES_MAX, PEERS_MAX
from shoal.protocol.statement import sign_statement, statement_holds

INVITE_NAME_BYTES = 4
_GUESTS_MAX = 64
RENEWED_FOR_S = 30 * 24 * 3600
"""How long a renewed certificate holds: a member may be away for about so long, and needs no other invite then."""


class AccessLevel(IntEnum):
    """Says what a key may do in the run. A higher value may do all that a lower one may."""

    STRANGER = 0
    OBSERVER = 1
    """May ask how the run does."""
    MEMBER = 2
    """May train, coordinate and vote."""


class Delegation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The owner lets the holder of `key` certify members of the run."""

    key: bytes
    """Public Ed25519 key of the invite, 32 bytes."""
    expires_s: int
    """Seconds since 1970 until which certificates made with it hold; 0: no end."""
    seats: int
    """How many members may be in the run by this invite at a time; 0: any number."""
    may_train: bool
    """False: its holders only look on."""
    signature: bytes
    """The owner's signature."""

    @property
    def name(self) -> str:
        """The name of the invite for people: 8 hex digits."""
        return invite_name(self.key)

    @property
    def access_level(self) -> AccessLevel:
        return AccessLevel.MEMBER if self.may_train else AccessLevel.OBSERVER


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The invite's key says that a key belongs to a member; the member's key itself is in its PeerID."""

    delegation: Delegation
    signature: bytes
    """The signature by the delegation's key; under a renewed certificate by the owner's."""
    renewed_to_s: int = 0
    """Seconds since 1970 until which a renewed certificate holds; 0: it is none, and ends with its invite."""

    @property
    def ends_s(self) -> int:
        """Seconds since 1970; 0: no end."""
        return self.renewed_to_s or self.delegation.expires_s


_ENCODER = msgspec.msgpack.Encoder()
_CERTIFICATES = msgspec.msgpack.Decoder(Certificate)


def invite_name(key: bytes) -> str:
    return blake3(key).hexdigest(length=INVITE_NAME_BYTES)


def delegate(
    owner: Identity, key: bytes, *, run: str, expires_s: int = 0, seats: int = 0, may_train: bool = True
) -> Delegation:
    """Let `key` certify members, as the run's owner."""
    unsigned = Delegation(key, expires_s, seats, may_train, b"")
    return msgspec.structs.replace(
        unsigned, signature=sign_statement(owner, "invite", run=run, body=_delegated(unsigned))
    )


def certify(invite: Identity, delegation: Delegation, member: PeerID, *, run: str) -> bytes:
    """Say that `member` belongs to the run, as the holder of an invite's key. Returns: the certificate's bytes."""
    signature = sign_statement(invite, "member", run=run, body=public_key_of(member))
    return _ENCODER.encode(Certificate(delegation, signature))


def renew(owner: Identity, delegation: Delegation, member: PeerID, *, run: str, ends_s: int) -> bytes:
    """Say that `member`, which came by this invite, belongs to the run until `ends_s`, as the run's owner. Returns: the
    certificate's bytes."""
    signature = sign_statement(owner, "member", run=run, body=_renewed(member, delegation, ends_s))
    return _ENCODER.encode(Certificate(delegation, signature, ends_s))


@lru_cache(maxsize=256)
def delegation_holds(delegation: Delegation, *, run: str, owner: PeerID) -> bool:
    """Whether the owner signed it. There are few invites, and many who show them."""
    if len(delegation.key) != 32:
        return False
    return statement_holds(owner, delegation.signature, "invite", run=run, body=_delegated(delegation))


def open_certificate(data: bytes, *, run: str, owner: PeerID, member: PeerID) -> Certificate:
    """Check that the holder of an invite of this run, or its owner, certified `member`.

    Raises: RemoteError: one sentence that says why not; names `member`.
    """
    try:
        if len(data) > CERTIFICATE_BYTES_MAX:
            raise ValueError("it is too long")
        certificate = _CERTIFICATES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise RemoteError(member, f"showed something that is no certificate ({error})") from error
    delegation = certificate.delegation
    if not delegation_holds(delegation, run=run, owner=owner):
        raise RemoteError(member, "showed an invite that the run's owner did not sign")
    signer, body = peer_id_of(delegation.key), public_key_of(member)
    if certificate.renewed_to_s:
        signer, body = owner, _renewed(member, delegation, certificate.renewed_to_s)
    if not statement_holds(signer, certificate.signature, "member", run=run, body=body):
        raise RemoteError(member, "showed somebody else's certificate")
    return certificate


def _renewed(member: PeerID, delegation: Delegation, ends_s: int) -> bytes:
    return _ENCODER.encode((public_key_of(member), delegation.key, ends_s))


def _delegated(delegation: Delegation) -> bytes:
    return _ENCODER.encode((delegation.key, delegation.expires_s, delegation.seats, delegation.may_train))


class Excluded(NamedTuple):
    """Says who is out of the run. All keys are public Ed25519 keys of 32 bytes."""

    keys: Set[bytes] = frozenset()
    """The keys of members and of invites."""
    readmitted: Set[bytes] = frozenset()
    """Members that are in although the invite by which they came is out."""
    came_by: Mapping[bytes, bytes] = {}
    """Excluded member -> the invite by which it came, where that is known: it has a seat for good."""


class Members:
    """Knows who belongs to one run, as far as this peer has been shown, and who is excluded from it.

    Args:
        certificate: our own, to be shown to others; empty for the run's owner, who needs none.
        is_open: anyone is a member who is not excluded: the run's spec says so.
        wall_s: seconds since 1970.
    """

    def __init__(
        self,
        run: str,
        owner: PeerID,
        *,
        certificate: bytes = b"",
        is_open: bool = False,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.run, self.owner, self.certificate, self.is_open = run, owner, certificate, is_open
        self._wall_s = wall_s
        self._shown: OrderedDict[PeerID, dict[bytes, Certificate]] = OrderedDict()
        """Peer -> invite's key -> certificate, for all that the peer has shown. The owner gives out few invites."""
        self.planned: Set[PeerID] | None = None
        """The members of the plans obeyed of late, whose certificates may have ended. None: this peer knows no plan, so
        it cannot tell, and refuses nobody for that."""
        self.guests: deque[PeerID] = deque(maxlen=_GUESTS_MAX)
        """Commands on this machine, which may ask this peer for all that a member may."""
        self._own_invite = _CERTIFICATES.decode(certificate).delegation.key if certificate else b""
        self.excluded = Excluded()
        self.on_exclusion: list[Callable[[], None]] = []
        """Called when more keys are excluded than before."""

    def show(self, peer: PeerID, certificate: bytes) -> None:
        """`peer` proves who let it in; remembered until others push it out. Raises: RemoteError: it proves nothing."""
        if peer == self.owner or not certificate:
            return
        shown = _opened(certificate, self.run, self.owner, peer)
        held = self._shown.pop(peer, {})
        known = held.pop(shown.delegation.key, shown)
        # An old certificate of an invite takes nothing away from a renewed one; the newest invite is the last.
        held[shown.delegation.key] = max(shown, known, key=lambda made: made.ends_s)
        self._shown[peer] = held
        if len(self._shown) > PEERS_MAX:
            self._shown.popitem(last=False)

    def access_level(self, peer: PeerID) -> AccessLevel:
        if self.is_excluded(peer):
            return AccessLevel.STRANGER
        if peer == self.owner or self.is_open or peer in self.guests:
            return AccessLevel.MEMBER
        shown = self._in_use(peer)
        return self._gives(peer, shown) if shown is not None else AccessLevel.STRANGER

    def why_stranger(self, peer: PeerID) -> str:
        """Say why `peer` is a stranger; empty: it has shown nothing."""
        if self.is_excluded(peer):
            return "you are excluded from this run"
        shown = self._in_use(peer)
        return _ended(shown) if shown is not None else ""

    def invite_of(self, peer: PeerID) -> bytes:
        """The key of the invite by which `peer` is a member; empty: it is the owner, or unknown, or it needs none."""
        shown = self._in_use(peer) if peer != self.owner and not self.is_open else None
        return shown.delegation.key if shown is not None else b""

    def why_not_enter(self, newcomer: PeerID, others: Collection[PeerID]) -> str:
        """Say why a coordinator must not let `newcomer` into the swarm beside `others`; empty: it may."""
        shown = self._in_use(newcomer)
        if newcomer == self.owner or shown is None:
            return ""  # an open run: those who are no members do not get here
        if self._is_over(shown):
            return _ended(shown)
        delegation, present = shown.delegation, (peer for peer in others if peer != newcomer)
        if delegation.seats and self.seats_taken(delegation.key, present) >= delegation.seats:
            return f"all {delegation.seats} seats of the invite {delegation.name} are taken: ask the host for one"
        return ""

    def seats_taken(self, invite: bytes, present: Iterable[PeerID]) -> int:
        """How many of the peers that are `present`, and of excluded ones, came by the invite with this key."""
        here = sum(1 for peer in present if self.invite_of(peer) == invite and not self.is_excluded(peer))
        return here + sum(1 for came_by in self.excluded.came_by.values() if came_by == invite)

    def renew(self, owner: Identity, member: PeerID) -> bytes:
        """Sign a certificate that lasts longer for `member`, as the run's owner. Returns: it; empty: `member` has shown
        none."""
        shown, ends_s = self._in_use(member), int(self._wall_s()) + RENEWED_FOR_S
        return renew(owner, shown.delegation, member, run=self.run, ends_s=ends_s) if shown is not None else b""

    def take_renewed(self, certificate: bytes, me: PeerID) -> None:
        """Show `certificate` from now on. Raises: RemoteError: it is not ours, or of another invite than ours."""
        renewed = open_certificate(certificate, run=self.run, owner=self.owner, member=me)
        if renewed.delegation.key != self._own_invite:
            raise RemoteError(me, "showed a certificate of another invite")
        self.certificate = certificate

    @property
    def should_renew(self) -> bool:
        """Whether our certificate is to be renewed: a quarter of what a fresh one would hold is gone."""
        ends_s = _CERTIFICATES.decode(self.certificate).ends_s if self.certificate else 0
        return 0 < ends_s < self._wall_s() + 0.75 * RENEWED_FOR_S

    def _is_over(self, shown: Certificate) -> bool:
        return 0 < shown.ends_s < self._wall_s()

    def _gives(self, peer: PeerID, shown: Certificate) -> AccessLevel:
        if self._is_over(shown) and self.planned is not None and peer not in self.planned:
            return AccessLevel.STRANGER
        return shown.delegation.access_level

    def _in_use(self, peer: PeerID) -> Certificate | None:
        """What gives `peer` the most: a peer that looked on first may come to train, and does not lose that by looking
        on. Of equal ones the one shown last."""
        held = reversed(self._shown.get(peer, {}).values())
        return max(held, key=lambda shown: self._gives(peer, shown), default=None)

    # --- exclusion ---

    def excludes_us(self, me: PeerID) -> bool:
        """Whether we, or all who came by our invite, have been put out of the run."""
        return me != self.owner and self._is_out(me, self.excluded, (self._own_invite,))

    def exclude(self, excluded: Excluded) -> None:
        """Take these keys, and all members that they certified, for strangers from now on, and no others."""
        before, self.excluded = self.excluded, excluded
        if not before.keys >= excluded.keys:
            for callback in self.on_exclusion:
                callback()

    def is_excluded(self, peer: PeerID) -> bool:
        return bool(self.excluded.keys) and self.is_out_by(peer, self.excluded)

    def is_out_by(self, peer: PeerID, excluded: Excluded) -> bool:
        """Whether `excluded` has the peer's own key, or that of any invite that it has ever shown here. The owner is
        beyond that."""
        return peer != self.owner and self._is_out(peer, excluded, self._shown.get(peer, ()))

    @staticmethod
    def _is_out(peer: PeerID, excluded: Excluded, invites: Collection[bytes]) -> bool:
        key = _key_of(peer)
        return key in excluded.keys or (key not in excluded.readmitted and not excluded.keys.isdisjoint(invites))


@lru_cache(maxsize=4096)
def _opened(certificate: bytes, run: str, owner: PeerID, member: PeerID) -> Certificate:
    return open_certificate(certificate, run=run, owner=owner, member=member)


def _ended(certificate: Certificate) -> str:
    return f"the invite {certificate.delegation.name} has expired: ask the host for a fresh one"


@lru_cache(maxsize=PEERS_MAX)
def _key_of(peer: PeerID) -> bytes:
    try:
        return public_key_of(peer)
    except ValueError:
        return b""
