"""Decides who is a member of a run, provable offline: the owner's key delegates to an invite's, which certifies
members.

    owner's key --Delegation--> invite's key --Certificate--> member's key

An invite carries its delegation and the seed of its key, so whoever has the invite certifies itself, while the host and
every coordinator may be dead; and whoever is shown a certificate checks two signatures and asks nobody. The same chain
is known from SPKI certificates (RFC 2693, section 3) and from capability tokens.

What a certificate cannot prove offline is *when* it was made, and how many others were made with the same invite. So
the invite's expiry and its number of seats bound who is let in: a coordinator applies both to newcomers
(`Members.why_not_enter`).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from functools import lru_cache

import msgspec
from blake3 import blake3

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID, peer_id_of, public_key_of
from shoal.protocol.limits import CERTIFICATE_BYTES_MAX, PEERS_MAX
from shoal.protocol.statement import sign_statement, statement_holds

INVITE_NAME_BYTES = 4


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
    """Seconds since 1970 until which newcomers are let in; 0: no end."""
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
    """The signature by the delegation's key."""


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


@lru_cache(maxsize=256)
def delegation_holds(delegation: Delegation, *, run: str, owner: PeerID) -> bool:
    """Whether the owner signed it. There are few invites, and many who show them."""
    if len(delegation.key) != 32:
        return False
    return statement_holds(owner, delegation.signature, "invite", run=run, body=_delegated(delegation))


def open_certificate(data: bytes, *, run: str, owner: PeerID, member: PeerID) -> Delegation:
    """Check that the holder of an invite of this run certified `member`. Returns: by which invite.

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
    signer = peer_id_of(delegation.key)
    if not statement_holds(signer, certificate.signature, "member", run=run, body=public_key_of(member)):
        raise RemoteError(member, "showed somebody else's certificate")
    return delegation


def _delegated(delegation: Delegation) -> bytes:
    return _ENCODER.encode((delegation.key, delegation.expires_s, delegation.seats, delegation.may_train))


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
        self._shown: OrderedDict[PeerID, Delegation] = OrderedDict()
        self._own_invite = _CERTIFICATES.decode(certificate).delegation.key if certificate else b""
        self._excluded: frozenset[bytes] = frozenset()
        self.on_exclusion: list[Callable[[], None]] = []
        """Called when more keys are excluded than before."""

    def show(self, peer: PeerID, certificate: bytes) -> None:
        """`peer` proves who let it in; remembered until others push it out. Raises: RemoteError: it proves nothing."""
        if peer == self.owner or not certificate:
            return
        delegation = _opened(certificate, self.run, self.owner, peer)
        held = self._shown.pop(peer, delegation)
        # Whoever looked on first may come to train; whoever trains does not lose that by looking on.
        self._shown[peer] = held if held.access_level > delegation.access_level else delegation
        if len(self._shown) > PEERS_MAX:
            self._shown.popitem(last=False)

    def access_level(self, peer: PeerID) -> AccessLevel:
        if self._excluded and self.is_excluded(peer):
            return AccessLevel.STRANGER
        if peer == self.owner or self.is_open:
            return AccessLevel.MEMBER
        delegation = self._shown.get(peer)
        return delegation.access_level if delegation is not None else AccessLevel.STRANGER

    def invite_of(self, peer: PeerID) -> bytes:
        """The key of the invite by which `peer` came; empty: unknown, the owner, or an open run."""
        if peer == self.owner or self.is_open:
            return b""
        delegation = self._shown.get(peer)
        return delegation.key if delegation is not None else b""

    def why_not_enter(self, newcomer: PeerID, others: Collection[PeerID]) -> str:
        """Say why a coordinator must not let `newcomer` into the swarm beside `others`; empty: it may."""
        delegation = self._shown.get(newcomer)
        if newcomer == self.owner or delegation is None:
            return ""  # an open run: those who are no members do not get here
        if delegation.expires_s and self._wall_s() > delegation.expires_s:
            return f"the invite {delegation.name} has expired: ask the host for a fresh one"
        if delegation.seats:
            taken = sum(1 for peer in others if peer != newcomer and self._came_by(peer, delegation.key))
            if taken >= delegation.seats:
                return f"all {delegation.seats} seats of the invite {delegation.name} are taken: ask the host for one"
        return ""

    def _came_by(self, peer: PeerID, key: bytes) -> bool:
        delegation = self._shown.get(peer)
        return delegation is not None and delegation.key == key

    # --- exclusion ---

    def excludes_us(self, me: PeerID) -> bool:
        """Whether we, or all who came by our invite, have been put out of the run."""
        return me != self.owner and (self._own_invite in self._excluded or _key_of(me) in self._excluded)

    @property
    def excluded(self) -> frozenset[bytes]:
        """Public keys of members and of invites."""
        return self._excluded

    def exclude(self, keys: Iterable[bytes]) -> None:
        """Take these keys, and all members that they certified, for strangers from now on."""
        more = self._excluded.union(keys)
        if more != self._excluded:
            self._excluded = more
            for callback in self.on_exclusion:
                callback()

    def is_excluded(self, peer: PeerID) -> bool:
        return bool(self._excluded) and self.is_among(peer, self._excluded)

    def is_among(self, peer: PeerID, keys: Collection[bytes]) -> bool:
        """Whether `keys` has the peer's own key, or that of the invite by which it came. The owner is beyond that."""
        if peer == self.owner:
            return False
        delegation = self._shown.get(peer)
        return _key_of(peer) in keys or (delegation is not None and delegation.key in keys)


@lru_cache(maxsize=4096)
def _opened(certificate: bytes, run: str, owner: PeerID, member: PeerID) -> Delegation:
    return open_certificate(certificate, run=run, owner=owner, member=member)


@lru_cache(maxsize=PEERS_MAX)
def _key_of(peer: PeerID) -> bytes:
    try:
        return public_key_of(peer)
    except ValueError:
        return b""
