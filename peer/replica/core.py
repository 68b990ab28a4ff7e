"""Decides what one replica of a stage does. Pure.

Every event enters by `handle` and goes to one of three parts: pipeline (`schedule.py`), group (`group_core.py`) or, at
stage 0 only, queue (`microbatch_queue.py`). If a command of one part is a request to another part, this core passes the
request on, in the order of the commands, and the driver never sees it:

    queue     Make, MemberGranted, RunAhead   -> group (`granted`, `granted_to`), pipeline (Arrived, RunAhead)
    pipeline  Contributed, Finished           -> Count for the driver; queue (`validated`, `look_again`)
    group     AskRepair                       -> queue (`run_again`), at stage 0

Other modules may read the parts, but only this core changes them.
"""

import math
from typing import Final, get_args

from shoal.peer.pipeline.microbatch import Microbatch, indices_from
from shoal.peer.replica.commands import AskRepair, Command, CommitCommand, Finished, Make, MemberGranted, QueueCommand
from shoal.peer.replica.events import (
    Arrived,
    Contributed,
    DrainBegun,
    DrainEnded,
    Event,
    GradientCounted,
    Lagging,
    Paused,
    PeerLost,
    PeerReady,
    PlanFollowed,
    ProgressArrived,
    QueueEvent,
    Resumed,
    RunAhead,
    ScheduleEvent,
    Stepped,
    TimerFired,
    TrafficPlanned,
)
from shoal.peer.replica.group_core import GroupCore
from shoal.peer.replica.member import MemberCore
from shoal.peer.replica.microbatch_queue import MicrobatchQueue
from shoal.peer.replica.router import in_turn
from shoal.peer.replica.schedule import Schedule
from shoal.protocol.errors import Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PresenceUpdate
from shoal.protocol.plan import Plan

_OF_THE_PIPELINE: Final = frozenset(get_args(ScheduleEvent)) - {Paused, Resumed, Lagging}
_OF_THE_QUEUE: Final = frozenset(get_args(QueueEvent)) - {TimerFired}
_OF_A_PART: Final = frozenset({Make, MemberGranted, RunAhead, AskRepair, Contributed, Finished})
"""Commands from one part of the core to another; the driver never sees them."""


