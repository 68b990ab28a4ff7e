"""The driver of one replica of a stage: it receives microbatches, has the device compute, and sends the results on.

A microbatch goes through this file as follows; each arrow is a decision of the core (`schedule.py`):

    forward   _on_activation -> _run (forward) -> _send_activation     stage 0 begins with `_run`; at the last stage
    backward  _on_gradient -> _run (backward) -> _send_gradient        one `_run` does forward and backward

`peer/membership/group_membership.py` turns the gradients into a step; `pipeline/stage.py` computes. If experts are on
other peers, `_run` sends tokens to these peers at each layer (`peer/experts/dispatch.py`).
"""

import asyncio
import functools
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from torch import Tensor

from shoal.peer.base.shortage import is_out_of_memory
from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.membership.activation_store import ActivationStore
from shoal.peer.membership.group_membership import GroupMembership, Renew, make_commit
from shoal.peer.membership.handing_back import HandingBack
from shoal.peer.membership.learner import Learner
from shoal.peer.model.state import RoundedWeights, StageState
from shoal.peer.pipeline.expert_call import JobInParts
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.queueing import LinkQueues
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.replica import commands, events
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.forward_times import ForwardTimes
from shoal.peer.replica.job import Job, TimelineEntry
from shoal.peer.replica.microbatch_queue import MicrobatchQueue
from shoal.peer.replica.schedule import Schedule
from shoal.peer.replica.work_queue import WorkQueue
from shoal.peer.services.services import Services
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import QUEUED_MICROBATCHES_MAX
from shoal.protocol.messages import Activation, Gradient, PresenceUpdate
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.tensors import BACKWARD_PER_FORWARD

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRADIENT_RETRIES_S: Final = (0.5, 1.0, 2.0, 4.0)
"""Seconds between the tries to send a gradient. A broken stream often comes back, and until the gradient arrives, the
microbatch counts as in flight at stage 0, which limits the number in flight."""


