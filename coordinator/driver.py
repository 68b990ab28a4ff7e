"""Coordination of one peer on its endpoint, directory and clock: carries out what the core decides."""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from shoal.coordinator.allocate.interface import Allocator
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.core import HEAD_HEARTBEATS, CoordinationCore
from shoal.coordinator.events import (
    Answered,
    Ask,
    Beat,
    Command,
    Event,
    HeadFound,
    Leaving,
    LookUp,
    Note,
    Obey,
    Persist,
    Publish,
    Received,
    Reply,
    SendHeartbeat,
    Tell,
    TimerFired,
    Unanswered,
)
from shoal.coordinator.governor import Governor
from shoal.coordinator.ledger import HISTORY_STEPS, StepRecord
from shoal.coordinator.outbox import ReportOutbox
from shoal.coordinator.store import PlanStore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused, RemoteError, ShoalError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S
from shoal.protocol.messages import (
    Advert,
    AdvertRecord,
    Done,
    HandOver,
    Heartbeat,
    HeartbeatReply,
    Leave,
    PlanHead,
    PlanLive,
    PlanOffer,
    PlanVote,
    Refusal,
    StatusRequest,
    SwarmStatus,
    TermGrant,
    TermRequest,
)
from shoal.protocol.plan import SignedPlan, open_plan, sign_plan
from shoal.protocol.ports import Clock, Directory
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

ADVERT_EXPIRES_S = 60.0
ADVERT_RENEWED_S = 20.0
"""Two renewals may fail before the directory forgets us."""
LEAVE_TIMEOUT_S = 15.0
PLANS_OPENED_MAX = 16
"""Signatures of plans last seen, so that a plan that comes with twenty heartbeats is verified once."""

_ANSWER: dict[type, type[msgspec.Struct]] = {
    TermRequest: TermGrant,
    PlanOffer: PlanVote,
    PlanLive: Done,
    HandOver: Done,
}


