"""Decides what one replica of a stage does: takes the events of its pipeline, group and, at stage 0, supply. Pure.

Every event enters by `handle` and goes to the part that it is for. Requests from one part to another are carried out
here, in their place among the commands, and never reach the driver:

    supply    Make, MemberGranted, RunAhead   -> group (WorkGranted, MemberGranted), pipeline (Arrived, RunAhead)
    pipeline  Contributed, Finished           -> Count for the driver; supply (Validated, Changed)
    group     AskRepair                       -> supply (LossReported), at stage 0

The parts are in files of their own. Others read them as views (`views.py`), and give them no event.
"""

import math
from typing import Final, get_args

from shoal.peer.pipeline.microbatch import Microbatch, indices_from
from shoal.peer.replica.commands import AskRepair, Command, Finished, Make
from shoal.peer.replica.events import (
    Arrived,
    Changed,
    Contributed,
    DrainBegun,
    DrainEnded,
    Event,
    GradientCounted,
    Lagging,
    LossReported,
    Made,
    MemberElsewhere,
    MemberGranted,
    MemberLost,
    MemberSaid,
    MemberState,
    Paused,
    PeerClosed,
    PeerLost,
    PeerReady,
    PlanFollowed,
    ProgressArrived,
    QueueEvent,
    QueueResumed,
    QueueStopped,
    Resumed,
    RunAhead,
    ScheduleEvent,
    Stepped,
    TimerFired,
    TrafficPlanned,
    UpstreamSet,
    ValidationDone,
    VersionReached,
    WorkGranted,
)
from shoal.peer.replica.group_core import GroupCore
from shoal.peer.replica.member import MemberCore
from shoal.peer.replica.microbatch_queue import MicrobatchQueue
from shoal.peer.replica.router import in_turn
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.views import PipelineView
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PresenceUpdate
from shoal.protocol.plan import Plan

_OF_THE_PIPELINE: Final = frozenset(get_args(ScheduleEvent)) - {Paused, Resumed, Lagging}
_OF_THE_SUPPLY: Final = frozenset(get_args(QueueEvent)) - {TimerFired, PlanFollowed, MemberLost}
_OF_A_PART: Final = frozenset({Make, MemberGranted, RunAhead, AskRepair, Contributed, Finished})
"""Commands from one part to another."""


