"""Runs one peer's coordination: passes events to the core (a state machine without I/O), and carries out the core's
commands on the peer's endpoint, directory and clock.

The file is long because it answers every coordination call and carries out every command in one place."""

import asyncio
import contextlib
import logging
import math
import random
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.coordinator.allocate.interface import Allocator, Layout, Searching
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.chain_sync import VerifiedPlans
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import (
    Alarm,
    Answered,
    Ask,
    Beat,
    Command,
    CoordinationEvent,
    CoordinationTimerFired,
    ExclusionHeard,
    Expelled,
    HeadFound,
    Heard,
    Introduce,
    Leaving,
    LogReason,
    LookUp,
    Obey,
    Publish,
    Received,
    Reply,
    ReportDue,
    Search,
    Searched,
    SendHeartbeat,
    SpreadOrder,
    TellNode,
    Unanswered,
)
from shoal.coordinator.core import CoordinationCore
from shoal.coordinator.discovery import Discovery
from shoal.coordinator.ledger import ReportQueue, StepRecord
from shoal.coordinator.membership import Admission
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.search_schedule import SearchJob
from shoal.coordinator.store import PlanStore
from shoal.coordinator.swarm_status import status_before_the_plan
from shoal.coordinator.voting import HEARD_HEARTBEATS, UNMET_MIN, Acquaintance
from shoal.protocol import messages
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused, RemoteError, ShoalError, Unreachable
from shoal.protocol.exclusion import Exclusion, open_exclusion
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CALL_TIMEOUT_S, LINKS_PER_REPLY_MAX, PROBES_PER_REPLY_MAX, TOGETHER_MAX
from shoal.protocol.membership import AccessLevel, Excluded
from shoal.protocol.messages import Advert, Done, Exclude, Heartbeat, HeartbeatReply, Ping, Refusal, SwarmStatus
from shoal.protocol.plan import Mandate, Plan, PlanShape, SignedPlan, sign_plan
from shoal.protocol.ports import Clock, Directory, RunBlocking, inline
from shoal.protocol.spec import RunSpec
from shoal.protocol.statement import Topic
from shoal.protocol.timer import Timer

logger = logging.getLogger(__name__)

REFUSED_TIMEOUTS = 0.9
"""A call that fails within this share of its timeout can count as refused; one that fails later is unanswered."""
TURNED_AWAY_TIMES = 5
"""This peer counts as turned away after this many refused heartbeats in a row: a new coordinator may refuse a few."""
FAREWELL_HEARTBEATS = 0.5
"""Time to tell excluded members of their exclusion before all peers stop talking to them."""
SIGN_HEARTBEATS = 0.5
"""The core is told that a member is alive at most once in this time: hundreds of frames may arrive in a second."""
LEAVE_HEARTBEATS = 10.0
"""How long a leaving coordinator tries to transfer the role: enough time to ask two peers."""

_ANSWER: dict[type[msgspec.Struct], type[msgspec.Struct]] = {
    Heartbeat: HeartbeatReply,
    messages.TermRequest: messages.TermGrant,
    messages.PlanOffer: messages.PlanVote,
    messages.PlanLive: Done,
    messages.TransferLeadership: Done,
    Ping: Ping,
    messages.PingRequest: Ping,
    messages.ChainRequest: messages.ChainLinks,
    messages.StandingRequest: messages.Standing,
    messages.Leave: Done,
    messages.Reset: Done,
}
"""Type of each call between coordinations -> type of its answer."""


async def searched(allocator: Allocator, job: SearchJob, run_blocking: RunBlocking) -> Searched:
    """Run a layout search outside the event loop. After an error the coordinator goes on with repaired layouts."""
    assert isinstance(allocator, Searching), "only a searching allocator is asked to"
    found: list[tuple[Layout | None, str]] = []
    try:
        await run_blocking(lambda: found.append(allocator.search(job.snapshot, job.previous, seed=job.seed)))
    except LocalError as error:
        return Searched(job=job, reason=f"no search: {error}")
    except Exception as error:
        logger.debug("the search that failed", exc_info=True)
        place, what = traceback.extract_tb(error.__traceback__)[-1], f"{type(error).__name__}: {error}"
        where = f"{Path(place.filename).name}:{place.lineno}"
        reason = f"a search for a layout failed, and the plan stays: {what.removesuffix(': ')} ({where})"
        return Searched(job=job, reason=reason, is_bug=True)
    ((layout, why),) = found
    return Searched(job=job, layout=layout, reason=why)


