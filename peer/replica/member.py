"""Decides what one member of a group does: an expert's holder, or a stage's replica, which also has a pipeline
(`core.py`). Pure.

A member passes through these states. It begins with a plan that names it, and ends when the driver drops it:

    joining    not ready, closed   it fetches the group's state
    learner    ready, open         it computes with the group's weights until it has the whole state
    closed     ready, closed       it takes no traffic yet: it could not repeat exactly a microbatch that runs again
    open       ready, open         it takes traffic
    lagging    ready, closed       a learner or a slow member: its weights are too old for the group's microbatches
    paused     ready, closed       the owner wants the device: its work goes back, its contributions are still reduced
    draining   ready, closed       it finishes its work; a plan may give its place back (`DrainEnded`)
    drained    not ready, closed   no peer needs it any more

The other members' presence messages (`PeerSaid`) tell a member which others are ready and open.
"""

from abc import ABC, abstractmethod
from typing import Final, get_args

from shoal.peer.replica.commands import AnnouncePresence, Command, CommitCommand, Count
from shoal.peer.replica.events import (
    CommitEvent,
    Contributed,
    DrainBegun,
    Drained,
    DrainEnded,
    Event,
    GradientCounted,
    JoinedGroup,
    Lagging,
    MemberSilent,
    Paused,
    PeerDied,
    PeerReborn,
    PeerSaid,
    PlanFollowed,
    Resumed,
    Stepped,
    TimerFired,
)
from shoal.peer.replica.group_core import GroupCore
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PresenceUpdate
from shoal.protocol.plan import Plan

_OF_THE_GROUP: Final = frozenset(get_args(CommitEvent))


