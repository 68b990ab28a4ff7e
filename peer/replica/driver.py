"""The driver of one replica: it owns the core, and has each command carried out on the device or on the wire."""

from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.pipeline.driver import PipelineDriver
from shoal.peer.replica.commands import (
    Answer,
    Command,
    Count,
    DropClaim,
    Forget,
    HandBack,
    HandOut,
    ReportValidation,
    SendActivation,
    SendClaim,
    SendGradient,
    TellValidation,
)
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.job import Job
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.supply import Supply
from shoal.peer.replica.supply_calls import SupplyCalls
from shoal.peer.replica.work_queue import WorkQueue
from shoal.peer.surroundings import Surroundings
from shoal.peer.tenures import Tenure, make_commit
from shoal.protocol.errors import DataError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Hello
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec


class Replica(Tenure):
    """Our part of `plan`, as a member of stage `stage`."""

    core: ReplicaCore

    def __init__(self, surroundings: Surroundings, plan: Plan, stage: int, *, incarnation: int) -> None:
        self.stage = stage
        self.layers = plan.stages[stage].layers
        if stage == 0 and not surroundings.arithmetic.has_text:
            raise DataError("the plan puts this peer at stage 0, but it does not have the run's text")
        self.experts_placed = bool(plan.experts)
        arithmetic = surroundings.arithmetic
        core = replica_core(surroundings, plan, stage, incarnation=incarnation)
        self.pipeline = PipelineDriver(
            core,
            arithmetic.trunk(*self.layers) if plan.experts else arithmetic.runtime(*self.layers),
            endpoint=surroundings.endpoint,
            compute=surroundings.compute,
            clock=surroundings.clock,
            post=self.handle,
            on_stepped=self.stepped,
            on_unreachable=surroundings.listeners.on_unreachable,
            on_failure=surroundings.listeners.on_failure,
            experts=ExpertDispatch(surroundings, plan, stage, incarnation=incarnation) if plan.experts else None,
        )
        super().__init__(surroundings, core, self.pipeline, incarnation=incarnation)
        self.supply = self._supply_calls() if stage == 0 else None

    def _supply_calls(self) -> SupplyCalls:
        return SupplyCalls(
            endpoint=self._s.endpoint,
            post=self.handle,
            on_validation=self._s.listeners.on_validation,
            on_failure=self._s.listeners.on_failure,
        )

    def _perform(self, command: Command) -> None:
        match command:
            case Job() | SendActivation() | SendGradient() | HandBack() | Forget():
                self.pipeline.perform(command)
            case Count(counted, again):
                if self.pipeline.settle(counted.microbatch, again=again):
                    super()._perform(command)
            case Answer() | SendClaim() | DropClaim() | HandOut() | TellValidation() | ReportValidation():
                assert self.supply is not None, "only stage 0 supplies"
                self.supply.perform(command)
            case _:
                super()._perform(command)

    def _near(self) -> list[tuple[PeerID, ...]]:
        plan = self.core.plan
        stages = plan.stages
        holders = [entry.peers for entry in plan.experts if entry.stage == self.stage]
        return [
            *(stages[i].peers for i in (self.stage - 1, self.stage, self.stage + 1) if 0 <= i < len(stages)),
            *holders,
        ]

    def _upstream(self) -> frozenset[PeerID]:
        return self._s.recent.ending_at(self.layers[0])

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
        if self.pipeline.experts:
            self.pipeline.experts.follow(plan)
        super().follow(plan)

    def depart(self, plan: Plan) -> None:
        """A plan without us in this place, while we drain: whoever leads now must be able to close our last rounds, and
        whoever holds the next stage to take what we still have to send there."""
        if self.stage < len(plan.stages):
            self.follow(plan)

    def peer_state(self, peer: PeerID, hello: Hello) -> None:
        self.experts_at(peer, hello)
        super().peer_state(peer, hello)

    def experts_at(self, peer: PeerID, hello: Hello) -> None:
        """What a peer, maybe we ourselves, holds of our layers' experts."""
        if self.pipeline.experts:
            self.pipeline.experts.heard(peer, hello)

    def peer_silent(self, peer: PeerID) -> None:
        if self.pipeline.experts:
            self.pipeline.experts.lost(peer)
        super().peer_silent(peer)

    def peer_died(self, peer: PeerID) -> None:
        if self.pipeline.experts:
            self.pipeline.experts.lost(peer)
        super().peer_died(peer)

    async def close(self) -> None:
        self.retire()
        if self.supply:
            await self.supply.close()
        await super().close()


def replica_core(surroundings: Surroundings, plan: Plan, stage: int, *, incarnation: int) -> ReplicaCore:
    """All that decides in a replica of `stage`."""
    spec, traffic = surroundings.spec, surroundings.traffic
    pipeline = Schedule(
        stage=stage,
        num_stages=len(plan.stages),
        s_max=spec.training.s_max,
        synchronous_steps=spec.synchronous_steps,
        version=0,
        router=traffic.router(),
        window=traffic.window(len(plan.stages)) if stage == 0 else None,
        control=traffic.control(spec) if stage == 0 else None,
    )
    group = make_commit(surroundings, stage, incarnation=incarnation, has_loss=pipeline.is_last)
    supply = Supply(book=work_queue_of(spec), group=group, demand=pipeline) if stage == 0 else None
    return ReplicaCore(group, pipeline, supply, plan)


def work_queue_of(spec: RunSpec) -> WorkQueue:
    """Of a whole run."""
    training = spec.training
    return WorkQueue(
        steps=training.steps,
        microbatches=training.microbatches_per_step,
        s_max=training.s_max,
        synchronous_steps=spec.synchronous_steps,
        validation_interval=training.validation_interval_steps,
        validation_microbatches=training.validation_microbatches,
    )