def ignore(*told: object) -> None:
    """Ignore an event of coordination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The node's reactions to coordination. None of these may block."""

    on_plan: Callable[[SignedPlan], None]
    """Called with every plan that this peer must obey, in order."""
    on_step: Callable[[StepRecord], None] = ignore
    """Called with every step that completes while this peer coordinates; two peers may report one step."""
    on_save: Callable[[int], None] = ignore
    """Called, maybe repeatedly, with the version at which every stage should write a snapshot."""
    on_safe: Callable[[tuple[int, int]], None] = ignore
    """Called, maybe repeatedly, with (era, version) of a safe snapshot; older ones are not needed any more."""
    on_probe: Callable[[tuple[PeerID, ...], tuple[PeerID, ...]], None] = ignore
    """Called with the peers to which we should measure our link, and the peers that share our network card."""
    on_doubt: Callable[[], None] = ignore
    """Called while the coordinator finds the run far slower than the measurements explain."""


class Coordination:
    """Takes part in a run's coordination for one peer: helps to choose coordinators and to agree on plans, and makes
    plans while it is the coordinator.

    Args:
        endpoint: answers calls after `start`; its `term` is set to that of the live plan.
        owner: the peer that makes the run's first plan.
        heartbeat: returns this peer's heartbeat, with each report once. `Coordination` keeps reports until a
            coordinator has them.
        has_lost_all: returns True if this peer's disk had snapshots, but none can be read now.
        run_blocking: runs layout searches, which may take a minute, off the event loop; simulations run them inline.
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
        callbacks: Callbacks,
        rng: random.Random,
        has_lost_all: Callable[[], bool] = lambda: False,
        run_blocking: RunBlocking = inline,
    ) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._spec = spec
        self._heartbeat, self._callbacks = heartbeat, callbacks
        identity, run, seals, members = endpoint.identity, endpoint.run, endpoint.seals, endpoint.members
        members.show(endpoint.peer_id, members.certificate)  # our own invite counts too

        def verify(topic: Topic, signer: PeerID, signature: bytes, body: bytes) -> bool:
            return seals.statement_holds(signer, signature, topic, run=run, body=body)

        def invite_of(peer: PeerID) -> bytes | None:
            is_known = members.access_level(peer) is AccessLevel.MEMBER
            return members.invite_of(peer) if is_known else None

        self.core = CoordinationCore(
            run=endpoint.run,
            me=endpoint.peer_id,
            owner=owner,
            spec=spec,
            chain=PlanChain(
                run, owner=owner, verify=partial(verify, "vote"), verify_order=partial(verify, "exclusion")
            ),
            policy=ReplanPolicy(ClusterView(endpoint.run, spec, invite_of), allocator, has_lost_all=has_lost_all),
            sign=lambda plan: sign_plan(identity, plan),
            sign_statement=lambda topic, body: seals.sign_statement(identity, topic, run=run, body=body),
            verify=verify,
            rng=rng,
            now_s=clock.now_s(),
        )
        self._allocator, self._run_blocking = allocator, run_blocking
        self._admission = Admission(endpoint.members, clock.now_s, is_open=spec.swarm.open)
        self.turned_away = ""
        """Why the coordinator refuses our heartbeats; empty: it does not, or has not answered yet."""
        self._times_turned_away = 0
        self._store = store
        self._discovery = Discovery(endpoint, directory, clock)
        self._reports = ReportQueue()
        self._plans = VerifiedPlans(run, owner=owner, shape=PlanShape.of(spec), seals=seals)
        self.said = ""  # the last logged reason, such as why the run waits
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = Timer(clock, lambda: self._feed(CoordinationTimerFired()))
        self._moved_on = asyncio.Event()
        self._closed = False
        self._knows_end: PeerID | None = None
        """The peer that sent us a proof of the run's end in its last reply; we send the proof to any other."""
        self._heard_s = clock.now_s()
        self._signs_s: dict[PeerID, float] = {}
        """Member -> time of its last sign of life that the core was told of."""
        self._came_s: dict[PeerID, float] = {}
        self.num_alarms = 0
        """Number of violated invariants."""

    # --- for the node ---

    @property
    def plan(self) -> SignedPlan | None:
        """The plan that this peer obeys, with its signatures."""
        return self.core.chain.live

    @property
    def silence_s(self) -> float:
        """Seconds since a coordinator last answered this peer; 0 if it coordinates itself."""
        return 0.0 if self.core.is_coordinator else self._clock.now_s() - self._heard_s

    def status(self) -> SwarmStatus | None:
        """Return the status of the swarm if this peer coordinates; else None."""
        return self.core.status(self._clock.now_s())

    async def ask_status(self) -> SwarmStatus:
        """Ask the coordinator for the status of the swarm.
        Raises: Unreachable, Refused: there is no coordinator to ask, or it has no plan yet; RemoteError."""
        return self.status() or await self._endpoint.ask(self.core.coordinator, messages.StatusRequest(), SwarmStatus)

    async def start(self) -> None:
        """Restore the stored state, then take part in coordination.
        Raises: LocalError: the store is damaged, another run's, or cannot be written."""
        self._restore()
        for kind in _ANSWER:
            self._endpoint.on(kind, self._answer)
        self._endpoint.on_heard = self._hear
        self._endpoint.on(Exclude, self._answer_exclude)
        self._endpoint.on(messages.StatusRequest, self._answer_status)
        self._endpoint.on(messages.PingRequest, self._ping_for)
        self._spawn(self._look_up())
        self._spawn(self._discovery.meet())
        if self.plan is None and self.core.owner == self._endpoint.peer_id:
            self._spawn(self._prepare_search())  # while the others arrive
        self._feed(CoordinationTimerFired())

    def exclude(self, order: Exclusion) -> None:
        """Spread an exclusion order, or our vote for one, and apply it if it is valid."""
        self._feed(ExclusionHeard(order=order, is_ours=True))

    async def close(self, leave: bool) -> None:
        """Stop. With `leave`, first transfer the role if this peer coordinates, and say good-bye."""
        if leave and not self._closed:
            try:
                async with asyncio.timeout(LEAVE_HEARTBEATS * self._spec.swarm.heartbeat_s):
                    await self._leave()
            except (TimeoutError, ShoalError) as error:
                logger.info("left without saying goodbye: %s", error or "no peer took the role in time")
        self._closed = True
        self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- exclusion ---

    async def _answer_exclude(self, source: PeerID, message: Exclude) -> msgspec.Struct:
        self._feed(ExclusionHeard(order=open_exclusion(message.order, source), is_ours=False))
        return Done()

    async def _put_out(self, order: Exclusion) -> None:
        """Exclude the members that `order` names. Tell them first: all peers stop talking to them afterwards."""
        members, excluded, plan = self._endpoint.members, self.core.excluded, self.core.plan
        leaving = [peer for peer in (plan.members if plan else ()) if members.is_out_by(peer, excluded)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_HEARTBEATS * self._spec.swarm.heartbeat_s):
                await asyncio.gather(*(self._tell(peer, Exclude(order=order.encode())) for peer in leaving))
        self._expel()
        self._spread(order.encode())

    def _expel(self) -> None:
        members = self._endpoint.members
        if members.excluded != self.core.excluded:
            logger.warning("%s", "; ".join(self.core.exclusions_told) or "no peer is excluded from the run any more")
        members.exclude(self.core.excluded)
        out = tuple(sorted(filter(members.is_excluded, self.core.known_peers())))
        if out:
            self._feed(Expelled(peers=out))

    def _spread(self, order: bytes) -> None:
        for peer in self.core.plan.members if self.core.plan is not None else ():
            if peer != self._endpoint.peer_id:
                self._spawn(self._tell(peer, Exclude(order=order)))

    async def _tell(self, peer: PeerID, message: msgspec.Struct) -> None:
        with contextlib.suppress(Unreachable, Refused, RemoteError):
            await self._endpoint.ask(peer, message, Done, timeout_s=self._timeout_s)

    # --- the core ---

    def report(self) -> None:
        """Send a heartbeat now, because the coordinator waits for its content."""
        self._feed(ReportDue())

    def _hear(self, peer: PeerID) -> None:
        now_s = self._came_s[peer] = self._clock.now_s()
        if not self.core.is_coordinator:
            self._signs_s.clear()
        elif now_s >= self._signs_s.get(peer, -math.inf) + SIGN_HEARTBEATS * self._spec.swarm.heartbeat_s:
            self._signs_s[peer] = now_s
            self._feed(Heard(peer=peer))

    def _feed(self, event: CoordinationEvent) -> msgspec.Struct | None:
        """Give the core an event and carry out its commands. Returns: the reply, if the event was a call."""
        if self._closed:
            return Refusal(reason="is closing")
        try:
            now_s = self._clock.now_s()
            commands = self._store.backed(self.core.handle(event, now_s=now_s), now_s)
            replies = [reply for command in commands if (reply := self._carry_out(command))]
        finally:
            self._timer.set(self.core.next_timer_s())
        assert len(replies) <= 1
        return replies[0] if replies else None

    def _carry_out(self, command: Command) -> msgspec.Struct | None:
        match command:
            case Reply():
                return command.message
            case Obey():
                self._obey(command.plan)
            case SendHeartbeat():
                self._spawn(self._beat(command.target))
            case Ask():
                self._spawn(self._ask(command.peer, command.message))
            case SpreadOrder(in_force=True, is_ours=True):
                self._spawn(self._put_out(command.order))
            case SpreadOrder():
                if command.in_force:
                    self._expel()
                self._spread(command.order.encode())
            case Publish():
                self._spawn(self._discovery.publish(command.plan))
            case Introduce():
                for peer, advert in command.peers:
                    self._introduce(peer, advert.addresses)
            case LookUp():
                self._spawn(self._look_up())
            case Search():
                self._spawn(self._search(command.job))
            case TellNode():
                self._callbacks.on_step(command.record)
            case LogReason():
                if command.text != self.said:
                    logger.info("%s", command.text)
                self.said = command.text
            case Alarm():
                self.num_alarms += 1
                logger.error("%s", command.text)
        return None

    def _obey(self, signed: SignedPlan) -> None:
        plan = signed.plan
        self._endpoint.term = plan.term
        logger.info("plan %d of term %d: %s", plan.sequence, plan.term, plan.reason)
        self._moved_on.set()
        self._expel()
        self._came_s = {peer: at_s for peer, at_s in self._came_s.items() if plan.has(peer)}
        for order in self.core.chain.exclusions.lacks(plan):
            self._spawn(self._tell(plan.coordinator, Exclude(order=order)))
        if self._discovery.should_read(plan):
            self._spawn(self._discovery.meet())
        self._callbacks.on_plan(signed)

    def _restore(self) -> None:
        record = self._store.load(self._endpoint.run)
        if record is None:
            self._store.save(self.core.chain.record())
            return
        self.core.restore(record, self._stored, self._clock.now_s())
        if self.plan is not None:
            self._obey(self.plan)

    def _stored(self, data: bytes) -> SignedPlan | None:
        """Decode a stored plan; None: `data` is empty, or an older release stored a plan that no peer can follow."""
        me = self._endpoint.peer_id
        if not data:
            return None
        with contextlib.suppress(RemoteError):
            return self._plans.open_link(data, me)
        try:
            # A plan that is only voted for has no votes yet; older releases kept live plans without theirs.
            return self._plans.open(data, me)
        except RemoteError as error:
            logger.error("dropped a stored plan that is not valid: %s", error)
            return None

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
        mandate: Mandate | None = None
        knows = Acquaintance()
        match message:
            case Heartbeat():
                if reason := self._why_not_enter(source, message.advert):
                    return Refusal(reason=reason)
                self._introduce(source, message.advert.addresses)
            case messages.TermRequest():
                base = self._plans.open_link(message.live, source)
            case messages.PlanOffer():
                plan = self._plans.open(message.plan, source)
                base = self._plans.open_link(message.predecessor, source) if message.predecessor else None
                knows = self._acquaintance(plan.plan, base.plan if base is not None else None)
            case messages.PlanLive() | messages.TransferLeadership():
                plan = self._plans.open_link(message.plan, source)
            case messages.Reset():
                base = self._plans.open_link(message.live, source)
                mandate = self._plans.open_mandate(message.mandate, source, coordinator=self._endpoint.peer_id)
        event = Received(source=source, message=message, plan=plan, base=base, mandate=mandate, knows=knows)
        reply = self._feed(event)
        assert reply is not None
        return reply

    def _acquaintance(self, plan: Plan, base: Plan | None) -> Acquaintance:
        """Collect what we know of the members that `plan` drops or adds; read the directory if many are unmet."""
        base = base if base is not None else self.core.plan
        if base is None:
            return Acquaintance()
        members = self._endpoint.members
        lately_s = self._clock.now_s() - HEARD_HEARTBEATS * self._spec.swarm.heartbeat_s
        keys: set[bytes] = set()
        for order in plan.exclusions:
            with contextlib.suppress(RemoteError):  # the chain refuses such a plan
                opened = open_exclusion(order, plan.coordinator)
                keys.update(key for at, key in enumerate(opened.keys) if at not in opened.readmitted)
        dropped = [peer for peer in base.members if not plan.has(peer)]
        unmet = frozenset(peer for peer in plan.members if not base.has(peer) and not self._has_met(peer))
        if len(unmet) > UNMET_MIN and self._discovery.should_read(plan):
            self._spawn(self._discovery.meet())
        return Acquaintance(
            heard=frozenset(peer for peer in dropped if self._came_s.get(peer, -math.inf) >= lately_s),
            excluded=frozenset(peer for peer in dropped if members.is_out_by(peer, Excluded(keys))),
            unmet=unmet,
        )

    def _has_met(self, peer: PeerID) -> bool:
        """True if `peer` has shown us a certificate or, in an open run, has sent us or the directory anything."""
        members = self._endpoint.members
        if not members.is_open:
            return members.access_level(peer) is not AccessLevel.STRANGER
        return peer in self._came_s or self._discovery.knows(peer)

    async def _answer_status(self, source: PeerID, message: messages.StatusRequest) -> msgspec.Struct:
        """Answer with the status of the run. If another peer coordinates, ask it."""
        mine, coordinator = self.status(), self.core.coordinator
        if mine is not None:
            return mine
        if self.turned_away:
            return Refusal(reason=self.turned_away)
        if self.core.plan is None:
            said = self.said or f"waiting for peers: the run begins with {self._spec.swarm.min_peers}"
            waits_for = said.removeprefix("waiting for ") if said.startswith("waiting for ") else f"a plan: {said}"
            return status_before_the_plan(self._endpoint.run, self._spec, self.core.owner, waits_for)
        if coordinator in (source, self._endpoint.peer_id):
            return Refusal(reason="there is no coordinator to ask now")
        try:
            return await self._endpoint.ask(coordinator, message, SwarmStatus, timeout_s=self._timeout_s)
        except ShoalError as error:
            return Refusal(reason=f"cannot reach the coordinator ({error})")

    async def _ping_for(self, source: PeerID, message: messages.PingRequest) -> msgspec.Struct:
        """Ping a member for the coordinator, which gets no answer from that member."""
        plan = self.core.plan
        if plan is None or source != plan.coordinator or not plan.has(message.peer):
            return Refusal(reason="pings only for the coordinator")
        try:
            return await self._endpoint.ask(message.peer, Ping(), Ping, timeout_s=self._spec.swarm.heartbeat_s)
        except ShoalError as error:
            return Refusal(reason=f"no answer to our ping either ({error})")

    def _why_not_enter(self, source: PeerID, advert: Advert) -> str:
        """Say why a newcomer may not join; empty: it may. Only the coordinator refuses peers, and never a member of a
        recent plan. An open run without a plan admits all, so that it can begin."""
        plan, core = self.core.plan, self.core
        leads = core.is_coordinator or (plan is None and core.owner == self._endpoint.peer_id)
        if not leads or self._endpoint.gate.is_planned(source) or (plan is None and self._spec.swarm.open):
            return ""
        return self._admission.why_not(source, advert, core.present_peers())

    def _introduce(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        if self._discovery.is_news(peer, addresses):
            self._spawn(self._discovery.introduce(peer, addresses))

    async def _ask(self, peer: PeerID, message: msgspec.Struct) -> None:
        asked_s = self._clock.now_s()
        try:
            expect = _ANSWER[type(message)]
            reply: msgspec.Struct = await self._endpoint.ask(peer, message, expect, timeout_s=self._timeout_s)
            newer = reply.live if isinstance(reply, messages.TermGrant | messages.PlanVote) else b""
            live = self._plans.open_link(newer, peer) if newer else None
            links = reply.links[:LINKS_PER_REPLY_MAX] if isinstance(reply, messages.ChainLinks) else ()
            opened = tuple(self._plans.open_link(link, peer) for link in links)
            voted = reply.accepted if isinstance(reply, messages.TermGrant) else b""
            accepted = self._plans.open(voted, peer) if voted else None
        except (Unreachable, Refused, RemoteError, ValueError) as error:  # ValueError: too large for any peer
            self._failed(peer, message, error, asked_s)
            return
        took_s = self._clock.now_s() - asked_s
        self._feed(
            Answered(peer=peer, asked=message, reply=reply, live=live, accepted=accepted, links=opened, took_s=took_s)
        )

    def _failed(self, peer: PeerID, asked: msgspec.Struct, error: Exception, asked_s: float) -> None:
        """Report a failed call to the core. An early failure means that no process listens there."""
        if isinstance(error, ValueError):
            logger.warning("no %s for %s: %s", type(asked).__name__, peer[-8:], error)
            if isinstance(asked, messages.TermRequest | messages.PlanOffer):
                return  # a retry would be as large, for other peers too: let the proposal expire
        took_s = self._clock.now_s() - asked_s
        is_answer = isinstance(error, Unreachable) and not error.is_silence
        refused = is_answer and took_s < REFUSED_TIMEOUTS * self._timeout_s
        reason = error.reason if isinstance(error, Refused) else str(error)
        self._feed(Unanswered(peer=peer, asked=asked, reason=reason, refused=refused, took_s=took_s))

    async def _beat(self, target: PeerID) -> None:
        own = self._heartbeat()
        self._feed(Beat(heartbeat=own))
        if self._discovery.is_due(own.advert):
            self._spawn(self._discovery.advertise(own.advert))
        own = msgspec.structs.replace(own, end=self._end(own), ends=() if target == self._knows_end else self.core.ends)
        heartbeat, sent = self._reports.enclose(own, self._clock.now_s())
        asked_s = self._clock.now_s()
        try:
            reply = await self._endpoint.ask(target, heartbeat, HeartbeatReply, timeout_s=self._timeout_s)
            live = self._plans.open_link(reply.plan, target) if reply.plan else None
        except (Unreachable, Refused, RemoteError, ValueError) as error:  # ValueError: too large for any peer
            self._reports.returned(sent, arrived=False)
            self._note_refusal(error)
            self._failed(target, heartbeat, error, asked_s)
            await self._discovery.meet()  # its address may have changed or be unknown
            return
        self._knows_end = target if reply.ends else None
        self._note_refusal(None)
        has_arrived = reply.is_coordinator and target == self.core.coordinator
        self._reports.returned(sent, arrived=has_arrived)
        if has_arrived:
            self._heard_s = self._clock.now_s()
            if reply.save_at:
                self._callbacks.on_save(reply.save_at)
            if reply.safe[1]:
                self._callbacks.on_safe(reply.safe)
            if reply.probe:
                self._callbacks.on_probe(reply.probe[:PROBES_PER_REPLY_MAX], reply.beside[:TOGETHER_MAX])
            if reply.in_doubt:
                self._callbacks.on_doubt()
        self._feed(Answered(peer=target, asked=heartbeat, reply=reply, live=live, took_s=self._clock.now_s() - asked_s))

    def _note_refusal(self, error: Exception | None) -> None:
        plan = self.core.plan
        is_outside = plan is None or not plan.has(self._endpoint.peer_id)
        reason = error.reason if isinstance(error, Refused) and is_outside else None
        self._times_turned_away = self._times_turned_away + 1 if reason is not None else 0
        self.turned_away = (reason or "") if self._times_turned_away >= TURNED_AWAY_TIMES else ""

    def _end(self, own: Heartbeat) -> bytes:
        """Return our signature of the run's end if all state that we hold is at the last version; empty: not yet."""
        plan, steps = self.core.plan, self._spec.training.steps
        takes_part = own.stage is not None and (own.synced or own.light is not None)
        if plan is None or own.era != plan.era or not (own.held or takes_part):
            return b""
        versions = [version for _, version in own.held] + ([own.version] if own.stage is not None else [])
        if min(versions) < steps:
            return b""
        identity, run = self._endpoint.identity, self._endpoint.run
        return self._endpoint.seals.sign_statement(identity, "end", run=run, body=self.core.end_body())

    @property
    def _timeout_s(self) -> float:
        return min(CALL_TIMEOUT_S, max(1.0, 4 * self._spec.swarm.heartbeat_s))

    async def _leave(self) -> None:
        if self.core.is_coordinator:
            self._feed(Leaving())
            while self.core.is_coordinator and self.core.role.has_heirs(self._clock.now_s()):
                self._moved_on.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._spec.swarm.heartbeat_s):
                        await self._moved_on.wait()
        if not self.core.is_coordinator:
            await self._beat(self.core.coordinator)  # our last reports, which no other peer can send
            await self._endpoint.ask(self.core.coordinator, messages.Leave(), Done, timeout_s=self._timeout_s)

    async def _prepare_search(self) -> None:
        """Compile the kernels of the layout search before the first search."""
        if isinstance(self._allocator, Searching):
            await self._run_blocking(self._allocator.prepare)

    async def _search(self, job: SearchJob) -> None:
        self._feed(await searched(self._allocator, job, self._run_blocking))

    async def _look_up(self) -> None:
        self._feed(HeadFound(head=await self._discovery.look_up(self.core.role.hint.doubted)))
