"""The coordinator's failure detector: before it believes that a member is gone, it looks for itself. Pure.

| what makes it look                    | what it finds              | what it concludes                               |
|---------------------------------------|----------------------------|-------------------------------------------------|
| a heartbeat is late                   | the ping is answered, or a | alive, if slow: it stays                        |
|                                       | frame or call of it comes  |                                                 |
| a member cannot reach another         | two pings refused in a row | its process is gone: out                        |
| (`Heartbeat.silent`)                  | no answer                  | out after its timeout (`roster`), or after half |
| a first refusal: everybody is pinged, |                            | of it if two neighbours cannot reach it either  |
| as all who die together are one plan  | refused, and a group's     | given time to come back: a network daemon that  |
|                                       | state is nowhere else      | died is there again sooner than a snapshot is   |
| a ping stays unanswered: two others   | it answers one of them     | alive, and out of our reach: the role goes to   |
| are asked to ping as well             |                            | who reaches it (`leader.py`)                    |

A process that was stopped keeps its connections and answers nothing, so silence alone needs time. The reports of other
members alone need the coordinator's own finding, since what they cannot reach may be their own link. And the
coordinator's own finding may be its own link, so others ping for it (SWIM, Das et al. 2002). Their word that somebody
is alive counts for `VOUCHED_HEARTBEATS` at most, or one liar could keep the dead in the plan.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.coordinator.coordination_events import Ask, Command, Note
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import Ping, PingRequest
from shoal.protocol.plan import Plan

PING_HEARTBEATS = 0.25
AGAIN_HEARTBEATS = 0.06
"""The second try follows a refusal after so long."""
RETURN_S = 3.0
"""A member that alone holds a group's state is asked again for so long before its refusals count: twice as long as a
peer's network daemon that died takes to come back on a busy machine (0.5 to 0.9 s on an idle one), however often
members say that they live. Going back to a snapshot costs everybody more than this.
"""
UNANSWERED_PATIENCE = 0.5
"""Our own pings must go unanswered for this share of a member's timeout before two reports count: it may be busy."""
REPORTERS = 2
ROLL_CALL_HEARTBEATS = 0.15
"""A plan waits so long for the members that are pinged after a first refusal."""
HELPERS = 2
HELP_HEARTBEATS = 0.5
"""Others are asked to ping a member that has owed us an answer for so long."""
VOUCHED_HEARTBEATS = 10.0
OUT_OF_REACH_HEARTBEATS = 1.0
"""A member that others have reached for so long, and we have not, is out of our reach; sooner it may just be slow."""
TOGETHER_HEARTBEATS = 0.5
"""A plan that drops a member waits so long for others whose timeout is about to end."""


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """What is being found out about one member."""

    since_s: float
    ping_at_s: float
    pinged: bool = False
    answered: bool = False
    refused_s: float | None = None
    returns_by_s: float = -math.inf
    """The time until which we hope to see the member again although it refuses us."""
    reporters: dict[PeerID, None] = field(default_factory=dict)
    """The members that cannot reach it, in the order of their reports."""
    help_at_s: float = math.inf
    """When others are to be asked to ping it; inf: we have not pinged it ourselves yet."""
    vouchers: dict[PeerID, None] = field(default_factory=dict)
    """The members that it has answered while it did not answer us."""
    vouched_s: float = math.inf
    """The time at which the first of them told us."""


