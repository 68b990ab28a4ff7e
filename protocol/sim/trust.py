"""Envelopes (signed wrappers of messages) for a world of honest peers: of full size, without signatures or checksums.

Ed25519 and the check of nesting depth take two thirds of the real time that a simulated call costs, and change nothing
among honest peers. Worlds with damage or forgery use the real `Seals`.
"""

from collections import OrderedDict

import msgspec

from shoal.protocol.envelope import CHECKSUM_BYTES, SIGNATURE_BYTES, Domain, Envelope, decoded, is_direct
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.plan import PlanShape, SignedPlan, open_plan
from shoal.protocol.seals import Seals
from shoal.protocol.statement import Topic

_NO_SIGNATURE = bytes(SIGNATURE_BYTES)
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


class TrustingSeals(Seals):
    """`Seals` without signatures. All peers of a world share one object, so that a plan is decoded once for all."""

    def __init__(self) -> None:
        self._plans: OrderedDict[bytes, SignedPlan] = OrderedDict()

    def seal(
        self,
        identity: Identity,
        domain: Domain,
        *,
        run: str,
        term: int,
        sequence: int,
        body: bytes,
        certificate: bytes = b"",
    ) -> bytes:
        proof = _NO_CHECKSUM if is_direct(domain) else _NO_SIGNATURE
        return _ENCODER.encode(Envelope(run, term, identity.peer_id, sequence, body, proof, certificate))

    def unseal(self, data: bytes, domain: Domain, *, run: str, source: PeerID, relayed: bool = False) -> Envelope:
        envelope = decoded(_DECODER, data, source, "an unreadable message")
        if envelope.run != run:
            raise RemoteError(source, f"speaks for run {envelope.run[:12]!r}, this is {run[:12]!r}")
        return envelope

    def open_plan(self, data: bytes, *, run: str, owner: PeerID, source: PeerID, shape: PlanShape) -> SignedPlan:
        plan = self._plans.get(data)
        if plan is None:
            plan = self._plans[data] = open_plan(data, run=run, owner=owner, source=source, shape=shape)
            if len(self._plans) > 64:
                self._plans.popitem(last=False)
        return plan

    def sign_statement(self, identity: Identity, topic: Topic, *, run: str, body: bytes) -> bytes:
        return _NO_SIGNATURE

    def statement_holds(self, signer: PeerID, signature: bytes, topic: Topic, *, run: str, body: bytes) -> bool:
        return True
