"""Messages with which a member (the opener) gets a stream to another member over a third, the carrier, in order:

    opener -> carrier       Carry       target and purpose
    carrier -> other end    Carried     the opener and the purpose
    other end -> carrier    Answer      if it accepts the stream
    carrier -> opener       Answer      if the two streams are now connected

Carried contains the opener's certificate, each other message its sender's, so that the receiver does nothing for a
stranger. The two ends prove their identities to each other afterwards (`secure_channel.py`).

The carrier also tells each end the address from which the other end is connected to the carrier. If the other end is
behind a NAT that uses one outer port for all destinations (any but a symmetric NAT), we can dial this address once the
other end has dialled us: that opens its NAT for our address. Both ends dial repeatedly, so the second dial succeeds.
"""

import asyncio
import re
import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from shoal.protocol.envelope import decoded
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
        public_key_of(PeerID(self.to))  # raises if it is no PeerID


class Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    source: _Peer
    """The opener's PeerID, as the carrier claims; the opener proves it later."""
    purpose: Purpose
    certificate: _Certificate
    seen_at: _Places
    """The multiaddrs from which the opener is connected to the carrier."""

    def __post_init__(self) -> None:
        public_key_of(PeerID(self.source))


class CarriageAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    refusal: _Sentence
    """The reason of a refusal; empty: the stream is accepted."""
    certificate: _Certificate
    seen_at: _Places = ()
    """Set by the carrier, for the opener: multiaddrs from which the other end is connected to the carrier."""


Said = TypeVar("Said", Carry, Carried, CarriageAnswer)


def plain_tcp(places: Sequence[str]) -> tuple[str, ...]:
    """Return at most two of a peer's multiaddrs: those that others could dial (plain TCP, without a relay)."""
    return tuple(place for place in places if _TCP.match(place) and len(place) <= ADDRESS_CHARS_MAX)[:_SEEN_AT_MAX]


def encode(message: Carry | Carried | CarriageAnswer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, kind: type[Said], source: PeerID) -> Said:
    """Read the first message of `source`. Raises: RemoteError: it is invalid. EOFError, OSError: the stream broke."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _BYTES_MAX:
        raise RemoteError(source, f"sent {length} bytes about a carried stream; the limit is {_BYTES_MAX}")
    body = await reader.readexactly(length)
    return decoded(msgspec.msgpack.Decoder(kind), body, source, "an unreadable message about a carried stream")


def check_member(members: Members, peer: PeerID, certificate: bytes) -> None:
    """Check and remember a certificate that `peer` has shown. Raises: RemoteError: `peer` is no member of this run."""
    members.show(peer, certificate)
    if members.access_level(peer) < AccessLevel.MEMBER:
        raise RemoteError(peer, "is no member of this run")
