"""Inference by the stages that train the model, so that no peer needs the whole model.

The path of a request through this file, from a client and back to it:

    client ── InferenceRequest ──> the *entry*, any peer: `_on_request`
        ── InferenceInput ──> a member of stage 0: `_on_input` -> `_pass`, its layers
        ── InferenceInput ──> a member of stage 1: `_on_input` -> `_pass` ... the last stage
        ── InferenceOutput ──> the entry: `_on_output` ── InferenceAnswer ──> client

**One version.** All stages answer with the weights of one version: the version that the client names, or else the
present one of stage 0. So a session's key-value caches are all of one version. Each stage keeps these weights while
requests use them, and waits if it has yet to make a step. A stage that has passed the version says so, and the client
begins again with a newer one.

**Which member.** The client chooses a number, the request's `way`; a hash of this number selects the member of each
stage. If that member is gone, or has no cache of the session, the request fails, and the client chooses another `way`
and a new session.

**Training goes first.** A peer computes one request at a time. While it trains it rests after each request, so that
requests take at most `SHARE` of its time.
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import torch
from blake3 import blake3

from shoal.peer.base.failures import Failures
from shoal.peer.base.plans import Plans
from shoal.peer.base.shortage import is_out_of_memory
from shoal.peer.base.tasks import Tasks
from shoal.peer.inference.sessions import Session, Sessions
from shoal.peer.inference.wire import InferenceWire, bytes_of
from shoal.peer.pipeline.fixed_stage import FixedStage
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.presence.parts import Parts, StagePart
from shoal.peer.presence.ports import Ports
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import INFERENCE_CANDIDATES_MAX, INFERENCES_MAX, INFERENCES_OF_ONE_MAX
from shoal.protocol.messages import Done, InferenceAnswer, InferenceInput, InferenceOutput, InferenceRequest
from shoal.protocol.ports import Payload, Priority, Timed
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARE: Final = 0.2
"""Largest share of a peer's time that requests take while it trains."""
ANSWER_S: Final = 45.0
"""Seconds for which the entry (the peer that the client asked) waits for the stages' answer."""
_DIVIDED: Final = "the layers have just been repartitioned"


class _Past(Refused):
    """The requested version is gone, because the stage has stepped."""


