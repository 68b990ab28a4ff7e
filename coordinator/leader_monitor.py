"""Knows which peer coordinates, and decides when its silence means that it is gone. Pure.

Every peer hears the coordinator once a heartbeat, in the answer to its own. The next peers in rank (`close`) also ping
it several times a heartbeat, so they may suspect it after little more than one heartbeat. The other peers check for
themselves once a candidate asks for their consent (`alarm`).

A refused connection is stronger evidence than silence, because a suspended process keeps its connections. Two
successive refusals need no timeout."""

from shoal.coordinator.adaptive_timeout import Arrivals, RoundTrip
from shoal.coordinator.roster import MEMORY_HEARTBEATS
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import HeartbeatReply, PlanHead
from shoal.protocol.plan import Plan

Order = tuple[int, int]

PING_HEARTBEATS = 0.25
CLOSE_FLOOR_HEARTBEATS = 1.2
"""Five pings stay unanswered in this time. A new plan takes three more round trips, so most of a heartbeat is left of
the two within which it should be live."""
FLOOR_HEARTBEATS = 3.0
"""Two answers are missing after this time without pings, and the third is late."""
BACKING_HEARTBEATS = 1.15
"""Heartbeats vary by a twentieth: after this time one is missing."""
ALARM_HEARTBEATS = 2.0
GONE_ON_HEARTBEATS = 3.0
"""A coordinator that obeys another plan names it: a peer that can follow has the missing links by then."""
HINT_HEARTBEATS = 5.0
"""How long we believe that a peer coordinates a plan above ours, and report to it."""
DOUBT_HEARTBEATS = 60.0
"""How long such a peer that has not shown the plan is not believed again."""
DOUBTED_MAX = 64


class LeaderMonitor:
    """Watches one coordinator after the other. Args: owner: all peers report to it before the first plan."""

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
        """The time from which the coordinator of our plan has named another plan; None: it names ours."""
        self._replaced: tuple[PeerID, float] | None = None
        """A coordinator that lost the role through silence, and the beginning of that silence."""
        self._hint: tuple[Order, PeerID] | None = None
        self._hint_until_s = now_s
        self._is_named = False
        self._behind_until_s = now_s
        self.doubted: dict[PeerID, float] = {}
        """Peers that have not shown the plan that they are said to coordinate -> until when, oldest first."""
        self.head_known = False
        """True once the directory has been asked for the head of the chain."""

    def target(self, live: Plan | None) -> PeerID:
        """Return the peer to report to: the coordinator of our plan, or of a higher known one."""
        if self._hint is not None and self._hint[0] > (live.order if live else (0, 0)):
            return self._hint[1]
        return live.coordinator if live else self._owner

    def run_exists(self, now_s: float) -> bool:
        """True if this run has a plan that we lack: the directory or a reporting peer names it."""
        return self._hint is not None or self._is_named or now_s < self._behind_until_s

    def is_behind(self, now_s: float) -> None:
        self._behind_until_s = now_s + MEMORY_HEARTBEATS * self._heartbeat_s

    # --- is it there ---

    @property
    def suspect_at_s(self) -> float:
        """When the coordinator counts as gone, if it stays silent until then."""
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
        """True if we back the coordinator against a candidate: by the delays so far, its next answer is not late."""
        if self._gone_s is not None:
            return False
        usual_s = max(BACKING_HEARTBEATS * self._heartbeat_s, self._beats.usual_s, 1.1 * self._beats.worst_s)
        return now_s < self._sign_s + min(usual_s, self._beats.patience_s)

    def has_gone_on(self, now_s: float) -> bool:
        """True if the coordinator of our plan answers, but has obeyed another plan for a while."""
        since_s = self._behind_since_s
        return since_s is not None and now_s >= since_s + GONE_ON_HEARTBEATS * self._heartbeat_s

    def keep_close(self, close: bool, now_s: float) -> None:
        """Set whether we are among the first in rank, and therefore ping the coordinator."""
        if close and not self._close:
            self._pings.excuse(self._sign_s)
            self._ping_at_s = now_s
        self._close = close

    def alarm(self, now_s: float) -> None:
        """Check the coordinator ourselves, because a candidate thinks that it is gone."""
        if now_s >= self._alarm_until_s and not self._close:
            self._ping_at_s = now_s
        self._alarm_until_s = now_s + ALARM_HEARTBEATS * self._heartbeat_s

    def is_fast_tick(self, now_s: float) -> bool:
        return self._close or now_s < self._alarm_until_s

    def takes_ping(self, now_s: float) -> bool:
        if not self.is_fast_tick(now_s) or now_s < self._ping_at_s:
            return False
        self._ping_at_s = now_s + PING_HEARTBEATS * self._heartbeat_s
        return True

    def answered(self, peer: PeerID, live: Plan | None, *, took_s: float, now_s: float) -> None:
        if live is not None and peer == live.coordinator:
            if self._close:
                self._pings.arrived(now_s)
            else:
                self._beats.signed(now_s)  # pings in alarm have no rhythm to be learned
            self._alive(took_s)
        else:
            self._was_wronged(peer, now_s)

    def refused(self, peer: PeerID, live: Plan | None, *, took_s: float, now_s: float) -> None:
        """Record that a call to `peer` was refused at once: no process listens there. Ping again soon to confirm."""
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
            # It was silent that long and alive, so allow such a silence from now on.
            self._pings.worst_s = max(self._pings.worst_s, now_s - self._replaced[1])
            self._replaced = None

    def obeys(self, plan: Plan, *, new_term: bool, replaced: PeerID | None, now_s: float) -> None:
        """Record a live plan; a new term has another coordinator to watch. The measured delays stay: they depend as
        much on us. Args: replaced: the coordinator that was replaced because it was silent."""
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
        """Stop believing a peer that should have shown a higher plan by now."""
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
        """Record the answer to a heartbeat of ours. Args: live: the plan that we obey after it."""
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
        """Record the directory's answer. Returns: whether it was news."""
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
                self._hint = order, coordinator  # without extending its time
                return False
            # otherwise two peers that outbid each other would never have to show a plan
            self._doubt(self._hint[1], now_s)
        self._hint, self._hint_until_s = (order, coordinator), now_s + HINT_HEARTBEATS * self._heartbeat_s
        return True
