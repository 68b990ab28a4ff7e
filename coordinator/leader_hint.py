"""Knows which peer is said to coordinate a plan above ours, by the directory or by a peer that follows it. Pure.

A hint proves nothing. We report to the named peer, which must answer with that plan."""

from shoal.coordinator.chain import PlanChain
from shoal.coordinator.roster import MEMORY_HEARTBEATS
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import HeartbeatReply, PlanHead

HINT_HEARTBEATS = 5.0
"""How long we believe that a peer coordinates a plan above ours, and report to it."""
DOUBT_HEARTBEATS = 60.0
"""How long such a peer that has not shown the plan is not believed again."""
DOUBTED_MAX = 64
GONE_ON_HEARTBEATS = 3.0
"""A coordinator that obeys another plan names it: a peer that can follow has the missing links by then."""


class LeaderHint:
    """Args: owner: all peers report to it before the first plan."""

    def __init__(self, *, me: PeerID, owner: PeerID, chain: PlanChain, heartbeat_s: float, now_s: float) -> None:
        self._me, self._owner, self._chain, self._heartbeat_s = me, owner, chain, heartbeat_s
        self._hint: tuple[tuple[int, int], PeerID] | None = None
        """(term, sequence) of a plan above ours, and its coordinator."""
        self._hint_until_s = self._behind_until_s = now_s
        self._is_named = False
        self._gone_on_since_s: float | None = None
        """The time from which the coordinator of our plan has named another plan; None: it names ours."""
        self.doubted: dict[PeerID, float] = {}
        """Peers that have not shown the plan that they are said to coordinate -> until when, oldest first."""
        self.head_known = False
        """True once the directory has been asked for the head of the chain."""

    @property
    def coordinator(self) -> PeerID:
        """The peer to report to: the coordinator of our plan, or of a higher known one."""
        live = self._chain.live
        if self._hint is not None and self._hint[0] > self._chain.order:
            return self._hint[1]
        return live.plan.coordinator if live else self._owner

    def run_exists(self, now_s: float) -> bool:
        """True if this run has a plan that we lack: the directory or a reporting peer names it."""
        return self._hint is not None or self._is_named or now_s < self._behind_until_s

    def has_gone_on(self, now_s: float) -> bool:
        """True if the coordinator of our plan answers, but has obeyed another plan for a while."""
        since_s = self._gone_on_since_s
        return since_s is not None and now_s >= since_s + GONE_ON_HEARTBEATS * self._heartbeat_s

    def is_behind(self, now_s: float) -> None:
        """Record that a peer reports a plan above ours."""
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
        """Record the directory's answer. Returns: whether it was news."""
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
        """Give the named peer its full time again, because this peer was suspended."""
        self._hint_until_s = now_s + HINT_HEARTBEATS * self._heartbeat_s

    def weigh(self, now_s: float) -> None:
        """Stop believing a peer that should have shown a higher plan by now."""
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
                self._hint = order, coordinator  # without extending its time
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