class ReplicaCore(MemberCore):
    """Decides for one replica of a stage. Args: queue: the supply of microbatches, at stage 0; elsewhere None."""

    def __init__(self, group: GroupCore, pipeline: Schedule, queue: MicrobatchQueue | None, plan: Plan) -> None:
        super().__init__(group, plan)
        self.pipeline = pipeline
        """Decides on this replica's microbatches. Other modules may read it; only this core changes it."""
        self._queue = queue
        """The microbatches to claim and grant; None: our stage is not stage 0."""
        self._queue_due_s = queue.next_timer_s() if queue is not None else math.inf
        self._upstream: frozenset[PeerID] = frozenset()
        self._draining_upstream: set[PeerID] = set()

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        kind = type(event)
        if kind in _OF_THE_PIPELINE:
            return self._flow(event, now_s)  # type: ignore[arg-type]
        if kind in _OF_THE_QUEUE:
            return self._queued(event, now_s)  # type: ignore[arg-type]
        match event:
            case TimerFired():
                commands = self._commit(event, now_s) if now_s >= self._group_due_s else []
                return commands + self._queued(event, now_s) if now_s >= self._queue_due_s else commands
            case ProgressArrived(source, progress):
                # A removed member may still send its last Progress: neither part counts it.
                has_place = self.group.has_place(source)
                commands = self._commit(event, now_s)
                if self._queue is not None and has_place:
                    self._queue.note(source, progress.step, progress.indices, progress.claimed, now_s=now_s)
                    self._queue_due_s = self._queue.next_timer_s()
                return commands
            case GradientCounted(microbatch):
                commands = self._commit(event, now_s)
                if self._queue is not None:
                    self._queue.made(microbatch, now_s=now_s)
                    self._queue_due_s = self._queue.next_timer_s()
                return commands
            case Stepped(version):
                commands = self._commit(event, now_s)
                if self._queue is not None:
                    commands += self._supplied(self._queue.reach(version, now_s=now_s), now_s)
                self._remembers = event.remembers
                return commands + self._open_if_fit(now_s)
            case Paused():
                self._stop_queue()
                return super().handle(event, now_s=now_s) + self._flow(event, now_s)
            case Resumed():
                self.is_paused = False
                commands = self._flow(event, now_s) + self._resume_queue(now_s)
                return commands + super().handle(event, now_s=now_s)
            case DrainBegun():
                self._stop_queue()
                return super().handle(event, now_s=now_s)
            case DrainEnded():
                return super().handle(event, now_s=now_s) + self._resume_queue(now_s)
            case Lagging(lags):
                if lags:
                    self._stop_queue()
                commands = super().handle(event, now_s=now_s)
                if not lags:
                    commands += self._resume_queue(now_s)
                return commands + self._flow(event, now_s)
            case _:
                return super().handle(event, now_s=now_s)

    def next_timer_s(self) -> float:
        return min(self._group_due_s, self._queue_due_s)

    # --- to the parts ---

    def _flow(self, event: ScheduleEvent, now_s: float) -> list[Command]:
        commands = self.pipeline.handle(event, now_s=now_s)
        return [*commands] if _OF_A_PART.isdisjoint(map(type, commands)) else self._routed([*commands], now_s)

    def _queued(self, event: QueueEvent, now_s: float) -> list[Command]:
        if self._queue is None:
            raise Refused(self.group.me, "does not lead stage 0")
        return self._supplied(self._queue.handle(event, now_s=now_s), now_s)

    def _supplied(self, commands: list[QueueCommand], now_s: float) -> list[Command]:
        """Pass each of the queue's commands to the part of the core that it is for; return those for the driver."""
        assert self._queue is not None, "commands of a queue at a later stage"
        self._queue_due_s = self._queue.next_timer_s()
        return self._routed([*commands], now_s) if commands else []

    def _stop_queue(self) -> None:
        if self._queue is not None:
            self._queue.is_stopped = True

    def _resume_queue(self, now_s: float) -> list[Command]:
        """Claim microbatches again, unless we are paused, draining or lagging."""
        if self._queue is None or self.is_paused or self.is_draining or self.is_lagging:
            return []
        self._queue.is_stopped = False
        return self._changed(now_s)

    def _routed(self, commands: list[Command], now_s: float) -> list[Command]:
        left: list[Command] = []
        for command in commands:
            match command:
                case Make(microbatch, retried):
                    left += self._make(microbatch, retried, now_s)
                case MemberGranted(peer, microbatch):
                    self.group.granted_to(peer, microbatch)
                case RunAhead():
                    left += self._flow(command, now_s)
                case Contributed():
                    left.append(self._count(command))
                case Finished(microbatch, loss):
                    if microbatch.validates and self._queue is not None:
                        left += self._supplied(self._queue.validated(microbatch, loss), now_s)
                    left += self._changed(now_s)
                case AskRepair(step, bitmap) if self._queue is not None:
                    indices = indices_from(bitmap, count=self.group.microbatches)
                    left += self._supplied(self._queue.run_again(step, indices, now_s=now_s), now_s)
                case _:
                    left.append(command)
        return left

    def _make(self, microbatch: Microbatch, retried: bool, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if not microbatch.validates and microbatch.step >= self.pipeline.version:
            commands = self._decided(self.group.granted(microbatch, retried=retried), now_s)
        return commands + self._flow(Arrived(microbatch, None, retried), now_s)

    # --- the life of a replica ---

    def _more_follows(self, step: int) -> bool:
        # Stage 0's leader judges each member's speed by its reports of contributions: stage 0 must not delay them.
        return self._queue is None and self.pipeline.has_more(step)

    def _changed(self, now_s: float) -> list[Command]:
        return [] if self._queue is None else self._supplied(self._queue.look_again(now_s), now_s)

    def _follow(self, event: PlanFollowed, now_s: float) -> list[Command]:
        self._upstream = event.upstream
        self._draining_upstream = {peer for peer in self._draining_upstream if event.plan.has(peer)}
        commands: list[Command] = []
        if self._queue is not None:
            commands = self._supplied(self._queue.follow(event.plan, now_s=now_s), now_s)
        commands += super()._follow(event, now_s)
        shares = {} if self.pipeline.is_last else self._shares_of_next(event.plan)
        return commands + self._flow(TrafficPlanned(shares, self._upstream | self._draining_upstream), now_s)

    def _shares_of_next(self, plan: Plan) -> dict[PeerID, float]:
        """Return member of the next stage -> share of the traffic. Each of our members begins with another one
        (`in_turn`)."""
        group_peers, receivers = plan.stages[self.pipeline.stage].peers, plan.stages[self.pipeline.stage + 1].members
        if self.group.me in group_peers:
            receivers = tuple(in_turn(receivers, group_peers.index(self.group.me), len(group_peers)))
        return {member.peer: member.share for member in receivers}

    def _member_said(self, peer: PeerID, presence: PresenceUpdate, now_s: float) -> list[CommitCommand]:
        if presence.stage != self.pipeline.stage:
            return self.group.member_elsewhere(peer, presence.incarnation, now_s=now_s)
        return self.group.member_said(
            peer,
            ready=presence.ready,
            is_open=presence.is_open,
            incarnation=presence.incarnation,
            drains=presence.draining,
            has_moved=self._plan.has(peer),
            learner=presence.learner,
            now_s=now_s,
        )

    def _peer_said(self, peer: PeerID, presence: PresenceUpdate, now_s: float) -> list[Command]:
        commands = self._decided(self._member_said(peer, presence, now_s), now_s)
        stage, stages = self.pipeline.stage, self._plan.stages
        if not self.pipeline.is_last and peer in stages[stage + 1].peers:
            commands += self._flow(self._what_it_takes(peer, presence), now_s)
        drains_upstream = presence.stage == stage - 1 and presence.draining
        if drains_upstream != (peer in self._draining_upstream):
            (self._draining_upstream.add if drains_upstream else self._draining_upstream.remove)(peer)
            self._draining_upstream = {peer for peer in self._draining_upstream if self._plan.has(peer)}
            commands += self._flow(TrafficPlanned(None, self._upstream | self._draining_upstream), now_s)
        return [*commands, *self._open_if_fit(now_s), *self._changed(now_s)]

    def _what_it_takes(self, peer: PeerID, presence: PresenceUpdate) -> PeerReady | PeerLost:
        stage = self.pipeline.stage
        if presence.stage == stage + 1 and presence.is_open:
            return PeerReady(peer)
        if presence.stage == stage + 1 and not presence.ready:
            return PeerLost(peer)  # it has no state or has drained, so it dropped the activations that reached it since
        if presence.stage in (stage - 1, stage + 1):
            # It holds the next stage, and still returns gradients; or it moves there from the stage before ours, and
            # still waits for gradients from us.
            return PeerReady(peer, is_open=False)
        return PeerLost(peer)

    def _peer_lost(self, peer: PeerID, successor: int | None, now_s: float) -> list[Command]:
        commands = [*self._flow(PeerLost(peer, successor), now_s), *self._open_if_fit(now_s)]
        if self._queue is not None:
            commands += self._supplied(self._queue.lost(peer, now_s=now_s), now_s)
        return commands
