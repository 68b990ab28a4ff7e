"""Serves the requests of other peers for the experts that this peer holds; there is one server per peer.

A request brings tokens for some experts. It waits until each expert's version is near enough to the request's step
(step - version <= s_max); then it is computed as one job and answered once. No sender is trusted: a recent plan must
name it, its requests here are limited in number, and it must send the sizes that follow from the spec. A request that
cannot be served here, or not soon, is refused, so that its sender tries another holder.

N tokens   D width
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Final

from shoal.peer.base.plans import Plans
from shoal.peer.base.tasks import Tasks
from shoal.peer.model.flop import expert_flop
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.expert_runs import Run
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.presence.parts import ExpertHolding
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import QUEUED_TOKENS_MAX, QUEUED_TOKENS_OF_ONE_MAX, REFUSED_TOKENS_OF_ONE_MAX
from shoal.protocol.messages import Done, ExpertDone, ExpertOutput, ExpertTokens
from shoal.protocol.ports import Compute, Payload, Priority
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import BACKWARD_PER_FORWARD

logger = logging.getLogger(__name__)

STRANGER: Final = PeerID("")
"""One peer ID under which we count all strangers' requests together, since a new ID costs a stranger nothing."""


class Room:
    """A limited number of places for requests; one peer takes at most `each` places."""

    def __init__(self, total: int, *, each: int) -> None:
        self._total = total
        self._each = each
        self._taken: Counter[PeerID] = Counter()

    def take(self, peer: PeerID) -> bool:
        """Take a place for the peer. Returns: False: no place is free for it."""
        if self._taken[peer] >= self._each or self._taken.total() >= self._total:
            return False
        self._taken[peer] += 1
        return True

    def leave(self, peer: PeerID) -> None:
        self._taken[peer] -= 1
        if not self._taken[peer]:
            del self._taken[peer]


class ExpertWork:
    """One expert of a stage, and its computation here. `version` changes only on the event loop's thread.

    Args: upwards: our membership in the expert's group; it says which gradients the group lacks, and counts ours."""

    def __init__(self, runtime: ExpertShard, stage: int, *, upwards: ExpertHolding) -> None:
        self.runtime = runtime
        self.stage = stage
        self.expert = runtime.expert
        self.upwards = upwards
        self.version = 0
        self.is_paused = False

    def load(self, state: StageState) -> None:
        self.runtime.load(state)
        self.version = state.version

    def flop(self, num_tokens: int, *, backward: bool) -> float:
        """Return the FLOP of a job on `num_tokens` tokens; a backward includes a second forward."""
        forward = expert_flop(self.runtime.spec.model, num_tokens)
        return (1.0 + BACKWARD_PER_FORWARD) * forward if backward else forward

    def has_whole(self, run: Run, num_layers: int) -> bool:
        return self.runtime.open_runs.layers_done(run) == num_layers

    def close_run(self, run: Run, *, retried: bool) -> None:
        """End a microbatch's run through the expert. The expert's gradient counts if the expert's group lacks it."""
        staleness_steps = self.runtime.close(run, wanted=self.upwards.wants(run.microbatch))
        if staleness_steps is not None:
            self.upwards.contributed(run.microbatch, loss=0.0, staleness_steps=staleness_steps, retried=retried)


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    source: PeerID
    meta: ExpertTokens
    payload: Payload

    @property
    def run(self) -> Run:
        return run_of(self.source, self.meta)


def run_of(source: PeerID, meta: ExpertTokens | ExpertDone) -> Run:
    return Run(Microbatch(meta.step, meta.index), source, meta.incarnation, meta.passage)


