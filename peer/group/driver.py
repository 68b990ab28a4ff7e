"""Carries out what a member's core asks for its group: it tells mates, reduces over the wire, and hands the mean
gradient to whatever steps.

The path of a commit through this file: `Tell` (`Progress` to the mates) -> `_on_round_start` -> `Reduce` -> `_begin`
-> frames `ReducePart` and `GatherPart` -> `_complete` -> `Stepper.commit` -> `stepped` -> `Tell` (`Digest`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from torch import Tensor

from shoal.peer.arithmetic import Held
from shoal.peer.group.catching_up import CatchingUp
from shoal.peer.group.early import Early, Piece
from shoal.peer.group.pieces import Pieces
from shoal.peer.group.pressing import PRESS_S, Pressing
from shoal.peer.group.reduce import Reduction
from shoal.peer.group.telling import Telling
from shoal.peer.outbox import Outbox
from shoal.peer.pipeline.microbatch import indices_from
from shoal.peer.replica.commands import CatchUp, ForgetMember, Reduce, Tell
from shoal.peer.replica.events import CommitEvent, DigestArrived, ProgressArrived, RoundArrived, StoodStill
from shoal.peer.replica.views import GroupView
from shoal.peer.tasks import Tasks
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX, REPLAYED_STEPS_MIN
from shoal.protocol.messages import (
    Digest,
    Done,
    GatherPart,
    Progress,
    ReducePart,
    RoundStart,
)
from shoal.protocol.ports import Clock, Compute, Payload

logger = logging.getLogger(__name__)

_CHUNKS_AT_ONCE: Final = 8
"""Added up before the first of them is sent: a switch of threads for each would cost as much as adding it."""


GroupDeed = Tell | Reduce | CatchUp | ForgetMember
"""What the group asks for that its members do among themselves."""


class Stepper(Protocol):
    """What computes the gradients and makes the step."""

    @property
    def runtime(self) -> Held: ...

    @property
    def compute(self) -> Compute:
        """The device; sums and copies of gradients are made beside its jobs."""
        ...

    @property
    def version(self) -> int: ...

    def commit(self, step: int, mean_gradient_N: Tensor) -> None:
        """The reduced gradient of `step` is complete: step as soon as the running job ends."""
        ...


class GroupDriver:
    """One member's part in its group.

    Args:
        core: to be read.
        post: hands the member's core an event; raises `Refused` or `RemoteError` if it declines.
        on_behind: we are too far behind that mate: fetch the state from it.
        on_unreachable: a mate does not answer.
        on_failure: this peer cannot go on.
        retained_from: the oldest version some newcomer still builds on; reduced gradients from there on are kept.
    """

    def __init__(
        self,
        core: GroupView,
        stepper: Stepper,
        *,
        endpoint: Endpoint,
        clock: Clock,
        post: Callable[[CommitEvent], None],
        on_behind: Callable[[PeerID], None],
        on_unreachable: Callable[[PeerID], None],
        on_failure: Callable[[BaseException], None],
        retained_from: Callable[[], int],
    ) -> None:
        self.core = core
        self._stepper = stepper
        self._vectors = stepper.runtime.vectors
        self._endpoint = endpoint
        self._clock = clock
        self._post = post
        self._retained_from = retained_from
        self._outbox = Outbox(endpoint, on_trouble=on_unreachable)
        self._telling = Telling(self.core.me, self._outbox, self._audience)
        self._reductions: dict[int, Reduction] = {}
        vectors, size = self._vectors, stepper.runtime.num_parameters
        mean_bytes = self._vectors.gradient_bytes * size
        self._replayed_steps = max(REPLAYED_STEPS_MIN, REPLAYED_BYTES_MAX // max(1, mean_bytes))
        # Two parts of the gradient go from one mate to another: one's own, and what it has of the other's.
        self._early = Early(vectors.chunk * vectors.gradient_bytes, size // vectors.chunk + 2)
        self._means: dict[int, Tensor] = {}  # step -> reduced gradient, until stepped and for those behind us
        self._committing = -1  # the version that the pipeline is stepping from
        self._committing_round: RoundStart | None = None  # whose result it steps with; None: a mate's
        self._tasks = Tasks(on_failure)
        self._compute = stepper.compute
        self._pieces = Pieces(endpoint, self._vectors, self._tasks, clock, self._compute)
        self._catching_up = CatchingUp(
            stage=core.stage,
            size=size,
            vectors=vectors,
            endpoint=endpoint,
            compute=self._compute,
            pieces=self._pieces,
            means=lambda: self._means,
            version=lambda: self.core.version,
            on_mean=self._mean_came,
            on_behind=on_behind,
            gives_to=core.has_place,
        )
        self._pressing = Pressing()
        self._closed = False

    def install(self) -> None:
        stage = self.core.stage
        self._endpoint.on(Progress, self._on_progress_message, stage=stage)
        self._endpoint.on(RoundStart, self._on_round_start, stage=stage)
        self._endpoint.on(Digest, self._on_digest, stage=stage)
        self._endpoint.on_frame(ReducePart, self._on_part, stage=stage)
        self._endpoint.on_frame(GatherPart, self._on_part, stage=stage)
        self._catching_up.install()
        self._tasks.spawn(self._press(), "press")

    def retire(self) -> None:
        """We take part in nothing any more, whatever still arrives."""
        self._closed = True

    async def close(self) -> None:
        self._closed = True
        self._endpoint.leave_stage(self.core.stage)
        self._telling.close()
        await self._tasks.cancel()
        await self._outbox.close()

    # --- told by the rest of the peer ---

    def perform(self, command: GroupDeed) -> None:
        """Do what the core asks."""
        if self._closed:
            return
        match command:
            case Tell():
                self._telling.tell(command)
            case Reduce(start):
                self._begin(start)
            case CatchUp(mate, step):
                self._catch_up(mate, step)
            case ForgetMember(peer, died):
                self._outbox.forget(peer)
                if died:
                    self._catching_up.mate_lost(peer)
                    self._pieces.forget(peer)

    def stepped(self, version: int) -> RoundStart | None:
        """The pipeline has stepped to `version`, or loaded a state of it, and the core is about to hear so.

        Returns: the round whose result it has stepped with.
        """
        keep_from = min(version - 1, max(self._retained_from(), version - self._replayed_steps))
        self._means = {step: mean_N for step, mean_N in self._means.items() if step >= keep_from}
        self._reductions = {step: r for step, r in self._reductions.items() if step >= version}
        self._early.forget_before(version, mates=(*self.core.mates, *self.core.departing))
        return self._committing_round if version == self._committing + 1 else None

    async def fetch_mean(self, mate: PeerID, step: int) -> bool:
        """As `CatchingUp.fetch`."""
        return await self._catching_up.fetch(mate, step)

    # --- messages ---

    async def _on_progress_message(self, source: PeerID, message: Progress) -> Done:
        self._post(ProgressArrived(source, message))
        return Done()

    async def _on_round_start(self, source: PeerID, message: RoundStart) -> Done:
        self._post(RoundArrived(source, message))
        return Done()

    async def _on_digest(self, source: PeerID, message: Digest) -> Done:
        self._post(DigestArrived(source, message))
        return Done()

    # --- frames ---

    async def _on_part(self, source: PeerID, meta: Piece, payload: Payload) -> None:
        if meta.step < self.core.version:
            return
        reduction = self._reductions.get(meta.step)
        if reduction is None or reduction.start.attempt < meta.attempt:
            # A mate heard of the round before we did. Who is no mate yet, by our plan, sends it again.
            if self.core.has_place(source):
                self._early.keep(source, meta, payload)
        elif reduction.start.attempt == meta.attempt:
            await self._take(reduction, source, meta, payload)

    # --- inside ---

    def _audience(self, message: Progress | RoundStart | Digest) -> list[PeerID]:
        """The mates, those who are about to leave, and whoever else is in the round."""
        named: Sequence[PeerID] = ()
        if isinstance(message, RoundStart):
            named = [m.peer for m in message.members]
        elif isinstance(message, Digest):
            named = self.core.round_mates
        near = [*self.core.mates, *self.core.departing]
        return [*near, *(peer for peer in named if peer != self.core.me and peer not in near)]

    def _begin(self, start: RoundStart) -> None:
        core, runtime = self.core, self._stepper.runtime
        mine = next(member.indices for member in start.members if member.peer == core.me)
        make_sum = runtime.gradient_sum(start.step, indices_from(mine, count=core.microbatches))
        reduction = Reduction(
            core.me, start, runtime.num_parameters, microbatches=core.microbatches, vectors=self._vectors
        )
        self._reductions[start.step] = reduction
        early = self._early.take(start.step, start.attempt)
        self._tasks.spawn(self._reduce(reduction, make_sum, early), f"round {start.step}")

    async def _reduce(
        self, reduction: Reduction, make_sum: Callable[[], Tensor], early: list[tuple[PeerID, Piece, Payload]]
    ) -> None:
        """Begin the round: send our sum, add up what needs nothing of others, take what came early."""
        due = reduction.begin(await self._compute.run_on_host(make_sum))
        if self._reductions.get(reduction.start.step, reduction) is not reduction:
            return  # A later attempt at the step has taken its place.
        for peer in reduction.others:
            self._pieces.send(reduction.scatter_to(peer), reduction.start, ReducePart)
        for at in range(0, len(due), _CHUNKS_AT_ONCE):
            await self._add_up(reduction, due[at : at + _CHUNKS_AT_ONCE])
        for source, meta, payload in early:
            try:  # it is not the fault of whoever tells us of the round
                await self._take(reduction, source, meta, payload)
            except RemoteError as error:
                logger.warning("an early piece of round %d: %s", reduction.start.step, error)
        self._complete(reduction)

    async def _take(self, reduction: Reduction, source: PeerID, meta: Piece, payload: Payload) -> None:
        if isinstance(meta, ReducePart):
            if reduction.part_arrived(source, meta.start, payload):
                await self._add_up(reduction, [meta.start])
        elif (take := reduction.result_arrived(source, meta.start, payload)) is not None:
            await self._compute.run_on_host(take)
            reduction.taken(meta.start)
            self._complete(reduction)

    async def _add_up(self, reduction: Reduction, chunks: Sequence[int]) -> None:
        await self._compute.run_on_host(reduction.adding(chunks))
        self._pieces.send(reduction.added(chunks), reduction.start, GatherPart)
        self._complete(reduction)

    def _complete(self, reduction: Reduction) -> None:
        if reduction.is_complete and self._reductions.get(reduction.start.step) is reduction:
            self._means[reduction.start.step] = reduction.mean_N
            self.commit_if_complete()

    def commit_if_complete(self) -> None:
        """Have the step made whose reduced gradient is here already."""
        version = self.core.version
        mean_N = self._means.get(version)
        if mean_N is not None and self._committing < version and not self._closed:
            assert self._stepper.version == version, "the pipeline and the group disagree on the version"
            self._committing = version
            ours = self._reductions.get(version)
            self._committing_round = ours.start if ours is not None and ours.mean_N is mean_N else None
            self._stepper.commit(version, mean_N)

    def _mean_came(self, step: int, mean_N: Tensor) -> None:
        self._means[step] = mean_N
        self.commit_if_complete()

    async def _press(self) -> None:
        """Send again what may have been lost in a round that does not end: of a stream that breaks nobody knows what
        had arrived. Whoever has ended it meanwhile does not, but says so by its digest. And where none has begun, what
        the lead may have forgotten: who could not be reached for a moment does not know that."""
        version = -1
        while True:
            await asyncio.sleep(PRESS_S)
            if version == self.core.version < self.core.steps and self.core.ready:
                logger.info("stage %d stays at version %d: %s", self.core.stage, version, self.core.waits_for())
                if version not in self._reductions:
                    self._post(StoodStill())
            version, now_s = self.core.version, self._clock.now_s()
            reduction = self._reductions.get(version)
            if not self._pressing.stands_still(reduction, now_s) or reduction is None or self._closed:
                continue
            owing = ", ".join(peer[-8:] for peer in sorted(reduction.missing_from()))
            logger.info("round %d does not end, for want of pieces from %s", version, owing)
            self._post(StoodStill())
            for peer in reduction.others:
                took_s = self._pieces.slowest_s(peer)
                if not self._pieces.is_sending_to(peer) and self._pressing.is_due(peer, now_s, took_s=took_s):
                    self._send_again(reduction, peer)

    def _send_again(self, reduction: Reduction, peer: PeerID) -> None:
        self._pieces.send(reduction.scatter_to(peer), reduction.start, ReducePart)
        finished = (out for out in reduction.finished() if out.target == peer)
        self._pieces.send(finished, reduction.start, GatherPart)

    def _catch_up(self, mate: PeerID, step: int) -> None:
        owing: list[PeerID] = []
        reduction = self._reductions.get(step)
        if reduction is not None and not self._pressing.was_in_vain(reduction):
            owing = sorted(reduction.missing_from().intersection(self.core.mates))
        catch_up = self._catching_up.catch_up(mate, step, owing=owing[0] if owing else None)
        self._tasks.spawn(catch_up, f"catch up with step {step}")
