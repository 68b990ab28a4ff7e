"""A peer's part while another coordinates: it watches the coordinator, and requests the next term in its turn. Pure.

A candidate first holds a pre-vote: it asks the members whether they miss the coordinator too and would grant the term.
An answer promises nothing. So half of a partitioned network spends no terms: the coordinator keeps the members' votes
and continues after the partition heals (Ongaro's thesis on Raft, section 9.6). A planned transfer needs no pre-vote."""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.coordinator import election
from shoal.coordinator.coordination_events import Answered, Ask, Command, LogReason
from shoal.coordinator.leader_monitor import PING_HEARTBEATS, LeaderMonitor
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Ping, TermGrant, TermRequest
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.quorum import is_quorum

CLOSE_PEERS = 2
"""Number of next peers in rank that ping the coordinator: two, in case the first fails together with it. With more, the
coordinator of a thousand peers would get thousands of calls a second."""
STAGGER_HEARTBEATS = 0.3
"""Extra wait of each further peer in rank, in addition to the three round trips of the one before it."""
GIVES_WAY_HEARTBEATS = 0.4
BACK_OFF_HEARTBEATS = 0.5
SOUNDING_HEARTBEATS = 3.0
"""Duration of a pre-vote, enough for a member that backs the coordinator at first to check for itself."""

ASK_AGAIN_HEARTBEATS = 0.5
"""A question without an answer counts as lost after this time."""


@dataclass(slots=True, kw_only=True)
class PreVote:
    base: SignedPlan
    term: int
    asks_at_s: float
    expires_at_s: float
    agreed: set[PeerID]
    waiting: dict[PeerID, float] = field(default_factory=dict)
    """Members that have been asked -> the time until which they are not asked again."""


class Agreed(NamedTuple):
    """A majority of the electors of `base` misses its coordinator and would grant us `term`."""

    base: SignedPlan
    term: int


