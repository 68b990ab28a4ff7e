"""Signs statements that other peers may forward in any message. Pure.

An envelope proves to its receiver which peer sent a message; a statement proves to any third party, at any later time,
that a key has signed it. The signature covers topic and run, so that a statement serves no other purpose or run.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from shoal.protocol.identity import Identity, PeerID, verify

Topic = Literal["invite", "member", "exclusion", "vote", "state", "end", "carried-from", "carried-to", "transfer"]
VerifySignature = Callable[[PeerID, bytes, bytes], bool]
"""(signer, signature, body) -> True if `signer` made the signature, for the run and topic that are built in."""


def sign_statement(identity: Identity, topic: Topic, *, run: str, body: bytes) -> bytes:
    """Return the signature of `body` for this topic and run by `identity`, 64 bytes."""
    return identity.sign(_signed_bytes(topic, run, body))


def statement_holds(signer: PeerID, signature: bytes, topic: Topic, *, run: str, body: bytes) -> bool:
    """True if `signer` signed `body` for this topic and run. Never raises, whatever the network sent."""
    return verify(signer, signature, _signed_bytes(topic, run, body))


def _signed_bytes(topic: Topic, run: str, body: bytes) -> bytes:
    # No envelope's domain equals "statement", so a signed envelope cannot pass for a statement, or the reverse.
    return msgspec.msgpack.encode(("statement", topic, run, body))