class ReplicaCore(MemberCore):
    """One replica of a stage. Args: supply: only at stage 0."""

    def __init__(self, group: GroupCore, pipeline: Schedule, queue: MicrobatchQueue | None, plan: Plan) -> None:
        super().__init__(group, plan)
        self._pipeline = pipeline
        self.pipeline: PipelineView = pipeline
        self._queue = queue
        """None: not stage 0."""
        self._queue_due_s = queue.next_timer_s() if queue is not None else math.inf
        self._upstream: frozenset[PeerID] = frozenset()
        self._draining_upstream: set[PeerID] = set()

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        kind = type(event)
        if kind in _OF_THE_PIPELINE:
            return self._flow(event, now_s)  # type: ignore[arg-type]
        if kind in _OF_THE_SUPPLY:
            return self._supplied(event, now_s)  # type: ignore[arg-type]
        match event:
            case TimerFired():
                commands = self._commit(event, now_s) if now_s >= self._group_due_s else []
                return commands + self._supplied(event, now_s) if now_s >= self._queue_due_s else commands
            case ProgressArrived(source, progress):
                # A removed member may still send its last Progress: neither part counts it.
                supplies = self._queue is not None and self._group.has_place(source)
                commands = self._commit(event, now_s)
                if supplies:
                    said = MemberSaid(source, progress.step, progress.indices, progress.claimed)
                    commands += self._supplied(said, now_s)
                return commands
            case GradientCounted(microbatch):
                commands = self._commit(event, now_s)
                return commands if self._queue is None else commands + self._supplied(Made(microbatch), now_s)
            case Stepped(version):
                commands = self._commit(event, now_s)
                commands += self._if_supplied(VersionReached(version), now_s)
                self._remembers = event.remembers
                return commands + self._open_if_fit(now_s)
            case Paused():
                commands = [*self._if_supplied(QueueStopped(), now_s), *super().handle(event, now_s=now_s)]
                return commands + self._flow(event, now_s)
            case Resumed():
                self.is_paused = False
                commands = self._flow(event, now_s)
                if not self.is_draining and not self.is_lagging:
                    commands += self._if_supplied(QueueResumed(), now_s)
                return commands + super().handle(event, now_s=now_s)
            case DrainBegun():
                return [*self._if_supplied(QueueStopped(), now_s), *super().handle(event, now_s=now_s)]
            case DrainEnded():
                commands = super().handle(event, now_s=now_s)
                if self.is_paused or self.is_lagging:
                    return commands
                return commands + self._if_supplied(QueueResumed(), now_s)
            case Lagging(lags):
                commands = self._if_supplied(QueueStopped(), now_s) if lags else []
                commands += super().handle(event, now_s=now_s)
                if not lags and not self.is_paused and not self.is_draining:
                    commands += self._if_supplied(QueueResumed(), now_s)
                return commands + self._flow(event, now_s)
            case _:
                return super().handle(event, now_s=now_s)

    def next_timer_s(self) -> float:
        return min(self._group_due_s, self._queue_due_s)

    # --- to the parts ---

    def _flow(self, event: ScheduleEvent, now_s: float) -> list[Command]:
        commands = self._pipeline.handle(event, now_s=now_s)
        return [*commands] if _OF_A_PART.isdisjoint(map(type, commands)) else self._routed([*commands], now_s)

    def _supplied(self, event: QueueEvent, now_s: float) -> list[Command]:
        if self._queue is None:
            raise Refused(self._group.me, "does not lead stage 0")
        commands = self._queue.handle(event, now_s=now_s)
        self._queue_due_s = self._queue.next_timer_s()
        return self._routed([*commands], now_s) if commands else []

    def _if_supplied(self, event: QueueEvent, now_s: float) -> list[Command]:
        return [] if self._queue is None else self._supplied(event, now_s)

    def _routed(self, commands: list[Command], now_s: float) -> list[Command]:
        left: list[Command] = []
        for command in commands:
            match command:
                case Make(microbatch, retried):
                    left += self._make(microbatch, retried, now_s)
                case MemberGranted():
                    left += self._commit(command, now_s)
                case RunAhead():
                    left += self._flow(command, now_s)
                case Contributed():
                    left.append(self._count(command))
                case Finished(microbatch, loss):
                    if microbatch.validates:
                        left += self._supplied(ValidationDone(microbatch, loss), now_s)
                    left += self._supplied(Changed(), now_s)
                case AskRepair(step, bitmap) if self._queue is not None:
                    indices = indices_from(bitmap, count=self._group.microbatches)
                    left += self._supplied(LossReported(step, indices), now_s)
                case _:
                    left.append(command)
        return left

    def _make(self, microbatch: Microbatch, retried: bool, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if not microbatch.validates and microbatch.step >= self._pipeline.version:
            commands = self._commit(WorkGranted(microbatch.step, microbatch.index, retried), now_s)
        return commands + self._flow(Arrived(microbatch, None, retried), now_s)

    # --- the life of a replica ---

    def _more_follows(self, step: int) -> bool:
        # Stage 0's leader judges each member's speed by these messages, which therefore must not be delayed.
        return self._queue is None and self._pipeline.has_more(step)

    def _changed(self, now_s: float) -> list[Command]:
        return self._if_supplied(Changed(), now_s)

    def _follow(self, event: PlanFollowed, now_s: float) -> list[Command]:
        self._upstream = event.upstream
        self._draining_upstream = {peer for peer in self._draining_upstream if event.plan.has(peer)}
        commands = self._if_supplied(event, now_s) + super()._follow(event, now_s)
        shares = {} if self._pipeline.is_last else self._shares_of_next(event.plan)
        return commands + self._flow(TrafficPlanned(shares, self._upstream | self._draining_upstream), now_s)

    def _shares_of_next(self, plan: Plan) -> dict[PeerID, float]:
        """Return the traffic shares of the next stage's members, beginning with the one that we serve first."""
        group_peers, receivers = plan.stages[self._pipeline.stage].peers, plan.stages[self._pipeline.stage + 1].members
        if self._group.me in group_peers:
            receivers = tuple(in_turn(receivers, group_peers.index(self._group.me), len(group_peers)))
        return {member.peer: member.share for member in receivers}

    def _what_it_is_here(self, peer: PeerID, presence: PresenceUpdate) -> MemberState | MemberElsewhere:
        if presence.stage != self._pipeline.stage:
            return MemberElsewhere(peer, presence.incarnation)
        has_moved = self._plan.has(peer)
        return MemberState(
            peer, presence.ready, presence.is_open, presence.incarnation, presence.draining, has_moved, presence.learner
        )

    def _peer_said(self, peer: PeerID, presence: PresenceUpdate, now_s: float) -> list[Command]:
        commands = self._commit(self._what_it_is_here(peer, presence), now_s)
        stage, stages = self._pipeline.stage, self._plan.stages
        if not self._pipeline.is_last and peer in stages[stage + 1].peers:
            commands += self._flow(self._what_it_takes(peer, presence), now_s)
        drains_upstream = presence.stage == stage - 1 and presence.draining
        if drains_upstream != (peer in self._draining_upstream):
            (self._draining_upstream.add if drains_upstream else self._draining_upstream.remove)(peer)
            self._draining_upstream = {peer for peer in self._draining_upstream if self._plan.has(peer)}
            commands += self._flow(UpstreamSet(self._upstream | self._draining_upstream), now_s)
        return [*commands, *self._open_if_fit(now_s), *self._changed(now_s)]

    def _what_it_takes(self, peer: PeerID, presence: PresenceUpdate) -> PeerReady | PeerClosed | PeerLost:
        stage = self._pipeline.stage
        if presence.stage == stage + 1 and presence.is_open:
            return PeerReady(peer)
        if presence.stage == stage + 1 and not presence.ready:
            return PeerLost(peer)  # it has no state or has drained: it has dropped what reached it since
        if presence.stage in (stage - 1, stage + 1):
            # It still answers what it owes there; or it comes from the stage before and still waits for what we owe.
            return PeerClosed(peer)
        return PeerLost(peer)

    def _peer_lost(self, peer: PeerID, successor: int | None, now_s: float) -> list[Command]:
        lost = self._flow(PeerLost(peer, successor), now_s)
        return [*lost, *self._open_if_fit(now_s), *self._if_supplied(MemberLost(peer), now_s)]
