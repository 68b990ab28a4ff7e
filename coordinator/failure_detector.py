"""Detects failed members. The coordinator checks a suspicion itself before it removes a member. Pure.

| suspicion                             | observation                | conclusion                                      |
|---------------------------------------|----------------------------|-------------------------------------------------|
| a heartbeat is late                   | the ping is answered, or a | alive but slow: it stays                        |
|                                       | frame or call of it comes  |                                                 |
| a member cannot reach another         | two pings refused in a row | its process is gone: out                        |
| (`Heartbeat.silent`)                  | no answer                  | out after its timeout (`roster`), or after half |
|                                       |                            | of it if two neighbours cannot reach it either  |
| a first refusal: all are pinged, so   | refused, and no other peer | gets time to return: a crashed network daemon   |
| that one plan removes all that failed | holds its group's state    | restarts faster than a snapshot is restored     |
| a ping stays unanswered: two others   | it answers one of them     | alive but unreachable for us: transfer the role |
| are asked to ping it too              |                            | to a peer that reaches it (`leader.py`)         |

A suspended process keeps its connections and answers nothing, so silence alone needs a timeout. Reports of other
members need the coordinator's own check, because their own links may be broken. The coordinator's link may be broken
too, so others ping for it (SWIM, Das et al. 2002). Their word that a member is alive counts for at most
`VOUCHED_HEARTBEATS`; otherwise one liar could keep a dead member in the plan.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.coordinator.coordination_events import Ask, Command, LogReason
from shoal.coordinator.leader_monitor import PING_HEARTBEATS
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import Ping, PingRequest
from shoal.protocol.plan import Plan

RETURN_S = 3.0
"""How long a member with the only copy of a state may refuse before it counts as gone: twice the restart time of a
peer's network daemon on a busy machine. A roll-back costs more."""
UNANSWERED_PATIENCE = 0.5
"""Share of a busy member's timeout for which our own pings must stay unanswered before two reports count."""
ROLL_CALL_HEARTBEATS = 0.15
"""How long a plan waits for members that are pinged after a first refusal."""
HELP_HEARTBEATS = 0.5
"""Others are asked to ping a member that has not answered us for this long."""
VOUCHED_HEARTBEATS = 10.0
OUT_OF_REACH_HEARTBEATS = 1.0
"""A member that others have reached for this long, and we have not, is out of our reach."""
TOGETHER_HEARTBEATS = 0.5
"""How long a plan that drops a member waits for others that are close to their timeout."""


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """The state of the check of one member."""

    since_s: float
    ping_at_s: float
    pinged: bool = False
    answered: bool = False
    refused_s: float | None = None
    returns_by_s: float = -math.inf
    """The member may return until this time although it refuses us."""
    reporters: dict[PeerID, None] = field(default_factory=dict)
    """Neighbours that cannot reach the member, in the order of their reports."""
    help_at_s: float = math.inf
    """When others are asked to ping the member; inf: we have not pinged it ourselves yet."""
    vouchers: dict[PeerID, None] = field(default_factory=dict)
    """Members that it has answered while it did not answer us."""
    vouched_s: float = math.inf


