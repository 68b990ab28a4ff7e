"""Stage 0: gets microbatches from the group's lead, or hands them out as the lead."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from shoal.peer.group.core import GroupCore
from shoal.peer.outbox import Outbox
from shoal.peer.pipeline.core import PipelineCore
from shoal.peer.pipeline.issue import IssueBook
from shoal.peer.pipeline.microbatch import IndexSet, Microbatch
from shoal.peer.pipeline.pace import Pace
from shoal.peer.tasks import Tasks
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import OPEN_STEPS_MAX
from shoal.protocol.messages import (
    Again,
    Claim,
    Done,
    Grant,
    Halt,
    Halted,
    Progress,
    Repair,
    ValidationReport,
    ValidationResult,
)
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Clock

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""How long the lead keeps a claim open when everything admissible is taken."""
_RETRY_S = 0.2
_SHARE_MIN = 1e-3
_STEPS_APART = 2
"""So many steps the lead may be ahead of a mate that takes part."""
_HALT_S = 10.0
"""How long a halt lasts that is not asked for again: who asked for it is gone, or a successor holds its stage."""
_ASKED_MAX = 16
"""The quickest of so many answers is one that did not wait for something to become admissible."""


class Claims:
    """One stage-0 replica's supply.

    Args:
        on_grant: a microbatch is ours to make; whether it may have run before.
        on_failure: we cannot claim any more.
        on_validation: all validation microbatches of a version are back (only at the lead).
    """

    def __init__(
        self,
        book: IssueBook,
        group: GroupCore,
        pipeline: PipelineCore,
        *,
        endpoint: Endpoint,
        clock: Clock,
        on_grant: Callable[[Microbatch, bool], None],
        on_validation: Callable[[ValidationReport], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.book = book
        self._group = group
        self._pipeline = pipeline
        self._endpoint = endpoint
        self._clock = clock
        self._on_grant = on_grant
        self._on_validation = on_validation
        self._on_failure = on_failure
        self._outbox = Outbox(endpoint)
        self._tasks = Tasks(on_failure)
        self._losses: dict[int, dict[int, float]] = {}
        self._changed = asyncio.Event()
        self._asked_s: deque[float] = deque(maxlen=_ASKED_MAX)  # how long recent answers took
        self._asked: tuple[PeerID, asyncio.Future[Grant]] | None = None
        self._waiting: dict[PeerID, tuple[int, asyncio.Future[list[Microbatch]]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._draining = False
        self._plan: Plan | None = None
        self._halts: dict[PeerID, float] = {}  # who leaves and alone holds a stage: until when no step begins for it
        self._pace = Pace()
        self._made_s: dict[PeerID, float] = {}  # when each claimant last contributed something of ours
        self._out: dict[Microbatch, tuple[PeerID, float]] = {}  # granted by us: to whom and when

    def install(self) -> None:
        self._endpoint.on(Claim, self._on_claim)
        self._endpoint.on(Repair, self._on_repair)
        self._endpoint.on(Again, self._on_again)
        self._endpoint.on(ValidationResult, self._on_validation_result)
        self._endpoint.on(Halt, self._on_halt)

    def start(self) -> None:
        self._task = asyncio.create_task(self._claim_forever(), name="claims")
        self._task.add_done_callback(self._ended)

    def drain(self, draining: bool = True) -> None:
        """Claim no more; or go on."""
        self._draining = draining
        if not draining:
            self.wake()

    async def close(self) -> None:
        self._endpoint.off(self._on_claim, self._on_repair, self._on_again, self._on_validation_result, self._on_halt)
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._tasks.cancel()
        await self._outbox.close()

    def follow(self, plan: Plan) -> None:
        """Who is not in the plan any more has left: no halt is for it."""
        self._plan = plan
        self._halts = {peer: until_s for peer, until_s in self._halts.items() if plan.has(peer)}
        self._end_halts()

    def reach(self, version: int) -> None:
        """This replica is at `version`."""
        self.book.reach(version)
        for old in [v for v in self._losses if v < version - 4]:
            del self._losses[old]
        self._out = {m: grant for m, grant in self._out.items() if m.step >= version}
        self._serve_soon()
        self.wake()

    def mate_progress(self, source: PeerID, message: Progress) -> None:
        """So that any of us can be lead next, everyone keeps the book."""
        count = self.book.microbatches
        made = IndexSet.from_bytes(message.indices, count=count)
        self.book.take(message.step, made)
        self.book.take(message.step, IndexSet.from_bytes(message.claimed, count=count))
        for microbatch, (peer, _) in list(self._out.items()):
            if peer == source and microbatch.step == message.step and microbatch.index in made:
                self.made(microbatch)

    def made(self, microbatch: Microbatch) -> None:
        """Whoever it was granted to has contributed it."""
        grant = self._out.pop(microbatch, None)
        if grant is not None:
            self._made_s[grant[0]] = self._clock.now_s()
            self._pace.took(grant[0], self._clock.now_s() - grant[1])

    def mate_lost(self, peer: PeerID) -> None:
        """It begins anew, if at all; how fast it is we still know."""
        self._out = {m: grant for m, grant in self._out.items() if grant[0] != peer}
        # What would be granted to a claim that it has left open, nobody would make, and nobody would know.
        _, answer = self._waiting.pop(peer, (0, None))
        if answer is not None and not answer.done():
            answer.set_result([])

    def wake(self) -> None:
        """Room in the window, a new version, a new lead or a mate that has become ready: look again."""
        self._changed.set()
        if self._waiting:
            self._serve_soon()
        if self._asked is not None and self._asked[0] != self._group.lead:
            self._asked[1].cancel()

    def validated(self, microbatch: Microbatch, loss: float) -> None:
        """A validation microbatch that we issued is back."""
        message = ValidationResult(step=microbatch.step, index=-1 - microbatch.index, loss=loss)
        lead = self._group.lead or self._group.me
        if lead == self._group.me:
            self._record(message)
        else:
            self._outbox.post(lead, (message.step, message.index), message)

    # --- the claimant ---

    async def _claim_forever(self) -> None:
        while True:
            self._changed.clear()
            count = self._wanted()
            lead = self._group.lead
            if count <= 0 or lead is None:
                await self._changed.wait()
                continue
            try:
                grant = await self._ask(lead, count)
                self._check(lead, grant.items, validates=True)
                self._follow(lead, grant)
            except (Unreachable, Refused, RemoteError) as error:
                logger.debug("no grant: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            # If the lead has changed meanwhile, our Progress, which names the new one, did not claim these: it will
            # grant them again.
            for step, index in grant.items if lead == self._group.lead else ():
                if index >= 0:
                    self.book.take(step, IndexSet(1 << index))  # we may lead next, and our Progress goes to others
                self._on_grant(Microbatch(step, index), False)

    async def _ask(self, lead: PeerID, count: int) -> Grant:
        """As long as it is the lead: a claim may stay open for seconds."""
        began_s = self._clock.now_s()
        ask = asyncio.ensure_future(self._endpoint.ask(lead, Claim(count=count), Grant, timeout_s=2 * _PATIENCE_S))
        self._asked = (lead, ask)
        try:
            await asyncio.wait({ask})
        finally:
            self._asked = None
            ask.cancel()
        if ask.cancelled():
            return Grant(items=())
        grant = ask.result()
        self._asked_s.append(self._clock.now_s() - began_s)
        return grant

    def _check(self, lead: PeerID, items: Sequence[tuple[int, int]], *, validates: bool = False) -> None:
        book = self.book
        first = -book.validation_microbatches if validates else 0
        for step, index in items:
            if not (0 <= step <= book.steps and first <= index < book.microbatches):
                raise RemoteError(lead, f"grants microbatch ({step}, {index}), which this run has not")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    def _follow(self, lead: PeerID, grant: Grant) -> None:
        if self._pipeline.control is not None:
            try:
                self._pipeline.control.follow(grant.steps_ahead, grant.gain)
            except ValueError as error:
                raise RemoteError(lead, str(error)) from None

    def _wanted(self) -> int:
        window = self._pipeline.window
        if self._draining or window is None or not self._group.ready:
            return 0
        # More than fits, so that the next is here when a place falls free: as many as do while a claim is on its way.
        ahead = 1 + min(window.size, math.ceil(window.rate_per_s * min(self._asked_s, default=0.0)))
        return self._pipeline.room + ahead - self._pipeline.num_waiting

    # --- the lead ---

    async def _on_claim(self, source: PeerID, message: Claim) -> Grant:
        if not self._group.is_lead or not self._group.has_place(source):
            raise Refused(self._endpoint.peer_id, "does not lead stage 0 for the sender")
        answer: asyncio.Future[list[Microbatch]] = asyncio.get_running_loop().create_future()
        self._waiting[source] = (message.count, answer)
        self._serve_soon()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                granted = await answer
        except TimeoutError:
            granted = []
        finally:
            if self._waiting.get(source) == (message.count, answer):
                del self._waiting[source]
        items = tuple((m.step, m.index) for m in granted)
        choice = self._pipeline.control.choice if self._pipeline.control else None
        if choice is None:
            return Grant(items=items)
        return Grant(items=items, steps_ahead=choice.steps_ahead, gain=choice.gain)

    async def _on_halt(self, source: PeerID, message: Halt) -> Halted:
        """A peer that alone holds a stage leaves. It asks again and again, so that the halt ends soon after it has."""
        self._check_holder(source)
        self._halts[source] = self._clock.now_s() + _HALT_S
        asyncio.get_running_loop().call_later(_HALT_S + _RETRY_S, self._end_halts)
        return Halted(version=self.book.halt(at_once=message.at_once))

    def _check_holder(self, source: PeerID) -> None:
        """Raises: Refused: we do not lead stage 0, or the plan gives the sender nothing to hold."""
        me = self._endpoint.peer_id
        if not self._group.is_lead:
            raise Refused(me, "does not lead stage 0")
        if self._plan is None or not (self._plan.groups_of(source) or self._group.has_place(source)):
            raise Refused(me, "does not know the sender as a holder")

    def _end_halts(self) -> None:
        now_s = self._clock.now_s()
        self._halts = {peer: until_s for peer, until_s in self._halts.items() if until_s > now_s}
        if not self._halts and self.book.halts_at is not None:
            self.book.go_on()
            self.wake()

    def _serve_soon(self) -> None:
        """Together with whoever else claims in this turn of the loop."""
        asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Grant every open claim at most its claimant's share of what there is: the first to ask must not leave the
        others with nothing. What is left then, the next claims get.

        Whoever is not ready waits: it is not known here, or has been lost since it asked.
        """
        if not self._group.is_lead:
            return
        admissible, now_s = self.book.admissible, self._clock.now_s()
        everyone = (self._group.me, *self._group.ready_mates)
        for source, (count, answer) in [claim for claim in self._waiting.items() if claim[0] in everyone]:
            share = max(1, math.ceil(self._group.share_of(source) * admissible))
            if not self._keeps_pace(source, everyone, now_s):
                # The whole step would wait for what it holds: now and then one, to see whether it has recovered.
                share = 1 if self._pace.is_due(source, now_s) else 0
            granted = self.book.grant(min(count, share)) if not answer.done() else []
            if granted:
                self._pace.given(source, now_s)
                for microbatch in (m for m in granted if not m.validates):
                    self._out[microbatch] = (source, now_s)
                    self._group.granted(source, microbatch.step, microbatch.index)
                answer.set_result(granted)
                del self._waiting[source]

    def _keeps_pace(self, peer: PeerID, everyone: Sequence[PeerID], now_s: float) -> bool:
        since_s = min((at_s for other, at_s in self._out.values() if other == peer), default=now_s)
        # Who has made something since is not stuck: what it waits for is at a slow replica further on.
        since_s = max(since_s, self._made_s.get(peer, 0.0))
        return self._pace.weight(peer, everyone, waiting_s=now_s - since_s) == 1.0

    async def _on_repair(self, source: PeerID, message: Repair) -> Done:
        self._check_holder(source)
        if not 0 <= message.step < self.book.steps:
            raise RemoteError(source, f"wants step {message.step} again, which this run has not")
        asked = IndexSet.from_bytes(message.indices, count=self.book.microbatches)
        passed = IndexSet()
        for index in range(self.book.microbatches):
            # What is not back at stage 0 yet is on its way, and will come by where it is missed.
            if index in asked and not self._group.lacks(message.step, index):
                passed.add(index)
        self.repair(message.step, passed)
        return Done()

    def repair(self, step: int, indices: IndexSet) -> None:
        """Run these again at once, every open member its part: as the lead of stage 0. Alone it would take as long as a
        dead replica has for its part of a step.

        Not through the book: a claim waits for room in a window, and the windows may be full of what waits for these.
        """
        self.book.take(step, indices)
        again = [Microbatch(step, index) for index in range(self.book.microbatches) if index in indices]
        for peer, part in self._shared(again).items():
            logger.info("microbatches %s of step %d run again at %s", [m.index for m in part], step, peer[-8:])
            if peer == self._group.me:
                self._run_again(part)
            else:
                self._tasks.spawn(self._hand_out(peer, part), f"step {step} again at {peer}")

    def _shared(self, again: Sequence[Microbatch]) -> dict[PeerID, list[Microbatch]]:
        """By shares, among those who keep pace."""
        everyone, now_s = (self._group.me, *self._group.open_mates), self._clock.now_s()
        able = [peer for peer in everyone if self._keeps_pace(peer, everyone, now_s)] or [self._group.me]
        shares = {peer: max(self._group.share_of(peer), _SHARE_MIN) for peer in able}
        parts: dict[PeerID, list[Microbatch]] = {}
        for microbatch in again:
            peer = min(shares, key=lambda peer: (len(parts.get(peer, ())) + 1) / shares[peer])
            parts.setdefault(peer, []).append(microbatch)
        return parts

    async def _hand_out(self, mate: PeerID, again: Sequence[Microbatch]) -> None:
        for microbatch in again:  # before it says so itself: if it dies with them they are known to be lost
            self._out[microbatch] = (mate, self._clock.now_s())
            self._group.granted(mate, microbatch.step, microbatch.index)
        try:
            await self._endpoint.ask(mate, Again(items=tuple((m.step, m.index) for m in again)), Done)
        except (Unreachable, Refused, RemoteError) as error:
            logger.info("runs itself again what %s does not: %s", mate[-8:], error)
            for microbatch in again:
                self._out.pop(microbatch, None)
            self._run_again(again)

    def _run_again(self, again: Iterable[Microbatch]) -> None:
        for microbatch in again:
            self._on_grant(microbatch, True)

    async def _on_again(self, source: PeerID, message: Again) -> Done:
        if source != self._group.lead or self._draining or not self._group.ready:
            raise Refused(self._endpoint.peer_id, "makes nothing for the sender")
        self._check(source, message.items)
        if any(step > self.book.version + self.book.s_max + _STEPS_APART for step, _ in message.items):
            raise Refused(self._endpoint.peer_id, "is not as far as that")
        for step, index in message.items:
            self.book.take(step, IndexSet(1 << index))
        self._run_again(Microbatch(step, index) for step, index in message.items)
        return Done()

    def handed_back(self, microbatch: Microbatch, *, begun: bool) -> None:
        """A mate pauses and will not make it: it runs here, as a repair does. Raises: Refused: we do not lead."""
        if not self._group.is_lead:
            raise Refused(self._endpoint.peer_id, "does not lead stage 0")
        self._out.pop(microbatch, None)
        self._on_grant(microbatch, begun)

    async def _on_validation_result(self, source: PeerID, message: ValidationResult) -> Done:
        if not self._group.has_place(source):
            raise Refused(self._endpoint.peer_id, "does not know the sender as a member of stage 0")
        if not 0 <= message.index < self.book.validation_microbatches or not 0 <= message.step <= self.book.steps:
            raise RemoteError(source, "reports a validation microbatch that this run has not")
        if message.step > self.book.version + OPEN_STEPS_MAX:
            raise Refused(self._endpoint.peer_id, "is not as far as that")
        self._record(message)
        return Done()

    def _record(self, message: ValidationResult) -> None:
        losses = self._losses.setdefault(message.step, {})
        complete = len(losses) == self.book.validation_microbatches
        losses[message.index] = message.loss
        if len(losses) == self.book.validation_microbatches and not complete:
            mean = sum(losses.values()) / len(losses)
            self._on_validation(ValidationReport(step=message.step, loss=mean, microbatches=len(losses)))
