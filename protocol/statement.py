"""Detached signatures: a signed statement that others may forward in any message. Pure.

An envelope proves the sender of a message; a statement proves to a third party what a key has signed, at any later
time. The signature covers topic and run, so that a statement serves no other purpose or run.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from shoal.protocol.identity import Identity, PeerID, verify

Topic = Literal["invite", "member", "exclusion", "vote", "state", "end", "carried-from", "carried-to", "transfer"]
VerifySignature = Callable[[PeerID, bytes, bytes], bool]
"""(signer, signature, body) -> True if it is the signer's statement about this run, of a topic that both sides know."""


def sign_statement(identity: Identity, topic: Topic, *, run: str, body: bytes) -> bytes:
    """Returns: 64 bytes."""
    return identity.sign(_signed_bytes(topic, run, body))


def statement_holds(signer: PeerID, signature: bytes, topic: Topic, *, run: str, body: bytes) -> bool:
    """True if `signer` signed `body` for this topic and run. Never raises, whatever the network sent."""
    return verify(signer, signature, _signed_bytes(topic, run, body))


def _signed_bytes(topic: Topic, run: str, body: bytes) -> bytes:
    # No envelope's domain equals the first element, so neither can pass for the other.
    return msgspec.msgpack.encode(("statement", topic, run, body))
