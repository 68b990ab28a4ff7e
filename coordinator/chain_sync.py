"""Opens the plans that others send, and fetches the links of the chain that this peer lacks. Pure.

A plan that does not follow ours may still be live. We ask the peer that named it for the links after ours, and each
link proves itself against the one before. A newcomer, and a peer that was away for longer than links are kept, have no
base for that: they take the oldest link that they receive on trust, and check all later ones against it. A peer that
hears its coordinator never trusts a link."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from shoal.coordinator.chain import PlanChain, link_flaw
from shoal.coordinator.coordination_events import Ask, Command
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ChainRequest
from shoal.protocol.plan import Mandate, PlanShape, SignedPlan, open_link, open_mandate
from shoal.protocol.seals import Seals

ASKED_MAX = 8
"""Maximum number of peers that are asked at the same time: a silent peer must not block the sync."""
PLANS_OPENED_MAX = 16
"""Plans that are remembered: one that arrives with twenty heartbeats is verified once."""


class VerifiedPlans:
    """Opens plans and mandates from the network, and verifies each once."""

    def __init__(self, run: str, *, owner: PeerID, shape: PlanShape, seals: Seals) -> None:
        self._run, self._owner, self._shape, self._seals = run, owner, shape, seals
        self._opened: OrderedDict[bytes, SignedPlan] = OrderedDict()

    def open(self, data: bytes, source: PeerID) -> SignedPlan:
        """Open and verify a plan. Raises: RemoteError: `source` sent an invalid plan, or none."""
        if not data:
            raise RemoteError(source, "left out a plan")
        plan = self._opened.pop(data, None)
        if plan is None:
            plan = self._seals.open_plan(data, run=self._run, owner=self._owner, source=source, shape=self._shape)
        self._opened[data] = plan
        if len(self._opened) > PLANS_OPENED_MAX:
            self._opened.popitem(last=False)
        return plan

    def open_link(self, data: bytes, source: PeerID) -> SignedPlan:
        """Open a plan that should be live, with its votes, which are not checked here.
        Raises: RemoteError: as `open`."""
        envelope, proof = open_link(data, source=source) if data else (b"", None)
        return msgspec.structs.replace(self.open(envelope, source), proof=proof)

    def open_mandate(self, data: bytes, source: PeerID, *, coordinator: PeerID) -> Mandate:
        """Open the owner's mandate for `coordinator` to make a plan without votes. Raises: RemoteError: it is none."""
        mandate = open_mandate(data, run=self._run, owner=self._owner, source=source)
        if mandate.coordinator != coordinator:
            raise RemoteError(source, "sent the mandate for another peer")
        return mandate


class ChainSync:
    def __init__(self, *, me: PeerID, chain: PlanChain, heartbeat_s: float) -> None:
        self._me, self._chain = me, chain
        self._patience_s = heartbeat_s  # a question without an answer counts as lost after this time
        self._asked: dict[PeerID, float] = {}
        """Peers that have been asked -> the time until which they are not asked again."""
        self._trusted: dict[PeerID, SignedPlan] = {}
        """Peer -> the first link that it sent, while its next links are on their way."""

    def ask(self, source: PeerID, now_s: float) -> list[Command]:
        """Ask `source` for links: it has named a plan that does not follow ours."""
        self._asked = {peer: until_s for peer, until_s in self._asked.items() if now_s < until_s}
        if source == self._me or source in self._asked or len(self._asked) >= ASKED_MAX:
            return []
        self._asked[source] = now_s + self._patience_s
        self._trusted.pop(source, None)
        return [self._question(source, self._chain.live)]

    def unanswered(self, peer: PeerID) -> None:
        self._trusted.pop(peer, None)

    def learn(
        self, peer: PeerID, links: Sequence[SignedPlan], now_s: float, *, may_trust: bool
    ) -> tuple[list[tuple[SignedPlan, SignedPlan | None]], list[Command]]:
        """Check the links that `peer` has sent, oldest first.
        Args: may_trust: we have no plan, or have lost touch with every peer that obeys ours.
        Returns: ([(plan to adopt, its predecessor if that is taken on trust)], further questions)."""
        self._asked.pop(peer, None)
        base = self._trusted.pop(peer, None)
        found: list[tuple[SignedPlan, SignedPlan | None]] = []
        last, override_epoch = self._chain.live, self._chain.height[0]
        for plan in links:
            if plan.plan.mandate or not plan.plan.previous or (last is not None and plan.plan.previous == last.digest):
                found.append((plan, None))
            elif base is not None and not link_flaw(plan, base):
                found.append((plan, base))
            elif may_trust and plan.plan.override_epoch <= override_epoch:
                base = plan  # to be obeyed, the next link must be above our plan
                continue
            else:
                continue
            last, override_epoch = plan, max(override_epoch, plan.plan.override_epoch)
        if found or base is None or not links or len(self._asked) >= ASKED_MAX:
            return found, []
        # The first link has filled the message.
        self._trusted[peer] = base
        self._asked[peer] = now_s + self._patience_s
        return [], [self._question(peer, base)]

    def _question(self, peer: PeerID, behind: SignedPlan | None) -> Ask:
        digest, override_epoch = (behind.digest, behind.plan.override_epoch) if behind is not None else ("", 0)
        return Ask(peer=peer, message=ChainRequest(after=digest, override_epoch=override_epoch))
