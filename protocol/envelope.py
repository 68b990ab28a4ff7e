"""Signed envelope around every record and every call: run, term, sender, sequence, body.

The signature covers a domain tag too ("call", "record", "plan", "mandate", "hello"), so that bytes signed for one
purpose cannot be replayed for another.
"""

from collections import OrderedDict
from typing import Literal

import msgspec

from shoal.protocol.depth import TooDeep, check_depth
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID, verify
from shoal.protocol.limits import CONTROL_BYTES_MAX, REPLAY_WINDOW

Domain = Literal["call", "reply", "record", "plan", "mandate", "hello"]


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`body` is the msgpack of one message; the rest says who speaks, in which run and term, and its number."""

    run: str
    term: int
    sender: PeerID
    sequence: int
    body: bytes
    signature: bytes
    certificate: bytes = b""
    """The sender's, where the receiver may not have seen it yet. It proves itself, so the signature leaves it out."""

    def signed_bytes(self, domain: Domain) -> bytes:
        return msgspec.msgpack.encode((domain, self.run, self.term, self.sender, self.sequence, self.body))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def seal(
    identity: Identity, domain: Domain, *, run: str, term: int, sequence: int, body: bytes, certificate: bytes = b""
) -> bytes:
    """Sign `body` as `identity`. Returns: the envelope's msgpack bytes."""
    unsigned = Envelope(run, term, identity.peer_id, sequence, body, b"", certificate)
    return _ENCODER.encode(msgspec.structs.replace(unsigned, signature=identity.sign(unsigned.signed_bytes(domain))))


def unseal(data: bytes, domain: Domain, *, run: str, source: PeerID, relayed: bool = False) -> Envelope:
    """Check size, nesting, shape, run and signature of what `source` handed us, in that order.

    Args:
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
    if not relayed and envelope.sender != source:
        raise RemoteError(source, f"speaks in the name of {envelope.sender[-8:]}")
    if not verify(envelope.sender, envelope.signature, envelope.signed_bytes(domain)):
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