class Coordination:
    """A peer's part in electing coordinators, agreeing on plans and, in its turn, making them.

    Args:
        endpoint: answers heartbeats, offers and the like from `start` on; its `term` follows the plan.
        owner: who makes the run's first plan.
        heartbeat: what this peer says of itself. Each report may be in one heartbeat only; it is kept here until a
            coordinator has it.
        on_plan: called with every plan that this peer is to obey, in order. Must not block.
        on_step: called with every step that completes while this peer coordinates; around a hand-over a step may be
            told twice, by two peers.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        directory: Directory,
        clock: Clock,
        spec: RunSpec,
        owner: PeerID,
        allocator: Allocator,
        store: PlanStore,
        heartbeat: Callable[[], Heartbeat],
        on_plan: Callable[[SignedPlan], None],
        rng: random.Random,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._endpoint, self._directory, self._clock = endpoint, directory, clock
        self._spec, self._store = spec, store
        self._heartbeat, self._on_plan, self._on_step = heartbeat, on_plan, on_step
        self._core = CoordinationCore(
            run=endpoint.run,
            me=endpoint.peer_id,
            owner=owner,
            spec=spec,
            chain=PlanChain(endpoint.run),
            governor=Governor(run=endpoint.run, spec=spec, allocator=allocator),
            sign=lambda plan: sign_plan(endpoint.identity, plan),
            rng=rng,
            now_s=clock.now_s(),
        )
        self._reports = ReportOutbox()
        self._opened: OrderedDict[bytes, SignedPlan] = OrderedDict()
        self._addresses: dict[PeerID, tuple[str, ...]] = {}
        self._advert: Advert | None = None
        self._advert_stored_s = 0.0
        self._said = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._moved_on = asyncio.Event()
        self._closed = False
        self.history: deque[StepRecord] = deque(maxlen=HISTORY_STEPS)
        """Steps completed in this peer's terms, oldest first."""

    # --- for the node ---

    @property
    def plan(self) -> SignedPlan | None:
        """What this peer obeys."""
        return self._core.live

    @property
    def is_coordinator(self) -> bool:
        return self._core.is_coordinator

    @property
    def done(self) -> bool:
        """The run has reached its last step."""
        return self._core.done

    def status(self) -> SwarmStatus | None:
        """The swarm as we see it, if we coordinate it."""
        live = self._core.live
        if live is None or not self._core.is_coordinator:
            return None
        return self._core.governor.status(live.plan, self._clock.now_s())

    async def ask_status(self) -> SwarmStatus:
        """The swarm as its coordinator sees it.

        Raises: Unreachable, Refused: there is no coordinator to ask, or it has no plan yet; RemoteError.
        """
        mine = self.status()
        if mine is not None:
            return mine
        return await self._endpoint.ask(self._core.coordinator, StatusRequest(), SwarmStatus)

    async def start(self) -> None:
        """Take up where the store ended and begin to answer, report and, if it comes to that, coordinate.

        Raises: LocalError: the store is damaged, or another run's.
        """
        self._restore()
        for kind in (Heartbeat, TermRequest, PlanOffer, PlanLive, HandOver, Leave):
            self._endpoint.on(kind, self._answer)
        self._endpoint.on(StatusRequest, self._answer_status)
        self._spawn(self._look_up())
        self._spawn(self._meet())
        self._feed(TimerFired())

    async def close(self, leave: bool) -> None:
        """Stop. With `leave`, first give the role away if it is here, and tell the coordinator not to wait for us."""
        if leave and not self._closed:
            try:
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._leave()
            except (TimeoutError, ShoalError) as error:
                logger.info("left without saying goodbye: %s", error or "nobody took the role in time")
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the core ---

    def _feed(self, event: Event) -> msgspec.Struct | None:
        """Let the core decide and do it. Returns: the reply, if the event was a call."""
        if self._closed:
            return Refusal(reason="is closing")
        try:
            commands = self._core.handle(event, now_s=self._clock.now_s())
            replies = [reply for command in commands if (reply := self._carry_out(command)) is not None]
        finally:
            self._arm()
        assert len(replies) <= 1
        return replies[0] if replies else None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, self._core.next_timer_s() - self._clock.now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._feed, TimerFired())

    def _carry_out(self, command: Command) -> msgspec.Struct | None:
        match command:
            case Reply():
                return command.message
            case Persist():
                self._store.save(command.record)
            case Obey():
                self._obey(command.plan)
            case SendHeartbeat():
                self._spawn(self._beat(command.target))
            case Ask():
                self._spawn(self._ask(command.peer, command.message))
            case Publish():
                self._spawn(self._publish(command.plan))
            case LookUp():
                self._spawn(self._look_up())
            case Tell():
                self.history.append(command.record)
                if self._on_step is not None:
                    self._on_step(command.record)
            case Note():
                if command.text != self._said:
                    logger.info("%s", command.text)
                self._said = command.text
        return None

    def _obey(self, signed: SignedPlan) -> None:
        plan = signed.plan
        self._endpoint.term = plan.term
        logger.info("plan %d of term %d: %s", plan.sequence, plan.term, plan.reason)
        self._moved_on.set()
        if any(peer not in self._addresses for peer in plan.members if peer != self._endpoint.peer_id):
            self._spawn(self._meet())
        self._on_plan(signed)

    def _restore(self) -> None:
        record = self._store.load(self._endpoint.run)
        if record is None:
            return
        try:
            live = self._open(record.live, self._endpoint.peer_id)
            accepted = self._open(record.accepted, self._endpoint.peer_id)
        except RemoteError as error:
            raise LocalError(f"the stored plan does not hold ({error}): remove the state folder") from error
        self._core.chain.restore(record, live=live, accepted=accepted)
        if live is not None:
            self._obey(live)

    def _open(self, data: bytes, source: PeerID) -> SignedPlan | None:
        """Raises: RemoteError: `source` handed us a plan that does not hold."""
        if not data:
            return None
        plan = self._opened.pop(data, None)
        if plan is None:
            plan = open_plan(data, run=self._endpoint.run, source=source, num_layers=self._spec.model.num_layers)
        self._opened[data] = plan
        if len(self._opened) > PLANS_OPENED_MAX:
            self._opened.popitem(last=False)
        return plan

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- calls ---

    async def _answer(self, source: PeerID, message: msgspec.Struct) -> msgspec.Struct:
        plan = base = None
        match message:
            case Heartbeat():
                self._spawn(self._introduce(source, message.advert.addresses))
            case TermRequest():
                base = self._need(message.live, source)
            case PlanOffer():
                plan, base = self._need(message.plan, source), self._open(message.predecessor, source)
            case PlanLive():
                plan = self._need(message.plan, source)
            case HandOver():
                plan = self._need(message.plan, source)
                for peer, advert in message.roster:
                    self._spawn(self._introduce(peer, advert.addresses))
        try:
            reply = self._feed(Received(source=source, message=message, plan=plan, base=base))
        except LocalError as error:
            logger.error("cannot vote: %s", error)
            return Refusal(reason="cannot keep its word on disk")
        assert reply is not None
        return reply

    def _need(self, data: bytes, source: PeerID) -> SignedPlan:
        plan = self._open(data, source)
        if plan is None:
            raise RemoteError(source, "left out a plan")
        return plan

    async def _ask(self, peer: PeerID, message: msgspec.Struct) -> None:
        try:
            expect = _ANSWER[type(message)]
            reply: msgspec.Struct = await self._endpoint.ask(peer, message, expect, timeout_s=self._timeout_s)
            live = accepted = None
            if isinstance(reply, TermGrant):
                live, accepted = self._open(reply.live, peer), self._open(reply.accepted, peer)
            elif isinstance(reply, PlanVote):
                live = self._open(reply.live, peer)
        except (Unreachable, Refused, RemoteError) as error:
            reason = error.reason if isinstance(error, Refused) else str(error)
            self._feed(Unanswered(peer=peer, asked=message, reason=reason))
            return
        self._feed(Answered(peer=peer, asked=message, reply=reply, live=live, accepted=accepted))

    async def _beat(self, target: PeerID) -> None:
        own = self._heartbeat()
        self._feed(Beat(heartbeat=own))
        self._advertise(own.advert)
        heartbeat, sent = self._reports.enclose(own)
        try:
            reply = await self._endpoint.ask(target, heartbeat, HeartbeatReply, timeout_s=self._timeout_s)
            live = self._open(reply.plan, target)
        except (Unreachable, Refused, RemoteError) as error:
            self._reports.failed(sent)
            self._feed(Unanswered(peer=target, asked=heartbeat, reason=str(error)))
            await self._meet()  # it may have moved, or we have never heard where it is
            return
        except asyncio.CancelledError:
            self._reports.failed(sent)
            raise
        if reply.is_coordinator:
            self._reports.arrived(sent)
        else:
            self._reports.failed(sent)
        self._feed(Answered(peer=target, asked=heartbeat, reply=reply, live=live))

    @property
    def _timeout_s(self) -> float:
        return min(CALL_TIMEOUT_S, max(1.0, 4 * self._spec.swarm.heartbeat_s))

    async def _answer_status(self, source: PeerID, message: StatusRequest) -> msgspec.Struct:
        mine = self.status()
        if mine is not None:
            return mine
        coordinator = self._core.coordinator
        if self._core.live is None or coordinator in (source, self._endpoint.peer_id):
            return Refusal(reason="there is no plan yet")
        try:
            return await self._endpoint.ask(coordinator, message, SwarmStatus, timeout_s=self._timeout_s)
        except ShoalError as error:
            return Refusal(reason=f"cannot reach the coordinator ({error})")

    async def _leave(self) -> None:
        if self._core.is_coordinator:
            self._feed(Leaving())
            while self._core.is_coordinator:
                self._moved_on.clear()
                await self._moved_on.wait()
        await self._endpoint.ask(self._core.coordinator, Leave(), Done, timeout_s=self._timeout_s)

    # --- directory ---

    @property
    def _peers_key(self) -> str:
        return f"shoal/{self._endpoint.run}/peers"

    @property
    def _plan_key(self) -> str:
        return f"shoal/{self._endpoint.run}/plan"

    def _advertise(self, advert: Advert) -> None:
        now_s = self._clock.now_s()
        if advert != self._advert or now_s >= self._advert_stored_s + ADVERT_RENEWED_S:
            self._advert, self._advert_stored_s = advert, now_s
            self._spawn(self._store_record(self._peers_key, AdvertRecord(advert=advert), ADVERT_EXPIRES_S))
            self._spawn(self._meet())

    async def _publish(self, signed: SignedPlan) -> None:
        head = PlanHead(
            term=signed.plan.term,
            sequence=signed.plan.sequence,
            digest=signed.digest,
            coordinator=self._endpoint.peer_id,
            addresses=self._endpoint.transport.addresses(),
        )
        expires_in_s = 3 * HEAD_HEARTBEATS * self._spec.swarm.heartbeat_s
        await self._store_record(self._plan_key, head, max(expires_in_s, ADVERT_EXPIRES_S))

    async def _store_record(self, key: str, record: msgspec.Struct, expires_in_s: float) -> None:
        sealed = self._endpoint.seal_record(record)
        if not await self._directory.store(key, self._endpoint.peer_id, sealed, expires_in_s=expires_in_s):
            logger.warning("the directory did not take our record for %s", key)

    async def _look_up(self) -> None:
        heads = [
            record
            for peer, record in (await self._records(self._plan_key)).items()
            if isinstance(record, PlanHead) and record.coordinator == peer
        ]
        head = max(heads, key=lambda h: (h.term, h.sequence, h.coordinator), default=None)
        if head is not None:
            await self._introduce(head.coordinator, head.addresses)
        self._feed(HeadFound(head=head))

    async def _meet(self) -> None:
        """Tell the transport where everybody is."""
        for peer, record in sorted((await self._records(self._peers_key)).items()):
            if isinstance(record, AdvertRecord):
                await self._introduce(peer, record.advert.addresses)

    async def _records(self, key: str) -> dict[PeerID, msgspec.Struct]:
        """Of those whose signature holds and who wrote under their own name."""
        found: dict[PeerID, msgspec.Struct] = {}
        for subkey, data in (await self._directory.get(key)).items():
            try:
                signer, record = self._endpoint.open_record(data, source=PeerID(subkey))
            except RemoteError as error:
                logger.warning("ignored a record under %s: %s", key, error)
                continue
            if signer == subkey:
                found[signer] = record
        return found

    async def _introduce(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        if addresses and peer != self._endpoint.peer_id and self._addresses.get(peer) != addresses:
            self._addresses[peer] = addresses
            await self._endpoint.transport.introduce(peer, addresses)
