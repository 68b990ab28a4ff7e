"""One tenure in one stage: the pipeline, the group, the supply of microbatches and the state, wired together."""

from collections.abc import Callable

from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.pipeline.core import PipelineCore
from shoal.peer.pipeline.driver import PipelineDriver
from shoal.peer.pipeline.issue import IssueBook
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.replica.events import (
    Changed,
    LossReported,
    Made,
    MemberElsewhere,
    MemberLost,
    MemberSaid,
    MemberState,
    PlanFollowed,
    SupplyResumed,
    SupplyStopped,
    Validated,
    VersionReached,
    WorkGranted,
    WorkReturned,
)
from shoal.peer.replica.supply import Supply
from shoal.peer.replica.supply_calls import SupplyCalls
from shoal.peer.surroundings import Surroundings
from shoal.peer.tenures import Tenure
from shoal.protocol.errors import DataError, Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Hello, Progress
from shoal.protocol.plan import Member, Plan


class Replica(Tenure):
    """Our part of `plan`, as a member of stage `stage`."""

    def __init__(self, surroundings: Surroundings, plan: Plan, stage: int, *, incarnation: int) -> None:
        spec = surroundings.spec
        self.stage = stage
        self.layers = plan.stages[stage].layers
        first = stage == 0
        if first and not surroundings.arithmetic.has_text:
            raise DataError("the plan puts this peer at stage 0, but it does not have the run's text")
        self.experts_placed = bool(plan.experts)
        runtime = surroundings.arithmetic.runtime(*self.layers, placed=self.experts_placed)
        experts = ExpertDispatch(surroundings, plan, stage, incarnation=incarnation) if plan.experts else None
        core = PipelineCore(
            stage=stage,
            num_stages=len(plan.stages),
            s_max=spec.training.s_max,
            synchronous_steps=spec.synchronous_steps,
            version=0,
            router=surroundings.traffic.router(),
            window=surroundings.traffic.window(len(plan.stages)) if first else None,
            control=surroundings.traffic.control(spec) if first else None,
        )
        self.pipeline = PipelineDriver(
            core,
            runtime,
            endpoint=surroundings.endpoint,
            compute=surroundings.compute,
            clock=surroundings.clock,
            upwards=self,
            experts=experts,
        )
        super().__init__(surroundings, plan, stage, self.pipeline, incarnation=incarnation, has_loss=core.is_last)
        self._draining_upstream: set[PeerID] = set()
        self.supply = self._make_supply() if first else None

    def _members(self, plan: Plan) -> tuple[Member, ...]:
        return plan.stages[self.stage].members

    def _near(self) -> list[tuple[PeerID, ...]]:
        stages = self._plan.stages
        holders = [entry.peers for entry in self._plan.experts if entry.stage == self.stage]
        return [
            *(stages[i].peers for i in (self.stage - 1, self.stage, self.stage + 1) if 0 <= i < len(stages)),
            *holders,
        ]

    def _more_follows(self, step: int) -> bool:
        # Stage 0's lead sees from these words how fast each member is, and must not see when it was told instead.
        return self.supply is None and self.pipeline.core.has_more(step)

    def _wake(self) -> None:
        if self.supply:
            self.supply.handle(Changed())

    @property
    def expert_loads(self) -> tuple[int, ...]:
        """As a heartbeat tells them; none if the experts are not placed."""
        loads = self.pipeline.runtime.expert_loads.totals() if self.experts_placed else {}
        return tuple(sum(counts) for counts in zip(*loads.values(), strict=True))

    # --- life ---

    def start(self) -> None:
        if self.supply:
            self.supply.install()
        super().start()

    def follow(self, plan: Plan) -> None:
        if not self.pipeline.core.is_last:
            self.pipeline.core.router.set_shares({m.peer: m.share for m in plan.stages[self.stage + 1].members})
        self._set_upstream(plan)
        if self.pipeline.experts:
            self.pipeline.experts.follow(plan)
        if self.supply:
            self.supply.handle(PlanFollowed(plan))
        super().follow(plan)
        self.pipeline.refresh()

    def depart(self, plan: Plan) -> None:
        """A plan without us in this place, while we drain: whoever leads now must be able to close our last rounds, and
        whoever holds the next stage to take what we still have to send there."""
        if self.stage < len(plan.stages):
            self.follow(plan)

    def peer_state(self, peer: PeerID, hello: Hello) -> None:
        """What a peer says of itself."""
        self.experts_at(peer, hello)
        if hello.stage == self.stage:
            has_moved = self._plan.has(peer)
            self.group.handle(
                MemberState(peer, hello.ready, hello.is_open, hello.incarnation, hello.draining, has_moved)
            )
        else:
            self.group.handle(MemberElsewhere(peer, hello.incarnation))
        stages = self._plan.stages
        if not self.pipeline.core.is_last and peer in stages[self.stage + 1].peers:
            if hello.stage == self.stage + 1 and hello.is_open:
                self.pipeline.peer_ready(peer)
            elif hello.stage in (self.stage - 1, self.stage + 1):
                # It will still answer what it owes there; or it comes from before us, and still waits for what we owe.
                self.pipeline.core.router.set_ready(peer, False)
            else:
                self.pipeline.peer_lost(peer)
        if hello.stage == self.stage - 1 and hello.draining:
            self._draining_upstream.add(peer)
            self._set_upstream(self._plan)
        elif peer in self._draining_upstream:
            self._draining_upstream.remove(peer)
            self._set_upstream(self._plan)
        self._open_if_fit()
        self._wake()

    def _set_upstream(self, plan: Plan) -> None:
        """Whose activations we take: who has a place in the stage before by a plan of late; and members of this plan
        that drain from there, though we came after the plan that had them there."""
        self._draining_upstream = {peer for peer in self._draining_upstream if plan.has(peer)}
        self.pipeline.core.upstream = self._s.recent.ending_at(self.layers[0]) | self._draining_upstream

    def experts_at(self, peer: PeerID, hello: Hello) -> None:
        """What a peer, maybe we ourselves, holds of our layers' experts."""
        if self.pipeline.experts:
            self.pipeline.experts.heard(peer, hello)

    def peer_silent(self, peer: PeerID) -> None:
        if self.pipeline.experts:
            self.pipeline.experts.lost(peer)
        super().peer_silent(peer)

    def peer_died(self, peer: PeerID) -> None:
        """The plan has dropped it, and it had not said that it would go."""
        if self.pipeline.experts:
            self.pipeline.experts.lost(peer)
        self.mate_died(peer)
        self.peer_reborn(peer)

    def peer_reborn(self, peer: PeerID) -> None:
        """It has begun anew, which its mates may have heard from its Progress before."""
        self.pipeline.peer_lost(peer)
        self._open_if_fit()
        if self.supply:
            self.supply.handle(MemberLost(peer))
        self._wake()

    def pause(self, *, at_once: bool) -> None:
        """Args: at_once: no backward begins either; else those whose gradients come back do."""
        if self.supply:
            self.supply.handle(SupplyStopped())
        super().pause(at_once=at_once)
        self.pipeline.pause(at_once=at_once)

    def resume(self) -> None:
        self.is_paused = False
        self.pipeline.resume()
        if self.supply and not self._draining:
            self.supply.handle(SupplyResumed())
        super().resume()

    async def drain(self, timeout_s: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
        if self.supply:
            self.supply.handle(SupplyStopped())
        return await super().drain(timeout_s, unless=unless)

    def stay(self, plan: Plan) -> None:
        if self.supply and not self.is_paused:
            self.supply.handle(SupplyResumed())
        super().stay(plan)

    async def close(self) -> None:
        self.retire()
        if self.supply:
            await self.supply.close()
        await super().close()

    # --- told by the pipeline and the group ---

    @property
    def lead(self) -> PeerID | None:
        return self.group.core.lead

    def handed_back(self, source: PeerID, microbatch: Microbatch, *, begun: bool) -> None:
        if self.supply is None:
            raise Refused(self._s.endpoint.peer_id, "does not lead the sender's stage")
        self.supply.handle(WorkReturned(source, microbatch, begun))

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, again: bool) -> None:
        super().contributed(microbatch, loss=loss, staleness_steps=staleness_steps, again=again)
        if self.supply:
            self.supply.handle(Made(microbatch))

    def finished(self, microbatch: Microbatch, *, loss: float) -> None:
        assert self.supply is not None
        if microbatch.validates:
            self.supply.handle(Validated(microbatch, loss))
        self.supply.handle(Changed())

    def _reached(self, version: int) -> None:
        if self.supply:
            self.supply.handle(VersionReached(version))

    # --- inside ---

    def _make_supply(self) -> SupplyCalls:
        spec = self._s.spec
        training = spec.training
        book = IssueBook(
            steps=training.steps,
            microbatches=training.microbatches_per_step,
            s_max=training.s_max,
            synchronous_steps=spec.synchronous_steps,
            validation_interval=training.validation_interval_steps,
            validation_microbatches=training.validation_microbatches,
        )
        group, pipeline = self.group.core, self.pipeline.core
        return SupplyCalls(
            Supply(book=book, group=group, demand=pipeline),
            endpoint=self._s.endpoint,
            clock=self._s.clock,
            on_make=self._make,
            on_granted=self.group.handle,
            on_run_ahead=pipeline.run_ahead,
            on_validation=self._s.on_validation,
            on_failure=self._s.on_failure,
        )

    def _make(self, microbatch: Microbatch, again: bool) -> None:
        if not microbatch.validates and microbatch.step >= self.version:
            self.group.handle(WorkGranted(microbatch.step, microbatch.index))
        self.pipeline.grant(microbatch, again=again)

    def _repair(self, step: int, indices: bytes) -> None:
        """What our group's lead misses, stage 0's lead hands out again."""
        if self.supply:
            self.supply.handle(LossReported(step, IndexSet.from_bytes(indices, count=self.group.core.microbatches)))
        else:
            super()._repair(step, indices)

    def _mate_progress(self, source: PeerID, message: Progress) -> None:
        if self.supply:
            self.supply.handle(MemberSaid(source, message.step, message.indices, message.claimed))
