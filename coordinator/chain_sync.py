"""Opens the plans that others send, fetches the plans of the chain that this peer lacks, and follows hints about the
coordinator of a later plan. Pure.

A plan that does not follow ours may still be live. We ask the peer that named that plan for the links (plans with their
votes) after ours, and check each link against the one before. A newcomer cannot check its first link, nor can a peer
that was away for longer than links are kept: such a peer trusts the oldest link that it receives, and checks all later
ones. A peer that hears its coordinator trusts no unchecked link.

The directory, or another peer's reply to a heartbeat, may name the coordinator of a plan above ours. Such a hint proves
nothing. We send our heartbeats to the named peer, which must answer with that plan."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from shoal.coordinator.chain import PlanChain, link_flaw
from shoal.coordinator.coordination_events import Ask, Command
from shoal.coordinator.roster import MEMORY_HEARTBEATS
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ChainRequest, HeartbeatReply, PlanHead
from shoal.protocol.plan import Mandate, PlanShape, SignedPlan, open_link, open_mandate
from shoal.protocol.seals import Seals

ASKED_MAX = 8
"""Maximum number of peers that are asked at the same time: a silent peer must not block the sync."""
PLANS_OPENED_MAX = 16
"""Number of opened plans that are remembered, so that a plan named in twenty heartbeats is verified only once."""
HINT_HEARTBEATS = 5.0
"""How long we believe a hint that a peer coordinates a plan above ours. Meanwhile it gets our heartbeats."""
DOUBT_HEARTBEATS = 60.0
"""If the peer of a hint has not shown its plan within `HINT_HEARTBEATS`, hints about it are ignored for this long."""
DOUBTED_MAX = 64
GONE_ON_HEARTBEATS = 3.0
"""If our coordinator names another plan for this long, it has gone on without us, and we fetch the later plans."""


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
        """Open a link: a plan that should be live, with its votes. The votes are not checked here.
        Raises: RemoteError: `source` sent an invalid plan, or none."""
        envelope, proof = open_link(data, source=source) if data else (b"", None)
        return msgspec.structs.replace(self.open(envelope, source), proof=proof)

    def open_mandate(self, data: bytes, source: PeerID, *, coordinator: PeerID) -> Mandate:
        """Open the owner's mandate for `coordinator` to make a plan without votes. Raises: RemoteError: invalid."""
        mandate = open_mandate(data, run=self._run, owner=self._owner, source=source)
        if mandate.coordinator != coordinator:
            raise RemoteError(source, "sent the mandate for another peer")
        return mandate


class ChainSync:
    def __init__(self, *, me: PeerID, chain: PlanChain, heartbeat_s: float) -> None:
        self._me, self._chain = me, chain
        self._patience_s = heartbeat_s  # a question without an answer counts as lost after this time
        self._asked: dict[PeerID, float] = {}
        """Peer that we have asked and that has not answered -> the time until which it is not asked again."""
        self._trusted: dict[PeerID, SignedPlan] = {}
        """Peer -> its link (plan with votes) that we trust unchecked, while that peer's next links are on their way."""

    def ask(self, source: PeerID, now_s: float) -> list[Command]:
        """Ask `source`, which has named a plan that does not follow ours, for the plans between that plan and ours."""
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
        """Check the links (plans with votes) that `peer` has sent, oldest first.
        Args: may_trust: True if we have no plan, or have lost touch with every peer that obeys ours.
        Returns: ([(plan to adopt, its predecessor if that is trusted unchecked)], commands that ask for more links)."""
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
                base = plan  # we do not obey this link, only a later one that is above our plan
                continue
            else:
                continue
            last, override_epoch = plan, max(override_epoch, plan.plan.override_epoch)
        if found or base is None or not links or len(self._asked) >= ASKED_MAX:
            return found, []
        # The link taken on trust has filled the message: ask for the next ones.
        self._trusted[peer] = base
        self._asked[peer] = now_s + self._patience_s
        return [], [self._question(peer, base)]

    def _question(self, peer: PeerID, behind: SignedPlan | None) -> Ask:
        digest, override_epoch = (behind.digest, behind.plan.override_epoch) if behind is not None else ("", 0)
        return Ask(peer=peer, message=ChainRequest(after=digest, override_epoch=override_epoch))


