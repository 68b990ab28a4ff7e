"""The envelope around every record and call: run, term, sender, sequence, body, and a signature or checksum.

An envelope that third parties may see (record, plan, mandate, hello) is signed by its sender. The envelopes of a call
and its reply carry a checksum instead, which detects damage: they stay within one libp2p connection, which has
authenticated both ends and encrypts the traffic, also through a relay. Signature and checksum also cover a domain tag
("call", "record", "plan", ...), so that bytes made for one purpose cannot serve another.
"""

from collections import OrderedDict
from typing import Final, Literal, TypeVar

import msgspec
from xxhash import xxh3_64_digest

from shoal.protocol.depth import TooDeep, check_depth
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID, verify
from shoal.protocol.limits import CONTROL_BYTES_MAX, REPLAY_WINDOW

T = TypeVar("T")

Domain = Literal["call", "reply", "record", "plan", "mandate", "hello"]
_DIRECT: Final = frozenset({"call", "reply"})
"""Domains of messages between two ends of one connection; no one forwards them."""
SIGNATURE_BYTES: Final = 64
CHECKSUM_BYTES: Final = 8


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One message (`body`, in msgpack) with its run, leadership term, sender and sequence number."""

    run: str
    term: int
    sender: PeerID
    sequence: int
    body: bytes
    proof: bytes
    """The sender's Ed25519 signature; in a call or a reply the checksum xxh3-64."""
    certificate: bytes = b""
    """The sender's certificate, if the receiver may lack it. It has its own signatures; `proof` does not cover it."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def is_direct(domain: Domain) -> bool:
    """True if the domain is "call" or "reply": such envelopes never leave one connection, and so need no signature."""
    return domain in _DIRECT


def seal(
    identity: Identity, domain: Domain, *, run: str, term: int, sequence: int, body: bytes, certificate: bytes = b""
) -> bytes:
    """Return the bytes of an envelope around `body`, signed by `identity`, or with a checksum if
    `is_direct(domain)`."""
    covered = _ENCODER.encode((domain, run, term, identity.peer_id, sequence, body))
    proof = xxh3_64_digest(covered) if domain in _DIRECT else identity.sign(covered)
    return _ENCODER.encode(Envelope(run, term, identity.peer_id, sequence, body, proof, certificate))


def unseal(data: bytes, domain: Domain, *, run: str, source: PeerID, relayed: bool = False) -> Envelope:
    """Check size, nesting, shape, run and signature (or checksum) of an envelope that `source` sent, in that order.

    Args:
        source: the peer at the other end, as authenticated by the transport.
        relayed: True for records and plans, which others forward: the signer may then differ from `source`.
    Raises: RemoteError: a check fails; the error names `source`.
    """
    if len(data) > CONTROL_BYTES_MAX:
        raise RemoteError(source, f"sent {len(data)} bytes where {CONTROL_BYTES_MAX} are the limit")
    try:
        check_depth(data)
        envelope = decoded(_DECODER, data, source, "an unreadable message")
        check_depth(envelope.body)
    except TooDeep as error:
        raise RemoteError(source, f"sent an unreadable message ({error})") from error
    if envelope.run != run:
        raise RemoteError(source, f"speaks for run {envelope.run[:12]!r}, this is {run[:12]!r}")
    direct = domain in _DIRECT
    if envelope.sender != source and (direct or not relayed):
        raise RemoteError(source, f"speaks in the name of {envelope.sender[-8:]}")
    covered = _ENCODER.encode((domain, run, envelope.term, envelope.sender, envelope.sequence, envelope.body))
    if direct:
        if xxh3_64_digest(covered) != envelope.proof:
            raise RemoteError(source, "sent a message with a wrong checksum")
    elif not verify(envelope.sender, envelope.proof, covered):
        raise RemoteError(source, "sent a message with an invalid signature")
    return envelope


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes, source: PeerID, what: str) -> T:
    """Decode data of `source`. Raises: RemoteError: `data` is invalid; `what` ("an unreadable plan") names it."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(source, f"sent {what} ({error})") from error


class ReplayGuard:
    """Accepts each sequence number of a sender once, and only if it is less than `REPLAY_WINDOW` below the highest."""

    def __init__(self) -> None:
        self._seen: OrderedDict[PeerID, tuple[int, set[int]]] = OrderedDict()

    def accept(self, sender: PeerID, sequence: int) -> bool:
        highest, recent = self._seen.pop(sender, (-1, set()))
        fresh = sequence > highest - REPLAY_WINDOW and sequence not in recent
        if fresh:
            recent.add(sequence)
            if sequence > highest:
                highest = sequence
                if len(recent) > 2 * REPLAY_WINDOW:
                    recent = {s for s in recent if s > highest - REPLAY_WINDOW}
        self._seen[sender] = (highest, recent)
        if len(self._seen) > 4096:
            self._seen.popitem(last=False)
        return fresh
