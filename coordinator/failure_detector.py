"""Detects failed peers: the coordinator watches the members, and each member watches the coordinator. Pure.

A suspended process keeps its connections and answers nothing, so silence alone needs a timeout (`adaptive_timeout`). A
refused connection is stronger evidence: after two in a row no timeout is needed.

The coordinator checks a suspicion itself before it removes a member:

| suspicion                             | observation                | conclusion                                      |
|---------------------------------------|----------------------------|-------------------------------------------------|
| a heartbeat is late                   | it answers a ping, or      | alive but slow: it stays                        |
|                                       | sends a frame or a call    |                                                 |
| a member cannot reach another         | two pings refused in a row | its process is gone: out                        |
| (`Heartbeat.silent`)                  | no answer                  | out after its timeout (`roster`), or after half |
|                                       |                            | of it if two neighbours cannot reach it either  |
| a first refusal: all are pinged, so   | refused, and no other peer | gets time to return: a crashed network daemon   |
| that one plan removes all that failed | holds its group's state    | restarts faster than a snapshot is restored     |
| a ping stays unanswered: two others   | it answers one of them     | alive but unreachable for us: transfer the role |
| are asked to ping it too              |                            | to a peer that reaches it (`role`)              |

Reports of other members need the coordinator's own check, because their own links may be broken. The coordinator's link
may be broken too, so others ping for it (SWIM, Das et al. 2002). Their word that a member is alive counts for at most
`VOUCHED_HEARTBEATS`; otherwise one liar could keep a dead member in the plan.

Every member hears the coordinator once a heartbeat, in the answer to its own. The next peers in rank, the order of
succession (`is_close`), also ping the coordinator several times a heartbeat, so they may suspect it after little more
than one heartbeat. The other members check for themselves once a candidate asks for their consent (`alarm`)."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.coordinator.adaptive_timeout import Arrivals, RoundTrip
from shoal.coordinator.coordination_events import Ask, Command, LogReason
from shoal.coordinator.roster import FLOOR_HEARTBEATS, MEMORY_HEARTBEATS, Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import Ping, PingRequest
from shoal.protocol.plan import Plan

PING_HEARTBEATS = 0.25
CONFIRM_HEARTBEATS = 0.06
"""A refused connection is tried again after this time."""
CLOSE_FLOOR_HEARTBEATS = 1.2
"""Shortest silence after which the peers that ping the coordinator suspect it: five pings without an answer. A new plan
should be live two heartbeats after a failure, so most of a heartbeat is left for its three round trips."""
BACKING_HEARTBEATS = 1.15
"""Members back a coordinator at least this long after its last sign of life: heartbeats vary by a twentieth."""
RETURN_S = 3.0
"""How long a member with the only copy of a state may refuse connections before it counts as gone: twice the restart
time of a peer's network daemon on a busy machine. A roll-back would cost more than this wait."""
UNANSWERED_PATIENCE = 0.5
"""If two neighbours cannot reach a member, it is gone after this part of its timeout without an answer to our pings."""
ROLL_CALL_HEARTBEATS = 0.15
"""How long a plan waits for the answers of members that are pinged after a first refusal."""
VOUCHED_HEARTBEATS = 10.0
OUT_OF_REACH_HEARTBEATS = 1.0
"""A member that others have reached for this long, while we have not, is out of our reach."""
HELP_HEARTBEATS = 0.5
"""Other members are asked to ping a member that has not answered us for this long."""
TOGETHER_HEARTBEATS = 0.5
"""A plan that drops a member waits at most this long, so that it can also drop others that are nearly timed out."""


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """The check of one peer that may have failed. A member's check of the coordinator uses the first three fields."""

    since_s: float
    ping_at_s: float
    refused_s: float | None = None
    """When the peer refused our connection for the first time since its last answer; None: it has not refused since."""
    pinged: bool = False
    answered: bool = False
    returns_by_s: float = -math.inf
    """A member that refuses our connections does not count as gone before this time, because it may still return."""
    reporters: dict[PeerID, None] = field(default_factory=dict)
    """Neighbours that cannot reach the member, in the order of their reports."""
    help_at_s: float = math.inf
    """When others are asked to ping the member; inf: we have not pinged it ourselves yet."""
    vouchers: dict[PeerID, None] = field(default_factory=dict)
    """Members that have reached the peer while we could not."""
    vouched_s: float = math.inf

    @property
    def is_open(self) -> bool:
        """True if a ping is unanswered."""
        return self.pinged and not self.answered

    def takes_ping(self, now_s: float, *, every_s: float) -> bool:
        """Return True if a ping is due, and schedule the next one."""
        if now_s < self.ping_at_s:
            return False
        self.ping_at_s = now_s + every_s
        return True

    def is_refused(self, now_s: float, *, took_s: float, again_s: float) -> bool:
        """Record a refused connection. After the first refusal, a ping follows in `again_s` seconds.
        Returns: whether this is the second refusal in a row. A call made before the first refusal does not count."""
        if self.refused_s is None:
            self.refused_s, self.ping_at_s = now_s, now_s + again_s
            return False
        return now_s - took_s > self.refused_s