class MemberCore(ABC):
    """Decides one member's commits and states. Args: plan: the plan that gives the member its place."""

    def __init__(self, group: GroupCore, plan: Plan) -> None:
        self.group = group
        """Decides on the group's rounds. Other modules may read it; only this core and its subclasses change it."""
        self._plan = plan
        self._remembers = False
        self.is_open = False
        self.is_paused = False
        self.is_draining = False
        self.is_lagging = False
        """Our weights are too old for the group's microbatches: our device is slow, or we are a learner."""
        group.take_traffic(False, now_s=0.0)
        self._group_due_s = group.next_timer_s()

    @property
    def plan(self) -> Plan:
        return self._plan

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        """Process an event; return commands. Raises: Refused, RemoteError: the event is invalid; nothing has
        changed."""
        match event:
            case GradientCounted() | Stepped() | MemberSilent():
                return self._of_the_group(event, now_s)
            case Contributed():
                return [self._count(event)]
            case PeerSaid(peer, presence):
                return self._peer_said(peer, presence, now_s)
            case PlanFollowed():
                return self._follow(event, now_s)
            case PeerDied(peer, is_barred):
                commands = self._decided(self.group.member_lost(peer, is_barred=is_barred, now_s=now_s), now_s)
                commands += self._peer_lost(peer, None, now_s)
                return [*commands, *self._open_if_fit(now_s), *self._changed(now_s)]
            case PeerReborn(peer, incarnation):
                lost = self._peer_lost(peer, incarnation, now_s)
                return [*lost, *self._open_if_fit(now_s), *self._changed(now_s)]
            case JoinedGroup(remembers, learner):
                self._remembers = remembers
                commands = self._decided(self.group.take_part(True, learner=learner, now_s=now_s), now_s)
                return [*commands, *self._open_if_fit(now_s), AnnouncePresence(), *self._changed(now_s)]
            case Lagging(lags):
                self.is_lagging = lags
                return self._close(now_s) if lags else self._open_if_fit(now_s)
            case Paused():
                self.is_paused = True
                return self._close(now_s)
            case Resumed():
                self.is_paused = False
                return self._open_if_fit(now_s)
            case DrainBegun():
                self.is_draining = True
                return self._close(now_s)
            case DrainEnded():
                self.is_draining = False
                return []
            case Drained():
                return [*self._decided(self.group.take_part(False, now_s=now_s), now_s), AnnouncePresence()]
            case TimerFired():
                return self._commit(event, now_s) if now_s >= self._group_due_s else []
            case _:
                assert type(event) in _OF_THE_GROUP, f"{event} is not for a member without a pipeline"
                return self._of_the_group(event, now_s)  # type: ignore[arg-type]

    def next_timer_s(self) -> float:
        """Return the time at which the driver must pass a `TimerFired`."""
        return self._group_due_s

    # --- what a kind of member defines ---

    @abstractmethod
    def _member_said(self, peer: PeerID, presence: PresenceUpdate, now_s: float) -> list[CommitCommand]:
        """Tell the group's core whether `peer` is in our group, and whether it is ready and open there."""

    def _more_follows(self, step: int) -> bool:
        """True if this member has yet to contribute more microbatches of `step`: one report can then cover several."""
        return False

    def _changed(self, now_s: float) -> list[Command]:
        """Begin work that may have waited for the change that just happened."""
        return []

    def _peer_lost(self, peer: PeerID, successor: int | None, now_s: float) -> list[Command]:
        """Handle the loss of the work that we sent to `peer`. `successor`: its incarnation after a restart, or None."""
        return []

    def _routed(self, commands: list[Command], now_s: float) -> list[Command]:
        """Pass on the commands that parts of the core give each other; return the others, which are for the driver."""
        return commands

    # --- inside ---

    def _count(self, event: Contributed) -> Count:
        step = event.microbatch.step
        # During a round our sum must not grow beyond what the round says.
        held_out = event.retried or self.group.has_round(step)
        follows = self._more_follows(step)
        return Count(
            GradientCounted(event.microbatch, event.loss, event.staleness_steps, held_out, follows), event.retried
        )

    def _of_the_group(self, event: CommitEvent, now_s: float) -> list[Command]:
        commands = self._commit(event, now_s)
        match event:
            case Stepped(remembers=remembers):
                self._remembers = remembers
                commands += self._open_if_fit(now_s)
            case MemberSilent():
                commands += self._changed(now_s)
        return commands

    def _commit(self, event: CommitEvent, now_s: float) -> list[Command]:
        return self._decided(self.group.handle(event, now_s=now_s), now_s)

    def _decided(self, commands: list[CommitCommand], now_s: float) -> list[Command]:
        """Carry out the commands of the group's core; return those for the driver."""
        self._group_due_s = self.group.next_timer_s()
        return self._routed([*commands], now_s) if commands else []

    def _follow(self, event: PlanFollowed, now_s: float) -> list[Command]:
        self._plan = event.plan
        commands = self._decided(self.group.follow(event.plan, event.former, now_s=now_s), now_s)
        return [*commands, *self._open_if_fit(now_s), *self._changed(now_s)]

    def _peer_said(self, peer: PeerID, presence: PresenceUpdate, now_s: float) -> list[Command]:
        commands = self._decided(self._member_said(peer, presence, now_s), now_s)
        return [*commands, *self._open_if_fit(now_s), *self._changed(now_s)]

    def _close(self, now_s: float) -> list[Command]:
        self.is_open = False
        return [*self._decided(self.group.take_traffic(False, now_s=now_s), now_s), AnnouncePresence()]

    def _open_if_fit(self, now_s: float) -> list[Command]:
        """Take traffic if nothing forbids that. A newcomer to a synchronous run waits until it has made a step itself,
        since until then it cannot repeat a microbatch exactly. It does not wait if no other member takes traffic."""
        is_kept_closed = self.is_draining or self.is_paused or self.is_lagging
        if self.is_open or is_kept_closed or not self.group.ready:
            return []
        at_the_beginning = self.group.version == self._plan.restore_version
        if not (self._remembers or at_the_beginning or not self.group.open_members):
            return []
        self.is_open = True
        return [*self._decided(self.group.take_traffic(True, now_s=now_s), now_s), AnnouncePresence()]


class ExpertCore(MemberCore):
    """One holder of an expert, as a member of the group of that expert's holders."""

    def _member_said(self, peer: PeerID, presence: PresenceUpdate, now_s: float) -> list[CommitCommand]:
        place = next((place for place in presence.experts if place.group == self.group.stage), None)
        if place is None:
            # Presence messages arrive in order, so the peer has left this group.
            return self.group.member_elsewhere(peer, 2**62, now_s=now_s)  # later than every incarnation
        return self.group.member_said(
            peer,
            ready=place.ready,
            is_open=place.is_open,
            incarnation=place.incarnation,
            drains=place.draining,
            has_moved=self._plan.has(peer),
            now_s=now_s,
        )