class ExpertServer:
    """Serves the requests for all experts of one peer."""

    def __init__(
        self, wire: TokenWire, *, endpoint: Endpoint, compute: Compute, plans: Plans, spec: RunSpec, tasks: Tasks
    ) -> None:
        self._plans = plans
        self._room = Room(QUEUED_TOKENS_MAX, each=QUEUED_TOKENS_OF_ONE_MAX)
        self._refusals = Room(QUEUED_TOKENS_MAX, each=REFUSED_TOKENS_OF_ONE_MAX)
        self._endpoint = endpoint
        self._compute = compute
        self._s_max = spec.training.s_max
        self._tasks = tasks
        self._wire = wire
        self._works: dict[tuple[int, int], ExpertWork] = {}
        self._pending: dict[tuple[PeerID, int, int], _Request] = {}
        self._changed = asyncio.Event()
        endpoint.on_frame(ExpertTokens, self._on_tokens)
        endpoint.on(ExpertDone, self._on_done)

    def add(self, work: ExpertWork) -> None:
        self._works[work.stage, work.expert] = work

    def remove(self, work: ExpertWork) -> None:
        if self._works.get((work.stage, work.expert)) is work:
            del self._works[work.stage, work.expert]
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def num_pending(self, work: ExpertWork) -> int:
        return sum(
            request.meta.stage == work.stage and any(expert == work.expert for expert, _ in request.meta.counts)
            for request in self._pending.values()
        )

    # --- tokens ---

    async def _on_tokens(self, source: PeerID, meta: ExpertTokens, payload: Payload) -> None:
        self._wire.check_tokens(meta, payload, source)
        key = (source, meta.incarnation, meta.serial)
        if key in self._pending:
            return  # the request came a second time
        if not self._plans.knows(source):
            self._refuse(source, meta, "does not know the sender as a member of the run", room_of=STRANGER)
        elif not self._room.take(source):
            self._refuse(source, meta, "is overloaded", room_of=source)
        else:
            request = self._pending[key] = _Request(source, meta, payload)
            self._tasks.spawn(self._serve(key, request), f"tokens of ({meta.step}, {meta.index})")

    async def _serve(self, key: tuple[PeerID, int, int], request: _Request) -> None:
        payload, refused = self._wire.room(0), ""
        try:
            payload = await self._compute_when_admitted(request)
        except Refused as refusal:
            refused = refusal.reason
        finally:
            del self._pending[key]
        await self._answer(request.source, request.meta, payload, refused)
        self._room.leave(request.source)  # only now: a sender that does not read its answers gets no more places

    def _refuse(self, source: PeerID, meta: ExpertTokens, why: str, *, room_of: PeerID) -> None:
        if self._refusals.take(room_of):  # else the sender asks again
            self._tasks.spawn(self._say_no(source, meta, why, room_of), "refuse tokens")

    async def _say_no(self, source: PeerID, meta: ExpertTokens, why: str, room_of: PeerID) -> None:
        await self._answer(source, meta, b"", why)
        self._refusals.leave(room_of)

    async def _compute_when_admitted(self, request: _Request) -> Payload:
        """Wait until no requested expert's version is too old, then compute. Raises: Refused: an expert is not here."""
        meta = request.meta
        while self._waits(request):
            await self._changed.wait()
        works = self._held(meta.stage, [expert for expert, _ in meta.counts], meta.layer)
        wanted = [meta.backward and work.upwards.wants(request.run.microbatch) for work in works]
        flop = sum(w.flop(count, backward=meta.backward) for w, (_, count) in zip(works, meta.counts, strict=True))
        timed = await self._compute.run(
            "backward" if meta.backward else "forward", lambda: self._work(request, works, wanted), flop=flop
        )
        return timed.value

    def _waits(self, request: _Request) -> bool:
        """True if an expert is too old for the request as yet. Raises: Refused: an expert is missing or far too old."""
        meta = request.meta
        works = self._held(meta.stage, [expert for expert, _ in meta.counts], meta.layer)
        self._check_near(works, meta.step)
        ahead = 0 if meta.index < 0 else self._s_max
        return any(meta.step - work.version > ahead for work in works)

    def _check_near(self, works: list[ExpertWork], step: int) -> None:
        """Check that no expert's version is too far behind `step`.

        A stage at version v has sent step v - 1 through experts of version v - 1 - s_max or later, and begins no step
        after v + s_max. So an expert more than 2 s_max + 1 versions behind `step` was suspended, or has missed the end
        of rounds, while other holders have not.

        Raises: Refused: an expert is so far behind.
        """
        if any(step - work.version > 2 * self._s_max + 1 for work in works):
            raise Refused(self._endpoint.peer_id, f"is far behind step {step}")

    def _held(self, stage: int, experts: list[int], layer: int | None = None) -> list[ExpertWork]:
        """Return the `ExpertWork` of each expert. Raises: Refused: an expert is not here or not ready; with `layer`,
        also if an expert is paused or not of that layer."""
        works = [self._works.get((stage, expert)) for expert in experts]
        held = [work for work in works if work is not None and work.upwards.is_ready]
        if len(held) < len(experts):
            raise Refused(self._endpoint.peer_id, f"does not hold all of the experts {experts} of stage {stage}")
        if layer is not None and any(work.is_paused for work in held):
            raise Refused(self._endpoint.peer_id, "pauses")
        if layer is not None and any(layer not in work.runtime.layers for work in held):
            raise Refused(self._endpoint.peer_id, f"holds no experts of layer {layer} in stage {stage}")
        return held

    def _work(self, request: _Request, works: list[ExpertWork], wanted: list[bool]) -> Payload:
        """Compute a request with each of its experts; called on the device's thread. Args: wanted: for each expert,
        True if the expert's group lacks the gradient."""
        meta = request.meta
        size = len(request.payload) // (2 if meta.backward else 1)
        tokens = self._wire.part(request.payload, slice(0, size))
        gradients = self._wire.part(request.payload, slice(size, None))
        outputs = []
        spans = self._wire.rows(dict(meta.counts))
        for work, is_wanted in zip(works, wanted, strict=True):
            runtime, span = work.runtime, spans[work.expert]
            x_ND = self._wire.decode(self._wire.part(tokens, span), runtime.device)
            if meta.backward:
                grad_ND = self._wire.decode(self._wire.part(gradients, span), runtime.device)
                y_ND = runtime.backward(request.run, meta.layer, x_ND, grad_ND, wanted=is_wanted)
            else:
                y_ND = runtime.forward(request.run.microbatch, meta.layer, x_ND)
            outputs.append(self._wire.encode(y_ND))
        return self._wire.joined(outputs)

    async def _answer(self, source: PeerID, meta: ExpertTokens, payload: Payload, refused: str) -> None:
        output = ExpertOutput(stage=meta.stage, incarnation=meta.incarnation, serial=meta.serial, refused=refused)
        priority = Priority.GRADIENT if meta.backward else Priority.ACTIVATION
        try:
            await self._endpoint.send(source, output, payload, priority=priority)
        except Unreachable as error:
            logger.info("cannot return tokens: %s", error)  # the sender asks again if it is still there

    # --- the end of a run ---

    async def _on_done(self, source: PeerID, message: ExpertDone) -> Done:
        self._wire.check_microbatch(message.step, message.index, source)
        if message.index < 0:
            raise RemoteError(source, "reports a validation as a contribution")
        if not self._plans.knows(source):
            raise Refused(self._endpoint.peer_id, "does not know the sender as a member of the run")
        run = run_of(source, message)
        works = self._held(message.stage, [expert for expert, _ in message.experts])
        self._check_near(works, message.step)
        for work, (_, layers) in zip(works, message.experts, strict=True):
            if message.step >= work.version and layers > 0 and not work.has_whole(run, layers):
                raise Refused(self._endpoint.peer_id, f"lacks layers of microbatch {run.microbatch}")
        for work in works:
            work.close_run(run, retried=message.retried)
        return Done()
