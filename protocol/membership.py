"""Membership of a run, provable offline: the owner's key delegates to an invite's key, which certifies members.

    owner's key --Delegation--> invite's key --Certificate--> member's key

An invite contains its delegation and the seed of its key, so a peer that holds it certifies itself, even while the host
and every coordinator are down. A receiver checks two signatures. Source: certificate chains of SPKI (RFC 2693,
section 3).

A certificate expires with its invite. A peer with an expired certificate is a stranger, unless it is in a recently
obeyed plan: then it stays a member and can ask the owner for a new certificate (`Members.renew`).

A certificate cannot show how many other members its invite has certified. So the coordinator enforces the invite's
seats (the number of members at a time) when newcomers enter (`Members.why_not_enter`).
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

RENEWED_FOR_S = 30 * 24 * 3600
"""Seconds for which a renewed certificate is valid: a member may be away for three quarters of it."""


class AccessLevel(IntEnum):
    """The permissions of a peer in the run. A higher level includes the lower ones."""

    STRANGER = 0
    OBSERVER = 1
    """May read the run's status."""
    MEMBER = 2
    """May train, coordinate and vote."""


class Delegation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The owner's permission to certify members of the run with an invite's key."""

    key: bytes
    expires_s: int
    """When the invite's certificates expire, in seconds since 1970; 0: never."""
    seats: int
    """Members that the invite allows at a time; 0: any number."""
    may_train: bool
    """True: members of this invite may train; False: they are observers."""
    signature: bytes

    @property
    def name(self) -> str:
        """The invite's name for people: 8 hex digits."""
        return invite_name(self.key)

    @property
    def access_level(self) -> AccessLevel:
        return AccessLevel.MEMBER if self.may_train else AccessLevel.OBSERVER


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The invite key's signature on a member's key; the member's key itself is in its PeerID."""

    delegation: Delegation
    signature: bytes
    """Signature with the invite's key; in a renewed certificate, with the owner's key."""
    renewed_to_s: int = 0
    """When a renewed certificate expires, in seconds since 1970; 0: it was not renewed and expires with its invite."""

    @property
    def ends_s(self) -> int:
        """When the certificate expires, in seconds since 1970; 0: never."""
        return self.renewed_to_s or self.delegation.expires_s


_ENCODER = msgspec.msgpack.Encoder()
_CERTIFICATES = msgspec.msgpack.Decoder(Certificate)


def invite_name(key: bytes) -> str:
    return blake3(key).hexdigest(length=4)


def delegate(
    owner: Identity, key: bytes, *, run: str, expires_s: int = 0, seats: int = 0, may_train: bool = True
) -> Delegation:
    """Sign, as the run's owner, the permission to certify members with the invite's key `key`."""
    unsigned = Delegation(key, expires_s, seats, may_train, b"")
    return msgspec.structs.replace(
        unsigned, signature=sign_statement(owner, "invite", run=run, body=_delegated(unsigned))
    )


def certify(invite: Identity, delegation: Delegation, member: PeerID, *, run: str) -> bytes:
    """Return a certificate for `member`, signed with the invite's key."""
    signature = sign_statement(invite, "member", run=run, body=public_key_of(member))
    return _ENCODER.encode(Certificate(delegation, signature))


def renew(owner: Identity, delegation: Delegation, member: PeerID, *, run: str, ends_s: int) -> bytes:
    """Return a certificate for `member` of this invite, signed by the run's owner and valid until `ends_s`."""
    signature = sign_statement(owner, "member", run=run, body=_renewed(member, delegation, ends_s))
    return _ENCODER.encode(Certificate(delegation, signature, ends_s))


@lru_cache(maxsize=256)
def delegation_holds(delegation: Delegation, *, run: str, owner: PeerID) -> bool:
    """True if the owner signed the delegation. Cached, since many members show the same delegation."""
    if len(delegation.key) != 32:
        return False
    return statement_holds(owner, delegation.signature, "invite", run=run, body=_delegated(delegation))