class FailureDetector:
    """Suspects members, pings them, and tells the roster which of them are gone."""

    def __init__(self, *, me: PeerID, heartbeat_s: float) -> None:
        self._me, self._heartbeat_s = me, heartbeat_s
        self._inquiries: dict[PeerID, Inquiry] = {}
        self._dead: frozenset[PeerID] = frozenset()
        self._wait_until_s = -math.inf

    def begin(self, doubted: Collection[PeerID], now_s: float) -> None:
        """Start anew, in a new term or after a suspension: only the `doubted` are suspects."""
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

    def answered(self, peer: PeerID, roster: Roster, now_s: float) -> list[Command]:
        inquiry = self._inquiries.get(peer)
        roster.signed(peer, now_s)
        if inquiry is None:
            return []
        reporters, inquiry.reporters = inquiry.reporters, {}
        inquiry.vouchers, inquiry.vouched_s = {}, math.inf
        if roster.overdue_at_s(peer) <= now_s:
            inquiry.answered, inquiry.refused_s, inquiry.returns_by_s = True, None, -math.inf
            inquiry.ping_at_s = now_s + 2 * PING_HEARTBEATS * self._heartbeat_s
        else:
            del self._inquiries[peer]
        if not reporters:
            return []
        names = ", ".join(reporter[-8:] for reporter in reporters)
        return [LogReason(text=f"{peer[-8:]} answers: only its links to {names} are broken")]

    def vouched(self, helper: PeerID, peer: PeerID, roster: Roster, now_s: float) -> list[Command]:
        """Record that `helper` has pinged `peer` for us and got an answer."""
        inquiry = self._inquiries.get(peer)
        if inquiry is None or inquiry.answered:
            return []
        is_news = not inquiry.vouchers
        inquiry.vouched_s = min(inquiry.vouched_s, now_s)
        inquiry.vouchers[helper] = None
        if now_s < inquiry.vouched_s + VOUCHED_HEARTBEATS * self._heartbeat_s:
            roster.signed(peer, now_s)
        return [LogReason(text=f"{peer[-8:]} answers {helper[-8:]} but not us")] if is_news else []

    def vouchers(self, now_s: float) -> frozenset[PeerID]:
        """Return the members that have reached a peer for `OUT_OF_REACH_HEARTBEATS` that we cannot reach."""
        apart_s = OUT_OF_REACH_HEARTBEATS * self._heartbeat_s
        lost = (inquiry for inquiry in self._inquiries.values() if now_s >= inquiry.vouched_s + apart_s)
        return frozenset(helper for inquiry in lost for helper in inquiry.vouchers)

    def refused(
        self, peer: PeerID, roster: Roster, plan: Plan, *, irreplaceable: bool, took_s: float, now_s: float
    ) -> list[Command]:
        """Record that a ping was refused. Args: irreplaceable: the state of some group would be lost."""
        inquiry = self._inquiries.get(peer)
        if inquiry is None:
            return []
        if roster.is_dead(peer):  # reported again since, but its time to return is over
            del self._inquiries[peer]
            return []
        if inquiry.refused_s is None:
            inquiry.refused_s = now_s
            inquiry.ping_at_s = now_s + 0.06 * self._heartbeat_s
            for other in plan.members:
                if other != self._me and not roster.is_gone(other, now_s):
                    self._suspect(other, now_s)
            return []
        if now_s - took_s <= inquiry.refused_s:
            return []  # sent before the first refusal: no new information
        if irreplaceable or inquiry.returns_by_s > -math.inf:  # a silent peer no longer counts as holder
            inquiry.returns_by_s = inquiry.refused_s + RETURN_S
            if now_s < inquiry.returns_by_s:
                return []
        del self._inquiries[peer]
        roster.lose(peer, dead=True)
        return [LogReason(text=f"{peer[-8:]} is gone: its connections are refused")]

    def look(self, roster: Roster, plan: Plan, now_s: float, *, awaited: Collection[PeerID] = ()) -> list[Command]:
        """Ping suspects, and remove those that neither two neighbours nor we can reach.
        Args: awaited: silent members that may return with the only copy of a state; the wait ends once they refuse us.
        """
        commands: list[Command] = []
        for peer in plan.members:
            if peer == self._me:
                continue
            if peer in awaited and not roster.is_dead(peer):
                self._suspect(peer, now_s)
            elif roster.is_gone(peer, now_s):
                # The check of a member that may return with its state goes on: only its refusals end that wait.
                if (inquiry := self._inquiries.get(peer)) is not None and inquiry.returns_by_s == -math.inf:
                    del self._inquiries[peer]
            elif roster.overdue_at_s(peer) <= now_s:
                self._suspect(peer, now_s)
        for peer, inquiry in list(self._inquiries.items()):
            unanswered = inquiry.pinged and not inquiry.answered
            if (
                unanswered
                and not roster.is_gone(peer, now_s)
                and len(inquiry.reporters) >= 2
                and now_s >= inquiry.since_s + UNANSWERED_PATIENCE * roster.arrivals(peer).patience_s
                and roster.arrivals(peer).sign_s <= inquiry.since_s
            ):
                del self._inquiries[peer]
                roster.lose(peer)
                commands.append(
                    LogReason(text=f"{peer[-8:]} is gone: its neighbours cannot reach it, and neither can we")
                )
                continue
            if now_s >= inquiry.help_at_s and unanswered:
                inquiry.help_at_s = now_s + self._heartbeat_s
                helpers = self._helpers(peer, inquiry, roster, plan, now_s)
                commands += [Ask(peer=helper, message=PingRequest(peer=peer)) for helper in helpers]
            if now_s >= inquiry.ping_at_s:
                if not inquiry.pinged:
                    inquiry.help_at_s = now_s + HELP_HEARTBEATS * self._heartbeat_s
                inquiry.pinged, inquiry.ping_at_s = True, now_s + PING_HEARTBEATS * self._heartbeat_s
                commands.append(Ask(peer=peer, message=Ping()))
        return commands

    def _helpers(self, peer: PeerID, inquiry: Inquiry, roster: Roster, plan: Plan, now_s: float) -> list[PeerID]:
        """Return the members to ask for a ping of `peer`: first those that have reached it, then its neighbours."""
        able = [
            other
            for other in plan.members
            if other not in (peer, self._me) and other not in inquiry.reporters and other not in self._inquiries
            if roster.was_heard(other) and not roster.is_gone(other, now_s)
        ]
        able.sort(key=lambda other: (other not in inquiry.vouchers, not _are_neighbours(plan, other, peer)))
        return able[:2]

    @property
    def are_open(self) -> bool:
        """True if a ping is unanswered, so that a result is near."""
        return any(inquiry.pinged and not inquiry.answered for inquiry in self._inquiries.values())

    def is_settled(self, roster: Roster, plan: Plan, now_s: float) -> bool:
        """True if the coordinator may plan now: no check is about to end after another member's failure."""
        dead = frozenset(peer for peer in plan.members if peer != self._me and roster.is_gone(peer, now_s))
        if not dead <= self._dead:
            self._wait_until_s = now_s + TOGETHER_HEARTBEATS * self._heartbeat_s
        self._dead = dead
        if any(now_s < inquiry.returns_by_s for inquiry in self._inquiries.values()):
            return False  # no training without this member, so a plan without the others gains nothing
        if not dead or now_s >= self._wait_until_s:
            return True
        return not any(self._is_imminent(peer, inquiry, roster, now_s) for peer, inquiry in self._inquiries.items())

    def _is_imminent(self, peer: PeerID, inquiry: Inquiry, roster: Roster, now_s: float) -> bool:
        if inquiry.answered:
            return False
        return (
            inquiry.refused_s is not None
            or now_s < inquiry.since_s + ROLL_CALL_HEARTBEATS * self._heartbeat_s
            or roster.arrivals(peer).suspect_at_s <= self._wait_until_s
        )

    def _suspect(self, peer: PeerID, now_s: float) -> Inquiry:
        return self._inquiries.setdefault(peer, Inquiry(since_s=now_s, ping_at_s=now_s))


def _are_neighbours(plan: Plan, one: PeerID, other: PeerID) -> bool:
    here, there = plan.stage_of(one), plan.stage_of(other)
    return here is not None and there is not None and abs(here - there) <= 1
