"""What a peer knows of the coordinator: who it is, and when its silence means that it is gone. Pure.

Every peer hears the coordinator once a heartbeat, with the answer to its own heartbeat. The peers that are next in turn
(`close`) also ping it several times a heartbeat, so they may suspect it after little more than one heartbeat, on the
evidence of six missing answers. The other peers have no such evidence and need none: they are asked whether they agree
(`follower`), and look for themselves when they are (`alarm`).

A refused connection says more than silence, since a process that stands still keeps its connections. Two refusals, one
after the other, need no waiting.
"""

from shoal.coordinator.adaptive_timeout import Arrivals, RoundTrip
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import HeartbeatReply, PlanHead
from shoal.protocol.plan import Plan

Order = tuple[int, int]

PING_HEARTBEATS = 0.25
CLOSE_FLOOR_HEARTBEATS = 1.2
"""Five pings are not answered in this time. A plan takes three round trips more (agree, grant, vote), so most of a
heartbeat is left of the two within which the next plan should be live."""
FLOOR_HEARTBEATS = 3.0
"""Two answers are missing after this time without pings, and the third is late."""
BACKING_HEARTBEATS = 1.15
"""Heartbeats vary by a twentieth: a peer that waits for longer than this has missed one."""
ALARM_HEARTBEATS = 2.0
GONE_ON_HEARTBEATS = 3.0
"""Whoever obeys another plan than ours names it in each reply, and the plans in between come well within this time."""
MEMORY_HEARTBEATS = 60.0
HINT_HEARTBEATS = 5.0
"""A peer that is said to coordinate a plan above ours answers with that plan. We believe that it does, and ask it, for
so long."""
DOUBT_HEARTBEATS = 60.0
"""If such a peer has not shown the plan we do not believe it again for so long. It may have been out of our reach."""
DOUBTED_MAX = 64


