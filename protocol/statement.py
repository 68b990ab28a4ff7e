"""Detached signatures: what a key says once, for others to hand on, beside whatever message carries it. Pure.

An envelope says who sent a message; a statement proves to a third party what a key has said, long after and wherever
it is found. The topic and the run are signed too, so that no statement serves another purpose or another run.
"""

from typing import Literal

import msgspec

from shoal.protocol.identity import Identity, PeerID, verify

Topic = Literal["invite", "member", "exclusion", "vote", "state", "end", "carried-from", "carried-to"]


def sign_statement(identity: Identity, topic: Topic, *, run: str, body: bytes) -> bytes:
    """Returns: 64 bytes."""
    return identity.sign(_signed_bytes(topic, run, body))


def statement_holds(signer: PeerID, signature: bytes, topic: Topic, *, run: str, body: bytes) -> bool:
    """Whether `signer` has said `body` about `run`. Never raises on what came from a network."""
    return verify(signer, signature, _signed_bytes(topic, run, body))


def _signed_bytes(topic: Topic, run: str, body: bytes) -> bytes:
    # The first element cannot be an envelope's domain, so that neither is ever taken for the other.
    return msgspec.msgpack.encode(("statement", topic, run, body))