@lru_cache(maxsize=4096)
def open_certificate(data: bytes, *, run: str, owner: PeerID, member: PeerID) -> Certificate:
    """Decode a certificate, and check that the owner, or an invite of this run, has certified `member`.

    Raises: RemoteError: the certificate is invalid; the error names `member`.
    """
    try:
        if len(data) > CERTIFICATE_BYTES_MAX:
            raise ValueError("it is too long")
        certificate = _CERTIFICATES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise RemoteError(member, f"showed an invalid certificate ({error})") from error
    delegation = certificate.delegation
    if not delegation_holds(delegation, run=run, owner=owner):
        raise RemoteError(member, "showed an invite that the run's owner did not sign")
    signer, body = peer_id_of(delegation.key), public_key_of(member)
    if certificate.renewed_to_s:
        signer, body = owner, _renewed(member, delegation, certificate.renewed_to_s)
    if not statement_holds(signer, certificate.signature, "member", run=run, body=body):
        raise RemoteError(member, "showed another member's certificate")
    return certificate


def _renewed(member: PeerID, delegation: Delegation, ends_s: int) -> bytes:
    return _ENCODER.encode((public_key_of(member), delegation.key, ends_s))


def _delegated(delegation: Delegation) -> bytes:
    return _ENCODER.encode((delegation.key, delegation.expires_s, delegation.seats, delegation.may_train))


class Excluded(NamedTuple):
    """Excluded keys of members and invites; all are public Ed25519 keys of 32 bytes."""

    keys: Set[bytes] = frozenset()
    readmitted: Set[bytes] = frozenset()
    """Keys that the owner has readmitted: such a member may enter even if its invite is excluded."""
    came_by: Mapping[bytes, bytes] = {}
    """Excluded member's key -> its invite's key, if known. While excluded, the member takes a seat of the invite."""


