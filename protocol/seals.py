"""Signing and checking of envelopes, plans and statements, as one replaceable object.

`sim/trust.py` replaces it in a world of a thousand modelled peers, where signatures would only cost time. Code that
listens to a real network must use `SEALS`.
"""

from typing import Protocol

from shoal.protocol.envelope import Domain, Envelope, seal, unseal
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.plan import PlanShape, SignedPlan, open_plan
from shoal.protocol.statement import Topic, sign_statement, statement_holds


class Seals(Protocol):
    def __hash__(self) -> int: ...

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
    ) -> bytes: ...

    def unseal(self, data: bytes, domain: Domain, *, run: str, source: PeerID, relayed: bool = False) -> Envelope:
        """Raises: RemoteError."""
        ...

    def open_plan(self, data: bytes, *, run: str, owner: PeerID, source: PeerID, shape: PlanShape) -> SignedPlan:
        """Raises: RemoteError."""
        ...

    def sign_statement(self, identity: Identity, topic: Topic, *, run: str, body: bytes) -> bytes: ...

    def statement_holds(self, signer: PeerID, signature: bytes, topic: Topic, *, run: str, body: bytes) -> bool: ...


class _Signed:
    seal = staticmethod(seal)
    unseal = staticmethod(unseal)
    open_plan = staticmethod(open_plan)
    sign_statement = staticmethod(sign_statement)
    statement_holds = staticmethod(statement_holds)


SEALS: Seals = _Signed()
