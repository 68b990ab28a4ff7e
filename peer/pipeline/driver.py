"""Runs a PipelineCore: its jobs on the device, its activations and gradients on the wire.

The path of a microbatch through this file: `grant` (stage 0) or `_on_activation` -> `_run` (forward)
-> `_send_activation` -> `_on_gradient` -> `_run` (backward) -> `Upwards.contributed` and `_send_gradient`.
Where experts are elsewhere, `_run` goes through `peer/experts/dispatch.py` at each layer.
"""

import asyncio
import functools
import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from torch import Tensor

from shoal.peer.arithmetic import Runtime
from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.experts.passage import Passage
from shoal.peer.pipeline.core import PipelineCore
from shoal.peer.pipeline.events import (
    Arrived,
    Contributed,
    Event,
    Finished,
    Forget,
    GradientArrived,
    HandBack,
    HandedBack,
    Job,
    JobDone,
    JobDropped,
    JobParked,
    Paused,
    PeerLost,
    PeerReady,
    Resumed,
    SendActivation,
    SendGradient,
    StepReady,
    TimelineEntry,
    VersionSet,
)
from shoal.peer.pipeline.handing_back import HandingBack
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.queueing import LinkQueues
from shoal.peer.pipeline.state import StageState
from shoal.peer.pipeline.suspended import Suspended
from shoal.peer.pipeline.wire import ActivationWire
from shoal.peer.tasks import Tasks
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import QUEUED_MICROBATCHES_MAX
from shoal.protocol.messages import Activation, Gradient
from shoal.protocol.ports import Clock, Compute, Payload, Priority

logger = logging.getLogger(__name__)

_TIMELINE_MAX = 4096
_GRADIENT_RETRIES_S = (0.5, 1.0, 2.0, 4.0)
"""A broken stream is often one that comes back: whoever waits for this gradient holds a place in its window for it."""


class Upwards(Protocol):
    """What the pipeline tells the rest of the peer."""

    def wants(self, microbatch: Microbatch) -> bool:
        """Whether the group still lacks this stage's gradient of it."""
        ...

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, again: bool) -> None: ...

    @property
    def lead(self) -> PeerID | None:
        """Of our group."""
        ...

    @property
    def is_paused(self) -> bool: ...

    def handed_back(self, source: PeerID, microbatch: Microbatch, *, begun: bool) -> None:
        """Stage 0, as its lead: a mate pauses and will not make it. Raises: Refused: we do not lead its stage."""
        ...

    def finished(self, microbatch: Microbatch, *, loss: float) -> None:
        """Stage 0: through the whole pipeline; `loss` is that of a validation microbatch."""
        ...

    def stepped(self, state: StageState, digest: str, skipped_layers: int) -> None: ...

    def unreachable(self, peer: PeerID) -> None:
        """A frame to it did not go out."""
        ...

    def failed(self, error: BaseException) -> None:
        """A bug or a broken machine: this peer cannot go on."""
        ...