class LeaderHint:
    """Knows the peer to which we send our heartbeats. Args: owner: the peer that gets them before the first plan."""

    def __init__(self, *, me: PeerID, owner: PeerID, chain: PlanChain, heartbeat_s: float, now_s: float) -> None:
        self._me, self._owner, self._chain, self._heartbeat_s = me, owner, chain, heartbeat_s
        self._hint: tuple[tuple[int, int], PeerID] | None = None
        """((term, sequence) of a plan above ours, the peer that is said to coordinate it); None: no hint counts now."""
        self._hint_until_s = self._behind_until_s = now_s
        self._is_named = False
        self._gone_on_since_s: float | None = None
        """The time from which the coordinator of our plan has named another plan; None: it names ours."""
        self.doubted: dict[PeerID, float] = {}
        """Peer of a hint that proved false, or that another hint outbid -> when hints about that peer count again."""
        self.head_known = False
        """True once the directory has answered our first question about the chain's newest plan (its head)."""

    @property
    def coordinator(self) -> PeerID:
        """The peer to send heartbeats to: the coordinator of our plan, or of a higher one that a hint names."""
        live = self._chain.live
        if self._hint is not None and self._hint[0] > self._chain.order:
            return self._hint[1]
        return live.plan.coordinator if live else self._owner

    def run_exists(self, now_s: float) -> bool:
        """True if the directory, a heartbeat, or an answer to one of ours has named a plan of this run that we lack."""
        return self._hint is not None or self._is_named or now_s < self._behind_until_s

    def has_gone_on(self, now_s: float) -> bool:
        """True if the coordinator of our plan answers, but has obeyed another plan for a while."""
        since_s = self._gone_on_since_s
        return since_s is not None and now_s >= since_s + GONE_ON_HEARTBEATS * self._heartbeat_s

    def is_behind(self, now_s: float) -> None:
        """Record that a peer reports a plan above ours. `run_exists` is then True for `MEMORY_HEARTBEATS`."""
        self._behind_until_s = now_s + MEMORY_HEARTBEATS * self._heartbeat_s

    def replied(self, peer: PeerID, reply: HeartbeatReply, now_s: float) -> None:
        """Record the answer of `peer` to a heartbeat of ours."""
        if not reply.is_coordinator and reply.coordinator not in (self._me, peer):
            self._hear_of((reply.term, 0), reply.coordinator, now_s)
        live = self._chain.live
        if live is None or peer != live.plan.coordinator:
            return
        if not reply.plan and reply.term <= live.plan.term:
            self._gone_on_since_s = None
        elif self._gone_on_since_s is None:
            self._gone_on_since_s = now_s

    def found(self, head: PlanHead | None, now_s: float) -> bool:
        """Record the directory's head of the chain. Returns: whether that plan was news."""
        self.head_known = True
        self._is_named = head is not None and head.coordinator != self._me
        if head is None or head.coordinator == self._me:
            return False
        return self._hear_of((head.term, head.sequence), head.coordinator, now_s)

    def obeyed(self) -> None:
        """Record that the chain has a new live plan."""
        self._gone_on_since_s = None
        if self._hint is not None and self._hint[0] <= self._chain.order:
            self._hint = None
        if self._chain.live is not None:
            self.doubted.pop(self._chain.live.plan.coordinator, None)

    def excuse(self, now_s: float) -> None:
        """Give the peer that a hint names its full time again, because our own process was suspended."""
        self._hint_until_s = now_s + HINT_HEARTBEATS * self._heartbeat_s

    def weigh(self, now_s: float) -> None:
        """Drop a hint if the peer that it names has not shown the higher plan in time."""
        for peer in [peer for peer, until_s in self.doubted.items() if now_s >= until_s]:
            del self.doubted[peer]
        if self._hint is not None and now_s >= self._hint_until_s:
            self._doubt(self._hint[1], now_s)
            self._hint = None

    def _hear_of(self, order: tuple[int, int], coordinator: PeerID, now_s: float) -> bool:
        if order <= self._chain.order or coordinator in self.doubted:
            return False
        if self._hint is not None:
            if order <= self._hint[0]:
                return False
            if coordinator == self._hint[1]:
                self._hint = order, coordinator  # a later plan of the same peer does not extend its time
                return False
            # otherwise two peers that outbid each other would never have to show a plan
            self._doubt(self._hint[1], now_s)
        self._hint, self._hint_until_s = (order, coordinator), now_s + HINT_HEARTBEATS * self._heartbeat_s
        return True

    def _doubt(self, peer: PeerID, now_s: float) -> None:
        self.doubted.pop(peer, None)
        self.doubted[peer] = now_s + DOUBT_HEARTBEATS * self._heartbeat_s
        if len(self.doubted) > DOUBTED_MAX:
            del self.doubted[next(iter(self.doubted))]
