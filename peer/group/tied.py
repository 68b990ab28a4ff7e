"""Sum the gradient of a tied matrix (embedding and head), which the first and the last stage (the two ends) hold.

Each end reduces its own gradient in its group, as every stage does, and rounds it to the format of reductions. Then
each member fetches the other end's gradient and adds the two. Addition of two numbers has no order, so all members of
both ends step the matrix with the same bits. The matrix is equal at both ends at the beginning and its gradient is
clipped by its own norm, so the matrix stays equal. If one stage is both ends, its members add the two parts locally.

    round ends -> `RoundEnded` to the group -> all have answered -> `TiedRequest` to a member of the other end
    -> `TiedOffer` and frames `TiedChunk` -> the sum -> all members of the other end have it, too -> step

**One result a step.** A gradient that the other end has received cannot be taken back. But if a member dies after its
round has ended, its group reduces again without it, to other bits. So when a member's round has ended, the member first
tells the others of its group (`RoundEnded`). A member that has acknowledged this joins no other attempt at that step
while the sender lives: it ends the same round, too, or catches up after the sender's step. When all living members have
acknowledged, the gradient may leave the group. If all members with the result then die, the group reduces again; but if
the other end has already added the dead members' gradient, the group steps the matrix with that sum.

**No step before the other end has the sum.** A member waits until each member of the other end has the sum or can get
it from its group. If members stepped earlier and then died, their replacements would begin at the next version without
the sum, and a member of the other end that is behind could get the sum from nobody.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3
from torch import Tensor

from shoal.peer.base.tasks import Tasks
from shoal.peer.base.tolerating import Tolerating
from shoal.peer.encoding.vectors import REDUCED_MAX, Vectors
from shoal.peer.group.reduce import Reduction
from shoal.peer.replica.views import GroupView
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import OPEN_STEPS_MAX
from shoal.protocol.messages import Done, RoundEnded, RoundStart, TiedChunk, TiedOffer, TiedRequest
from shoal.protocol.ports import Compute, Payload, Priority
from shoal.protocol.wire_format import WireFormat, tensor_bytes

logger = logging.getLogger(__name__)

_AGAIN_S: Final = 0.5
_ANSWER_S: Final = 2.0
"""Seconds for which we wait for an answer. Between tries we check whether the plan has dropped the peer."""
_WAIT_S: Final = 5.0
"""Seconds for which a request of the other end (last or first stage) waits for our own round to end. Then we refuse it,
so that the requester can ask another member, which may be further ahead."""
_SILENT_S: Final = 5.0
"""Seconds after which a silent member of the other end (last or first stage) counts as one that has the sum or gets it
from its group, if another member there has it."""


@dataclass(slots=True)
class _Promise:
    """Binds this member to one attempt at a step, since some member already has that attempt's result."""

    attempt: int
    told_by: set[PeerID]
    """The living members of the group that have the result, this member included once its round has ended."""
    put_off: RoundStart | None = None
    """The latest round of another attempt that the leader has opened. This member joins it once `told_by` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The gradient of the matrix that one end sends to the other end."""

    values_n: Tensor
    """The gradient, float32 [n], rounded to the values that the receiver decodes."""
    form: WireFormat
    is_whole: bool
    """True for the sum of both ends' gradients, False for one end's."""
    made: Mapping[int, Payload] = field(default_factory=dict)
    """First element -> the piece's bytes, for formats of few bits: encoding `values_n` again would round it again."""


@dataclass(slots=True)
class _Fetch:
    source: PeerID
    serial: int
    missing: set[int]
    pieces: dict[int, Payload] = field(default_factory=dict)
    """First element -> a piece's bytes, decoded last: the offer that names the format may come after the pieces."""
    is_lost: bool = False
    more: asyncio.Event = field(default_factory=asyncio.Event)