class FailureDetector:
    """Doubts members, pings them, and tells the roster which of them are gone."""

    def __init__(self, *, me: PeerID, heartbeat_s: float) -> None:
        self._me, self._heartbeat_s = me, heartbeat_s
        self._inquiries: dict[PeerID, Inquiry] = {}
        self._dead: frozenset[PeerID] = frozenset()
        self._wait_until_s = -math.inf

    def begin(self, doubted: Collection[PeerID], now_s: float) -> None:
        """A term of ours begins, or a sleep of ours ends: nothing is known but that the `doubted` were silent."""
        self._inquiries.clear()
        self._dead = frozenset()
        for peer in doubted:
            self._suspect(peer, now_s)

    def report(self, reporter: PeerID, silent: Collection[PeerID], plan: Plan, now_s: float) -> None:
        """`reporter` cannot reach the `silent` peers."""
        if not silent or not plan.has(reporter):
            return
        for peer in tuple(silent)[:LINKS_PER_HEARTBEAT_MAX]:
            if plan.has(peer) and peer not in (reporter, self._me):
                inquiry = self._suspect(peer, now_s)
                if _are_neighbours(plan, reporter, peer):
                    inquiry.reporters[reporter] = None

    def heard(self, peer: PeerID) -> None:
        """A heartbeat of `peer` has come."""
        self._inquiries.pop(peer, None)

    def answered(self, peer: PeerID, roster: Roster, now_s: float) -> list[Command]:
        """`peer` has answered our ping."""
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
        return [Note(text=f"{peer[-8:]} answers: only its links to {names} are broken")]

    def vouched(self, helper: PeerID, peer: PeerID, roster: Roster, now_s: float) -> list[Command]:
        """`helper` has pinged `peer` for us and got an answer."""
        inquiry = self._inquiries.get(peer)
        if inquiry is None or inquiry.answered:
            return []
        is_news = not inquiry.vouchers
        inquiry.vouched_s = min(inquiry.vouched_s, now_s)
        inquiry.vouchers[helper] = None
        if now_s < inquiry.vouched_s + VOUCHED_HEARTBEATS * self._heartbeat_s:
            roster.signed(peer, now_s)
        return [Note(text=f"{peer[-8:]} answers {helper[-8:]} and not us")] if is_news else []

    def vouchers(self, now_s: float) -> frozenset[PeerID]:
        """The members that have reached a peer which has not answered us, for each such peer that they first reached
        `OUT_OF_REACH_HEARTBEATS` ago or earlier."""
        apart_s = OUT_OF_REACH_HEARTBEATS * self._heartbeat_s
        lost = (inquiry for inquiry in self._inquiries.values() if now_s >= inquiry.vouched_s + apart_s)
        return frozenset(helper for inquiry in lost for helper in inquiry.vouchers)

    def refused(
        self, peer: PeerID, roster: Roster, plan: Plan, *, irreplaceable: bool, took_s: float, now_s: float
    ) -> list[Command]:
        """No process answers where `peer` was.

        Args: irreplaceable: the state of some group would be lost with it.
        """
        inquiry = self._inquiries.get(peer)
        if inquiry is None:
            return []
        if roster.is_dead(peer):  # a member has reported it since: it was given its time to come back, once
            del self._inquiries[peer]
            return []
        if inquiry.refused_s is None:
            inquiry.refused_s = now_s
            inquiry.ping_at_s = now_s + AGAIN_HEARTBEATS * self._heartbeat_s
            for other in plan.members:
                if other != self._me and not roster.is_gone(other, now_s):
                    self._suspect(other, now_s)
            return []
        if now_s - took_s <= inquiry.refused_s:
            return []  # under way when the first was refused: the same piece of news
        if irreplaceable or inquiry.returns_by_s > -math.inf:  # silent by now, it is nobody's holder any more
            inquiry.returns_by_s = inquiry.refused_s + RETURN_S
            if now_s < inquiry.returns_by_s:
                return []
        del self._inquiries[peer]
        roster.lose(peer, dead=True)
        return [Note(text=f"{peer[-8:]} is gone: its connections are refused")]

    def look(self, roster: Roster, plan: Plan, now_s: float, *, awaited: Collection[PeerID] = ()) -> list[Command]:
        """Ping the members that are doubted, and count out those that neither two neighbours nor we can reach.

        Args: awaited: members that are silent and may come back with what nobody else has; once they refuse us nobody
            need wait for them.
        """
        commands: list[Command] = []
        for peer in plan.members:
            if peer == self._me:
                continue
            if peer in awaited and not roster.is_dead(peer):
                self._suspect(peer, now_s)
            elif roster.is_gone(peer, now_s):
                self._end_unless_refused(peer)
            elif roster.overdue_at_s(peer) <= now_s:
                self._suspect(peer, now_s)
        for peer, inquiry in list(self._inquiries.items()):
            unanswered = inquiry.pinged and not inquiry.answered
            if (
                unanswered
                and not roster.is_gone(peer, now_s)
                and len(inquiry.reporters) >= REPORTERS
                and now_s >= inquiry.since_s + UNANSWERED_PATIENCE * roster.patience_s(peer)
                and roster.sign_s(peer) <= inquiry.since_s
            ):
                del self._inquiries[peer]
                roster.lose(peer)
                commands.append(Note(text=f"{peer[-8:]} is gone: neither its neighbours reach it nor we"))
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
        """The members that are asked to ping `peer`: those that have reached it, then those that work with it."""
        able = [
            other
            for other in plan.members
            if other not in (peer, self._me) and other not in inquiry.reporters and other not in self._inquiries
            if roster.was_heard(other) and not roster.is_gone(other, now_s)
        ]
        able.sort(key=lambda other: (other not in inquiry.vouchers, not _are_neighbours(plan, other, peer)))
        return able[:HELPERS]

    def _end_unless_refused(self, peer: PeerID) -> None:
        """A member has been silent for too long, which settles what was to be found out; but whether it may come back
        with its state, for which others wait, is said by its refusals alone."""
        inquiry = self._inquiries.get(peer)
        if inquiry is not None and inquiry.returns_by_s == -math.inf:
            del self._inquiries[peer]

    @property
    def are_open(self) -> bool:
        """Whether a member owes us an answer, so that we are about to know whether it is gone."""
        return any(inquiry.pinged and not inquiry.answered for inquiry in self._inquiries.values())

    def is_settled(self, roster: Roster, plan: Plan, now_s: float) -> bool:
        """Whether to plan now: not while a member has just died and we are about to know whether others died with
        it."""
        dead = frozenset(peer for peer in plan.members if peer != self._me and roster.is_gone(peer, now_s))
        if not dead <= self._dead:
            self._wait_until_s = now_s + TOGETHER_HEARTBEATS * self._heartbeat_s
        self._dead = dead
        if any(now_s < inquiry.returns_by_s for inquiry in self._inquiries.values()):
            return False  # nobody can train without it, so a plan without the others gains nothing
        if not dead or now_s >= self._wait_until_s:
            return True
        return not any(self._is_imminent(peer, inquiry, roster, now_s) for peer, inquiry in self._inquiries.items())

    def _is_imminent(self, peer: PeerID, inquiry: Inquiry, roster: Roster, now_s: float) -> bool:
        if inquiry.answered:
            return False
        return (
            inquiry.refused_s is not None
            or now_s < inquiry.since_s + ROLL_CALL_HEARTBEATS * self._heartbeat_s
            or roster.suspect_at_s(peer) <= self._wait_until_s
        )

    def _suspect(self, peer: PeerID, now_s: float) -> Inquiry:
        return self._inquiries.setdefault(peer, Inquiry(since_s=now_s, ping_at_s=now_s))


def _are_neighbours(plan: Plan, one: PeerID, other: PeerID) -> bool:
    here, there = plan.stage_of(one), plan.stage_of(other)
    return here is not None and there is not None and abs(here - there) <= 1