class InferenceService:
    """One peer's part in inference: it receives clients' requests, and computes as a member of a stage."""

    def __init__(self, spec: RunSpec, ports: Ports, plans: Plans, parts: Parts, failures: Failures) -> None:
        self._spec, self._wire = spec, InferenceWire(spec)
        self._endpoint, self._compute = ports.endpoint, ports.compute
        self._clock, self._meter = ports.clock, ports.meter
        self._plans, self._parts, self._tasks = plans, parts, Tasks(failures.add)
        self._sessions = Sessions()
        self._asking: Counter[PeerID] = Counter()
        self._answers: dict[int, asyncio.Future[InferenceOutput]] = {}
        self._num_asked = 0
        self._num_waiting = 0
        self._device = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._endpoint.on(InferenceRequest, self._on_request)
        self._endpoint.on(InferenceOutput, self._on_output)
        self._endpoint.on_frame(InferenceInput, self._on_input)

    def free(self) -> None:
        """Drop all weights and caches that are kept for clients; the clients' sessions must begin anew."""
        self._sessions.clear()

    async def close(self) -> None:
        self._sessions.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        for answer in self._answers.values():
            answer.cancel()
        await self._tasks.cancel()

    # --- the entry ---

    async def _on_request(self, source: PeerID, request: InferenceRequest) -> InferenceAnswer:
        length = self._wire.check_request(request, source)
        if self._asking[source] >= INFERENCES_OF_ONE_MAX or self._asking.total() >= INFERENCES_MAX:
            raise Refused(self._endpoint.peer_id, "has too many requests at once: ask again in a moment")
        self._asking[source] += 1
        self._num_asked += 1
        serial = self._num_asked
        answer = self._answers[serial] = asyncio.get_running_loop().create_future()
        meta = InferenceInput(
            stage=0,
            first_layer=0,
            entry=self._endpoint.peer_id,
            serial=serial,
            way=request.way,
            session=request.session,
            version=request.version,
            rows=request.rows,
            length=length,
            position=request.position,
            has_targets=bool(request.targets),
            has_begins=bool(request.begins),
        )
        try:
            era = self._endpoint.era
            await self._send(meta, request.tokens + request.targets + request.begins)
            until_s = self._clock.now_s() + ANSWER_S
            while not (await asyncio.wait([answer], timeout=1.0))[0]:  # is the layout still the same?
                if self._endpoint.era != era:
                    raise self._no(_DIVIDED)  # an answer under way belongs to the previous era and would be ignored
                if self._clock.now_s() >= until_s:
                    raise self._no(f"the stages gave no answer within {ANSWER_S:.0f} s")
            output = answer.result()
        finally:
            del self._answers[serial]
            self._asking[source] -= 1
            if not self._asking[source]:
                del self._asking[source]
        if output.refused and not output.is_past:
            raise Refused(self._endpoint.peer_id, output.refused)
        return InferenceAnswer(
            version=output.version, era=self._endpoint.era, payload=output.payload, is_past=output.is_past
        )

    async def _on_output(self, source: PeerID, output: InferenceOutput) -> Done:
        answer, plan = self._answers.get(output.serial), self._plans.newest
        if not output.refused and (plan is None or source not in plan.stages[-1].peers):
            raise RemoteError(source, "answered a request, but is not in the last stage")
        if answer is not None and not answer.done():
            answer.set_result(output)
        return Done()

    # --- a stage ---

    async def _on_input(self, source: PeerID, meta: InferenceInput, payload: Payload) -> None:
        self._wire.check_input(meta, payload, source)
        if self._num_waiting >= INFERENCES_MAX:
            self._tasks.spawn(self._refuse(meta, "a peer of a stage has too many requests"), "refuse a question")
            return
        self._num_waiting += 1
        self._tasks.spawn(self._serve(meta, payload), f"question {meta.serial}")

    async def _serve(self, meta: InferenceInput, payload: Payload) -> None:
        try:
            version, stage = await self._fixed(meta)
            async with self._device:
                took_s = await self._pass(meta, payload, version, stage)
                replica = self._parts.stage
                if replica is not None and not replica.is_idle:
                    await asyncio.sleep(took_s * (1 / SHARE - 1))
        except Refused as refusal:
            await self._refuse(meta, refusal.reason, is_past=isinstance(refusal, _Past))
        finally:
            self._num_waiting -= 1

    async def _pass(self, meta: InferenceInput, payload: Payload, version: int, stage: FixedStage) -> float:
        """Run our layers, and send the result on. Returns: seconds for which the device computed. Raises: Refused."""
        plan = self._plans.newest
        if plan is None or meta.stage >= len(plan.stages) or plan.stages[meta.stage].first_layer != meta.first_layer:
            raise self._no(_DIVIDED)  # in our plan the stage does not begin at the sender's layer
        if stage.has_head != (meta.stage == len(plan.stages) - 1):
            raise self._no(_DIVIDED)
        work = functools.partial(self._work, stage, version, meta, payload)
        timed = await self._with_memory(work, self._flop_of(meta))
        took_s = timed.ended_s - timed.started_s
        if stage.has_head:
            output = InferenceOutput(serial=meta.serial, version=version, payload=bytes(timed.value))
            self._tasks.spawn(self._answer(meta, output), f"answer {meta.serial}")
            return took_s
        next_layer = plan.stages[meta.stage].last_layer
        onwards = msgspec.structs.replace(meta, stage=meta.stage + 1, first_layer=next_layer, version=version)
        self._tasks.spawn(self._send_on(onwards, timed.value), f"question {meta.serial} goes on")
        return took_s

    @torch.inference_mode()
    def _work(self, stage: FixedStage, version: int, meta: InferenceInput, payload: Payload) -> Payload:
        """Run our layers; called on the device's thread. Returns: the payload for the next stage or the entry."""
        question = self._wire.decode(meta, payload)
        session: Session = (meta.entry, meta.session)
        now_s, memory = self._clock.now_s(), None
        if meta.session:
            if meta.position == 0:
                self._sessions.begin(session, version, stage, self._session_bytes(stage), now_s)
            memory = self._sessions.memory(session, version, meta.position, now_s)
            if memory is None:
                raise self._no("the cache of the tokens before is gone")
        y_BTD = stage.run(question.x, position=meta.position, begins_BT=question.begins_BT, memory=memory)
        if meta.session:
            self._sessions.remembered(session, meta.position + meta.length)
        if not stage.has_head:
            return self._wire.encode(y_BTD, question)
        if question.targets_BT is not None:
            return bytes_of(*stage.log_likelihoods(y_BTD, question.targets_BT))
        token_K, logit_K = stage.candidates(y_BTD, INFERENCE_CANDIDATES_MAX)
        return bytes_of(token_K.to(torch.int32), logit_K)

    async def _fixed(self, meta: InferenceInput) -> tuple[int, FixedStage]:
        """Return (version, our stage at it) for the version that `meta` wants, once committed. Raises: Refused."""
        until_s = self._clock.now_s() + 15.0
        while True:
            replica, plan, now_s = self._parts.stage, self._plans.newest, self._clock.now_s()
            if replica is None or plan is None or replica.stage != meta.stage:
                raise self._no("the peer now holds another stage")
            if replica.layers[0] != meta.first_layer:
                raise self._no(_DIVIDED)
            runtime = replica.runtime
            if not isinstance(runtime, StageRuntime):
                raise self._no("this run places its experts on separate peers, which cannot be asked yet")
            wanted = meta.version
            if wanted < 0 and not self._sessions.has_room(now_s):
                wanted = self._sessions.newest(replica.layers)
            if wanted >= 0 and (stage := self._sessions.fixed(wanted, replica.layers, now_s)) is not None:
                return wanted, stage
            if replica.is_ready and runtime.state is not None:
                if 0 <= wanted < runtime.version:
                    raise _Past(self._endpoint.peer_id, f"version {wanted} is gone: stage {meta.stage} has passed it")
                if wanted in (-1, runtime.version):
                    return await self._keep(replica, runtime)
            if now_s >= until_s:
                raise self._no(f"a peer of stage {meta.stage} has no weights of version {wanted} yet")
            await asyncio.sleep(0.05)

    async def _keep(self, replica: StagePart, runtime: StageRuntime) -> tuple[int, FixedStage]:
        """Keep the weights of the committed version. Take them within a job, so that no step changes them meanwhile."""
        known = self._sessions.fixed(runtime.version, replica.layers, self._clock.now_s())
        if known is not None:
            return runtime.version, known
        if not self._sessions.has_room(self._clock.now_s()):
            raise self._no("a peer of a stage keeps other versions for other clients")

        def keep() -> tuple[int, FixedStage]:
            return runtime.version, runtime.fixed()

        version, stage = (await self._with_memory(keep, 0.0)).value
        self._sessions.keep(version, stage, replica.layers, self._clock.now_s())
        self._expire_soon()
        return version, stage

    async def _with_memory(self, work: Callable[[], T], flop: float) -> Timed[T]:
        """Run a job for a request. Args: flop: the FLOP of the job.

        Raises: Refused: the device has no memory for the job. Then all that is kept for clients is dropped, so that
            training has the memory.
        """
        try:
            return await self._compute.run("validate", work, flop=flop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.free()
            raise self._no("a peer of a stage has no memory for the request") from error

    def _expire_soon(self) -> None:
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(1.0, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._sessions.drop_idle(self._clock.now_s())
        if not self._sessions.is_empty:
            self._expire_soon()

    # --- sending ---

    async def _send_on(self, meta: InferenceInput, payload: Payload) -> None:
        try:
            await self._send(meta, payload)
        except Refused as refusal:
            await self._refuse(meta, refusal.reason)

    async def _send(self, meta: InferenceInput, payload: Payload) -> None:
        """Send `payload` to the member of stage `meta.stage` that a hash of `meta.way` selects. Raises: Refused: no
        plan, or the member cannot be reached."""
        plan = self._plans.newest
        if plan is None or meta.stage >= len(plan.stages):
            raise self._no("there is no plan yet")
        members = sorted(plan.stages[meta.stage].peers, key=lambda peer: _rank(peer, meta))
        members = [peer for peer in members if not self._meter.cannot_reach(peer)] or members
        try:
            await self._endpoint.send(members[0], meta, payload, priority=Priority.ACTIVATION)
        except Unreachable as error:
            raise self._no(f"stage {meta.stage}: {error}") from error

    async def _answer(self, meta: InferenceInput, output: InferenceOutput) -> None:
        try:
            await self._endpoint.ask(meta.entry, output, Done)
        except (Unreachable, Refused, RemoteError) as error:
            logger.info("cannot answer request %d of %s: %s", meta.serial, meta.entry[-8:], error)

    async def _refuse(self, meta: InferenceInput, why: str, *, is_past: bool = False) -> None:
        await self._answer(meta, InferenceOutput(serial=meta.serial, refused=why, is_past=is_past))

    def _no(self, why: str) -> Refused:
        return Refused(self._endpoint.peer_id, why)

    # --- cost of a request ---

    def _flop_of(self, meta: InferenceInput) -> float:
        """Return a request's FLOP: a microbatch's forward FLOP, in proportion to the number of tokens."""
        replica = self._parts.stage
        training = self._spec.training
        share = meta.rows * meta.length / (training.microbatch_size * self._spec.model.context)
        return 0.0 if replica is None else share * replica.runtime.flop.forward

    def _session_bytes(self, stage: FixedStage) -> int:
        model = self._spec.model
        return stage.num_layers * 2 * model.num_kv_heads * model.head_dim * model.context * stage.dtype.itemsize


def _rank(peer: PeerID, meta: InferenceInput) -> bytes:
    """Return a member's rank, a hash of the request's `way`; the lowest rank is selected (rendezvous hashing)."""
    return blake3(f"{peer}/{meta.entry}/{meta.way}".encode()).digest()