class CoordinatorWatch:
    """Watches the coordinator of the live plan; one object serves all terms."""

    def __init__(self, *, heartbeat_s: float, now_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        memory_s = MEMORY_HEARTBEATS * heartbeat_s
        self._beats = Arrivals(heartbeat_s, now_s, FLOOR_HEARTBEATS * heartbeat_s, memory_s)
        self._pings = Arrivals(PING_HEARTBEATS * heartbeat_s, now_s, CLOSE_FLOOR_HEARTBEATS * heartbeat_s, memory_s)
        self._round_trip = RoundTrip(heartbeat_s)
        self._inquiry = Inquiry(since_s=now_s, ping_at_s=now_s)
        self._gone_s: float | None = None
        """When the coordinator's process was found to be gone; None: it was not."""
        self.is_close = False
        """True if we are among the first in rank (the order of succession), and so ping the coordinator all the
        time."""
        self._alarm_until_s = now_s
        self._replaced: tuple[PeerID, float] | None = None
        """(coordinator that lost its role by silence, its last sign of life); None: the last term ended otherwise."""

    @property
    def suspect_at_s(self) -> float:
        """The time after which a coordinator that has stayed silent counts as gone."""
        if self._gone_s is not None:
            return self._gone_s
        arrivals = self._pings if self.is_close else self._beats
        return self._sign_s + arrivals.patience_s + self._round_trip.patience_s

    @property
    def _sign_s(self) -> float:
        return max(self._beats.sign_s, self._pings.sign_s)

    @property
    def round_trip_s(self) -> float:
        return self._round_trip.patience_s

    def heard_lately(self, now_s: float) -> bool:
        """True if the coordinator's answer is not late yet, by past delays: then we back it against a candidate."""
        if self._gone_s is not None:
            return False
        usual_s = max(BACKING_HEARTBEATS * self._heartbeat_s, self._beats.usual_s, 1.1 * self._beats.worst_s)
        return now_s < self._sign_s + min(usual_s, self._beats.patience_s)

    def keep_close(self, close: bool, now_s: float) -> None:
        """Set whether we are among the next peers in rank (the order of succession), which ping the coordinator."""
        if close and not self.is_close:
            self._pings.excuse(self._sign_s)
            self._inquiry.ping_at_s = now_s
        self.is_close = close

    def alarm(self, now_s: float) -> None:
        """Check the coordinator ourselves, because a candidate thinks that it is gone."""
        if now_s >= self._alarm_until_s and not self.is_close:
            self._inquiry.ping_at_s = now_s
        self._alarm_until_s = now_s + 2.0 * self._heartbeat_s

    def is_fast_tick(self, now_s: float) -> bool:
        return self.is_close or now_s < self._alarm_until_s

    def takes_ping(self, now_s: float) -> bool:
        return self.is_fast_tick(now_s) and self._inquiry.takes_ping(now_s, every_s=PING_HEARTBEATS * self._heartbeat_s)

    def heard(self, took_s: float, now_s: float) -> None:
        """Record the coordinator's answer to a heartbeat."""
        self._beats.arrived(now_s)
        self._alive(took_s)

    def answered(self, took_s: float, now_s: float) -> None:
        """Record the coordinator's answer to a ping."""
        if self.is_close:
            self._pings.arrived(now_s)
        else:
            self._beats.signed(now_s)  # pings in alarm have no rhythm to be learned
        self._alive(took_s)

    def refused(self, took_s: float, now_s: float) -> None:
        """Record that a call to the coordinator was refused at once: no process listens there."""
        if self._inquiry.refused_s is None:
            self.alarm(now_s)
        if self._inquiry.is_refused(now_s, took_s=took_s, again_s=CONFIRM_HEARTBEATS * self._heartbeat_s):
            self._gone_s = self._gone_s if self._gone_s is not None else now_s

    def _alive(self, took_s: float) -> None:
        self._round_trip.took(took_s)
        self._inquiry.refused_s = self._gone_s = None

    def obeys(self, *, replaced: PeerID | None, now_s: float) -> None:
        """Watch the coordinator of a new term. Keep the measured delays, which depend on our machine too.
        Args: replaced: the coordinator that was replaced because it was silent."""
        self._replaced = (replaced, self._sign_s) if replaced is not None else None
        self.excuse(now_s)
        self._inquiry.refused_s = self._gone_s = None
        self._alarm_until_s = now_s
        self.is_close = False

    def was_wronged(self, peer: PeerID, now_s: float) -> None:
        """Record an answer of `peer`. If `peer` lost the coordinator's role by a silence, it was not dead: learn this
        silence as the worst gap, so that one as long is tolerated for a while."""
        if self._replaced is not None and self._replaced[0] == peer:
            self._pings.worst_s = max(self._pings.worst_s, now_s - self._replaced[1])
            self._replaced = None

    def excuse(self, now_s: float) -> None:
        self._beats.excuse(now_s)
        self._pings.excuse(now_s)


class FailureDetector:
    """Suspects members, pings them, and tells the roster which of them are gone."""

    def __init__(self, *, me: PeerID, roster: Roster) -> None:
        self._me, self._roster, self._heartbeat_s = me, roster, roster.heartbeat_s
        self._inquiries: dict[PeerID, Inquiry] = {}
        self._dead: frozenset[PeerID] = frozenset()
        self._wait_until_s = -math.inf

    def begin(self, doubted: Collection[PeerID], now_s: float) -> None:
        """Start anew, in a new term or after our own suspension. Only the `doubted` members are suspects."""
        self._inquiries.clear()
        self._dead = frozenset()
        for peer in doubted:
            self._suspect(peer, now_s)

    def report(self, reporter: PeerID, silent: Collection[PeerID], plan: Plan, now_s: float) -> None:
        if not silent or not plan.has(reporter):
            return
        for peer in tuple(silent)[:LINKS_PER_HEARTBEAT_MAX]:
            if plan.has(peer) and peer not in (reporter, self._me):
                inquiry = self._suspect(peer, now_s)
                if _are_neighbours(plan, reporter, peer):
                    inquiry.reporters[reporter] = None

    def heard(self, peer: PeerID) -> None:
        self._inquiries.pop(peer, None)

    def answered(self, peer: PeerID, now_s: float) -> list[Command]:
        inquiry = self._inquiries.get(peer)
        self._roster.signed(peer, now_s)
        if inquiry is None:
            return []
        reporters, inquiry.reporters = inquiry.reporters, {}
        inquiry.vouchers, inquiry.vouched_s = {}, math.inf
        if self._roster.overdue_at_s(peer) <= now_s:
            inquiry.answered, inquiry.refused_s, inquiry.returns_by_s = True, None, -math.inf
            inquiry.ping_at_s = now_s + 2 * PING_HEARTBEATS * self._heartbeat_s
        else:
            del self._inquiries[peer]
        if not reporters:
            return []
        names = ", ".join(reporter[-8:] for reporter in reporters)
        return [LogReason(text=f"{peer[-8:]} answers: only its links to {names} are broken")]

    def vouched(self, helper: PeerID, peer: PeerID, now_s: float) -> list[Command]:
        """Record that `helper` has pinged `peer` for us and got an answer."""
        inquiry = self._inquiries.get(peer)
        if inquiry is None or inquiry.answered:
            return []
        is_news = not inquiry.vouchers
        inquiry.vouched_s = min(inquiry.vouched_s, now_s)
        inquiry.vouchers[helper] = None
        if now_s < inquiry.vouched_s + VOUCHED_HEARTBEATS * self._heartbeat_s:
            self._roster.signed(peer, now_s)
        return [LogReason(text=f"{peer[-8:]} answers {helper[-8:]} but not us")] if is_news else []

    def vouchers(self, now_s: float) -> frozenset[PeerID]:
        """Return the members that have reached, for `OUT_OF_REACH_HEARTBEATS`, a peer that we cannot reach."""
        apart_s = OUT_OF_REACH_HEARTBEATS * self._heartbeat_s
        lost = (inquiry for inquiry in self._inquiries.values() if now_s >= inquiry.vouched_s + apart_s)
        return frozenset(helper for inquiry in lost for helper in inquiry.vouchers)

    def refused(self, peer: PeerID, plan: Plan, *, irreplaceable: bool, took_s: float, now_s: float) -> list[Command]:
        """Record that `peer` refused a ping. Args: irreplaceable: True if a group's state would be lost with `peer`."""
        inquiry = self._inquiries.get(peer)
        if inquiry is None:
            return []
        if self._roster.is_dead(peer):  # others report it again, but its time to return is over
            del self._inquiries[peer]
            return []
        if inquiry.refused_s is None:
            for other in plan.members:
                if other != self._me and not self._roster.is_gone(other, now_s):
                    self._suspect(other, now_s)
        if not inquiry.is_refused(now_s, took_s=took_s, again_s=CONFIRM_HEARTBEATS * self._heartbeat_s):
            return []
        assert inquiry.refused_s is not None
        if irreplaceable or inquiry.returns_by_s > -math.inf:  # a silent peer no longer counts as holder
            inquiry.returns_by_s = inquiry.refused_s + RETURN_S
            if now_s < inquiry.returns_by_s:
                return []
        del self._inquiries[peer]
        self._roster.lose(peer, dead=True)
        return [LogReason(text=f"{peer[-8:]} is gone: its connections are refused")]

    def look(self, plan: Plan, now_s: float, *, awaited: Collection[PeerID] = ()) -> list[Command]:
        """Ping suspects. A suspect is gone if two neighbours cannot reach it, and it does not answer us either.
        Args: awaited: silent members that may return with the only copy of a state, until they refuse us."""
        for peer in plan.members:
            if peer == self._me:
                continue
            if peer in awaited and not self._roster.is_dead(peer):
                self._suspect(peer, now_s)
            elif self._roster.is_gone(peer, now_s):
                # The check of a member that may return with its state goes on: only its refusals end that wait.
                if (inquiry := self._inquiries.get(peer)) is not None and inquiry.returns_by_s == -math.inf:
                    del self._inquiries[peer]
            elif self._roster.overdue_at_s(peer) <= now_s:
                self._suspect(peer, now_s)
        commands: list[Command] = []
        for peer, inquiry in list(self._inquiries.items()):
            if inquiry.is_open and self._is_out_of_reach(peer, inquiry, now_s):
                del self._inquiries[peer]
                self._roster.lose(peer)
                text = f"{peer[-8:]} is gone: its neighbours cannot reach it, and neither can we"
                commands.append(LogReason(text=text))
                continue
            if inquiry.is_open and now_s >= inquiry.help_at_s:
                inquiry.help_at_s = now_s + self._heartbeat_s
                helpers = self._helpers(peer, inquiry, plan, now_s)
                commands += [Ask(peer=helper, message=PingRequest(peer=peer)) for helper in helpers]
            if inquiry.takes_ping(now_s, every_s=PING_HEARTBEATS * self._heartbeat_s):
                if not inquiry.pinged:
                    inquiry.help_at_s = now_s + HELP_HEARTBEATS * self._heartbeat_s
                inquiry.pinged = True
                commands.append(Ask(peer=peer, message=Ping()))
        return commands

    def _is_out_of_reach(self, peer: PeerID, inquiry: Inquiry, now_s: float) -> bool:
        """True if two neighbours report `peer` as silent, and `peer` has not answered us for half of its timeout."""
        if self._roster.is_gone(peer, now_s) or len(inquiry.reporters) < 2:
            return False
        arrivals = self._roster.arrivals(peer)
        due_s = inquiry.since_s + UNANSWERED_PATIENCE * arrivals.patience_s
        return now_s >= due_s and arrivals.sign_s <= inquiry.since_s

    def _helpers(self, peer: PeerID, inquiry: Inquiry, plan: Plan, now_s: float) -> list[PeerID]:
        """Return the members to ask for a ping of `peer`: first those that have reached it, then its neighbours."""
        able = [
            other
            for other in plan.members
            if other not in (peer, self._me) and other not in inquiry.reporters and other not in self._inquiries
            if self._roster.beat(other) is not None and not self._roster.is_gone(other, now_s)
        ]
        able.sort(key=lambda other: (other not in inquiry.vouchers, not _are_neighbours(plan, other, peer)))
        return able[:2]

    @property
    def are_open(self) -> bool:
        """True if any suspect has a ping left to answer, so that the result of its check is near."""
        return any(inquiry.is_open for inquiry in self._inquiries.values())

    def is_settled(self, plan: Plan, now_s: float) -> bool:
        """True if the coordinator may plan now. After a failure it waits for other checks that are about to end."""
        dead = frozenset(peer for peer in plan.members if peer != self._me and self._roster.is_gone(peer, now_s))
        if not dead <= self._dead:
            self._wait_until_s = now_s + TOGETHER_HEARTBEATS * self._heartbeat_s
        self._dead = dead
        if any(now_s < inquiry.returns_by_s for inquiry in self._inquiries.values()):
            return False  # no training without this member, so a plan without the others gains nothing
        if not dead or now_s >= self._wait_until_s:
            return True
        return not any(self._is_imminent(peer, inquiry, now_s) for peer, inquiry in self._inquiries.items())

    def _is_imminent(self, peer: PeerID, inquiry: Inquiry, now_s: float) -> bool:
        if inquiry.answered:
            return False
        return (
            inquiry.refused_s is not None
            or now_s < inquiry.since_s + ROLL_CALL_HEARTBEATS * self._heartbeat_s
            or self._roster.arrivals(peer).suspect_at_s <= self._wait_until_s
        )

    def _suspect(self, peer: PeerID, now_s: float) -> Inquiry:
        return self._inquiries.setdefault(peer, Inquiry(since_s=now_s, ping_at_s=now_s))


def _are_neighbours(plan: Plan, one: PeerID, other: PeerID) -> bool:
    here, there = plan.stage_of(one), plan.stage_of(other)
    return here is not None and there is not None and abs(here - there) <= 1
