"""Invites: the text with which a volunteer finds and enters a run, short enough for a chat message.

    "shoal1" base58( version:1 run:8 owner:32 key peer* check:4 )
    key      0:1 | 1:1 seed:32 expires:4 seats:2 rights:1 signature:64    0: none, the run is open; 1: admits newcomers
    peer     header:1 [key:32] address*     header: number of addresses; + 128 for the owner, which then has no key here
    address  4:1 ip:4 port:2 | 6:1 ip:16 port:2 | 0:1 length:1 text       IPv4, IPv6, or a multiaddr without /p2p/…

`name:n` is a field of n bytes. An invite has 220 characters with one address of the host, 330 with the addresses of
three members. Anybody with the text can enter: an invite is a secret until it expires or is revoked. `check` (BLAKE3 of
the rest) detects a lost letter. Whitespace inside an invite and punctuation around an invite do no harm.
"""

import ipaddress
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence

import base58
import msgspec
from blake3 import blake3

from shoal.protocol.envelope import SIGNATURE_BYTES
from shoal.protocol.errors import InviteError
from shoal.protocol.identity import Identity, PeerID, peer_id_of, public_key_of
from shoal.protocol.limits import ADDRESS_CHARS_MAX, ADDRESSES_MAX, PROTOCOL_VERSION
from shoal.protocol.membership import Delegation, Members, certify, delegate, delegation_holds

PREFIX = "shoal1"
"""Start of each invite's text. Base58 has no l, so it cannot occur further inside."""
_CHECK_BYTES = 4
_RUN_BYTES, _KEY_BYTES = 8, 32
_IS_OWNER = 128
_CHARS_MAX = 4096
"""Most characters that we decode as an invite, since base58 takes quadratic time. Eight addresses as text, one for each
of eight peers, take 3,300."""
_TEXT, _IP4, _IP6 = 0, 4, 6
_AROUND = "`'\"<>()[].,;:!?*_"
_TCP = re.compile(r"^/ip([46])/([^/]+)/tcp/(\d{1,5})$")
_PLACE = re.compile(r"^/(ip[46]|dns[46a]?[a-z]*)/([^/]+)/tcp/\d+")


_KEYLESS, _KEYED = 0, 1
_TERMS = struct.Struct(">IHB")
"""The terms of an invite's key: its expiry, the number of members that it admits, and whether these may train."""
EXPIRES_S_MAX = (1 << 32) - 1
SEATS_MAX = (1 << 16) - 1


class InviteKey(msgspec.Struct, frozen=True):
    """The secret in an invite: its key's seed, and the owner's permission to certify members with that key."""

    seed: bytes
    delegation: Delegation

    @classmethod
    def make(
        cls, owner: Identity, *, run: str, expires_s: int = 0, seats: int = 0, may_train: bool = True
    ) -> "InviteKey":
        """Make a new key.

        Args:
            expires_s: expiry in seconds since 1970; 0: none.
            seats: members that the invite allows at a time; 0: any number.
            may_train: False: members of this invite are observers.
        Raises: ValueError: `expires_s` or `seats` does not fit into an invite.
        """
        if not (0 <= expires_s <= EXPIRES_S_MAX and 0 <= seats <= SEATS_MAX):
            raise ValueError(f"an invite expires by {EXPIRES_S_MAX} s after 1970 and has at most {SEATS_MAX} seats")
        seed = os.urandom(32)
        key = Identity(seed).public_key
        return cls(seed, delegate(owner, key, run=run, expires_s=expires_s, seats=seats, may_train=may_train))

    def encode(self) -> bytes:
        terms = _TERMS.pack(self.delegation.expires_s, self.delegation.seats, self.delegation.may_train)
        return self.seed + terms + self.delegation.signature


