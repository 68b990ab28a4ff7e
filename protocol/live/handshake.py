"""HELLO, the first frame of each side on a stream: its identity, run, version and addresses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from shoal.protocol.envelope import decoded, seal, unseal
from shoal.protocol.errors import RemoteError
from shoal.protocol.frames import Frame, FrameType, encode_frame
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import ADDRESS_CHARS_MAX, ADDRESSES_MAX, PROTOCOL_VERSION
from shoal.protocol.membership import AccessLevel, Members

NONCE_BYTES: Final = 16

_Address = Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARS_MAX)]


class StreamHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The content of a HELLO, a stream's first frame. It names its receiver, so that nobody can replay it elsewhere."""

    version: int
    to: PeerID
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    """Random bytes. The hash of both ends' nonces identifies the stream when an end opens a lane (TCP connection)."""
    lane_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """TCP port on which the sender accepts lanes (further connections of a stream); 0: it accepts none."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StreamHello)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeter:
    """Makes and checks HELLOs (a stream's first frames) for one peer.

    The side that did not open the stream checks the opener's HELLO first: so a stranger learns no run or addresses.
    """

    identity: Identity
    members: Members
    addresses: Callable[[], tuple[str, ...]]
    """Returns our addresses. Every HELLO has them, since another peer's daemon forgets them when it restarts."""

    def hello(self, to: PeerID, *, nonce: bytes, lane_port: int = 0) -> bytes:
        """Return the bytes of the HELLO frame for the peer `to`."""
        short = tuple(address for address in self.addresses() if len(address) <= ADDRESS_CHARS_MAX)
        body = _ENCODER.encode(StreamHello(PROTOCOL_VERSION, to, short[:ADDRESSES_MAX], nonce, lane_port))
        run, certificate = self.members.run, self.members.certificate
        meta = seal(self.identity, "hello", run=run, term=0, sequence=0, body=body, certificate=certificate)
        return b"".join(encode_frame(FrameType.HELLO, 0, meta, b""))

    def check(self, frame: Frame, source: PeerID) -> StreamHello:
        """Return the HELLO that the first frame of `source` contains.

        Raises: RemoteError: the HELLO is invalid, of another version or for another peer, or `source` is no member.
        """
        envelope = unseal(frame.meta, "hello", run=self.members.run, source=source)
        hello = decoded(_DECODER, envelope.body, source, "an unreadable hello")
        if hello.version != PROTOCOL_VERSION:
            raise RemoteError(source, f"speaks protocol {hello.version}, this is {PROTOCOL_VERSION}")
        if hello.to != self.identity.peer_id:
            raise RemoteError(source, "sent a hello that was meant for another peer")
        self.members.show(source, envelope.certificate)
        if self.members.access_level(source) < AccessLevel.MEMBER:
            raise RemoteError(source, "is no member of this run")
        return hello