class TiedGradient:
    """One member's side of the exchange, in the group of the stage at one end of the pipeline.

    N parameters of the stage   n parameters of the matrix

    Args:
        spans: the slices of the matrix among our parameters (`tied_spans`): one, or two if the stage is both ends.
        keep_steps: number of steps for which results are kept: a member of the other end may be that far behind us.
        other_end: returns the number of the other end's stage and its planned members; None: our stage is both ends.
        on_whole: called with a step's gradient, float32 [N], which has both ends' sum for the matrix, and our round.
        begin: called to take part in a round that was put off.
    """

    def __init__(
        self,
        core: GroupView,
        spans: Mapping[str, slice],
        *,
        vectors: Vectors,
        endpoint: Endpoint,
        compute: Compute,
        tasks: Tasks,
        keep_steps: int,
        other_end: Callable[[], tuple[int, Sequence[PeerID]] | None],
        on_whole: Callable[[Tensor, RoundStart], None],
        begin: Callable[[RoundStart], None],
    ) -> None:
        self._core, self._spans = core, tuple(spans.values())
        self._vectors, self._endpoint, self._compute, self._tasks = vectors, endpoint, compute, tasks
        self._exact = vectors.mean_form
        """The format in which a sum of both ends' gradients travels."""
        self._piece_bytes_max = max(tensor_bytes(form, vectors.chunk) for form in (self._exact, *vectors.sums))
        self._other_end, self._on_whole, self._begin = other_end, on_whole, begin
        self._keep_steps = keep_steps
        self._size = self._spans[0].stop - self._spans[0].start
        self._promises: dict[int, _Promise] = {}
        self._given: dict[int, _Given] = {}
        """Step -> our gradient of the matrix, or both ends' sum, for the other end (last or first stage) to fetch."""
        self._news = asyncio.Event()
        """Set when a change may let a waiting request go on; a new event then takes its place."""
        self._fetches: dict[int, _Fetch] = {}
        self._num_asked = 0
        self._silent: dict[PeerID, float] = {}
        """Member of the other end -> when it stopped answering."""

    def install(self) -> None:
        stage = self._core.stage
        self._endpoint.on(RoundEnded, self._on_round_ended, stage=stage)
        self._endpoint.on(TiedRequest, self._on_request, stage=stage)
        self._endpoint.on_frame(TiedChunk, self._on_chunk, stage=stage)

    # --- our group ---

    def may_begin(self, start: RoundStart) -> bool:
        """True if we may take part in a round now; otherwise the round is put off, and `begin` may be called later."""
        promise = self._promises.get(start.step)
        if promise is None or promise.attempt == start.attempt:
            return True
        if not promise.told_by:
            del self._promises[start.step]
            return True
        logger.info("round %d: attempt %d ended before attempt %d", start.step, promise.attempt, start.attempt)
        promise.put_off = start
        return False

    def ended(self, reduction: Reduction) -> None:
        """Start the exchange after our round. Repeated calls have no effect."""
        start = reduction.start
        promise = self._promised(start.step, start.attempt)
        if promise.attempt == start.attempt and self._core.me not in promise.told_by:
            promise.told_by.add(self._core.me)
            self._tasks.spawn(self._meet(reduction), f"both ends of step {start.step}")

    def _promised(self, step: int, attempt: int) -> _Promise:
        """Return our promise for `step`: the old one while a living member has its attempt's result, else a new promise
        for `attempt`."""
        promise = self._promises.get(step)
        if promise is None or not promise.told_by:
            promise = self._promises[step] = _Promise(attempt, set())
        return promise

    def look(self) -> None:
        """Join a put-off round if all members with the other attempt's result are dead. Give up fetches from peers that
        the plan has dropped from the other end. Call this after each change of members."""
        other = self._other_end()
        for fetch in self._fetches.values():
            if other is None or fetch.source not in other[1]:
                fetch.is_lost = True
                fetch.more.set()
        holders = (self._core.me, *self._core.holders)
        for promise in self._promises.values():
            promise.told_by.intersection_update(holders)
        for step, promise in list(self._promises.items()):
            if promise.put_off is not None and not promise.told_by:
                del self._promises[step]
                self._begin(promise.put_off)

    def mate_lost(self, peer: PeerID) -> None:
        """Record that a member is gone or has restarted, and so has lost the results of its rounds."""
        for promise in self._promises.values():
            promise.told_by.discard(peer)

    def reached(self, version: int) -> None:
        """Drop promises and gradients that are no longer needed at `version`."""
        self._promises = {step: promise for step, promise in self._promises.items() if step >= version}
        self._given = {step: given for step, given in self._given.items() if step >= version - self._keep_steps}
        self._tell()

    async def _on_round_ended(self, source: PeerID, message: RoundEnded) -> Done:
        if message.step < self._core.version:
            return Done()  # the sender will catch up with us
        if not self._core.has_place(source) or message.step >= self._core.version + OPEN_STEPS_MAX:
            raise Refused(self._core.me, f"does not know the sender as a member of group {self._core.stage}")
        promise = self._promised(message.step, message.attempt)
        if promise.attempt != message.attempt:
            raise Refused(self._core.me, f"holds to another attempt at step {message.step}")
        promise.told_by.add(source)
        self._tell()
        return Done()

    async def _told(self, mate: PeerID, start: RoundStart) -> None:
        """Tell `mate` that the round has ended; repeat this until `mate` answers or is gone, or we make the step."""
        word = RoundEnded(stage=start.stage, step=start.step, attempt=start.attempt)
        while self._is_open(start.step) and not self._core.is_gone(mate):
            with Tolerating(logger.debug, f"the end of step {start.step}'s round is not acknowledged"):
                await self._endpoint.ask(mate, word, Done, timeout_s=_ANSWER_S)
                return
            await asyncio.sleep(_AGAIN_S)

    # --- both ends ---

    async def _meet(self, reduction: Reduction) -> None:
        start = reduction.start
        await asyncio.gather(*(self._told(mate, start) for mate in reduction.others))
        if not self._is_open(start.step):
            return
        mean_N = reduction.mean_N
        if self._other_end() is None:
            whole_N = await self._compute.run_on_host(lambda: self._added_here(mean_N))
        else:
            ours = await self._compute.run_on_host(lambda: self._rounded(mean_N, start))
            self._give(start.step, ours)
            theirs = await self._fetched(start.step)
            if theirs is None:
                return
            whole_N, whole = await self._compute.run_on_host(lambda: self._added(mean_N, ours, theirs))
            if not self._is_open(start.step):
                return
            self._give(start.step, whole)
            await self._known_there(start.step)
        if self._is_open(start.step):
            self._on_whole(whole_N, start)

    def _is_open(self, step: int) -> bool:
        """True if we have not made the step. (A round may end before we reach its step, if its leader is ahead.)"""
        return self._core.version <= step

    # The following methods change a copy of a reduced gradient: other members may still need pieces of the original.

    def _added_here(self, mean_N: Tensor) -> Tensor:
        whole_N = self._vectors.copied(mean_N)
        self._vectors.meet(whole_N, self._spans, [mean_N[span] for span in self._spans[1:]])
        return whole_N

    def _rounded(self, mean_N: Tensor, start: RoundStart) -> _Given:
        """Return our end's gradient of the matrix, rounded to what the other end will decode; we add the same numbers.
        All members of our group make the same bytes."""
        own_n, made = self._vectors.copied(mean_N[self._spans[0]]), {}
        for at, size in self._chunks():
            payload = self._vectors.round_mean(own_n[at : at + size], start.form, _key(start, at))
            if payload is not None:
                made[at] = payload
        return _Given(values_n=own_n, form=start.form, is_whole=False, made=made)

    def _added(self, mean_N: Tensor, ours: _Given, theirs: _Given) -> tuple[Tensor, _Given]:
        """Return (a copy of our stage's gradient that contains the sum of both ends' matrix gradients, that sum)."""
        whole_N, span = self._vectors.copied(mean_N), self._spans[0]
        if theirs.is_whole:
            whole_N[span] = theirs.values_n
        else:
            whole_N[span] = ours.values_n
            self._vectors.meet(whole_N, self._spans, [theirs.values_n])
        return whole_N, _Given(values_n=self._vectors.copied(whole_N[span]), form=self._exact, is_whole=True)

    def _chunks(self) -> list[tuple[int, int]]:
        chunk = self._vectors.chunk
        return [(at, min(chunk, self._size - at)) for at in range(0, self._size, chunk)]

    def _give(self, step: int, given: _Given) -> None:
        self._given[step] = given
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _known_there(self, step: int) -> None:
        """Wait until each member of the other end has the sum, or is silent and can get it there; or we stepped."""
        known: set[PeerID] = set()
        while self._is_open(step) and (other := self._other_end()) is not None:
            stage, peers = other
            waiting = [peer for peer in peers if peer not in known]
            answers = await asyncio.gather(*(self._knows(peer, stage, step) for peer in waiting))
            known.update(peer for peer, knows in zip(waiting, answers, strict=True) if knows)
            now_s = asyncio.get_running_loop().time()
            if all(peer in known or (known and now_s >= self._silent_since(peer) + _SILENT_S) for peer in peers):
                return
            await asyncio.sleep(_AGAIN_S)

    def _silent_since(self, peer: PeerID) -> float:
        return self._silent.get(peer, math.inf)

    async def _knows(self, peer: PeerID, stage: int, step: int) -> bool:
        asked_s = asyncio.get_running_loop().time()
        request = TiedRequest(stage=stage, step=step, peek=True)
        try:
            offer = await self._endpoint.ask(peer, request, TiedOffer, timeout_s=_ANSWER_S)
        except Refused:
            return True  # it is no longer a member there, or has only just become one
        except (Unreachable, RemoteError):
            self._silent.setdefault(peer, asked_s)
            return False
        self._silent.pop(peer, None)
        return offer.is_whole

    async def _fetched(self, step: int) -> _Given | None:
        """Fetch and return the other end's gradient of the matrix; None: we made the step by other means meanwhile."""
        tried = self._core.standing[0]  # spread our group's requests over the other end
        while self._is_open(step) and (other := self._other_end()) is not None:
            stage, peers = other
            for number in range(len(peers)):
                if not self._is_open(step):
                    return None
                with Tolerating(logger.debug, f"no gradient of the other end for step {step}"):
                    return await self._fetch(peers[(tried + number) % len(peers)], stage, step)
            await asyncio.sleep(_AGAIN_S)
        return None

    async def _fetch(self, peer: PeerID, stage: int, step: int) -> _Given:
        self._num_asked += 1
        fetch = self._fetches[step] = _Fetch(peer, self._num_asked, {at for at, _ in self._chunks()})
        request = TiedRequest(stage=stage, step=step, serial=fetch.serial)
        asking = asyncio.ensure_future(self._endpoint.ask(peer, request, TiedOffer, timeout_s=_WAIT_S + _ANSWER_S))
        asking.add_done_callback(lambda _: fetch.more.set())
        try:
            while fetch.missing or not asking.done():
                if fetch.is_lost or (asking.done() and asking.exception() is not None):
                    break
                fetch.more.clear()
                try:
                    async with asyncio.timeout(60.0):  # if no piece comes, begin again with another member
                        await fetch.more.wait()
                except TimeoutError:
                    fetch.is_lost = True
            if fetch.is_lost:
                raise Unreachable(peer, f"its gradient of step {step} did not arrive")
            return await self._compute.run_on_host(functools.partial(self._read, fetch, asking.result()))
        finally:
            asking.cancel()
            del self._fetches[step]

    def _read(self, fetch: _Fetch, offer: TiedOffer) -> _Given:
        """Decode the other end's fetched pieces. Raises: RemoteError: the offer or a piece is invalid."""
        if offer.form not in (self._exact, *self._vectors.sums):
            raise RemoteError(fetch.source, f"sends gradients as {offer.form}, which this run does not")
        values_n = self._vectors.empty(self._size)
        for at, size in self._chunks():
            payload = fetch.pieces[at]
            if len(payload) != tensor_bytes(offer.form, size):
                raise RemoteError(fetch.source, f"sent {len(payload)} bytes for {size} numbers of a gradient at {at}")
            values_n[at : at + size] = piece_C = self._vectors.piece_of(payload, offer.form, size)
            if not self._vectors.is_within(piece_C, REDUCED_MAX):
                raise RemoteError(fetch.source, f"sent numbers that no gradient has, at {at}")
        return _Given(values_n=values_n, form=offer.form, is_whole=offer.is_whole)

    async def _on_chunk(self, source: PeerID, meta: TiedChunk, payload: Payload) -> None:
        fetch = self._fetches.get(meta.step)
        if fetch is None or (fetch.source, fetch.serial) != (source, meta.serial) or meta.start not in fetch.missing:
            return  # the piece may belong to an earlier answer with another gradient
        if len(payload) > self._piece_bytes_max:
            raise RemoteError(source, f"sent {len(payload)} bytes for a piece of a gradient")
        fetch.pieces[meta.start] = payload
        fetch.missing.discard(meta.start)
        fetch.more.set()

    async def _on_request(self, source: PeerID, message: TiedRequest) -> TiedOffer:
        step = message.step
        if message.peek:
            await self._wait_for(lambda: not self._needs(step), 1.0)  # we may have the sum in a moment
            return TiedOffer(is_whole=not self._needs(step))
        other = self._other_end()
        if other is None or source not in other[1]:
            raise Refused(self._core.me, f"does not know the sender as a member of the end beyond {self._core.stage}")
        await self._wait_for(lambda: step in self._given or self._core.version > step, _WAIT_S)
        if step not in self._given:
            why = "keeps nothing of" if self._core.version > step else "has not reduced"
            raise Refused(self._core.me, f"{why} step {step}")
        given = self._given[step]
        self._tasks.spawn(self._send(source, other[0], message, given), "to the other end")
        return TiedOffer(is_whole=given.is_whole, form=given.form)

    def _needs(self, step: int) -> bool:
        """True if we lack the sum of `step` and only the other end can give it to us. If we have acknowledged another
        member's result of the round, and have not finished the round ourselves, that member gives us the sum."""
        if not self._core.ready or self._core.version > step or (step in self._given and self._given[step].is_whole):
            return False
        promise = self._promises.get(step)
        return promise is None or self._core.me in promise.told_by or not promise.told_by

    async def _wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    await self._news.wait()

    async def _send(self, target: PeerID, stage: int, asked: TiedRequest, given: _Given) -> None:
        for at, size in self._chunks():
            payload = given.made.get(at)
            if payload is None:
                values_C = given.values_n[at : at + size]
                payload = await self._compute.run_on_host(
                    functools.partial(self._vectors.piece_payload, values_C, given.form, (0, 0))
                )
            try:
                meta = TiedChunk(stage=stage, step=asked.step, serial=asked.serial, start=at)
                await self._endpoint.send(target, meta, payload, priority=Priority.REDUCTION)
            except Unreachable as error:
                logger.warning("step %d for the other end: %s", asked.step, error)
                return


def _key(start: RoundStart, at: int) -> tuple[int, int]:
    digest = blake3(f"{start.stage} {start.step} {at} tied".encode()).digest(length=8)
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
