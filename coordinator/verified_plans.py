"""Opens plans and mandates from the network, and verifies each once."""

from collections import OrderedDict

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Mandate, PlanShape, SignedPlan, open_link, open_mandate
from shoal.protocol.seals import Seals

PLANS_OPENED_MAX = 16
"""Plans that are remembered: one that arrives with twenty heartbeats is verified once."""


class VerifiedPlans:
    def __init__(self, run: str, *, owner: PeerID, shape: PlanShape, seals: Seals) -> None:
        self._seals = seals
        self._run, self._owner, self._shape = run, owner, shape
        self._opened: OrderedDict[bytes, SignedPlan] = OrderedDict()

    def open(self, data: bytes, source: PeerID) -> SignedPlan | None:
        """Open and verify a plan; None for no bytes. Raises: RemoteError: `source` sent an invalid plan."""
        if not data:
            return None
        plan = self._opened.pop(data, None)
        if plan is None:
            plan = self._seals.open_plan(data, run=self._run, owner=self._owner, source=source, shape=self._shape)
        self._opened[data] = plan
        if len(self._opened) > PLANS_OPENED_MAX:
            self._opened.popitem(last=False)
        return plan

    def need(self, data: bytes, source: PeerID) -> SignedPlan:
        """Open a plan that must be present. Raises: RemoteError: it is invalid or missing."""
        return _there(self.open(data, source), source)

    def open_link(self, data: bytes, source: PeerID) -> SignedPlan | None:
        """Open a plan that should be live, with its votes, which are not checked here; None for no bytes.
        Raises: RemoteError: `source` sent an invalid plan."""
        if not data:
            return None
        envelope, proof = open_link(data, source=source)
        return msgspec.structs.replace(self.need(envelope, source), proof=proof)

    def need_link(self, data: bytes, source: PeerID) -> SignedPlan:
        """Open a link that must be present. Raises: RemoteError: it is invalid or missing."""
        return _there(self.open_link(data, source), source)

    def mandate(self, data: bytes, source: PeerID, *, coordinator: PeerID) -> Mandate:
        """Open the owner's mandate for `coordinator` to make a plan without votes. Raises: RemoteError: it is none."""
        mandate = open_mandate(data, run=self._run, owner=self._owner, source=source)
        if mandate.coordinator != coordinator:
            raise RemoteError(source, "sent the mandate for another peer")
        return mandate


def _there(plan: SignedPlan | None, source: PeerID) -> SignedPlan:
    if plan is None:
        raise RemoteError(source, "left out a plan")
    return plan
