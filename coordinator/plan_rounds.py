"""Begins proposals, and announces what becomes of them: a live plan, or the end of an attempt. Pure."""

from collections.abc import Callable, Sequence

from shoal.coordinator.allocate.plan_layout import Layout
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.coordination_events import (
    Alarm,
    Answered,
    Ask,
    Command,
    Introduce,
    LogReason,
    LookUp,
    Publish,
    Reply,
    Search,
    Searched,
)
from shoal.coordinator.follower import Agreed, Follower
from shoal.coordinator.leader import KeepRole, Leader, Want
from shoal.coordinator.proposer import GivenUp, PlanAdopted, Progress, Proposer
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, HeartbeatReply, Holding, PlanLive, PlanVote, Refusal, Reset, TermGrant
from shoal.protocol.plan import Mandate, SignedPlan


class PlanRounds:
    """Args: adopt: obeys a plan if it is above ours."""

    def __init__(
        self,
        *,
        me: PeerID,
        chain: PlanChain,
        policy: ReplanPolicy,
        proposer: Proposer,
        follower: Follower,
        leader: Leader,
        adopt: Callable[[SignedPlan, float], list[Command]],
    ) -> None:
        self._me, self._chain, self._policy = me, chain, policy
        self._proposer, self._follower, self._leader = proposer, follower, leader
        self._adopt = adopt

    def found_run(self, own: Sequence[Holding], now_s: float) -> list[Command]:
        """Make the first plan alone, as only the owner may, if it is time. Args: own: the snapshots on our disk."""
        watch = self._follower.watch
        if not watch.head_known:
            return []
        if watch.run_exists(now_s):
            return [LogReason(text="waiting for the plan of this run")]
        found, reason = self._policy.first_plan(now_s, own=own)
        match found:
            case Layout():
                return [
                    LogReason(text=reason),
                    *self._went_live(
                        self._proposer.make(None, 1, self._policy.foreseen(found, now_s), now_s), (), now_s
                    ),
                ]
            case SearchJob():
                return [LogReason(text=reason), Search(job=found)]
            case None:
                return [LogReason(text=reason)]

    def reported(self, sequence: int, now_s: float) -> list[Command]:
        """Handle a peer's report that it obeys the plan of this sequence."""
        live = self._chain.live
        if sequence <= (live.plan.sequence if live else 0):
            return []
        self._follower.watch.is_behind(now_s)
        return [LookUp()]  # the chain has grown without us

    def remind(self, peer: PeerID, reply: HeartbeatReply) -> list[Command]:
        """Send our coordinator its plan if it knows only a lower term: it has lost its disk."""
        live = self._chain.live
        forgot = live is not None and live.plan.coordinator == peer != self._me and reply.term < live.plan.term
        return [Ask(peer=peer, message=PlanLive(plan=live.link))] if live and forgot else []

    def reset(self, reset: Reset, base: SignedPlan, mandate: Mandate, now_s: float) -> list[Command]:
        commands = self._adopt(base, now_s)
        live = self._chain.live
        if live is None:
            return [*commands, Reply(message=Refusal(reason="obeys no plan of the run yet: look again"))]
        if live.plan.mandate == reset.mandate:
            return [*commands, Reply(message=Done())]  # asked twice
        if (
            live.digest != base.digest
            or mandate.override_epoch <= live.plan.override_epoch
            or mandate.previous != base.digest
        ):
            reason = f"obeys plan {self._chain.order} of reign {live.plan.override_epoch}: look again"
            return [*commands, Reply(message=Refusal(reason=reason))]
        sequence = self._proposer.next_sequence(live)
        layout, reason = self._policy.reset_plan(live, reset, mandate, now_s, sequence=sequence)
        if layout is None:
            return [*commands, Reply(message=Refusal(reason=reason))]
        layout = self._policy.foreseen(layout, now_s)
        plan = self._proposer.make(
            live, mandate.term, layout, now_s, mandate=reset.mandate, override_epoch=mandate.override_epoch
        )
        commands.append(Introduce(peers=reset.roster))
        commands += self._went_live(plan, tuple(peer for peer, _ in reset.roster), now_s)
        return [*commands, LogReason(text=layout.reason), Reply(message=Done())]

    def pursue(self, want: Want, live: SignedPlan, now_s: float) -> list[Command]:
        """Propose the result of `Leader.work`. We coordinate."""
        match want:
            case Layout():
                return self._conclude(self._proposer.propose(live, self._policy.foreseen(want, now_s), now_s), now_s)
            case KeepRole(permit):
                return self.inherit(live, permit, now_s)
            case None:
                return []

    def inherit(self, live: SignedPlan, permit: bytes, now_s: float) -> list[Command]:
        """Request the next term, which the coordinator has transferred to us."""
        return self._conclude(self._proposer.campaign(live, now_s, permit=permit), now_s)

    def succeed(self, agreed: Agreed | None, now_s: float) -> list[Command]:
        """Request the coordinator's term, if a majority would grant it."""
        if agreed is None or self._proposer.is_busy:
            return []
        base, term = agreed
        note = LogReason(text=f"a majority misses coordinator {base.plan.coordinator[-8:]}, asking for term {term}")
        return [note, *self._conclude(self._proposer.campaign(base, now_s, term=term), now_s)]

    def count(self, event: Answered, now_s: float) -> list[Command]:
        reply = event.reply
        if not isinstance(reply, TermGrant | PlanVote):
            return []
        notes = self._refused(event, reply.reason, now_s) if isinstance(reply, PlanVote) and reply.unfit else []
        return notes + self._conclude(self._proposer.count(event, reply, now_s), now_s)

    def _refused(self, event: Answered, reason: str, now_s: float) -> list[Command]:
        view, plan = self._policy.view, self._proposer.offered(event.asked)
        if plan is None or self._chain.live is None:
            return []
        view.electorate.refused(self._chain.live.plan, plan)
        name = view.roster.name_of(event.peer)
        text = view.refusals.note(event.peer, name, plan.sequence, reason, now_s)
        return [LogReason(text=text)] if text else []

    def sounded(self, event: Answered, now_s: float) -> list[Command]:
        assert isinstance(event.reply, TermGrant)
        agreed = self._follower.count(event) if self._chain.takes_term(event.reply.term + 1) else None
        return self.succeed(agreed, now_s)

    def press(self, now_s: float) -> list[Command]:
        """Repeat unanswered questions, or let the proposal expire."""
        return self._conclude(self._proposer.press(now_s), now_s) if self._proposer.is_busy else []

    def searched(self, event: Searched) -> list[Command]:
        """Handle the end of a search. Its result becomes a plan at the next look, if it still fits."""
        wanted = self._policy.searched(event)
        if event.is_bug:
            return [Alarm(text=event.reason)]
        return [LogReason(text=event.reason)] if wanted else []

    def _conclude(self, progress: Progress, now_s: float) -> list[Command]:
        """Act on the result of a proposal."""
        commands, outcome = progress
        match outcome:
            case PlanAdopted() as won:
                commands = commands + self._went_live(won.plan, won.voters, now_s)
                if won.plan.plan.coordinator != self._me and self._chain.live is won.plan:
                    # This finishes a dead coordinator's plan; our own plan follows in the same term.
                    ask = self._proposer.campaign(won.plan, now_s, permit=won.permit, term=won.term)
                    return commands + self._conclude(ask, now_s)
                return commands
            case GivenUp() as lost:
                self._follower.back_off(now_s)
                self._leader.lost(now_s, outbid=lost.outbid)
                return [*commands, LogReason(text=lost.reason), LookUp()]
            case None:
                return commands

    def _went_live(self, plan: SignedPlan, voters: tuple[PeerID, ...], now_s: float) -> list[Command]:
        commands = self._adopt(plan, now_s)
        news = PlanLive(plan=plan.link)
        audience = dict.fromkeys((*voters, *plan.plan.members))
        commands += [Ask(peer=peer, message=news) for peer in audience if peer != self._me]
        return [*commands, Publish(plan=plan)] if plan.plan.coordinator == self._me else commands
