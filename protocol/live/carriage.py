"""What two members and their carrier say before a stream is put through: one short message each, in this order.

    opener -> carrier   Carry       to whom, and what for
    carrier -> other    Carried     from whom, and what for
    other -> carrier    Answer      whether it takes the stream
    carrier -> opener   Answer      whether it is through

Whoever asks and whoever answers shows its certificate, so that each knows a member before it does anything for it. Who
is at the two ends the ends prove to each other afterwards (`secure_channel.py`).

The carrier also tells each end from where the other one is connected with it. Behind a NAT that has one outer port for
all whom a peer speaks to (any but a symmetric one) this is an address that can be dialled, once the peer behind it has
dialled us: that opens its NAT for our address. Each end dials the other's again and again, so a hole is punched by the
second of these dials, whoever it is from.
"""

import asyncio
import re
import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID, public_key_of
from shoal.protocol.limits import ADDRESS_CHARS_MAX, CERTIFICATE_BYTES_MAX, PEER_ID_CHARS_MAX
from shoal.protocol.live.secure_channel import Purpose
from shoal.protocol.membership import AccessLevel, Members

_LENGTH: Final = struct.Struct(">H")
_TCP: Final = re.compile(r"^/ip[46]/[0-9a-fA-F.:]+/tcp/[0-9]+$")
_BYTES_MAX: Final = 2048
_SEEN_AT_MAX: Final = 2

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_Peer = Annotated[str, msgspec.Meta(max_length=PEER_ID_CHARS_MAX)]
_Certificate = Annotated[bytes, msgspec.Meta(max_length=CERTIFICATE_BYTES_MAX)]
_Sentence = Annotated[str, msgspec.Meta(max_length=120)]
_Places = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARS_MAX)], ...], msgspec.Meta(max_length=_SEEN_AT_MAX)
]


class Carry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    to: _Peer
    purpose: Purpose
    certificate: _Certificate

    def __post_init__(self) -> None:
        public_key_of(PeerID(self.to))  # or it names nobody


class Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    source: _Peer
    """The opener, as the carrier knows it; it proves that itself."""
    purpose: Purpose
    certificate: _Certificate
    seen_at: _Places
    """The multiaddrs from which the opener is connected with the carrier."""

    def __post_init__(self) -> None:
        public_key_of(PeerID(self.source))


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    refusal: _Sentence
    """The reason why not; empty: yes."""
    certificate: _Certificate
    seen_at: _Places = ()
    """Those of the other end, from the carrier."""


Said = TypeVar("Said", Carry, Carried, Answer)


def plain_tcp(places: Sequence[str]) -> tuple[str, ...]:
    """Choose among the other ends of a peer's connections those that somebody else could dial."""
    return tuple(place for place in places if _TCP.match(place) and len(place) <= ADDRESS_CHARS_MAX)[:_SEEN_AT_MAX]


def encode(message: Carry | Carried | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, kind: type[Said], source: PeerID) -> Said:
    """Read what `source` says first. Raises: RemoteError: it is none of this; EOFError, OSError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _BYTES_MAX:
        raise RemoteError(source, f"said {length} bytes about a carried stream, where {_BYTES_MAX} are the limit")
    try:
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(source, f"said nothing readable about a carried stream ({error})") from error


def check_member(members: Members, peer: PeerID, certificate: bytes) -> None:
    """Raises: RemoteError: `peer` is no member of this run."""
    members.show(peer, certificate)
    if members.access_level(peer) < AccessLevel.MEMBER:
        raise RemoteError(peer, "is no member of this run")