class Members:
    """Knows the members of one run by the certificates that this peer has seen, and the excluded keys.

    Args:
        certificate: our own certificate, which we show to others; empty if we are the run's owner.
        is_open: True if the run's spec admits every peer that is not excluded.
        wall_s: returns seconds since 1970.
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
        self.planned: Set[PeerID] | None = None
        """Members of recently obeyed plans: they stay members if their certificates expire. None: this peer knows no
        plan, and so accepts every expired certificate."""
        self.guests: deque[PeerID] = deque(maxlen=64)
        """Peer IDs of `shoal` commands that run on this machine and have a member's permissions; the newest 64."""
        self._own_invite = _CERTIFICATES.decode(certificate).delegation.key if certificate else b""
        self.excluded = Excluded()
        self.on_exclusion: list[Callable[[], None]] = []

    def show(self, peer: PeerID, certificate: bytes) -> None:
        """Remember `peer`'s certificate. Raises: RemoteError: the certificate is invalid."""
        if peer == self.owner or not certificate:
            return
        shown = open_certificate(certificate, run=self.run, owner=self.owner, member=peer)
        held = self._shown.pop(peer, {})
        known = held.pop(shown.delegation.key, shown)
        # Of two certificates of one invite keep the one that expires later. The invite shown last is the last entry.
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
        """Return why `peer`, which is a stranger, has no permissions; empty: it has shown no certificate."""
        if self.is_excluded(peer):
            return "you are excluded from this run"
        shown = self._in_use(peer)
        return _ended(shown) if shown is not None else ""

    def invite_of(self, peer: PeerID) -> bytes:
        """Return the key of the invite with which `peer` entered; empty: the run is open, or no invite is known."""
        shown = self._in_use(peer) if peer != self.owner and not self.is_open else None
        return shown.delegation.key if shown is not None else b""

    def why_not_enter(self, newcomer: PeerID, others: Collection[PeerID]) -> str:
        """Return why a coordinator must not admit `newcomer` while `others` are members; empty: no reason."""
        shown = self._in_use(newcomer)
        if newcomer == self.owner or shown is None:
            return ""  # an open run: strangers are refused earlier
        if self._is_over(shown):
            return _ended(shown)
        delegation, present = shown.delegation, (peer for peer in others if peer != newcomer)
        if delegation.seats and self.seats_taken(delegation.key, present) >= delegation.seats:
            return f"all {delegation.seats} seats of the invite {delegation.name} are taken: ask the host for one"
        return ""

    def seats_taken(self, invite: bytes, present: Iterable[PeerID]) -> int:
        """Count this invite's members: those among the peers `present`, and the excluded ones."""
        here = sum(1 for peer in present if self.invite_of(peer) == invite and not self.is_excluded(peer))
        return here + sum(1 for came_by in self.excluded.came_by.values() if came_by == invite)

    def renew(self, owner: Identity, member: PeerID) -> bytes:
        """Return a new certificate for `member`, signed by the owner; empty: `member` has never shown one."""
        shown, ends_s = self._in_use(member), int(self._wall_s()) + RENEWED_FOR_S
        return renew(owner, shown.delegation, member, run=self.run, ends_s=ends_s) if shown is not None else b""

    def take_renewed(self, certificate: bytes, me: PeerID) -> None:
        """Use `certificate` as our own from now on. Raises: RemoteError: it is of another member or another invite."""
        renewed = open_certificate(certificate, run=self.run, owner=self.owner, member=me)
        if renewed.delegation.key != self._own_invite:
            raise RemoteError(me, "showed a certificate of another invite")
        self.certificate = certificate

    @property
    def should_renew(self) -> bool:
        """True if our certificate is valid for less than three quarters of `RENEWED_FOR_S` from now."""
        ends_s = _CERTIFICATES.decode(self.certificate).ends_s if self.certificate else 0
        return 0 < ends_s < self._wall_s() + 0.75 * RENEWED_FOR_S

    def _is_over(self, shown: Certificate) -> bool:
        return 0 < shown.ends_s < self._wall_s()

    def _gives(self, peer: PeerID, shown: Certificate) -> AccessLevel:
        if self._is_over(shown) and self.planned is not None and peer not in self.planned:
            return AccessLevel.STRANGER
        return shown.delegation.access_level

    def _in_use(self, peer: PeerID) -> Certificate | None:
        """Return the certificate of `peer` that grants the highest level; of several such, the one shown last.

        A peer that may train keeps that permission if it later shows an observer's certificate.
        """
        held = reversed(self._shown.get(peer, {}).values())
        return max(held, key=lambda shown: self._gives(peer, shown), default=None)

    # --- exclusion ---

    def excludes_us(self, me: PeerID) -> bool:
        """True if our own key is excluded, or our invite while we are not readmitted. False if we are the owner."""
        return me != self.owner and self._is_out(me, self.excluded, (self._own_invite,))

    def exclude(self, excluded: Excluded) -> None:
        """Replace the excluded keys. Peers with them, and not readmitted members of such invites, are strangers."""
        before, self.excluded = self.excluded, excluded
        if not before.keys >= excluded.keys:
            for callback in self.on_exclusion:
                callback()

    def is_excluded(self, peer: PeerID) -> bool:
        return bool(self.excluded.keys) and self.is_out_by(peer, self.excluded)

    def is_out_by(self, peer: PeerID, excluded: Excluded) -> bool:
        """True if `excluded` names the peer's own key, or names an invite that the peer has shown and does not readmit
        the peer. False for the owner."""
        return peer != self.owner and self._is_out(peer, excluded, self._shown.get(peer, ()))

    @staticmethod
    def _is_out(peer: PeerID, excluded: Excluded, invites: Collection[bytes]) -> bool:
        key = _key_of(peer)
        return key in excluded.keys or (key not in excluded.readmitted and not excluded.keys.isdisjoint(invites))


def _ended(certificate: Certificate) -> str:
    return f"the invite {certificate.delegation.name} has expired: ask the host for a fresh one"


@lru_cache(maxsize=PEERS_MAX)
def _key_of(peer: PeerID) -> bytes:
    try:
        return public_key_of(peer)
    except ValueError:
        return b""
