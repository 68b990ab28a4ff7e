"""One tenure in one stage: the pipeline, the group, the supply of microbatches and the state, wired together.

A replica is born with a plan that names its peer, becomes *ready* when it holds its stage's state, is *open* while it
takes traffic, and retires by draining. Who else is ready and open it learns from their Hellos.
"""

import asyncio
import logging
from collections.abc import Callable

from shoal.peer.group.claims import Claims
from shoal.peer.group.core import GroupCore
from shoal.peer.group.driver import GroupDriver
from shoal.peer.joining import Joining
from shoal.peer.pipeline.core import PipelineCore
from shoal.peer.pipeline.driver import PipelineDriver
from shoal.peer.pipeline.issue import IssueBook
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.pipeline.state import StageState
from shoal.peer.surroundings import Surroundings
from shoal.peer.tasks import Tasks
from shoal.protocol.errors import DataError, Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, Hello, Progress, Repair
from shoal.protocol.plan import Plan

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_REPAIR_TRIES = 10


class Replica:
    """Our part of `plan`, as a member of stage `stage`."""

    def __init__(self, surroundings: Surroundings, plan: Plan, stage: int, *, incarnation: int) -> None:
        self._s = surroundings
        spec, me = surroundings.spec, surroundings.endpoint.peer_id
        self.stage = stage
        self.layers = (plan.stages[stage].first_layer, plan.stages[stage].last_layer)
        self.is_open = False
        self._plan = plan
        self.is_paused = self._draining = self._closed = False
        first = stage == 0
        if first and not surroundings.arithmetic.has_text:
            raise DataError("the plan puts this peer at stage 0, but it does not have the run's text")
        runtime = surroundings.arithmetic.runtime(*self.layers)
        core = PipelineCore(
            stage=stage,
            num_stages=len(plan.stages),
            s_max=spec.training.s_max,
            version=0,
            router=surroundings.traffic.router(),
            window=surroundings.traffic.window(len(plan.stages)) if first else None,
            control=surroundings.traffic.control(spec.training) if first else None,
        )
        self.pipeline = PipelineDriver(
            core,
            runtime,
            endpoint=surroundings.endpoint,
            compute=surroundings.compute,
            clock=surroundings.clock,
            upwards=self,
        )
        group = GroupCore(
            me=me,
            stage=stage,
            steps=spec.training.steps,
            microbatches=spec.training.microbatches_per_step,
            tokens_per_microbatch=spec.training.microbatch_size * spec.model.context,
            has_loss=core.is_last,
            incarnation=incarnation,
            deadline_s=spec.training.commit_deadline_s,
            quorum=spec.training.commit_quorum,
        )
        self.group = GroupDriver(
            group,
            self.pipeline,
            endpoint=surroundings.endpoint,
            clock=surroundings.clock,
            on_report=surroundings.on_commit,
            on_witness=surroundings.on_witness,
            on_resync=self._resync,
            on_progress=self._mate_progress,
            on_repair=self._repair,
            on_unreachable=surroundings.on_unreachable,
            retained_from=surroundings.server.pinned_from,
        )
        self.claims = self._make_claims(group) if first else None
        self.joining = Joining(
            endpoint=surroundings.endpoint,
            compute=surroundings.compute,
            inbox=surroundings.inbox,
            runtime=runtime,
            group=self.group,
            take_over=self._take_over,
            begin_era=surroundings.begin_era,
        )
        self._tasks = Tasks(surroundings.on_failure)
        self._sync_task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.group.core.ready and not self._closed

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def version(self) -> int:
        return self.pipeline.core.version

    @property
    def state(self) -> StageState | None:
        return self.pipeline.runtime.state

    @property
    def audience(self) -> list[PeerID]:
        """Who wants to know whether we are ready: mates and both neighbouring stages.

        Also mates of a plan that has no place for us any more: they may wait for the word of one who drains.
        """
        stages, core = self._plan.stages, self.group.core
        near = [stages[i].peers for i in (self.stage - 1, self.stage, self.stage + 1) if 0 <= i < len(stages)]
        peers = dict.fromkeys(peer for peers in (*near, core.mates, core.departing) for peer in peers)
        return [peer for peer in peers if peer != self._s.endpoint.peer_id]

    # --- life ---

    def start(self) -> None:
        for part in (self.pipeline, self.group, self.claims):
            if part is not None:
                part.install()
        self.group.set_open(False)
        self.follow(self._plan)
        self._sync_task = asyncio.create_task(self._join(), name=f"join stage {self.stage}")
        if self.claims:
            self.claims.start()

    def follow(self, plan: Plan) -> None:
        """A plan in which our stage and its layers are as before."""
        self._plan = plan
        members = plan.stages[self.stage].members
        if not self.pipeline.core.is_last:
            self.pipeline.core.router.set_shares({m.peer: m.share for m in plan.stages[self.stage + 1].members})
        self.group.plan_changed(members, plan.sequence)
        self._open_if_fit()
        self.pipeline.refresh()
        if self.claims:
            self.claims.wake()

    def depart(self, plan: Plan) -> None:
        """A plan without us in this place, while we drain: whoever leads now must be able to close our last rounds, and
        whoever holds the next stage to take what we still have to send there."""
        if self.stage < len(plan.stages):
            self.follow(plan)

    def peer_state(self, peer: PeerID, hello: Hello) -> None:
        """What a peer says of itself."""
        if hello.stage == self.stage:
            self.group.mate_ready(
                peer, hello.ready, hello.is_open, drains=hello.draining, incarnation=hello.incarnation
            )
        elif peer in (*self.group.core.mates, *self.group.core.departing):
            self.group.mate_elsewhere(peer, incarnation=hello.incarnation)
        stages = self._plan.stages
        if not self.pipeline.core.is_last and peer in stages[self.stage + 1].peers:
            if hello.stage == self.stage + 1 and hello.is_open:
                self.pipeline.peer_ready(peer)
            elif hello.stage in (self.stage - 1, self.stage + 1):
                # It will still answer what it owes there; or it comes from before us, and still waits for what we owe.
                self.pipeline.core.router.set_ready(peer, False)
            else:
                self.pipeline.peer_lost(peer)
        self._open_if_fit()
        if self.claims:
            self.claims.wake()

    def peer_died(self, peer: PeerID) -> None:
        """The plan has dropped it, and it had not said that it would go."""
        if peer in (*self.group.core.mates, *self.group.core.departing):
            self.group.mate_lost(peer)
        self.peer_reborn(peer)

    def peer_reborn(self, peer: PeerID) -> None:
        """It has begun anew, which its mates may have heard from its Progress before."""
        self.pipeline.peer_lost(peer)
        self._open_if_fit()
        if self.claims:
            self.claims.mate_lost(peer)
            self.claims.wake()

    def peer_silent(self, peer: PeerID) -> None:
        """It does not answer; the network or it may be to blame, and it may come back."""
        if peer in (*self.group.core.mates, *self.group.core.departing):
            self.group.mate_silent(peer)
        if self.claims:
            self.claims.wake()

    def pause(self, *, at_once: bool) -> None:
        """Take nothing new and hand on what is here, but stay: what we have contributed is reduced with our mates'.

        Args: at_once: no backward begins either; else those whose gradients come back do.
        """
        self.is_paused = True
        self.is_open = False
        if self.claims:
            self.claims.drain()
        self.group.set_open(False)
        self._s.on_change()
        self.pipeline.pause(at_once=at_once)

    def resume(self) -> None:
        self.is_paused = False
        self.pipeline.resume()
        if self.claims and not self._draining:
            self.claims.drain(False)
        self._open_if_fit()

    async def drain(self, timeout_s: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Take nothing new, finish what is here, see every contribution committed, `unless` that has become pointless.

        Returns: whether that came about.
        """
        self._draining = True
        self.is_open = False
        if self.claims:
            self.claims.drain()
        self.group.set_open(False)
        self._s.on_change()
        until_s = self._s.clock.now_s() + timeout_s
        while not self.pipeline.core.is_idle or self.group.core.owes:
            if unless():
                return False
            if self._s.clock.now_s() >= until_s:
                logger.warning("left work behind: stage %d did not drain in %.0f s", self.stage, timeout_s)
                return False
            await asyncio.sleep(0.05)
        self.group.set_ready(False)
        self._s.on_change()
        return True

    async def close(self) -> None:
        self.is_open = False
        self._closed = True
        self.group.retire()
        if self._sync_task:
            self._sync_task.cancel()
            await asyncio.gather(self._sync_task, return_exceptions=True)
        if self.claims:
            await self.claims.close()
        await self._tasks.cancel()
        await self.group.close()
        await self.pipeline.close()

    # --- state ---

    async def _join(self) -> None:
        try:
            await self.joining.run(self._plan)
        except (OSError, RuntimeError, ValueError) as error:
            self._s.on_failure(error)
            return
        self._become_ready()

    async def _take_over(self, state: StageState) -> None:
        self.pipeline.load(state)
        digest = (await self._s.compute.run("step", state.digest, flop=0.0)).value
        if self.version == state.version:
            self.group.stepped(state.version, digest)
            self._s.on_state(self, state)
            if self.claims:
                self.claims.reach(state.version)

    def _become_ready(self) -> None:
        logger.info("stage %d is ready at version %d", self.stage, self.version)
        self.group.set_ready(True)
        self._open_if_fit()
        self._s.on_change()
        if self.claims:
            self.claims.wake()

    def _open_if_fit(self) -> None:
        """Take traffic. A newcomer to a synchronous run waits for its first step of its own: until then it could not
        repeat exactly what others may have to run again. Unless nobody else is there to take it.
        """
        runtime = self.pipeline.runtime
        if self.is_open or self._draining or self.is_paused or not self.is_ready:
            return
        at_the_beginning = self.version == self._plan.restore_version
        if runtime.remembers or at_the_beginning or not self.group.core.open_mates:
            self.is_open = True
            self.group.set_open(True)
            self._s.on_change()

    def _resync(self, mate: PeerID) -> None:
        if self.is_ready and not self._draining:
            self._s.on_resync()

    # --- told by the pipeline and the group ---

    def wants(self, microbatch: Microbatch) -> bool:
        return self.group.core.lacks(microbatch.step, microbatch.index)

    @property
    def lead(self) -> PeerID | None:
        return self.group.core.lead

    def handed_back(self, microbatch: Microbatch, *, begun: bool) -> None:
        if self.claims is None:
            raise Refused(self._s.endpoint.peer_id, "does not lead stage 0")
        self.claims.handed_back(microbatch, begun=begun)

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, again: bool) -> None:
        # What comes while a round stands must not outgrow it.
        apart = again or self.group.core.has_round(microbatch.step)
        self.group.contributed(
            microbatch.step,
            microbatch.index,
            loss=loss,
            staleness_steps=staleness_steps,
            apart=self.pipeline.runtime.contribute(microbatch, apart=apart),
        )
        if self.claims:
            self.claims.made(microbatch)

    def finished(self, microbatch: Microbatch, *, loss: float) -> None:
        assert self.claims is not None
        if microbatch.validates:
            self.claims.validated(microbatch, loss)
        self.claims.wake()

    def stepped(self, state: StageState, digest: str, skipped_layers: int) -> None:
        if skipped_layers:
            logger.error("step %d: %d layers had a gradient that is not finite", state.version, skipped_layers)
        self.group.stepped(state.version, digest)
        self.joining.stepped()
        if self.claims:
            self.claims.reach(state.version)
        self._s.on_state(self, state)
        self._open_if_fit()

    def unreachable(self, peer: PeerID) -> None:
        self._s.on_unreachable(peer)

    def failed(self, error: BaseException) -> None:
        self._s.on_failure(error)

    # --- inside ---

    def _make_claims(self, group: GroupCore) -> Claims:
        training = self._s.spec.training
        book = IssueBook(
            steps=training.steps,
            microbatches=training.microbatches_per_step,
            s_max=training.s_max,
            validation_interval=training.validation_interval_steps,
            validation_microbatches=training.validation_microbatches,
        )
        return Claims(
            book,
            group,
            self.pipeline.core,
            endpoint=self._s.endpoint,
            clock=self._s.clock,
            on_grant=self._granted,
            on_validation=self._s.on_validation,
        )

    def _granted(self, microbatch: Microbatch, again: bool) -> None:
        if not microbatch.validates and microbatch.step >= self.version:
            self.group.claimed(microbatch.step, microbatch.index)
        self.pipeline.grant(microbatch, again=again)

    def _repair(self, step: int, indices: bytes) -> None:
        """What our group's lead misses, stage 0's lead hands out again."""
        if self.claims:
            self.claims.repair(step, IndexSet.from_bytes(indices, count=self.claims.book.microbatches))
        else:
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

    def _mate_progress(self, source: PeerID, message: Progress) -> None:
        if self.claims:
            self.claims.mate_progress(source, message)
