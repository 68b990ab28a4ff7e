"""Carries out what a replica's core asks for its pipeline: jobs on the device, activations and gradients on the wire.

The path of a microbatch through this file: `_on_activation` (at stage 0 the core lets it begin) -> `_run` (forward)
-> `_send_activation` -> `_on_gradient` -> `_run` (backward) -> `settle` and `_send_gradient`.
Where experts are elsewhere, `_run` goes through `peer/experts/dispatch.py` at each layer.
"""

import asyncio
import functools
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from torch import Tensor

from shoal.peer.arithmetic import DenseRuntime, TrunkRuntime
from shoal.peer.experts.call import JobInParts
from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.experts.passage import Passage
from shoal.peer.model.flop import BACKWARD_PER_FORWARD
from shoal.peer.pipeline.handing_back import HandingBack
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.queueing import LinkQueues
from shoal.peer.pipeline.state import StageState
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.replica.commands import Forget, HandBack, SendActivation, SendGradient
from shoal.peer.replica.core import ReplicaCore
from shoal.peer.replica.events import (
    Arrived,
    Event,
    GradientArrived,
    JobDone,
    JobDropped,
    JobParked,
    PeerLost,
    StepReady,
    VersionSet,
)
from shoal.peer.replica.job import Job, TimelineEntry
from shoal.peer.tasks import Tasks
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import QUEUED_MICROBATCHES_MAX
from shoal.protocol.messages import Activation, Gradient
from shoal.protocol.ports import Clock, Compute, Payload, Priority

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMELINE_MAX = 4096
_GRADIENT_RETRIES_S = (0.5, 1.0, 2.0, 4.0)
"""A broken stream is often one that comes back: whoever waits for this gradient holds a place in its window for it."""


PipelineDeed = Job | SendActivation | SendGradient | HandBack | Forget
"""What the pipeline asks for that is no other part's affair."""


@dataclass(slots=True)
class Cargo:
    """What the driver keeps for one microbatch that is here."""

    input: Payload | None = None
    """The activation, from its arrival until the forward. One that comes again is not kept."""
    output: Payload | None = None
    """What we send next for it; kept until it is answered."""
    gradient: Payload | None = None
    """From its arrival until the backward."""
    waited_s: float = 0.0
    """How long its activation stood in line to leave."""
    passage: Passage | None = None
    """Of this run through the experts, where those are placed: the same for the forward and the backward."""
    is_wanted: bool = True
    """False: it is computed for the other stages only. Our group has its gradient."""