class LeaderMonitor:
    """Watches one coordinator after the other.

    Args:
        owner: the peer to which everybody reports before there is a plan.
    """

    def __init__(self, *, owner: PeerID, heartbeat_s: float, now_s: float) -> None:
        self._owner, self._heartbeat_s = owner, heartbeat_s
        memory_s = MEMORY_HEARTBEATS * heartbeat_s
        self._beats = Arrivals(heartbeat_s, now_s, FLOOR_HEARTBEATS * heartbeat_s, memory_s)
        self._pings = Arrivals(PING_HEARTBEATS * heartbeat_s, now_s, CLOSE_FLOOR_HEARTBEATS * heartbeat_s, memory_s)
        self._round_trip = RoundTrip(heartbeat_s)
        self._close = False
        self._ping_at_s = now_s
        self._alarm_until_s = now_s
        self._refused_s: float | None = None
        self._gone_s: float | None = None
        self._behind_since_s: float | None = None
        """The time since which the coordinator of our plan has named another one; None: it names ours."""
        self._replaced: tuple[PeerID, float] | None = None
        """A coordinator that lost the role by its silence, and since when it had been silent."""
        self._hint: tuple[Order, PeerID] | None = None
        self._hint_until_s = now_s
        self._is_named = False
        self._behind_until_s = now_s
        self.doubted: dict[PeerID, float] = {}
        """The peers that are said to coordinate a plan above ours and have not shown it, and until when not to believe
        it. Oldest first."""
        self.head_known = False
        """Whether the directory has been asked where the chain is."""

    def target(self, live: Plan | None) -> PeerID:
        """The peer to report to: the coordinator of our plan, or of a higher one that we have heard of and do not
        have."""
        if self._hint is not None and self._hint[0] > (live.order if live else (0, 0)):
            return self._hint[1]
        return live.coordinator if live else self._owner

    def run_exists(self, now_s: float) -> bool:
        """Whether there is a plan of this run that we do not have: the directory names it, though its coordinator may
        not answer, or peers that obey it report to us."""
        return self._hint is not None or self._is_named or now_s < self._behind_until_s

    def is_behind(self, now_s: float) -> None:
        """A peer has reported that it obeys a later plan than we do."""
        self._behind_until_s = now_s + MEMORY_HEARTBEATS * self._heartbeat_s

    # --- is it there ---

    @property
    def suspect_at_s(self) -> float:
        """The time at which the coordinator's silence, if it lasts until then, means that it is gone."""
        if self._gone_s is not None:
            return self._gone_s
        arrivals = self._pings if self._close else self._beats
        return self._sign_s + arrivals.patience_s + self._round_trip.patience_s

    @property
    def _sign_s(self) -> float:
        return max(self._beats.sign_s, self._pings.sign_s)

    @property
    def round_trip_s(self) -> float:
        return self._round_trip.patience_s

    def heard_lately(self, now_s: float) -> bool:
        """Whether to back the coordinator against a candidate that thinks it gone. We back it until its next answer is
        late, and for longer if we have seen it come late before."""
        if self._gone_s is not None:
            return False
        usual_s = max(BACKING_HEARTBEATS * self._heartbeat_s, self._beats.usual_s, 1.1 * self._beats.worst_s)
        return now_s < self._sign_s + min(usual_s, self._beats.patience_s)

    def has_gone_on(self, now_s: float) -> bool:
        """Whether the coordinator of our plan answers, but has obeyed another plan for a while, which we cannot follow:
        it is there, and no sign that anybody obeys ours."""
        since_s = self._behind_since_s
        return since_s is not None and now_s >= since_s + GONE_ON_HEARTBEATS * self._heartbeat_s

    def keep_close(self, close: bool, now_s: float) -> None:
        """Say whether we are among the first in turn, and therefore ping the coordinator."""
        if close and not self._close:
            self._pings.excuse(self._sign_s)
            self._ping_at_s = now_s
        self._close = close

    def alarm(self, now_s: float) -> None:
        """Another peer thinks the coordinator gone: look for ourselves."""
        if now_s >= self._alarm_until_s and not self._close:
            self._ping_at_s = now_s
        self._alarm_until_s = now_s + ALARM_HEARTBEATS * self._heartbeat_s

    def is_brisk(self, now_s: float) -> bool:
        """Whether we are pinging the coordinator."""
        return self._close or now_s < self._alarm_until_s

    def takes_ping(self, now_s: float) -> bool:
        """Whether to ping the coordinator now. It is True once for each ping."""
        if not self.is_brisk(now_s) or now_s < self._ping_at_s:
            return False
        self._ping_at_s = now_s + PING_HEARTBEATS * self._heartbeat_s
        return True

    def answered(self, peer: PeerID, live: Plan | None, *, took_s: float, now_s: float) -> None:
        """`peer` has answered a ping."""
        if live is not None and peer == live.coordinator:
            if self._close:
                self._pings.arrived(now_s)
            else:
                self._beats.signed(now_s)  # pings in alarm have no rhythm to be learned
            self._alive(took_s)
        else:
            self._was_wronged(peer, now_s)

    def refused(self, peer: PeerID, live: Plan | None, *, took_s: float, now_s: float) -> None:
        """A call to `peer` was turned away at once: its process is not there. We ask again shortly, to be sure."""
        if live is None or peer != live.coordinator:
            return
        if self._refused_s is None:
            self._refused_s = now_s
            self.alarm(now_s)
            self._ping_at_s = now_s + PING_HEARTBEATS / 2 * self._heartbeat_s
        elif now_s - took_s > self._refused_s and self._gone_s is None:
            self._gone_s = now_s

    def _alive(self, took_s: float) -> None:
        self._round_trip.took(took_s)
        self._refused_s = self._gone_s = None

    def _was_wronged(self, peer: PeerID, now_s: float) -> None:
        if self._replaced is not None and self._replaced[0] == peer:
            # It stood still for so long and lived: do not take such a silence for a death again.
            self._pings.worst_s = max(self._pings.worst_s, now_s - self._replaced[1])
            self._replaced = None

    def obeys(self, plan: Plan, *, new_term: bool, replaced: PeerID | None, now_s: float) -> None:
        """A new plan is live; in a new term there is another coordinator to listen to. What was measured of the one
        before stays, because it says as much about us and our network.

        Args: replaced: the coordinator whose silence brought the new term.
        """
        self._behind_since_s = None
        if new_term:
            self._replaced = (replaced, self._sign_s) if replaced is not None else None
            self._beats.excuse(now_s)
            self._pings.excuse(now_s)
            self._refused_s = self._gone_s = None
            self._alarm_until_s = now_s
            self._close = False
        if self._hint is not None and self._hint[0] <= plan.order:
            self._hint = None
        self.doubted.pop(plan.coordinator, None)

    def excuse(self, now_s: float) -> None:
        self._beats.excuse(now_s)
        self._pings.excuse(now_s)
        self._hint_until_s = now_s + HINT_HEARTBEATS * self._heartbeat_s

    def weigh_hint(self, now_s: float) -> None:
        """Time has passed: a peer that is said to have a plan above ours should have shown it by now."""
        for peer in [peer for peer, until_s in self.doubted.items() if now_s >= until_s]:
            del self.doubted[peer]
        if self._hint is not None and now_s >= self._hint_until_s:
            self._doubt(self._hint[1], now_s)
            self._hint = None

    def _doubt(self, peer: PeerID, now_s: float) -> None:
        self.doubted.pop(peer, None)
        self.doubted[peer] = now_s + DOUBT_HEARTBEATS * self._heartbeat_s
        if len(self.doubted) > DOUBTED_MAX:
            del self.doubted[next(iter(self.doubted))]

    def replied(
        self, peer: PeerID, reply: HeartbeatReply, live: Plan | None, *, me: PeerID, took_s: float, now_s: float
    ) -> None:
        """A heartbeat of ours has been answered. Args: live: the plan that we obey after it."""
        if reply.is_coordinator and (live is None or peer == live.coordinator):
            self._beats.arrived(now_s)
            self._alive(took_s)
        elif not reply.is_coordinator and reply.coordinator not in (me, peer):
            self._hear_of((reply.term, 0), reply.coordinator, live, now_s)
        if live is not None and peer == live.coordinator:
            if not reply.plan and reply.term <= live.term:
                self._behind_since_s = None
            elif self._behind_since_s is None:
                self._behind_since_s = now_s
        if live is not None and peer != live.coordinator:
            self._was_wronged(peer, now_s)

    def found(self, head: PlanHead | None, live: Plan | None, *, me: PeerID, now_s: float) -> bool:
        """The directory has answered. Returns: whether it has said anything new."""
        self.head_known = True
        self._is_named = head is not None and head.coordinator != me
        if head is None or head.coordinator == me:
            return False
        return self._hear_of((head.term, head.sequence), head.coordinator, live, now_s)

    def _hear_of(self, order: Order, coordinator: PeerID, live: Plan | None, now_s: float) -> bool:
        if order <= (live.order if live else (0, 0)) or coordinator in self.doubted:
            return False
        if self._hint is not None:
            if order <= self._hint[0]:
                return False
            if coordinator == self._hint[1]:
                self._hint = order, coordinator  # and no more time to show it
                return False
            self._doubt(self._hint[1], now_s)  # else two who outdo each other would never have to show theirs
        self._hint, self._hint_until_s = (order, coordinator), now_s + HINT_HEARTBEATS * self._heartbeat_s
        return True