class Follower:
    def __init__(
        self, *, run: str, me: PeerID, owner: PeerID, heartbeat_s: float, rng: random.Random, now_s: float
    ) -> None:
        self.watch = LeaderMonitor(owner=owner, heartbeat_s=heartbeat_s, now_s=now_s)
        self._run, self._me, self._owner = run, me, owner
        self._heartbeat_s, self._rng = heartbeat_s, rng
        self._pre_vote: PreVote | None = None
        self._is_asking = False
        self._not_before_s = now_s
        self._term_max = 0
        self._turn: tuple[Plan | None, int | None] = None, None

    def is_fast_tick(self, now_s: float) -> bool:
        """True if a pre-vote or pings need the short tick."""
        return self._pre_vote is not None or self.watch.is_fast_tick(now_s)

    def hold_off(self, until_s: float) -> None:
        """Do not request a term before `until_s`: another peer has the term, or our proposal has failed."""
        self._not_before_s = max(self._not_before_s, until_s)

    def gives_way(self, candidate: PeerID, plan: Plan, now_s: float) -> None:
        """Let `candidate`, which we support, try first if it ranks before us, so that we do not split the promises."""
        theirs = election.standing(self._run, plan.term, plan.coordinator, plan.members, candidate)
        ours = self._standing(plan)
        if theirs is not None and ours is not None and theirs < ours:
            self._pre_vote = None
            self.hold_off(now_s + GIVES_WAY_HEARTBEATS * self._heartbeat_s)

    def back_off(self, now_s: float) -> None:
        """Wait after a failed proposal, for a random time so that two candidates do not collide again."""
        self._pre_vote, self._is_asking = None, False
        self.hold_off(now_s + (1 + 2 * self._rng.random()) * BACK_OFF_HEARTBEATS * self._heartbeat_s)

    def obeys(self, plan: Plan, *, new_term: bool, replaced: PeerID | None, now_s: float) -> None:
        self._is_asking = self._is_asking and not new_term
        self._pre_vote = None
        self.watch.obeys(plan, new_term=new_term, replaced=replaced, now_s=now_s)

    def work(
        self, live: SignedPlan, now_s: float, *, eligible: bool, busy: bool, term: int
    ) -> tuple[list[Command], Agreed | None]:
        """Ping the coordinator if that is our task; hold a pre-vote if it is silent and it is our turn.
        Args: busy: a proposal of ours is under way. term: the next term that we could have.
        Returns: (commands, what a majority agrees to if our own opinion is one)."""
        plan = live.plan
        turn = self._standing(plan) if eligible else None
        self.watch.keep_close(turn is not None and turn < CLOSE_PEERS, now_s)
        commands: list[Command] = []
        if self.watch.takes_ping(now_s):
            commands.append(Ask(peer=plan.coordinator, message=Ping()))
        if turn is None or now_s < self.watch.suspect_at_s:
            self._pre_vote, self._is_asking = None, False
        if turn is None or busy or now_s < self.watch.suspect_at_s:
            return commands, None
        # A peer that has begun to ask continues under a later plan of the same coordinator, whatever its rank there.
        stagger_s = STAGGER_HEARTBEATS * self._heartbeat_s + 3.0 * self.watch.round_trip_s
        due_s = self.watch.suspect_at_s + (0 if self._is_asking else turn) * stagger_s
        if now_s < max(due_s, self._not_before_s):
            return commands, None
        pre_vote = self._pre_vote
        if pre_vote is None:
            commands.append(LogReason(text=f"coordinator {plan.coordinator[-8:]} is silent: asking the other members"))
            self._is_asking = True
            pre_vote = self._pre_vote = PreVote(
                base=live,
                term=max(term, self._term_max + 1),
                asks_at_s=now_s,
                expires_at_s=now_s + SOUNDING_HEARTBEATS * self._heartbeat_s,
                agreed={self._me},
            )
        if now_s >= pre_vote.expires_at_s:
            self.back_off(now_s)
            text = f"{len(pre_vote.agreed)} of {len(plan.electors)} miss the coordinator, no majority: it stays"
            return [*commands, LogReason(text=text)], None
        return commands + self._ask(pre_vote, now_s), self._agreed(pre_vote)

    def count(self, event: Answered) -> Agreed | None:
        """Count a member's answer. Returns: what a majority agrees to with it."""
        pre_vote = self._about(event.asked)
        if pre_vote is None or not isinstance(event.reply, TermGrant):
            return None
        pre_vote.waiting.pop(event.peer, None)
        if event.reply.granted:
            pre_vote.agreed.add(event.peer)
        elif event.reply.term >= pre_vote.term:
            self._term_max = event.reply.term
            pre_vote.term = event.reply.term + 1  # consent to a lower term covers this one
        return self._agreed(pre_vote)

    def unanswered(self, peer: PeerID, asked: TermRequest) -> None:
        pre_vote = self._about(asked)
        if pre_vote is not None:
            pre_vote.waiting.pop(peer, None)

    def _agreed(self, pre_vote: PreVote) -> Agreed | None:
        """Return what a majority agrees to, and end the pre-vote then."""
        if not is_quorum(pre_vote.agreed, pre_vote.base.plan, self._owner):
            return None
        self._pre_vote = None
        return Agreed(pre_vote.base, pre_vote.term)

    def _about(self, asked: object) -> PreVote | None:
        pre_vote = self._pre_vote
        if pre_vote is None or not isinstance(asked, TermRequest) or asked.live != pre_vote.base.link:
            return None
        return pre_vote

    def _ask(self, pre_vote: PreVote, now_s: float) -> list[Command]:
        if now_s < pre_vote.asks_at_s:
            return []
        pre_vote.asks_at_s = now_s + PING_HEARTBEATS / 2 * self._heartbeat_s
        coordinator = pre_vote.base.plan.coordinator
        question = TermRequest(term=pre_vote.term, live=pre_vote.base.link, permit=b"", prevote=True)
        left_out = {coordinator, *pre_vote.agreed, *(p for p, until_s in pre_vote.waiting.items() if now_s < until_s)}
        peers = [peer for peer in pre_vote.base.plan.electors if peer not in left_out]
        again_s = now_s + max(ASK_AGAIN_HEARTBEATS * self._heartbeat_s, 2 * self.watch.round_trip_s)
        pre_vote.waiting.update(dict.fromkeys(peers, again_s))
        return [Ask(peer=peer, message=question) for peer in peers]

    def _standing(self, plan: Plan) -> int | None:
        if self._turn[0] is not plan:
            order = election.standing(self._run, plan.term, plan.coordinator, plan.members, self._me)
            self._turn = plan, order
        return self._turn[1]