class PipelineDriver:
    """One replica's traffic and work. Handlers must be installed (`install`) before the first frame.

    Args:
        experts: who computes the experts, if they are placed.
    """

    def __init__(
        self,
        core: PipelineCore,
        runtime: Runtime,
        *,
        endpoint: Endpoint,
        compute: Compute,
        clock: Clock,
        upwards: Upwards,
        experts: ExpertDispatch | None = None,
    ) -> None:
        self.core = core
        self.experts = experts
        self.runtime = runtime
        self.timeline: deque[TimelineEntry] = deque(maxlen=_TIMELINE_MAX)
        self._endpoint = endpoint
        self.compute = compute
        self._clock = clock
        self.upwards = upwards
        self._wire = ActivationWire(runtime.spec)
        self._inputs: dict[Microbatch, Payload] = {}  # activation in, until the forward (re-sent ones never come here)
        self._outputs: dict[Microbatch, Payload] = {}  # what we send next for it; kept until answered
        self._gradients: dict[Microbatch, Payload] = {}
        self._losses: dict[Microbatch, float] = {}
        self._activation_queues, self._gradient_queues = LinkQueues(), LinkQueues()
        self._waited_s: dict[Microbatch, float] = {}  # that its activation stood in line to leave
        self._passages: dict[Microbatch, Passage] = {}
        self._unwanted: set[Microbatch] = set()  # computed for the other stages only: our group has its gradient
        self._mean_gradient_N: Tensor | None = None
        self._tasks = Tasks(upwards.failed)
        self._handing_back = HandingBack(endpoint, core.stage, upwards, self._tasks)
        self._closed = False

    def install(self) -> None:
        self._endpoint.on_frame(Activation, self._on_activation)
        self._endpoint.on_frame(Gradient, self._on_gradient)
        if self.experts:
            self.experts.install()
        self._handing_back.install(self._check, on_back=lambda m, peer: self._handle(HandedBack(m, peer)))

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
        return self.core.version

    @property
    def is_idle(self) -> bool:
        """Nothing is here at all."""
        return self.core.is_idle and (self.experts is None or self.experts.is_idle)

    @property
    def forward_s(self) -> float:
        """Median seconds of the recent forwards (of the whole loss job at the last stage); 0 before the first."""
        took_s: dict[Job, float] = {}
        for entry in list(self.timeline)[-64:]:
            if entry.job.kind in ("forward", "loss"):  # of a job in parts there is an entry each
                took_s[entry.job] = took_s.get(entry.job, 0.0) + entry.ended_s - entry.started_s
        return median(took_s.values()) if took_s else 0.0

    # --- told by the rest of the peer ---

    def grant(self, microbatch: Microbatch, *, again: bool = False) -> None:
        """Stage 0: the group's lead lets us make it, `again` if it may have run before."""
        self._handle(Arrived(microbatch, None, again))

    def commit(self, step: int, mean_gradient_N: Tensor) -> None:
        """The reduced gradient of `step` is complete: step as soon as the running job ends."""
        self._mean_gradient_N = mean_gradient_N
        self._handle(StepReady(step))

    def load(self, state: StageState) -> None:
        self.runtime.load(state)
        self._handle(VersionSet(state.version))

    def peer_ready(self, peer: PeerID) -> None:
        self._handle(PeerReady(peer))

    def peer_lost(self, peer: PeerID) -> None:
        self._handle(PeerLost(peer))

    def pause(self, *, at_once: bool) -> None:
        """Begin nothing new; `at_once`: and no backward either."""
        self._handle(Paused(at_once))

    def resume(self) -> None:
        self._handle(Resumed())

    def refresh(self) -> None:
        """Shares changed: whatever waited for a target may have one now."""
        for peer in self.core.router.shares:
            if self.core.router.is_ready(peer):
                self._handle(PeerReady(peer))

    # --- frames ---

    async def _on_activation(self, source: PeerID, meta: Activation, payload: Payload) -> None:
        microbatch = Microbatch(meta.step, meta.index)
        if not self.core.takes_from(source):
            logger.debug("an activation of %s, which is not of the stage before", source[-8:])
            return
        if self.runtime.state is None:
            logger.debug("an activation of %s before there are weights, though we are not ready", source[-8:])
            return
        self._check(source, microbatch)
        self._wire.check_activation(payload, source)
        if meta.stage != self.core.stage or self.core.is_first:
            logger.debug("an activation for stage %d came to stage %d", meta.stage, self.core.stage)
            return
        if not self.core.holds(microbatch):
            if self.core.num_waiting >= QUEUED_MICROBATCHES_MAX:
                raise RemoteError(source, f"has more than {QUEUED_MICROBATCHES_MAX} microbatches waiting here")
            self._inputs[microbatch] = payload
        self._handle(Arrived(microbatch, source, meta.again))

    async def _on_gradient(self, source: PeerID, meta: Gradient, payload: Payload) -> None:
        microbatch = Microbatch(meta.step, meta.index)
        self._check(source, microbatch)
        if not 0.0 <= meta.waited_s < math.inf:
            raise RemoteError(source, f"says that a microbatch waited {meta.waited_s} s")
        if not 0.0 <= meta.commit_s < math.inf:
            raise RemoteError(source, f"says that commits take {meta.commit_s} s")
        if not microbatch.validates:
            self._wire.check_gradient(payload, source)
        if not self.core.awaits(microbatch, source):
            return  # It went to somebody else, or is back: what is kept of it must stay what that one sent.
        if microbatch.validates:
            self._losses[microbatch] = meta.loss
        else:
            self._gradients[microbatch] = payload
        waited_s = meta.waited_s + self._waited_s.pop(microbatch, 0.0)
        self._handle(GradientArrived(microbatch, source, waited_s, meta.commit_s))

    def _check(self, source: PeerID, microbatch: Microbatch) -> None:
        training = self.runtime.spec.training
        if not (
            0 <= microbatch.step <= training.steps
            and -training.validation_microbatches <= microbatch.index < training.microbatches_per_step
        ):
            raise RemoteError(source, f"sent microbatch {microbatch}, which this run has not")

    # --- commands ---

    def _handle(self, event: Event) -> None:
        if self._closed:
            return
        commands = self.core.handle(event, now_s=self._clock.now_s())
        self._handing_back.send([command for command in commands if isinstance(command, HandBack)])
        for command in commands:
            match command:
                case Job():
                    self._tasks.spawn(self._run(command), f"job {command}")
                case SendActivation(microbatch, target, again):
                    self._tasks.spawn(self._send_activation(microbatch, target, again), f"activation {microbatch}")
                case SendGradient(microbatch, target, waited_s, commit_s):
                    payload = b"" if microbatch.validates else self._outputs.get(microbatch, b"")
                    loss = self._losses.get(microbatch, 0.0)
                    meta = Gradient(
                        stage=self.core.stage - 1,
                        step=microbatch.step,
                        index=microbatch.index,
                        loss=loss,
                        waited_s=waited_s + self._gradient_queues.last_waited_s(target),
                        commit_s=commit_s,
                    )
                    self._tasks.spawn(self._send_gradient(target, meta, payload), f"gradient {microbatch}")
                case Contributed(microbatch, staleness_steps, again):
                    self._end_passage(microbatch, done=True, again=again)
                    if microbatch not in self._unwanted:
                        loss = self._losses.get(microbatch, 0.0)
                        self.upwards.contributed(microbatch, loss=loss, staleness_steps=staleness_steps, again=again)
                case Finished(microbatch):
                    self.upwards.finished(microbatch, loss=self._losses.get(microbatch, math.nan))
                case Forget(microbatch):
                    self._forget(microbatch)

    async def _run(self, job: Job) -> None:
        work, flop = self._work(job)
        kind = "forward" if job.kind == "loss" else job.kind
        timed = await self.compute.run(kind, work, flop=flop)
        self.timeline.append(TimelineEntry(job=job, started_s=timed.started_s, ended_s=timed.ended_s))
        if job.microbatch is None:
            state, digest, skipped = timed.value
            self._handle(JobDone(job))
            self.upwards.stepped(state, digest, skipped)
            return
        passage = self._passage(job, job.microbatch)
        if isinstance(timed.value, Suspended):
            self._handle(JobParked(job))
        while isinstance(timed.value, Suspended):
            assert self.experts is not None
            assert passage is not None
            output = await self.experts.exchange(passage, timed.value.call)
            if not self.core.goes_on(job):
                self._handle(JobDropped(job))
                return
            timed = await self.compute.run(kind, functools.partial(timed.value.resume, output), flop=timed.value.flop)
            self.timeline.append(TimelineEntry(job=job, started_s=timed.started_s, ended_s=timed.ended_s))
        self._keep(job, job.microbatch, timed.value)
        self._handle(JobDone(job))

    def _passage(self, job: Job, microbatch: Microbatch) -> Passage | None:
        """Where experts are placed: of this run of the microbatch, the same for its forward and its backward."""
        if self.experts is None:
            return None
        if job.kind != "backward":
            self._end_passage(microbatch, done=False)
            self._passages[microbatch] = self.experts.begin(microbatch)
        return self._passages[microbatch]

    def _end_passage(self, microbatch: Microbatch, *, done: bool, again: bool = False) -> None:
        """`done`: its backward is, and its experts' holders may count it; else nobody asks for it any more."""
        passage = self._passages.pop(microbatch, None)
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
        if job.kind == "backward":
            gradient = self._gradients.pop(microbatch)
            return (lambda: runtime.backward(microbatch, gradient)), runtime.flop.backward
        payload = self._inputs.pop(microbatch, None)
        wanted = microbatch.validates or self.upwards.wants(microbatch)
        if not wanted:
            self._unwanted.add(microbatch)
        if job.kind == "validate":
            return (lambda: runtime.validate(microbatch, payload)), runtime.flop.forward
        if job.kind == "loss":
            return (lambda: runtime.loss(microbatch, payload, contributes=wanted)), runtime.flop.loss
        return (lambda: runtime.forward(microbatch, payload, contributes=wanted)), runtime.flop.forward

    def _keep(self, job: Job, microbatch: Microbatch, value: Any) -> None:
        if job.kind == "loss":
            self._losses[microbatch], value = value
        elif job.kind == "validate" and self.core.is_last:
            self._losses[microbatch], value = value, None
        self._outputs.pop(microbatch, None)
        if value is not None:
            self._outputs[microbatch] = value

    def _forget(self, microbatch: Microbatch) -> None:
        for table in (self._inputs, self._outputs, self._gradients, self._losses, self._waited_s):
            table.pop(microbatch, None)
        self._unwanted.discard(microbatch)
        self._end_passage(microbatch, done=False)
        self.runtime.forget(microbatch)

    async def _send_activation(self, microbatch: Microbatch, target: PeerID, again: bool) -> None:
        payload = self._outputs.get(microbatch)
        if payload is None:
            return  # Forgotten before the task began.
        meta = Activation(stage=self.core.stage + 1, step=microbatch.step, index=microbatch.index, again=again)
        began_s = self._clock.now_s()
        try:
            await self._endpoint.send(target, meta, payload, priority=Priority.ACTIVATION)
            waited_s = self._activation_queues.sent(target, self._clock.now_s() - began_s)
            if self.core.holds(microbatch):
                self._waited_s[microbatch] = waited_s
        except Unreachable as error:
            logger.warning("activation %s: %s; sending it elsewhere", microbatch, error)
            self._handle(PeerLost(target))
            self.upwards.unreachable(target)

    async def _send_gradient(self, target: PeerID, meta: Gradient, payload: Payload) -> None:
        for wait_s in _GRADIENT_RETRIES_S:
            began_s = self._clock.now_s()
            try:
                await self._endpoint.send(target, meta, payload, priority=Priority.GRADIENT)
                if payload:
                    self._gradient_queues.sent(target, self._clock.now_s() - began_s)
            except Unreachable as error:
                logger.warning("gradient (%d, %d): %s", meta.step, meta.index, error)
                self.upwards.unreachable(target)
                await asyncio.sleep(wait_s)
            else:
                return
        # Its receiver is gone, and with it everyone who would use this gradient; else it will ask again.
