"""A part in one group, from the plan that gives it until it drains: born, *ready* when it holds the group's state,
*open* while it takes traffic, gone.

What a group works at is its subclasses' business. Who else is ready and open it learns from their Hellos.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from shoal.peer.group.core import GroupCore
from shoal.peer.group.driver import GroupDriver, Stepper
from shoal.peer.group.witnesses import Witnesses
from shoal.peer.joining import Joining
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.state import StageState
from shoal.peer.replica.events import (
    GradientCounted,
    GroupPlanned,
    MemberLost,
    MemberSilent,
    OpenSet,
    ReadySet,
)
from shoal.peer.surroundings import Surroundings
from shoal.peer.tasks import Tasks
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, Hello, Progress, Repair
from shoal.protocol.plan import Member, Plan

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


class Tenure(ABC):
    """Our part of `plan` in its group `group_id`."""

    def __init__(
        self,
        surroundings: Surroundings,
        plan: Plan,
        group_id: int,
        work: Work,
        *,
        incarnation: int,
        has_loss: bool,
    ) -> None:
        self._s = surroundings
        self.group_id = group_id
        self.incarnation = incarnation
        self.is_open = False
        self._plan = plan
        self._work = work
        self.is_paused = self._draining = self._closed = False
        spec = surroundings.spec
        group = GroupCore(
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
        self.group = GroupDriver(
            group,
            work,
            endpoint=surroundings.endpoint,
            clock=surroundings.clock,
            on_report=surroundings.on_commit,
            on_witness=surroundings.on_witness,
            on_resync=self._resync,
            on_progress=self._mate_progress,
            on_repair=self._repair,
            on_unreachable=surroundings.on_unreachable,
            on_failure=surroundings.on_failure,
            retained_from=surroundings.server.pinned_from,
        )
        self.joining = Joining(
            endpoint=surroundings.endpoint,
            compute=surroundings.compute,
            inbox=surroundings.inbox,
            runtime=work.runtime,
            group=self.group,
            take_over=self._take_over,
            begin_era=lambda era: surroundings.begin_era(era, group_id),
            members=lambda: self._plan.members,
        )
        self._tasks = Tasks(surroundings.on_failure)
        self.witnesses = Witnesses(
            group, endpoint=surroundings.endpoint, compute=surroundings.compute, tasks=self._tasks
        )
        self._sync_task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.group.core.ready and not self._closed

    @property
    def is_draining(self) -> bool:
        return self._draining

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
        core = self.group.core
        peers = dict.fromkeys(peer for peers in (*self._near(), core.mates, core.departing) for peer in peers)
        return [peer for peer in peers if peer != self._s.endpoint.peer_id]

    # --- what a subclass says ---

    @abstractmethod
    def _members(self, plan: Plan) -> tuple[Member, ...]:
        """Of our group, in `plan`."""

    @abstractmethod
    def _near(self) -> list[tuple[PeerID, ...]]:
        """Who works with our group, besides its members."""

    @abstractmethod
    def peer_state(self, peer: PeerID, hello: Hello) -> None:
        """What a peer says of itself."""

    @abstractmethod
    def peer_died(self, peer: PeerID) -> None:
        """The plan has dropped it, and it had not said that it would go."""

    @abstractmethod
    def peer_reborn(self, peer: PeerID) -> None:
        """It has begun anew in its stage, which its mates may have heard from its Progress before."""

    @property
    def _is_needed(self) -> bool:
        """Who comes after us has not what we have."""
        return False

    def _more_follows(self, step: int) -> bool:
        """More microbatches of `step` are here, whose contributions will be told of."""
        return False

    def _wake(self) -> None:  # noqa: B027  # a kind of tenure may do nothing then
        """Something has changed on which work may have waited."""

    # --- life ---

    def start(self) -> None:
        self._work.install()
        self.group.install()
        self.witnesses.install()
        self.group.handle(OpenSet(False))
        self.follow(self._plan)
        self._sync_task = asyncio.create_task(self._join(), name=f"join group {self.group_id}")

    def follow(self, plan: Plan) -> None:
        """A plan in which our group and its layers are as before."""
        self._plan = plan
        former = self._s.recent.former(self.group_id)
        self.group.handle(GroupPlanned(self._members(plan), plan.sequence, former))
        self.witnesses.look(self.state)
        self._open_if_fit()
        self._wake()

    def mate_died(self, peer: PeerID) -> None:
        """The plan has dropped it, and it had not said that it would go."""
        self.witnesses.mate_lost(peer)
        self.group.handle(MemberLost(peer))
        self._open_if_fit()
        self._wake()

    def peer_silent(self, peer: PeerID) -> None:
        """It does not answer; the network or it may be to blame, and it may come back."""
        self.group.handle(MemberSilent(peer))
        self._wake()

    def pause(self, *, at_once: bool) -> None:
        """Take nothing new and hand on what is here, but stay: what we have contributed is reduced with our mates'.

        Args: at_once: what others could do as well is not even ended.
        """
        self.is_paused = True
        self.is_open = False
        self.group.handle(OpenSet(False))
        self._s.on_change()

    def resume(self) -> None:
        self.is_paused = False
        self._open_if_fit()

    async def drain(self, timeout_s: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Take nothing new, finish what is here, see every contribution committed, `unless` that has become pointless.

        Returns: whether that came about.
        """
        self._draining = True
        self.is_open = False
        self.group.handle(OpenSet(False))
        self._s.on_change()
        until_s = self._s.clock.now_s() + timeout_s
        while not self._work.is_idle or self.group.core.owes or self._is_needed:
            if unless() or not self._draining:
                return False
            if self._s.clock.now_s() >= until_s:
                logger.warning("left work behind: group %d did not drain in %.0f s", self.group_id, timeout_s)
                return False
            await asyncio.sleep(0.05)
        if not self._draining:
            return False
        self.group.handle(ReadySet(False))
        self._s.on_change()
        return True

    def stay(self, plan: Plan) -> None:
        """A plan has given us our place back before we had drained."""
        self._draining = False
        self.follow(plan)

    def retire(self) -> None:
        """We take part in nothing any more, whatever still arrives."""
        self.is_open = False
        self._closed = True
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
            await self.joining.run(self._plan)
        except (OSError, RuntimeError, ValueError) as error:
            self._s.on_failure(error)
            return
        logger.info("group %d is ready at version %d", self.group_id, self.version)
        self.group.handle(ReadySet(True))
        self._open_if_fit()
        self._s.on_change()
        self._wake()

    async def _take_over(self, state: StageState) -> None:
        self._work.load(state)
        digest = (await self._s.compute.run("step", state.digest, flop=0.0)).value
        if self.version == state.version:
            self.group.stepped(state.version, digest)
            self._s.on_state(self, state)
            self._reached(state.version)

    def _reached(self, version: int) -> None:  # noqa: B027  # a kind of tenure may do nothing then
        """We are at `version`, by a step or because we have taken over a state."""

    def _open_if_fit(self) -> None:
        """Take traffic. A newcomer to a synchronous run waits for its first step of its own: until then it could not
        repeat exactly what others may have to run again. Unless nobody else is there to take it.
        """
        if self.is_open or self._draining or self.is_paused or not self.is_ready:
            return
        at_the_beginning = self.version == self._plan.restore_version
        if self._work.runtime.remembers or at_the_beginning or not self.group.core.open_mates:
            self.is_open = True
            self.group.handle(OpenSet(True))
            self._s.on_change()

    def _resync(self, mate: PeerID) -> None:
        if self.is_ready and not self._draining:
            self._s.on_resync(self)

    # --- told by the work and the group ---

    def wants(self, microbatch: Microbatch) -> bool:
        return self.group.core.lacks(microbatch.step, microbatch.index)

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, again: bool) -> None:
        # What comes while a round stands must not outgrow it.
        apart = again or self.group.core.has_round(microbatch.step)
        apart = self._work.runtime.contribute(microbatch, apart=apart)
        more_follows = self._more_follows(microbatch.step)
        self.group.handle(GradientCounted(microbatch, loss, staleness_steps, apart, more_follows))

    def stepped(self, state: StageState, digest: str, skipped_layers: int) -> None:
        if skipped_layers:
            logger.error("step %d: %d layers had a gradient that is not finite", state.version, skipped_layers)
        self.group.stepped(state.version, digest, gradient_norm=state.gradient_norm)
        self.witnesses.look(state)
        self.joining.stepped()
        self._reached(state.version)
        self._s.on_state(self, state)
        self._open_if_fit()

    def unreachable(self, peer: PeerID) -> None:
        self._s.on_unreachable(peer)

    def failed(self, error: BaseException) -> None:
        self._s.on_failure(error)

    # --- inside ---

    def _repair(self, step: int, indices: bytes) -> None:
        """What our group's lead misses, stage 0's lead hands out again."""
        self._tasks.spawn(self._ask_repair(Repair(step=step, indices=indices)), f"repair step {step}")

    async def _ask_repair(self, message: Repair) -> None:
        for _ in range(_REPAIR_TRIES):
            for peer in self._plan.stages[0].peers:
                try:
                    await self._s.endpoint.ask(peer, message, Done)
                except (Unreachable, Refused, RemoteError) as error:
                    logger.debug("no repair: %s", error)
                else:
                    return
            await asyncio.sleep(_RETRY_S)

    def _mate_progress(self, source: PeerID, message: Progress) -> None:  # noqa: B027  # a kind of tenure may do nothing then
        """A mate has said what it has."""
