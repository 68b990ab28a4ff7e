"""What a peer does while another one coordinates: it watches the coordinator, and if that is gone and it is this peer's
turn, it asks for the next term. Pure.

Before a candidate asks for a term it holds a pre-vote: it asks the members whether they miss the coordinator too and
would grant the term. Nobody promises anything by an answer. So a peer that lost only its own way to the coordinator, or
half of a cut network, spends no terms: the coordinator keeps the members' votes and goes on when the cut is healed
(Ongaro's thesis on Raft, section 9.6). The pre-vote costs one round trip of a take-over, and none of a hand-over.
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.coordinator import election
from shoal.coordinator.coordination_events import Answered, Ask, Command, Note
from shoal.coordinator.leader_monitor import PING_HEARTBEATS, LeaderMonitor
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Ping, TermGrant, TermRequest
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.quorum import is_quorum

CLOSE_PEERS = 2
"""How many of the next in turn ping the coordinator. The second one is there in case the first has died with the
coordinator. If more of them pinged, the coordinator of a thousand peers would get thousands of calls a second."""
STAGGER_HEARTBEATS = 0.3
"""Each next in turn waits so much longer before it tries, besides the three round trips that the one before it needs.
"""
STAGGER_ROUND_TRIPS = 3.0
GIVES_WAY_HEARTBEATS = 0.4
BACK_OFF_HEARTBEATS = 0.5
SOUNDING_HEARTBEATS = 3.0
"""A pre-vote lasts for so long. A member that backs the coordinator at first will have seen for itself by then."""

ASK_AGAIN_HEARTBEATS = 0.5
"""A question that has not been answered for so long counts as lost."""


@dataclass(slots=True, kw_only=True)
class PreVote:
    base: SignedPlan
    term: int
    asks_at_s: float
    expires_at_s: float
    agreed: set[PeerID]
    waiting: dict[PeerID, float] = field(default_factory=dict)
    """The members that have been asked, and until when not to ask them again."""


class Agreed(NamedTuple):
    """A majority of the electors of `base` misses its coordinator and would grant us `term`."""

    base: SignedPlan
    term: int


class Follower:
    """One peer's part while another peer coordinates.

    Args:
        run, me, owner: as in the core.
    """

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

    def is_brisk(self, now_s: float) -> bool:
        """Whether something waits for less than half a heartbeat."""
        return self._pre_vote is not None or self.watch.is_brisk(now_s)

    def hold_off(self, until_s: float) -> None:
        """Do not ask for a term before `until_s`: another peer has the term, or our proposal came to nothing."""
        self._not_before_s = max(self._not_before_s, until_s)

    def gives_way(self, candidate: PeerID, plan: Plan, now_s: float) -> None:
        """We have told `candidate` that we miss the coordinator too. If it comes before us, it tries first: otherwise
        the two of us would share the members' promises and neither would have a majority."""
        theirs = election.standing(self._run, plan.term, plan.coordinator, plan.members, candidate)
        ours = self._standing(plan)
        if theirs is not None and ours is not None and theirs < ours:
            self._pre_vote = None
            self.hold_off(now_s + GIVES_WAY_HEARTBEATS * self._heartbeat_s)

    def back_off(self, now_s: float) -> None:
        """Our proposal came to nothing. The wait is random, so that two candidates that met do not meet again."""
        self._pre_vote, self._is_asking = None, False
        self.hold_off(now_s + (1 + 2 * self._rng.random()) * BACK_OFF_HEARTBEATS * self._heartbeat_s)

    def obeys(self, plan: Plan, *, new_term: bool, replaced: PeerID | None, now_s: float) -> None:
        """A new plan is live."""
        self._is_asking = self._is_asking and not new_term
        self._pre_vote = None
        self.watch.obeys(plan, new_term=new_term, replaced=replaced, now_s=now_s)

    def work(
        self, live: SignedPlan, now_s: float, *, eligible: bool, busy: bool, term: int
    ) -> tuple[list[Command], Agreed | None]:
        """Ping the coordinator if that is ours to do; ask the others about it if it is silent and it is our turn.

        Args:
            busy: a proposal of ours is under way.
            term: the next term that we could have.
        Returns: (commands, what a majority agrees to if our own opinion is one).
        """
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
        # A peer that has begun to ask goes on when it learns of a later plan of the same coordinator, whoever is next.
        stagger_s = STAGGER_HEARTBEATS * self._heartbeat_s + STAGGER_ROUND_TRIPS * self.watch.round_trip_s
        due_s = self.watch.suspect_at_s + (0 if self._is_asking else turn) * stagger_s
        if now_s < max(due_s, self._not_before_s):
            return commands, None
        pre_vote = self._pre_vote
        if pre_vote is None:
            commands.append(Note(text=f"coordinator {plan.coordinator[-8:]} is silent, asking who misses it"))
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
            text = f"{len(pre_vote.agreed)} of {len(plan.electors)} miss the coordinator: it stays"
            return [*commands, Note(text=text)], None
        return commands + self._ask(pre_vote, now_s), self._agreed(pre_vote)

    def count(self, event: Answered) -> Agreed | None:
        """A member has told us its opinion. Returns: what a majority agrees to with it."""
        pre_vote = self._about(event.asked)
        if pre_vote is None or not isinstance(event.reply, TermGrant):
            return None
        pre_vote.waiting.pop(event.peer, None)
        if event.reply.granted:
            pre_vote.agreed.add(event.peer)
        elif event.reply.term >= pre_vote.term:
            self._term_max = event.reply.term
            pre_vote.term = event.reply.term + 1  # who agreed to a lower term agrees to this
        return self._agreed(pre_vote)

    def unanswered(self, peer: PeerID, asked: TermRequest) -> None:
        pre_vote = self._about(asked)
        if pre_vote is not None:
            pre_vote.waiting.pop(peer, None)

    def _agreed(self, pre_vote: PreVote) -> Agreed | None:
        """What a majority agrees to; that ends the pre-vote."""
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
        question = TermRequest(term=pre_vote.term, live=pre_vote.base.link, handed_over=False, sounding=True)
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