class Replica(GroupMembership):
    """The driver of our replica of stage `stage` under `plan`. `first_stage.py` extends it for stage 0."""

    core: ReplicaCore

    def __init__(self, services: Services, renew: Renew, plan: Plan, stage: int, *, incarnation: int) -> None:
        self.stage = stage
        self.layers = plan.stages[stage].layers
        self.experts_placed = bool(plan.experts)
        arithmetic = services.arithmetic
        self.runtime = arithmetic.trunk(*self.layers) if plan.experts else arithmetic.runtime(*self.layers)
        core = replica_core(services, plan, stage, incarnation=incarnation)
        super().__init__(services, renew, core, self.runtime, incarnation=incarnation)
        self.experts = ExpertDispatch(services, plan, stage, incarnation=incarnation) if plan.experts else None
        self.timeline: deque[TimelineEntry] = deque(maxlen=4096)
        self._forward_times = ForwardTimes()
        self.activations = ActivationStore(
            self.runtime, core.group, is_last=core.pipeline.is_last, experts=self.experts
        )
        self._wire = ActivationWire(services.spec)
        self._widest = services.spec.wire.forward[0]
        self._travel(plan)
        self._activation_queues, self._gradient_queues = LinkQueues(), LinkQueues()
        self._mean_gradient_N: Tensor | None = None
        self._handing_back = HandingBack(services, core, self._tasks, post=self.handle, check=self._check)

    def _perform(self, command: commands.Command) -> events.Event | None:
        match command:
            case Job():
                self._tasks.spawn(self._run(command), f"job {command}")
            case commands.SendActivation(microbatch, target, retried):
                self._tasks.spawn(self._send_activation(microbatch, target, retried), f"activation {microbatch}")
            case commands.SendGradient(microbatch, target):
                self._tasks.spawn(self._send_gradient(*self._gradient(command)), f"gradient {microbatch} to {target}")
            case commands.RejectMicrobatch():
                self._handing_back.soon(command)
            case commands.Forget(microbatch):
                self.activations.forget(microbatch)
            case commands.Count(counted, retried) if not self.activations.settle(counted.microbatch, retried=retried):
                pass  # the group has its gradient already
            case _:
                return super()._perform(command)
        return None

    # --- receive, forward, send; receive, backward, send ---

    async def _on_activation(self, source: PeerID, meta: Activation, payload: Payload) -> None:
        pipeline, microbatch = self.core.pipeline, Microbatch(meta.step, meta.index)
        if not pipeline.takes_from(source):
            logger.debug("an activation of %s, which is not of the stage before", source[-8:])
            return
        if self.state is None and not self.runtime.is_stepping and not self.runtime.is_learner:
            logger.debug("an activation of %s before there are weights, though we are not ready", source[-8:])
            return
        if not self.is_ready:
            # We have drained and the group no longer counts us: our gradient would be in no sum. The sender gives the
            # microbatch to another replica as soon as it hears of our drain.
            logger.debug("an activation of %s after we have drained", source[-8:])
            return
        self._check(source, microbatch)
        self._wire.check_activation(payload, source)
        if meta.stage != self.stage or pipeline.is_first:
            logger.debug("an activation for stage %d came to stage %d", meta.stage, self.stage)
            return
        if not pipeline.holds(microbatch):
            if pipeline.num_waiting >= QUEUED_MICROBATCHES_MAX:
                raise RemoteError(source, f"has more than {QUEUED_MICROBATCHES_MAX} microbatches waiting here")
            self.activations.of(microbatch).input = payload
        self.handle(events.Arrived(microbatch, source, meta.retried, meta.incarnation))

    async def _run(self, job: Job) -> None:
        microbatch = job.microbatch
        if microbatch is None:
            state, digest, skipped = await self._made_step(job, self._optimizer_step())
            self.handle(events.JobDone(job))
            self.stepped(state, digest, skipped)
            return
        work, flop = self.activations.job(job, microbatch)
        if self.experts is None:
            try:
                value = await self._with_room(job, work, flop)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._run_short()
                self._forward_times.dropped(job)
                self.handle(events.JobFailed(job))
                return
            self._forward_times.ended(job)
            self.handle(events.JobDone(job, self.activations.keep(job, microbatch, value)))
        else:
            await self._run_with_experts(self.experts, job, microbatch, JobInParts(work()), flop)

    async def _run_with_experts(
        self, experts: ExpertDispatch, job: Job, microbatch: Microbatch, parts: JobInParts[Any], first_flop: float
    ) -> None:
        """Run a job that needs experts on other peers. While the job waits for answers, the device does other jobs."""
        call = await self._on_device(job, parts.go_on, first_flop)
        passage = self.activations.passage(experts, job, microbatch)
        if call is not None:
            self.handle(events.JobParked(job))
        while call is not None:
            output = await experts.exchange(passage, call)
            if not self.core.pipeline.goes_on(job):
                self._forward_times.dropped(job)
                self.handle(events.JobDropped(job))
                return
            part_flop = self.runtime.flop.forward * (BACKWARD_PER_FORWARD if call.backward else 1.0)
            call = await self._on_device(job, functools.partial(parts.go_on, output), part_flop)
        self._forward_times.ended(job)
        self.handle(events.JobDone(job, self.activations.keep(job, microbatch, parts.value)))

    async def _with_room(self, job: Job, work: Callable[[], T], flop: float) -> T:
        """Run a job; if it runs out of memory, free caches and run it once more."""
        try:
            return await self._on_device(job, work, flop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no memory for %s: freeing caches, and trying once more", job)
            self._s.shortages.free()

        def again() -> T:
            self.runtime.make_room()
            return work()

        return await self._on_device(job, again, flop)

    async def _made_step(self, job: Job, work: Callable[[], T]) -> T:
        """Make the optimizer step; retry until there is memory for it. No other peer can make this step for us, and a
        failed try changes nothing."""
        while True:
            try:
                return await self._with_room(job, work, self.runtime.step_flop)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._run_short()
            await asyncio.sleep(1.0)

    def _run_short(self) -> None:
        """Pause for lack of memory: our microbatches go to other peers, and the next plan gives us fewer layers."""
        self.pause(at_once=True)
        self._s.shortages.add(self)

    async def _on_device(self, job: Job, work: Callable[[], T], flop: float) -> T:
        timed = await self.compute.run("forward" if job.kind == "loss" else job.kind, work, flop=flop)
        self.timeline.append(TimelineEntry(job=job, started_s=timed.started_s, ended_s=timed.ended_s))
        self._forward_times.ran(job, timed.ended_s - timed.started_s)
        return timed.value

    async def _send_activation(self, microbatch: Microbatch, target: PeerID, retried: bool) -> None:
        payloads = self.activations.get(microbatch)
        if payloads is None or (payload := payloads.output) is None:
            return  # the microbatch was forgotten before this task began
        step, index = microbatch.step, microbatch.index
        meta = Activation(stage=self.stage + 1, incarnation=self.incarnation, step=step, index=index, retried=retried)
        once_more = msgspec.structs.replace(meta, retried=True)
        began_s = self._clock.now_s()
        try:
            await self._endpoint.send(target, meta, payload, priority=Priority.ACTIVATION, again=once_more)
            waited_s = self._activation_queues.sent(target, self._clock.now_s() - began_s)
            if self.activations.get(microbatch) is payloads:
                payloads.waited_s = waited_s
        except Unreachable as error:
            logger.warning("activation %s: %s; sending it elsewhere", microbatch, error)
            self.handle(events.PeerLost(target))
            self._s.neighbours.unreachable(target)

    async def _on_gradient(self, source: PeerID, meta: Gradient, payload: Payload) -> None:
        microbatch = Microbatch(meta.step, meta.index)
        self._check(source, microbatch)
        if not 0.0 <= meta.waited_s < math.inf:
            raise RemoteError(source, f"says that a microbatch waited {meta.waited_s} s")
        if not 0.0 <= meta.commit_s < math.inf:
            raise RemoteError(source, f"says that commits take {meta.commit_s} s")
        if not microbatch.validates:
            self._wire.check_gradient(payload, source)
        if not self.core.pipeline.awaits(microbatch, source):
            return  # The microbatch went to another replica, or its gradient is here already: ignore this one.
        payloads = self.activations.of(microbatch)
        if not microbatch.validates:
            payloads.gradient = payload
        waited_s, payloads.waited_s = meta.waited_s + payloads.waited_s, 0.0
        self.handle(events.GradientArrived(microbatch, source, waited_s, meta.commit_s, meta.loss))

    def _gradient(self, command: commands.SendGradient) -> tuple[PeerID, Gradient, Payload]:
        """Return (target, header, payload) of a gradient to send; for a validation microbatch the payload is empty."""
        microbatch, target = command.microbatch, command.target
        meta = Gradient(
            stage=self.stage - 1,
            step=microbatch.step,
            index=microbatch.index,
            loss=command.loss,
            waited_s=command.waited_s + self._gradient_queues.last_waited_s(target),
            commit_s=command.commit_s,
        )
        return target, meta, b"" if microbatch.validates else self.activations.of(microbatch).output or b""

    async def _send_gradient(self, target: PeerID, meta: Gradient, payload: Payload) -> None:
        for wait_s in _GRADIENT_RETRIES_S:
            began_s = self._clock.now_s()
            try:
                await self._endpoint.send(target, meta, payload, priority=Priority.GRADIENT, again=meta)
                if payload:
                    self._gradient_queues.sent(target, self._clock.now_s() - began_s)
            except Unreachable as error:
                logger.warning("gradient (%d, %d): %s", meta.step, meta.index, error)
                self._s.neighbours.unreachable(target)
                await asyncio.sleep(wait_s)
            else:
                return
        # The receiver is gone, and no other peer needs this gradient; or it will ask for the gradient again.

    def _check(self, source: PeerID, microbatch: Microbatch) -> None:
        """Check that this run has the microbatch. Raises: RemoteError: the run does not have it."""
        training = self._s.spec.training
        if not (
            0 <= microbatch.step <= training.steps
            and -training.validation_microbatches <= microbatch.index < training.microbatches_per_step
        ):
            raise RemoteError(source, f"sent microbatch {microbatch}, which this run does not have")

    # --- the step ---

    def _step(self, step: int, mean_gradient_N: Tensor) -> None:
        self._mean_gradient_N = mean_gradient_N
        self.handle(events.StepReady(step))

    def _optimizer_step(self) -> Callable[[], tuple[StageState, str, int]]:
        mean_gradient_N, self._mean_gradient_N = self._mean_gradient_N, None
        assert mean_gradient_N is not None, "a step without a gradient"
        return lambda: self.runtime.step(mean_gradient_N)

    def _load(self, state: StageState) -> None:
        self.runtime.load(state)
        self.handle(events.VersionSet(state.version))
        if self.core.is_lagging:
            self.handle(events.Lagging(False))  # a full member that is behind catches up by replaying steps

    def _make_learner(self) -> Learner | None:
        """Return an object that makes us a learner. None: the run is synchronous (each step would wait for the
        learner's weights), or has tied matrices, or has adapters or experts on other peers (then the state is small
        beside the weights)."""
        spec = self._s.spec
        if spec.training.s_max == 0 or spec.adapter is not None or self._tied is not None or self.experts_placed:
            return None
        return Learner(
            self._s,
            self.core.group,
            self.runtime,
            self.reductions,
            self._catching_up,
            take=self._take_weights,
            join=self._join_as_learner,
        )

    def _join_as_learner(self) -> None:
        self.handle(events.JoinedGroup(self.runtime.remembers, learner=True))

    def _take_weights(self, weights: RoundedWeights) -> None:
        """Compute with newer weights from now on. They come from other members, without an optimizer state."""
        self.runtime.load_weights(weights)
        self.handle(events.VersionSet(weights.version))
        self.reductions.reached(weights.version)
        self.handle(events.Stepped(weights.version, None, remembers=self.runtime.remembers))
        self._note_lag()

    def _lagging(self) -> events.Lagging | None:
        # While our weights are too old, we take no microbatches: the group's step would wait until we get newer ones.
        # A full member that only steps a moment later than the others does not count.
        group, lagged = self.core.group, self.core.is_lagging
        if self._light is not None:
            lags = group.most_are_past(self.version + self._s.spec.training.s_max)
        elif lagged:
            lags = group.most_are_past(self.version)
        else:
            lags = group.is_left_behind(self._clock.now_s())
        return events.Lagging(lags) if lags != lagged else None

    # --- what others see ---

    @property
    def version(self) -> int:
        return self.core.pipeline.version

    @property
    def is_idle(self) -> bool:
        return self.core.pipeline.is_idle and (self.experts is None or self.experts.is_idle)

    @property
    def forward_s(self) -> float:
        """Median seconds of recent forwards (at the last stage: of loss jobs), without waiting for experts on other
        peers; 0 before the first forward."""
        return self._forward_times.seconds

    @property
    def expert_loads(self) -> tuple[int, ...]:
        """Number of tokens of each expert, summed over our layers; empty if stages hold their own experts."""
        loads = self.runtime.expert_loads.totals() if self.experts_placed else {}
        return tuple(sum(counts) for counts in zip(*loads.values(), strict=True))

    def _near(self) -> list[tuple[PeerID, ...]]:
        plan = self.core.plan
        stages = plan.stages
        holders = [entry.peers for entry in plan.experts if entry.stage == self.stage]
        return [
            *(stages[i].peers for i in (self.stage - 1, self.stage, self.stage + 1) if 0 <= i < len(stages)),
            *holders,
        ]

    def _upstream(self) -> frozenset[PeerID]:
        return self._s.plans.ending_at(self.layers[0])

    def _whereabouts(self) -> str:
        return f"; microbatches {self.core.pipeline.whereabouts(self._clock.now_s())}"

    # --- life ---

    def _install(self) -> None:
        self._endpoint.on_frame(Activation, self._on_activation)
        self._endpoint.on_frame(Gradient, self._on_gradient)
        if self.experts:
            self.experts.install()
        self._handing_back.install()

    def follow(self, plan: Plan) -> None:
        self._travel(plan)
        if self.experts:
            self.experts.follow(plan)
        super().follow(plan)

    def _travel(self, plan: Plan) -> None:
        cuts = dict(enumerate(plan.formats.activations)) if plan.formats else {}
        self.runtime.travel_as(cuts.get(self.stage, self._widest), cuts.get(self.stage - 1, self._widest))

    def depart(self, plan: Plan) -> None:
        """Follow a plan that no longer names us while we drain: the leader under that plan must be able to close our
        last rounds, and the next stage's holders must accept the activations that we still send."""
        if self.stage < len(plan.stages):
            self.follow(plan)

    def peer_state(self, peer: PeerID, presence: PresenceUpdate) -> None:
        self.experts_at(peer, presence)
        super().peer_state(peer, presence)

    def experts_at(self, peer: PeerID, presence: PresenceUpdate) -> None:
        """Record which of our layers' experts `peer` holds; `peer` may be this peer."""
        if self.experts:
            self.experts.heard(peer, presence)

    def peer_silent(self, peer: PeerID) -> None:
        if self.experts:
            self.experts.lost(peer)
        super().peer_silent(peer)

    def peer_died(self, peer: PeerID) -> None:
        if self.experts:
            self.experts.lost(peer)
        super().peer_died(peer)

    async def close(self) -> None:
        """Drop all microbatches that are here. Wait for the running job, since a device cannot be interrupted."""
        self.retire()
        self._endpoint.off(self._on_activation, self._on_gradient)
        self._handing_back.close()
        await super().close()
        if self.experts:
            await self.experts.close()


def replica_core(services: Services, plan: Plan, stage: int, *, incarnation: int) -> ReplicaCore:
    """Make the core of a replica of `stage`."""
    spec, training, traffic = services.spec, services.spec.training, services.run.traffic
    pipeline = Schedule(
        stage=stage,
        num_stages=len(plan.stages),
        s_max=training.s_max,
        synchronous_steps=spec.synchronous_steps,
        version=0,
        router=traffic.router(),
        window=traffic.window(len(plan.stages)) if stage == 0 else None,
        control=traffic.control(spec) if stage == 0 else None,
    )
    group = make_commit(services, stage, incarnation=incarnation, has_loss=pipeline.is_last)
    book = WorkQueue(
        steps=training.steps,
        microbatches=training.microbatches_per_step,
        s_max=training.s_max,
        synchronous_steps=spec.synchronous_steps,
        validation_interval=training.validation_interval_steps,
        validation_microbatches=training.validation_microbatches,
    )
    queue = MicrobatchQueue(book=book, group=group, demand=pipeline) if stage == 0 else None
    return ReplicaCore(group, pipeline, queue, plan)