class Invite(msgspec.Struct, frozen=True):
    """A decoded invite. `addresses` are multiaddrs, with `/p2p/…`, of peers that admit newcomers; `owner` is the peer
    that signs the run spec."""

    protocol_version: int
    run: str
    """The run's id, 16 hex digits."""
    owner: PeerID
    addresses: tuple[str, ...]
    key: InviteKey | None = None
    """The key with which newcomers certify themselves; None: the run is open to anyone."""

    def certificate_of(self, member: PeerID) -> bytes:
        """Return the certificate of `member`; empty if `member` is the owner or the run is open."""
        if self.key is None or member == self.owner:
            return b""
        return certify(Identity(self.key.seed), self.key.delegation, member, run=self.run)

    def members_for(self, me: PeerID) -> Members:
        """Return the `Members` with which a new peer `me` begins: they know the owner and our own certificate only."""
        return Members(self.run, self.owner, certificate=self.certificate_of(me), is_open=self.key is None)

    def encode(self) -> str:
        """Return the invite as text. Raises: ValueError: a part is invalid, such as an address without a peer."""
        body = bytes((self.protocol_version,)) + bytes.fromhex(self.run) + public_key_of(self.owner)
        body += bytes((_KEYLESS,)) if self.key is None else bytes((_KEYED,)) + self.key.encode()
        if len(self.addresses) > ADDRESSES_MAX:
            raise ValueError(f"{len(self.addresses)} addresses are more than an invite can hold")
        grouped: dict[str, list[str]] = {}
        for address in self.addresses:
            where, peer = split_address(address)
            grouped.setdefault(peer, []).append(where)
        for peer, places in grouped.items():
            own = peer == self.owner
            body += bytes(((_IS_OWNER if own else 0) + len(places),))
            body += (b"" if own else public_key_of(PeerID(peer))) + b"".join(map(_encode_address, places))
        check = blake3(body).digest(length=_CHECK_BYTES)
        return PREFIX + str(base58.b58encode(body + check), "ascii")


def make_invite(run: str, owner: PeerID, addresses: Sequence[str], key: InviteKey | None = None) -> str:
    return Invite(PROTOCOL_VERSION, run, owner, tuple(addresses[:ADDRESSES_MAX]), key).encode()


def parse_invite(text: str) -> Invite:
    """Read an invite. Raises: InviteError, in one line: the text is no invite, is damaged, or has another version."""
    _, prefix, rest = "".join(text.split()).rpartition(PREFIX)
    if not prefix:
        raise InviteError(f"this is not a shoal invite (they begin with {PREFIX!r}): ask the host for a fresh one")
    try:
        raw = base58.b58decode(rest.strip(_AROUND)[:_CHARS_MAX])
    except ValueError as error:
        raise InviteError("the invite has a character that none contains: copy it again, whole") from error
    body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if len(raw) <= _CHECK_BYTES or blake3(body).digest(length=_CHECK_BYTES) != check:
        raise InviteError("the invite is damaged or cut short: copy it again, whole")
    if body[0] != PROTOCOL_VERSION:
        older, remedy = ("older", "the host") if body[0] < PROTOCOL_VERSION else ("newer", "you")
        raise InviteError(
            f"the invite is of protocol version {body[0]}, {older} than this shoal's {PROTOCOL_VERSION}: "
            f"{remedy} must upgrade"
        )
    try:
        invite = _decode(body)
    except (ValueError, IndexError, struct.error) as error:
        raise InviteError("the invite has invalid content: ask the host for a fresh one") from error
    if not invite.addresses:
        raise InviteError("the invite names no address: ask the host for a fresh one")
    return invite


def split_address(address: str) -> tuple[str, str]:
    """Split `…/p2p/ID` into (`…`, `ID`), where `…` may contain a relay's own ID. Without an ID: (`address`, "")."""
    where, slash, peer = address.rpartition("/p2p/")
    return (where, peer) if slash and "/" not in peer else (address, "")


def peers_of(addresses: Iterable[str]) -> list[PeerID]:
    """Return the peers that `addresses` (multiaddrs) name, each once, in order."""
    return list(dict.fromkeys(PeerID(split_address(address)[1]) for address in addresses))