class PipelineDriver:
    """One replica's traffic and work. Handlers must be installed (`install`) before the first frame.

    Args:
        core: to be read.
        post: hands the replica's core an event; raises `Refused` or `RemoteError` if it declines.
        on_stepped: an optimizer step has made this state, with that digest; so many layers were left as they are.
        on_unreachable: a frame to that peer did not go out.
        on_failure: a bug or a broken machine: this peer cannot go on.
        experts: who computes the experts, if they are placed.
    """

    def __init__(
        self,
        core: ReplicaCore,
        runtime: DenseRuntime | TrunkRuntime,
        *,
        endpoint: Endpoint,
        compute: Compute,
        clock: Clock,
        post: Callable[[Event], None],
        on_stepped: Callable[[StageState, str, int], None],
        on_unreachable: Callable[[PeerID], None],
        on_failure: Callable[[BaseException], None],
        experts: ExpertDispatch | None = None,
    ) -> None:
        self.experts = experts
        self.runtime = runtime
        self.timeline: deque[TimelineEntry] = deque(maxlen=_TIMELINE_MAX)
        self._replica = core
        self._core = core.pipeline
        self._endpoint = endpoint
        self.compute = compute
        self._clock = clock
        self._post = post
        self._on_stepped = on_stepped
        self._on_unreachable = on_unreachable
        self._wire = ActivationWire(runtime.spec)
        self._cargo: dict[Microbatch, Cargo] = {}
        self._activation_queues, self._gradient_queues = LinkQueues(), LinkQueues()
        self._mean_gradient_N: Tensor | None = None
        self._tasks = Tasks(on_failure)
        self._handing_back = HandingBack(
            endpoint, core, self._tasks, post=post, check=self._check, on_unreachable=on_unreachable
        )
        self._closed = False

    def install(self) -> None:
        self._endpoint.on_frame(Activation, self._on_activation)
        self._endpoint.on_frame(Gradient, self._on_gradient)
        if self.experts:
            self.experts.install()
        self._handing_back.install()

    async def close(self) -> None:
        """Drop everything in flight. The job that runs is waited for: a device cannot be interrupted."""
        self._closed = True
        self._endpoint.off(self._on_activation, self._on_gradient)
        self._handing_back.close()
        await self._tasks.cancel()
        if self.experts:
            await self.experts.close()

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def is_idle(self) -> bool:
        """Nothing is here at all."""
        return self._core.is_idle and (self.experts is None or self.experts.is_idle)

    @property
    def forward_s(self) -> float:
        """Median seconds of the recent forwards (of the whole loss job at the last stage); 0 before the first."""
        took_s: dict[Job, float] = {}
        for entry in list(self.timeline)[-64:]:
            if entry.job.kind in ("forward", "loss"):  # of a job in parts there is an entry each
                took_s[entry.job] = took_s.get(entry.job, 0.0) + entry.ended_s - entry.started_s
        return median(took_s.values()) if took_s else 0.0

    def commit(self, step: int, mean_gradient_N: Tensor) -> None:
        """The reduced gradient of `step` is complete: step as soon as the running job ends."""
        self._mean_gradient_N = mean_gradient_N
        self._post(StepReady(step))

    def load(self, state: StageState) -> None:
        self.runtime.load(state)
        self._post(VersionSet(state.version))

    # --- frames ---

    async def _on_activation(self, source: PeerID, meta: Activation, payload: Payload) -> None:
        microbatch = Microbatch(meta.step, meta.index)
        if not self._core.takes_from(source):
            logger.debug("an activation of %s, which is not of the stage before", source[-8:])
            return
        if self.runtime.state is None:
            logger.debug("an activation of %s before there are weights, though we are not ready", source[-8:])
            return
        self._check(source, microbatch)
        self._wire.check_activation(payload, source)
        if meta.stage != self._core.stage or self._core.is_first:
            logger.debug("an activation for stage %d came to stage %d", meta.stage, self._core.stage)
            return
        if not self._core.holds(microbatch):
            if self._core.num_waiting >= QUEUED_MICROBATCHES_MAX:
                raise RemoteError(source, f"has more than {QUEUED_MICROBATCHES_MAX} microbatches waiting here")
            self._of(microbatch).input = payload
        self._post(Arrived(microbatch, source, meta.again))

    async def _on_gradient(self, source: PeerID, meta: Gradient, payload: Payload) -> None:
        microbatch = Microbatch(meta.step, meta.index)
        self._check(source, microbatch)
        if not 0.0 <= meta.waited_s < math.inf:
            raise RemoteError(source, f"says that a microbatch waited {meta.waited_s} s")
        if not 0.0 <= meta.commit_s < math.inf:
            raise RemoteError(source, f"says that commits take {meta.commit_s} s")
        if not microbatch.validates:
            self._wire.check_gradient(payload, source)
        if not self._core.awaits(microbatch, source):
            return  # It went to somebody else, or is back: what is kept of it must stay what that one sent.
        cargo = self._of(microbatch)
        if not microbatch.validates:
            cargo.gradient = payload
        waited_s, cargo.waited_s = meta.waited_s + cargo.waited_s, 0.0
        self._post(GradientArrived(microbatch, source, waited_s, meta.commit_s, meta.loss))

    def _check(self, source: PeerID, microbatch: Microbatch) -> None:
        training = self.runtime.spec.training
        if not (
            0 <= microbatch.step <= training.steps
            and -training.validation_microbatches <= microbatch.index < training.microbatches_per_step
        ):
            raise RemoteError(source, f"sent microbatch {microbatch}, which this run has not")

    # --- commands ---

    def perform(self, command: PipelineDeed) -> None:
        """Do what the core asks."""
        if self._closed:
            return
        match command:
            case Job():
                self._tasks.spawn(self._run(command), f"job {command}")
            case SendActivation(microbatch, target, again):
                self._tasks.spawn(self._send_activation(microbatch, target, again), f"activation {microbatch}")
            case SendGradient(microbatch, target):
                self._tasks.spawn(self._send_gradient(*self._gradient(command)), f"gradient {microbatch} to {target}")
            case HandBack():
                self._handing_back.soon(command)
            case Forget(microbatch):
                self._cargo_gone(microbatch)

    def settle(self, microbatch: Microbatch, *, again: bool) -> bool:
        """Its backward is done. Returns: whether its gradient is wanted here."""
        cargo = self._of(microbatch)
        self._end_passage(cargo, done=True, again=again)
        return cargo.is_wanted

    def _of(self, microbatch: Microbatch) -> Cargo:
        cargo = self._cargo.get(microbatch)
        if cargo is None:
            cargo = self._cargo[microbatch] = Cargo()
        return cargo

    def _gradient(self, command: SendGradient) -> tuple[PeerID, Gradient, Payload]:
        microbatch, target = command.microbatch, command.target
        meta = Gradient(
            stage=self._core.stage - 1,
            step=microbatch.step,
            index=microbatch.index,
            loss=command.loss,
            waited_s=command.waited_s + self._gradient_queues.last_waited_s(target),
            commit_s=command.commit_s,
        )
        return target, meta, b"" if microbatch.validates else self._of(microbatch).output or b""

    async def _run(self, job: Job) -> None:
        work, flop = self._work(job)
        if job.microbatch is None:
            state, digest, skipped = await self._on_device(job, work, flop)
            self._post(JobDone(job))
            self._on_stepped(state, digest, skipped)
        elif self.experts is None:
            value = await self._on_device(job, work, flop)
            self._post(JobDone(job, self._keep(job, job.microbatch, value)))
        else:
            await self._run_with_experts(self.experts, job, job.microbatch, JobInParts(work()), flop)

    async def _run_with_experts(
        self, experts: ExpertDispatch, job: Job, microbatch: Microbatch, parts: JobInParts[Any], first_flop: float
    ) -> None:
        """Run a job whose experts are elsewhere: whenever it waits for them the device does other jobs."""
        call = await self._on_device(job, parts.go_on, first_flop)
        passage = self._passage(experts, job, microbatch)
        if call is not None:
            self._post(JobParked(job))
        while call is not None:
            output = await experts.exchange(passage, call)
            if not self._core.goes_on(job):
                self._post(JobDropped(job))
                return
            part_flop = self.runtime.flop.forward * (BACKWARD_PER_FORWARD if call.backward else 1.0)
            call = await self._on_device(job, functools.partial(parts.go_on, output), part_flop)
        self._post(JobDone(job, self._keep(job, microbatch, parts.value)))

    async def _on_device(self, job: Job, work: Callable[[], T], flop: float) -> T:
        """Run a job, or a part of one, and note when it ran."""
        timed = await self.compute.run("forward" if job.kind == "loss" else job.kind, work, flop=flop)
        self.timeline.append(TimelineEntry(job=job, started_s=timed.started_s, ended_s=timed.ended_s))
        return timed.value

    def _passage(self, experts: ExpertDispatch, job: Job, microbatch: Microbatch) -> Passage:
        """This run of the microbatch through the experts: the same for its forward and its backward."""
        cargo = self._of(microbatch)
        if job.kind != "backward":
            self._end_passage(cargo, done=False)
            cargo.passage = experts.begin(microbatch)
        assert cargo.passage is not None, "a backward of a microbatch that has not been through the experts"
        return cargo.passage

    def _end_passage(self, cargo: Cargo, *, done: bool, again: bool = False) -> None:
        """`done`: its backward is, and its experts' holders may count it; else nobody asks for it any more."""
        passage, cargo.passage = cargo.passage, None
        if passage is None or self.experts is None:
            return
        if done:
            self.experts.settle(passage, again=again)
        else:
            self.experts.abandon(passage)

    def _work(self, job: Job) -> tuple[Callable[[], Any], float]:
        """The job as a function for the device's thread, and its arithmetic in FLOP."""
        runtime, microbatch = self.runtime, job.microbatch
        if microbatch is None:
            mean_gradient_N, self._mean_gradient_N = self._mean_gradient_N, None
            assert mean_gradient_N is not None, "a step without a gradient"
            return (lambda: runtime.step(mean_gradient_N)), runtime.step_flop
        cargo = self._of(microbatch)
        if job.kind == "backward":
            gradient, cargo.gradient = cargo.gradient, None
            assert gradient is not None, f"a backward of {microbatch} without its gradient"
            return (lambda: runtime.backward(microbatch, gradient)), runtime.flop.backward
        payload, cargo.input = cargo.input, None
        wanted = microbatch.validates or self._replica.group.lacks(microbatch.step, microbatch.index)
        cargo.is_wanted = cargo.is_wanted and wanted
        if job.kind == "validate":
            return (lambda: runtime.validate(microbatch, payload)), runtime.flop.forward
        if job.kind == "loss":
            return (lambda: runtime.loss(microbatch, payload, contributes=wanted)), runtime.flop.loss
        return (lambda: runtime.forward(microbatch, payload, contributes=wanted)), runtime.flop.forward

    def _keep(self, job: Job, microbatch: Microbatch, value: Any) -> float | None:
        """What a job has computed is sent next. Returns: the loss, of a job that computes one."""
        loss = None
        if job.kind == "loss":
            loss, value = value
        elif job.kind == "validate" and self._core.is_last:
            loss, value = value, None
        self._of(microbatch).output = value
        return loss

    def _cargo_gone(self, microbatch: Microbatch) -> None:
        cargo = self._cargo.pop(microbatch, None)
        if cargo is not None:
            self._end_passage(cargo, done=False)
        self.runtime.forget(microbatch)

    async def _send_activation(self, microbatch: Microbatch, target: PeerID, again: bool) -> None:
        cargo = self._cargo.get(microbatch)
        if cargo is None or (payload := cargo.output) is None:
            return  # Forgotten before the task began.
        meta = Activation(stage=self._core.stage + 1, step=microbatch.step, index=microbatch.index, again=again)
        began_s = self._clock.now_s()
        try:
            await self._endpoint.send(target, meta, payload, priority=Priority.ACTIVATION)
            waited_s = self._activation_queues.sent(target, self._clock.now_s() - began_s)
            if self._cargo.get(microbatch) is cargo:
                cargo.waited_s = waited_s
        except Unreachable as error:
            logger.warning("activation %s: %s; sending it elsewhere", microbatch, error)
            self._post(PeerLost(target))
            self._on_unreachable(target)

    async def _send_gradient(self, target: PeerID, meta: Gradient, payload: Payload) -> None:
        for wait_s in _GRADIENT_RETRIES_S:
            began_s = self._clock.now_s()
            try:
                await self._endpoint.send(target, meta, payload, priority=Priority.GRADIENT)
                if payload:
                    self._gradient_queues.sent(target, self._clock.now_s() - began_s)
            except Unreachable as error:
                logger.warning("gradient (%d, %d): %s", meta.step, meta.index, error)
                self._on_unreachable(target)
                await asyncio.sleep(wait_s)
            else:
                return
        # Its receiver is gone, and with it everyone who would use this gradient; else it will ask again.
