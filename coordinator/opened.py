"""Plans and mandates from the network, verified once."""

from collections import OrderedDict

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import SignedPlan, open_mandate
from shoal.protocol.seals import SEALS, Seals
from shoal.protocol.spec import ModelSpec

PLANS_OPENED_MAX = 16
"""Signatures of plans last seen, so that a plan that comes with twenty heartbeats is verified once."""


class OpenedPlans:
    """Of one run, whose owner signs mandates."""

    def __init__(self, run: str, *, owner: PeerID, model: ModelSpec, seals: Seals = SEALS) -> None:
        self._seals = seals
        self._run, self._owner, self._model = run, owner, model
        self._opened: OrderedDict[bytes, SignedPlan] = OrderedDict()

    def open(self, data: bytes, source: PeerID) -> SignedPlan | None:
        """None for no bytes. Raises: RemoteError: `source` handed us a plan that does not hold."""
        if not data:
            return None
        plan = self._opened.pop(data, None)
        if plan is None:
            plan = self._seals.open_plan(
                data,
                run=self._run,
                owner=self._owner,
                source=source,
                num_layers=self._model.num_layers,
                num_experts=self._model.num_experts,
            )
        self._opened[data] = plan
        if len(self._opened) > PLANS_OPENED_MAX:
            self._opened.popitem(last=False)
        return plan

    def need(self, data: bytes, source: PeerID) -> SignedPlan:
        """Raises: RemoteError: as `open`, or there is none."""
        plan = self.open(data, source)
        if plan is None:
            raise RemoteError(source, "left out a plan")
        return plan

    def mandated_term(self, mandate: bytes, source: PeerID, *, coordinator: PeerID) -> int:
        """In which term the owner lets `coordinator` make a plan without votes. Raises: RemoteError: in none."""
        term, mandated = open_mandate(mandate, run=self._run, owner=self._owner, source=source)
        if mandated != coordinator:
            raise RemoteError(source, "sent the mandate for another peer")
        return term