def only_direct(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return `addresses` without those that lead over a relay."""
    return tuple(address for address in addresses if "/p2p-circuit" not in address)


def is_global(address: str) -> bool:
    """True if a multiaddr looks dialable from anywhere: a host name or a public IP address, without a relay."""
    match = _PLACE.match(address)
    if match is None or not only_direct((address,)):
        return False
    try:
        return match[1].startswith("dns") or ipaddress.ip_address(match[2]).is_global
    except ValueError:
        return False


def is_open(addresses: Iterable[str]) -> bool:
    """True if a peer with these multiaddrs looks dialable from anywhere: some address is public, and none is private.

    One public address is not enough: once four peers have seen a NAT's outer address, libp2p announces it, too.
    """
    ranks = [(_rank(address), is_global(address)) for address in only_direct(addresses)]
    return any(is_outer for _, is_outer in ranks) and all(rank != _PRIVATE for rank, _ in ranks)


def worth_telling(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses to put into an invite: host names, relays and public ones, then private ones; loopback and
    link-local ones only if there are no others."""
    ranked = [(_rank(address), address) for address in addresses]
    best = min((rank for rank, _ in ranked), default=0)
    kept = [(rank, address) for rank, address in ranked if rank < _LOOPBACK or best >= _LOOPBACK]
    return tuple(address for _, address in sorted(kept, key=lambda pair: pair[0]))


_PRIVATE, _LOOPBACK = 1, 2


def _rank(address: str) -> int:
    match = _TCP.match(split_address(address)[0])
    try:
        ip = ipaddress.ip_address(match[2]) if match else None
    except ValueError:
        ip = None
    if ip is None:
        return 0  # a host name or a relay, which the host has chosen on purpose
    if ip.is_loopback or ip.is_link_local:
        return _LOOPBACK
    return 0 if ip.is_global else _PRIVATE


def _encode_address(where: str) -> bytes:
    match = _TCP.match(where)
    if match is not None and int(match[3]) <= 65535:
        try:
            ip = ipaddress.ip_address(match[2])
        except ValueError:
            pass
        else:
            if str(ip) == match[2] and ip.version == int(match[1]):
                return bytes((_IP4 if ip.version == 4 else _IP6,)) + ip.packed + struct.pack(">H", int(match[3]))
    text = where.encode()
    if not 0 < len(text) <= ADDRESS_CHARS_MAX - 1:
        raise ValueError(f"{where!r} is too long for an invite")
    return bytes((_TEXT, len(text))) + text


def _decode(body: bytes) -> Invite:
    """Decode an invite's bytes (without `check`). Raises: ValueError, IndexError, struct.error: they are no invite."""
    run, start = body[1 : 1 + _RUN_BYTES].hex(), 1 + _RUN_BYTES + _KEY_BYTES
    raw_owner = body[1 + _RUN_BYTES : start]
    owner = _peer_id(raw_owner)
    kind, rest, key = body[start], body[start + 1 :], None
    if kind == _KEYED:
        key, rest = _decode_key(rest, run, owner)
    elif kind != _KEYLESS:
        raise ValueError("unknown kind of key")
    return Invite(body[0], run, owner, tuple(_decode_addresses(rest, raw_owner)), key)


def _decode_key(rest: bytes, run: str, owner: PeerID) -> tuple[InviteKey, bytes]:
    seed, rest = rest[:_KEY_BYTES], rest[_KEY_BYTES:]
    expires_s, seats, may_train = _TERMS.unpack_from(rest)
    end = _TERMS.size + SIGNATURE_BYTES
    if len(rest) < end or may_train > 1:
        raise ValueError("invalid terms of the key")
    delegation = Delegation(Identity(seed).public_key, expires_s, seats, bool(may_train), rest[_TERMS.size : end])
    if not delegation_holds(delegation, run=run, owner=owner):
        raise ValueError("the run's owner has not signed it")
    return InviteKey(seed, delegation), rest[end:]


def _decode_addresses(rest: bytes, owner: bytes) -> Iterator[str]:
    total = 0
    while rest:
        header, rest = rest[0], rest[1:]
        key = owner
        if not header & _IS_OWNER:
            key, rest = rest[:_KEY_BYTES], rest[_KEY_BYTES:]
        total += header % _IS_OWNER
        if total > ADDRESSES_MAX:
            raise ValueError("more addresses than an invite can hold")
        for _ in range(header % _IS_OWNER):
            where, rest = _decode_address(rest)
            yield f"{where}/p2p/{_peer_id(key)}"


def _decode_address(rest: bytes) -> tuple[str, bytes]:
    kind, rest = rest[0], rest[1:]
    if kind == _TEXT:
        length = rest[0]
        text = rest[1 : 1 + length]
        if len(text) != length or not text.startswith(b"/") or not text.decode("ascii").isprintable():
            raise ValueError("no multiaddr")
        return text.decode("ascii"), rest[1 + length :]
    size = {_IP4: 4, _IP6: 16}.get(kind, 0)
    ip = ipaddress.ip_address(rest[:size])
    (port,) = struct.unpack_from(">H", rest, size)
    return f"/ip{ip.version}/{ip}/tcp/{port}", rest[size + 2 :]


def _peer_id(key: bytes) -> PeerID:
    if len(key) != _KEY_BYTES:
        raise ValueError("no key")
    return peer_id_of(key)
