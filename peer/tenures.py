"""The driver of a part in one group, from the plan that gives it until it drains (`replica/member.py` has its states).

What a group works at is its subclasses' business.
"""

import asyncio
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from shoal.peer.group.driver import GroupDriver, Stepper
from shoal.peer.group.witnesses import Witnesses
from shoal.peer.joining import Joining
from shoal.peer.pipeline.state import StageState
from shoal.peer.replica.commands import (
    AskRepair,
    CatchUp,
    Command,
    Count,
    ForgetMember,
    Reduce,
    Report,
    Resync,
    SayHello,
    Tell,
    Witness,
)
from shoal.peer.replica.commit import Commit
from shoal.peer.replica.events import (
    DrainBegun,
    Drained,
    DrainEnded,
    Event,
    Joined,
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
from shoal.peer.replica.member import MemberCore
from shoal.peer.surroundings import Surroundings
from shoal.peer.tasks import Tasks
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, Hello, Repair
from shoal.protocol.plan import Plan
from shoal.protocol.timer import Timer

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_REPAIR_TRIES = 10


class Work(Stepper, Protocol):
    """What a tenure does: contributes gradients, and steps."""

    @property
    def is_idle(self) -> bool:
        """Nothing is here at all."""
        ...

    def load(self, state: StageState) -> None: ...

    def install(self) -> None:
        """Take messages."""
        ...

    async def close(self) -> None: ...


def make_commit(surroundings: Surroundings, group_id: int, *, incarnation: int, has_loss: bool) -> Commit:
    """The part of a member's core that commits."""
    spec = surroundings.spec
    return Commit(
        me=surroundings.endpoint.peer_id,
        stage=group_id,
        steps=spec.training.steps,
        microbatches=spec.training.microbatches_per_step,
        tokens_per_microbatch=spec.training.microbatch_size * spec.model.context,
        has_loss=has_loss,
        incarnation=incarnation,
        deadline_s=spec.training.commit_deadline_s,
        quorum=spec.training.commit_quorum,
    )


class Tenure(ABC):
    """The driver of one member: what we are in the group `core.group`. It owns the one timer and the one door to the
    core (`handle`), and has each command carried out by whoever can."""

    def __init__(self, surroundings: Surroundings, core: MemberCore, work: Work, *, incarnation: int) -> None:
        self._s = surroundings
        self.core = core
        self.group_id = core.group.stage
        self.incarnation = incarnation
        self._work = work
        self._closed = False
        self._timer = Timer(surroundings.clock, self._ring)
        self.group = GroupDriver(
            core.group,
            work,
            endpoint=surroundings.endpoint,
            clock=surroundings.clock,
            post=self.handle,
            on_behind=self._resync,
            on_unreachable=surroundings.listeners.on_unreachable,
            on_failure=surroundings.listeners.on_failure,
            retained_from=surroundings.server.pinned_from,
        )
        self.joining = Joining(
            endpoint=surroundings.endpoint,
            compute=surroundings.compute,
            inbox=surroundings.inbox,
            runtime=work.runtime,
            group=self.group,
            take_over=self._take_over,
            begin_era=lambda era: surroundings.listeners.begin_era(era, self.group_id),
            members=lambda: self.core.plan.members,
        )
        self._tasks = Tasks(surroundings.listeners.on_failure)
        self.witnesses = Witnesses(
            core.group, endpoint=surroundings.endpoint, compute=surroundings.compute, tasks=self._tasks
        )
        self._sync_task: asyncio.Task[None] | None = None

    # --- the one door ---

    def handle(self, event: Event) -> None:
        """Raises: Refused, RemoteError: as `MemberCore.handle`."""
        if self._closed:
            return
        try:
            for command in self.core.handle(event, now_s=self._s.clock.now_s()):
                self._perform(command)
        finally:
            if not self._closed:
                self._timer.set(self.core.next_timer_s())

    def _perform(self, command: Command) -> None:
        """Do what the core asks, or have it done."""
        match command:
            case Tell() | Reduce() | CatchUp() | ForgetMember():
                self.group.perform(command)
            case Count(counted):
                apart = self._work.runtime.contribute(counted.microbatch, apart=counted.apart)
                self.handle(counted if apart == counted.apart else dataclasses.replace(counted, apart=apart))
            case SayHello():
                self._s.listeners.on_change()
            case Report(report):
                self._s.listeners.on_commit(report)
            case Witness(report):
                self._s.listeners.on_witness(report)
            case AskRepair(step, indices):
                # What our group's leader misses, stage 0's leader hands out again.
                self._tasks.spawn(self._ask_repair(Repair(step=step, indices=indices)), f"repair step {step}")
            case Resync(mate, version):
                logger.error("our state at version %d is not the group's: fetching it", version)
                self._resync(mate)
            case _:
                raise AssertionError(f"nobody carries out {command}")

    def _ring(self) -> None:
        try:
            self.handle(TimerFired())
        except Exception as error:
            self._s.listeners.on_failure(error)

    # --- what others see ---

    @property
    def is_ready(self) -> bool:
        return self.core.group.ready and not self._closed

    @property
    def is_open(self) -> bool:
        """It takes traffic."""
        return self.core.is_open and not self._closed

    @property
    def is_draining(self) -> bool:
        return self.core.is_draining

    @property
    def version(self) -> int:
        return self._work.version

    @property
    def state(self) -> StageState | None:
        return self._work.runtime.state

    @property
    def audience(self) -> list[PeerID]:
        """Who wants to know whether we are ready.

        Also mates of a plan that has no place for us any more: they may wait for the word of one who drains.
        """
        group = self.core.group
        peers = dict.fromkeys(peer for peers in (*self._near(), group.mates, group.departing) for peer in peers)
        return [peer for peer in peers if peer != self._s.endpoint.peer_id]

    # --- what a subclass says ---

    @abstractmethod
    def _near(self) -> list[tuple[PeerID, ...]]:
        """Who works with our group, besides its members."""

    def _upstream(self) -> frozenset[PeerID]:
        """Who holds, or held of late, the stage before ours."""
        return frozenset()

    @property
    def _is_needed(self) -> bool:
        """Who comes after us has not what we have."""
        return False

    # --- life ---

    def start(self) -> None:
        self._work.install()
        self.group.install()
        self.witnesses.install()
        self.follow(self.core.plan)
        self._sync_task = asyncio.create_task(self._join(), name=f"join group {self.group_id}")

    def follow(self, plan: Plan) -> None:
        """A plan in which our group and its layers are as before."""
        self.handle(PlanFollowed(plan, self._s.recent.former(self.group_id), self._upstream()))
        self.witnesses.look(self.state)

    def peer_state(self, peer: PeerID, hello: Hello) -> None:
        """What a peer says of itself."""
        self.handle(PeerSaid(peer, hello))

    def peer_died(self, peer: PeerID) -> None:
        """The plan has dropped it, and it had not said that it would go."""
        self.witnesses.mate_lost(peer)
        self.handle(PeerDied(peer))

    def peer_reborn(self, peer: PeerID) -> None:
        """It has begun anew in its stage, which its mates may have heard from its Progress before."""
        self.handle(PeerReborn(peer))

    def peer_silent(self, peer: PeerID) -> None:
        """It does not answer; the network or it may be to blame, and it may come back."""
        self.handle(MemberSilent(peer))

    def pause(self, *, at_once: bool) -> None:
        """Take nothing new and hand on what is here, but stay: what we have contributed is reduced with our mates'.

        Args: at_once: what others could do as well is not even ended; else backwards are made whose gradients come.
        """
        self.handle(Paused(at_once))

    def resume(self) -> None:
        """The pause is over."""
        self.handle(Resumed())

    async def drain(self, timeout_s: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Take nothing new, finish what is here, see every contribution committed, `unless` that has become pointless.

        Returns: whether that came about.
        """
        self.handle(DrainBegun())
        until_s = self._s.clock.now_s() + timeout_s
        while not self._work.is_idle or self.core.group.owes or self._is_needed:
            if unless() or not self.is_draining:
                return False
            if self._s.clock.now_s() >= until_s:
                logger.warning("left work behind: group %d did not drain in %.0f s", self.group_id, timeout_s)
                return False
            await asyncio.sleep(0.05)
        if not self.is_draining:
            return False
        self.handle(Drained())
        return True

    def stay(self, plan: Plan) -> None:
        """A plan has given us our place back before we had drained."""
        self.handle(DrainEnded())
        self.follow(plan)

    def retire(self) -> None:
        """We take part in nothing any more, whatever still arrives."""
        self._closed = True
        self._timer.cancel()
        self.group.retire()

    async def close(self) -> None:
        self.retire()
        if self._sync_task:
            self._sync_task.cancel()
            await asyncio.gather(self._sync_task, return_exceptions=True)
        await self._tasks.cancel()
        await self.witnesses.close()
        await self.group.close()
        await self._work.close()

    # --- state ---

    async def _join(self) -> None:
        try:
            await self.joining.run(self.core.plan)
        except (OSError, RuntimeError, ValueError) as error:
            self._s.listeners.on_failure(error)
            return
        logger.info("group %d is ready at version %d", self.group_id, self.version)
        self.handle(Joined(self._work.runtime.remembers))

    async def _take_over(self, state: StageState) -> None:
        self._work.load(state)
        digest = (await self._s.compute.run("step", state.digest, flop=0.0)).value
        if self.version == state.version:
            self._reached(state, digest, None)
            self._s.listeners.on_state(self, state)

    def _reached(self, state: StageState, digest: str, gradient_norm: float | None) -> None:
        """The core and the group hear that we hold `state`."""
        by = self.group.stepped(state.version)
        self.handle(Stepped(state.version, digest, by, gradient_norm, self._work.runtime.remembers))
        self.group.commit_if_complete()

    def _resync(self, mate: PeerID) -> None:
        if self.is_ready and not self.is_draining:
            self._s.listeners.on_resync(self)

    # --- told by the work ---

    def stepped(self, state: StageState, digest: str, skipped_layers: int) -> None:
        """An optimizer step has made `state`."""
        if skipped_layers:
            logger.error("step %d: %d layers had a gradient that is not finite", state.version, skipped_layers)
        self._reached(state, digest, state.gradient_norm)
        self.witnesses.look(state)
        self.joining.stepped()
        self._s.listeners.on_state(self, state)

    # --- inside ---

    async def _ask_repair(self, message: Repair) -> None:
        for _ in range(_REPAIR_TRIES):
            for peer in self.core.plan.stages[0].peers:
                try:
                    await self._s.endpoint.ask(peer, message, Done)
                except (Unreachable, Refused, RemoteError) as error:
                    logger.debug("no repair: %s", error)
                else:
                    return
            await asyncio.sleep(_RETRY_S)
