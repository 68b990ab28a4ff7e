"""The envelope around every record and every call: run, term, sender, sequence, body, and what vouches for them.

An envelope that a third party may be shown (record, plan, mandate, hello) is signed by its sender. A call and its reply
are shown to nobody but the other end of one libp2p connection, which has proved both ends' keys to each other and keeps
what it carries secret and whole, also through a relay. The transport says who that other end is, so these two
envelopes carry a checksum in place of the signature: it finds damage, and stops nobody who lies about himself, which
the transport does.

Signature and checksum cover a domain tag too ("call", "record", "plan", ...), so that bytes made for one purpose cannot
be used for another.
"""

from collections import OrderedDict
from typing import Final, Literal

import msgspec
from xxhash import xxh3_64_digest

from shoal.protocol.depth import TooDeep, check_depth
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID, verify
from shoal.protocol.limits import CONTROL_BYTES_MAX, REPLAY_WINDOW

Domain = Literal["call", "reply", "record", "plan", "mandate", "hello"]
_DIRECT: Final = frozenset({"call", "reply"})
"""Domains of what one peer hands to another and nobody hands on."""
SIGNATURE_BYTES: Final = 64
CHECKSUM_BYTES: Final = 8


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`body` is the msgpack of one message; the rest says who speaks, in which run and term, and its number."""

    run: str
    term: int
    sender: PeerID
    sequence: int
    body: bytes
    proof: bytes
    """The sender's Ed25519 signature; of a call or a reply the checksum xxh3-64."""
    certificate: bytes = b""
    """The sender's, where the receiver may not have seen it yet. It proves itself, so the signature leaves it out."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def is_direct(domain: Domain) -> bool:
    """Whether such an envelope is for the other end of a connection alone, and so needs no signature."""
    return domain in _DIRECT


def seal(
    identity: Identity, domain: Domain, *, run: str, term: int, sequence: int, body: bytes, certificate: bytes = b""
) -> bytes:
    """Put `body` into an envelope of `identity`, signed unless it `is_direct`. Returns: the envelope's bytes."""
    covered = _ENCODER.encode((domain, run, term, identity.peer_id, sequence, body))
    proof = xxh3_64_digest(covered) if domain in _DIRECT else identity.sign(covered)
    return _ENCODER.encode(Envelope(run, term, identity.peer_id, sequence, body, proof, certificate))


def unseal(data: bytes, domain: Domain, *, run: str, source: PeerID, relayed: bool = False) -> Envelope:
    """Check size, nesting, shape, run and signature (or checksum) of what `source` handed us, in that order.

    Args:
        source: who the transport says is at the other end.
        relayed: records and plans are handed on by others; only then may the signer differ from `source`.
    Raises: RemoteError: any of the checks fails; names `source`.
    """
    if len(data) > CONTROL_BYTES_MAX:
        raise RemoteError(source, f"sent {len(data)} bytes where {CONTROL_BYTES_MAX} are the limit")
    try:
        check_depth(data)
        envelope = _DECODER.decode(data)
        check_depth(envelope.body)
    except (TooDeep, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(source, f"sent an unreadable message ({error})") from error
    if envelope.run != run:
        raise RemoteError(source, f"speaks for run {envelope.run[:12]!r}, this is {run[:12]!r}")
    direct = domain in _DIRECT
    if envelope.sender != source and (direct or not relayed):
        raise RemoteError(source, f"speaks in the name of {envelope.sender[-8:]}")
    covered = _ENCODER.encode((domain, run, envelope.term, envelope.sender, envelope.sequence, envelope.body))
    if direct:
        if xxh3_64_digest(covered) != envelope.proof:
            raise RemoteError(source, "sent a message whose checksum does not hold")
    elif not verify(envelope.sender, envelope.proof, covered):
        raise RemoteError(source, "sent a message whose signature does not hold")
    return envelope


class ReplayGuard:
    """Accepts each call sequence of a sender once, in any order within `REPLAY_WINDOW` of its highest."""

    def __init__(self, senders_max: int = 4096) -> None:
        self._seen: OrderedDict[PeerID, tuple[int, set[int]]] = OrderedDict()
        self._senders_max = senders_max

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
        if len(self._seen) > self._senders_max:
            self._seen.popitem(last=False)
        return fresh
