"""The driver of one peer: follows plans, holds a replica of a stage when a plan says so, reports to the coordinator.

Open this file first: `obey` is where work begins, `heartbeat` is what the coordinator hears. The replica (`replica/`)
trains. This file is long because all parts of a peer are wired together here.
"""

import asyncio
import heapq
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import msgspec

from shoal.peer.base.recent_plans import RecentPlans
from shoal.peer.base.tasks import Tasks
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.compute.probe import FAR_S, DeviceProbe, LinkProbe, probe_device
from shoal.peer.disk.archive import Archive
from shoal.peer.disk.attesting import Attesting
from shoal.peer.disk.partial_checkpoint import PartialCheckpoint
from shoal.peer.group.witnesses import Witnessed
from shoal.peer.handoff.base_layers import BaseLayers
from shoal.peer.handoff.copies import Copies
from shoal.peer.handoff.fetching_ahead import FetchingAhead
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.initial import InitialWeights, begun_numel
from shoal.peer.handoff.retained_layers import RetainedLayers
from shoal.peer.handoff.server import StateServer
from shoal.peer.inference.service import InferenceService
from shoal.peer.links import LinkMeter
from shoal.peer.membership.departure import Departure
from shoal.peer.membership.expert_seats import DRAIN_S, ExpertSeats
from shoal.peer.membership.first_stage import FirstReplica
from shoal.peer.membership.group_membership import GroupMembership
from shoal.peer.membership.pausing import Pausing
from shoal.peer.membership.replica_driver import Replica
from shoal.peer.model.state import LayerState, StageState
from shoal.peer.replica.flow import AdaptiveTraffic, Traffic
from shoal.peer.reports import Reports
from shoal.peer.services.expert_server import ExpertServer
from shoal.peer.services.neighbours import Neighbours
from shoal.peer.services.services import BetweenLayouts, GroupPart, Listeners, Services
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.limits import PROBES_PER_REPLY_MAX, TOGETHER_MAX, UNSOUND_MAX
from shoal.protocol.messages import Advert, CommitReport, Heartbeat, LinkReport, PresenceUpdate, ValidationReport
from shoal.protocol.plan import Plan, SignedPlan, Stage
from shoal.protocol.ports import Clock, Compute, Disk
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

_SHORT_S = 20.0
"""Delay until a replica out of memory tries again. By then the next plan has replaced it, if another peer can."""
_DOUBT_S = 30.0
_AGAIN_S = 0.5
"""Delay until a probe far below earlier ones is repeated, if the coordinator found the run too slow in `_DOUBT_S`."""


RunBlocking = Callable[[Callable[[], object]], Awaitable[object]]


async def _inline(work: Callable[[], object]) -> object:
    return work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks for an observer of a peer's work."""

    on_commit: Callable[[CommitReport], None] | None = None
    """Receives every commit of the peer's groups, even if another member reports it to the coordinator."""
    on_validation: Callable[[ValidationReport], None] | None = None
    on_state: Callable[[int, StageState], None] | None = None
    """Receives (stage, state) after each step or load of the replica."""
    on_end: Callable[[], None] | None = None
    """Called when a group of ours reaches the end of the layout: the run stands still until the coordinator knows."""
    say: Callable[[str], None] = logger.info


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Facts about a peer that it claims and that are not measured."""

    name: str = ""
    machine: str = ""
    """Equal for peers that share a network card (`Advert.machine`)."""
    memory_bytes: int | None = None
    """Memory to claim; None: what is free. Virtual worlds set it: free memory of their machine differs between runs."""


class PeerDriver:
    """One peer of one run.

    Args:
        arithmetic: what it computes with; without the run's text it is never at stage 0.
        traffic: how it feeds the next stage; None: by measurements.
        disk: holds snapshots in the run's folder; None keeps none.
        meter: measures the links by the endpoint's calls and frames; None: no calls and frames are seen.
        run_blocking: runs a function that blocks on the disk; `asyncio.to_thread` in life, inline in virtual time.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        compute: Compute,
        clock: Clock,
        spec: RunSpec,
        arithmetic: Arithmetic,
        traffic: Traffic | None = None,
        disk: Disk | None,
        claims: Claims | None = None,
        meter: LinkMeter | None = None,
        run_blocking: RunBlocking = _inline,
        watcher: Watcher | None = None,
    ) -> None:
        self.replica: Replica | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception when this peer cannot go on."""
        self._endpoint = endpoint
        self._compute = compute
        self._spec, self._arithmetic, self._claims = spec, arithmetic, claims or Claims()
        self._meter = meter or LinkMeter(clock)
        watcher = watcher or Watcher()
        self.reports = Reports(endpoint, clock, on_commit=watcher.on_commit, on_validation=watcher.on_validation)
        self._on_state, self._on_end, self._say = watcher.on_state, watcher.on_end, watcher.say
        self._probe: DeviceProbe | None = None
        self._plan: SignedPlan | None = None
        self._recent = RecentPlans()
        self._followed: SignedPlan | None = None
        self._transition: asyncio.Task[None] | None = None
        self._base_for: tuple[Stage, ...] = ()
        self._num_begun = 0
        self._renewing = False
        self._links: dict[PeerID, LinkReport] = {}
        self._probing: asyncio.Task[None] | None = None
        self._to_probe: list[PeerID] = []
        self._far: set[PeerID] = set()
        """Peers on other machines that we have probed since the last joint probe of several links."""
        self._beside: tuple[PeerID, ...] = ()
        self._card_bytes_per_s = 0.0
        """Highest rate sent over several links at once."""
        self._is_card_known = False
        """Measured since it was last in doubt."""
        self._doubted_s = -math.inf
        """When the coordinator last said that the run is slower than its figures explain."""
        self._draining = False
        self._unsound: set[PeerID] = set()
        """Peers that sent non-finite or absurd gradients since this process began."""
        self._shortages = 0
        self._claim_bytes: int | None = None
        self._short: dict[GroupPart, asyncio.TimerHandle] = {}
        """A part that paused for lack of memory -> the timer of its next try."""
        self.pausing = Pausing(clock, memberships=lambda: self._memberships, on_change=self._announce_presence)
        self._clock = clock
        self._saved_s = clock.now_s()
        """When our stage last wrote a snapshot, or we took our place there."""
        self._tasks, self._base_tasks = Tasks(self._fail), Tasks(self._fail)
        self._neighbours = Neighbours(
            endpoint=endpoint,
            clock=clock,
            own=self._presence,
            on_state=self._heard,
            on_reborn=self._reborn,
            on_silence=self._on_silence,
            silence_s=3.0 * spec.swarm.heartbeat_s,
            knows=lambda peer: self._recent.has(peer, now_s=clock.now_s()),
        )
        self._retained = RetainedLayers()
        self._archive = Archive(disk, run=endpoint.run, spec=spec, clock=clock, run_blocking=run_blocking)
        self._attesting = Attesting(
            self._archive,
            endpoint=endpoint,
            compute=compute,
            model=spec.model,
            on_news=lambda: self._on_end() if self._on_end else None,
        )
        vectors = arithmetic.vectors
        self._inbox = ChunkInbox(endpoint, compute=compute, vectors=vectors)
        self.server = StateServer(
            endpoint=endpoint,
            compute=compute,
            clock=clock,
            current=self._current,
            is_stepping=self._is_stepping,
            stored=self._stored,
            vectors=vectors,
            knows=lambda peer: self._recent.has(peer, now_s=clock.now_s()),
            witnessed=self._witnessed,
            is_busy=lambda: not self._meter.is_quiet,
            gives_way=lambda version: self._copies.give_way(version),
            inbox=self._inbox,
        )
        self._ahead = FetchingAhead(
            endpoint=endpoint,
            compute=compute,
            clock=clock,
            inbox=self._inbox,
            arithmetic=arithmetic,
            spec=spec,
            on_failure=self._fail,
            line_bytes_per_s=lambda: max((link.bytes_per_s for link in self._links.values()), default=0.0),
        )
        self._base = self._base_layers(disk, run_blocking) if spec.adapter is not None else None
        self.server.initial = self._base
        self._copies = Copies(
            self._attesting,
            endpoint=endpoint,
            spec=spec,
            server=self.server,
            inbox=self._inbox,
            compute=compute,
            plan=lambda: self._plan.plan if self._plan else None,
            is_leaving=lambda: self._draining,
            clock=clock,
            tasks=self._tasks,
            base=self._base,
            vectors=vectors,
        )
        self._departure = Departure(
            endpoint=endpoint,
            clock=clock,
            spec=spec,
            archive=self._archive,
            copies=self._copies,
            memberships=lambda: self._memberships,
            plan=lambda: self._plan.plan if self._plan else None,
            drains=self._drains,
            stays=self._stays,
            say=watcher.say,
        )
        self._link_probe = LinkProbe(endpoint=endpoint, clock=clock, vectors=vectors)
        self._services = Services(
            endpoint=endpoint,
            compute=compute,
            clock=clock,
            spec=spec,
            arithmetic=arithmetic,
            traffic=traffic or AdaptiveTraffic(),
            listeners=Listeners(
                on_commit=self._committed,
                on_witness=self._witnessed_commit,
                on_validation=self.reports.validated,
                on_state=self._state_changed,
                on_change=self._announce_presence,
                on_resync=self._renew,
                on_unreachable=self._neighbours.unreachable,
                on_unsound=self._unsound.add,
                begin_era=self._archive.begin_era,
                on_failure=self._fail,
                on_no_memory=lambda: self.inference.free(),
                on_shortage=self._run_short,
            ),
            inbox=self._inbox,
            server=self.server,
            between=BetweenLayouts(
                retained=self._retained,
                ahead=self._ahead,
                base=self._base,
                kept=PartialCheckpoint(disk, run=endpoint.run, spec=spec, run_blocking=run_blocking),
            ),
            recent=self._recent,
            experts=ExpertServer(arithmetic.tokens, endpoint=endpoint, compute=compute, spec=spec, tasks=self._tasks),
        )
        self._inference_tasks = Tasks(self._fail)
        self.inference = InferenceService(
            spec,
            endpoint=endpoint,
            compute=compute,
            clock=clock,
            replica=lambda: self.replica,
            plan=lambda: self._plan.plan if self._plan else None,
            cannot_reach=self._meter.cannot_reach,
            tasks=self._inference_tasks,
        )
        self.experts = ExpertSeats(
            self._services,
            self._neighbours,
            plan=lambda: self._plan,
            is_leaving=lambda: self._is_leaving,
            on_begun=self.pausing.begun,
            on_change=self._announce_presence,
        )

    @property
    def unsaved(self) -> str:
        """A sentence that names the steps lost when this peer ends, and why; empty: none."""
        is_over = self.replica is not None and self.replica.version >= self._spec.training.steps
        return self._departure.unsaved or (self._archive.unsaved if is_over else "")

    def has_lost_all(self) -> bool:
        """See `Archive.has_lost_all`."""
        return self._archive.has_lost_all

    def begin_with(self, weights: InitialWeights | None) -> None:
        """Set this machine's copy of the initial weights (of the base model, with adapters); None: it has none."""
        if self._base is not None:
            self._base.model_folder = weights
        else:
            self.server.initial = weights

    def _base_layers(self, disk: Disk | None, run_blocking: RunBlocking) -> BaseLayers:
        return BaseLayers(
            self._spec,
            endpoint=self._endpoint,
            compute=self._compute,
            inbox=self._inbox,
            arithmetic=self._arithmetic,
            disk=disk,
            run_blocking=run_blocking,
            pass_on=self.server.pass_on,
        )

    # --- life ---

    async def start(self) -> None:
        """Measure the device and read what is on the disk. Raises: whatever the device raises when it is unfit."""
        await self._archive.open()
        self._probe = await probe_device(
            self._spec, self._compute, self._arithmetic, memory_bytes=self._claims.memory_bytes
        )

    async def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Finish our work and see it committed; first save what no other peer holds (`departure.py`). Returns: True if
        all of that was done. Takes a little longer than `timeout_s` where a disk is slow."""
        self._draining = True
        if self._transition:
            await asyncio.gather(self._transition, return_exceptions=True)
        self.pausing.resume()  # a drain finishes what is in flight, which a pause would hold up
        self._announce_presence()
        drained = await self._departure.run(timeout_s)
        await self._neighbours.flush(2.0)  # group members wait for the last word of a peer that leaves
        return drained

    async def close(self) -> None:
        if self._transition:
            self._transition.cancel()
            await asyncio.gather(self._transition, return_exceptions=True)
        if self._probing:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        if self.replica:
            await self.replica.close()
            await self.replica.keep()
        for timer in self._short.values():
            timer.cancel()
        await self.experts.close()
        await self._ahead.close()
        await self.pausing.close()
        self.inference.close()
        await self._inference_tasks.cancel()
        await self._base_tasks.cancel()
        self._copies.close()
        await self._tasks.wait()
        await self._neighbours.close()

    # --- with the coordinator ---

    def obey(self, signed: SignedPlan, *, predecessor: SignedPlan | None = None) -> None:
        """Follow a live plan, newer than all before. Args: predecessor: the plan before it, if the caller has it: it
        tells a newcomer which peers may still drain."""
        before, self._plan = self._plan, signed
        if before is None or before.plan.term != signed.plan.term:
            self._meter.tell_all()
        self._recent.obey(signed.plan, now_s=self._clock.now_s(), before=predecessor.plan if predecessor else None)
        self._archive.follow(signed.plan)
        self._attesting.follow(signed.plan)
        if before is None:
            self._tasks.spawn(self._attesting.sign_stored(signed.plan), "sign what is on the disk")
        self._carry(signed.plan)
        self._neighbours.forget_strangers()
        if before is not None and before.plan.era == signed.plan.era:
            self._count_out(before.plan, signed.plan)
            if self.replica and self.replica.is_draining:
                # The drain may wait for members that only this plan names, and `_follow` waits for the drain.
                self.replica.depart(signed.plan)
                self._recall(before.plan, signed.plan)
                self._neighbours.say_news(self.replica.audience)
            self.experts.follow_soon()
        self._follow_soon()

    def _carry(self, plan: Plan) -> None:
        """Prepare the next layout: keep our state if the layout ends here, fetch missing layers, keep gradients."""
        self._retained.follow(plan)
        self._ahead.follow(plan)
        self.server.gradient_log.follow(plan)
        self._get_base_ready(plan)
        if not plan.next_layout:
            self.server.forget_ahead()
        if plan.cutover_version:
            self._archive.want(plan.cutover_version)
        if plan.era != self._endpoint.era:
            return
        for membership in self._memberships:
            if membership.is_ready and (state := membership.state) is not None:
                self._retained.take(plan, state.version, state.layers)
                if plan.cutover_version == state.version:
                    self._sign(membership, state)

    def _get_base_ready(self, plan: Plan) -> None:
        place = next((stage for stage in plan.next_layout if self._endpoint.peer_id in stage.peers), None)
        if self._base is not None and place is not None and plan.next_layout != self._base_for:
            self._base_for = plan.next_layout
            keys = stage_layer_keys(self._spec.model, *place.layers)
            self._base_tasks.spawn(self._base.get_ready(keys, plan.members), "get the base ready")

    def lose_excluded(self) -> None:
        """Treat members that the run has excluded as dead, even if they said that they drain: nobody hears them now."""
        plan = self._plan
        for peer in plan.plan.members if plan is not None else ():
            if self._endpoint.members.is_excluded(peer):
                self._died(peer)

    def advert(self) -> Advert:
        assert self._probe is not None, "not started"
        rate = max((link.bytes_per_s for link in self._links.values()), default=0.0)
        at = self._endpoint.transport.addresses()
        name, machine = self._claims.name, self._claims.machine
        advert = self._probe.advert(name, rate, at, has_data=self._arithmetic.has_text)
        memory_bytes = advert.memory_bytes if self._claim_bytes is None else self._claim_bytes
        return msgspec.structs.replace(
            advert, machine=machine, card_bytes_per_s=self._card_bytes_per_s, memory_bytes=memory_bytes
        )

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with all reports since the last one. The caller must make sure that it arrives."""
        replica = self.replica
        window = replica.core.pipeline.window if replica else None
        return Heartbeat(
            advert=self.advert(),
            plan_sequence=self._plan.plan.sequence if self._plan else 0,
            plan_digest=self._plan.digest if self._plan else "",
            era=self._endpoint.era,
            revision=self._endpoint.revision,
            stage=replica.stage if replica else None,
            version=max(replica.version if replica else 0, self._archive.version_noted(self._endpoint.era)),
            synced=replica is not None and replica.is_ready and not replica.is_learner,
            light=replica.learner_layers if replica is not None and replica.is_ready else None,
            draining=self._is_leaving,
            commits=self.reports.take_commits(),
            validations=tuple(self.reports.validations),
            links=self._meter.report(),
            holdings=self._archive.holdings,
            attested=self._attesting.told,
            carried=self._retained.holding,
            unfetched_bytes=self._ahead.unfetched_bytes,
            held=tuple((place.group, place.version) for place in self.experts.places if place.ready),
            loads=replica.expert_loads if replica else (),
            silent=self._neighbours.silent,
            unsound=tuple(sorted(filter(self._plan.plan.has, self._unsound)))[:UNSOUND_MAX] if self._plan else (),
            forward_s=replica.forward_s if replica else 0.0,
            window=window.size if window else 0,
            paused_s=self.pausing.paused_s,
            unsaved_s=self._unsaved_s,
            shortages=self._shortages,
        )

    def save_at(self, version: int) -> None:
        """Write a snapshot at `version`: the coordinator wants one of every stage."""
        if self.replica is not None and version > self.replica.version:
            self._archive.want(version)

    def thin(self, safe: tuple[int, int]) -> None:
        """Remove snapshots older than `safe` (era, version), which the coordinator no longer needs."""
        if self._archive.may_thin(safe):
            self._tasks.spawn(self._archive.thin(safe), f"remove snapshots before {safe}")

    @property
    def _unsaved_s(self) -> float:
        replica = self.replica
        keeps = self._archive.keeps and replica is not None and replica.is_ready and not replica.is_learner
        return self._clock.now_s() - self._saved_s if keeps else 0.0

    # --- plans ---

    def _follow_soon(self) -> None:
        if self._transition is None or self._transition.done():
            self._transition = asyncio.create_task(self._follow(), name="follow the plan")
            self._transition.add_done_callback(self._transition_done)

    async def _follow(self) -> None:
        while self._plan is not None and (self._plan is not self._followed or self._renewing):
            before, self._followed = self._followed, self._plan
            plan = self._followed.plan
            if before is not None and before.plan.era != plan.era:
                await self._drop_replica()
                await self.experts.drop_all()
                self._neighbours.forget_all()
            self._endpoint.era = plan.era
            self.experts.follow_soon()
            replica = self.replica
            await self._take_place(before, plan)
            self._recall(before.plan if before is not None and replica is self.replica else None, plan)
            if self.replica:
                self._neighbours.say_news(self.replica.audience)

    def _recall(self, before: Plan | None, plan: Plan) -> None:
        """Replay Hellos that came before the plan. Args: before: the plan that our replica followed; None: it is
        new."""
        audience = frozenset(self.replica.audience) if self.replica else frozenset()
        for peer, presence in self._neighbours.words():
            is_known = before is not None and before.groups_of(peer) == plan.groups_of(peer)
            if self.replica and peer in audience and not is_known:
                self.replica.peer_state(peer, presence)

    def _count_out(self, before: Plan, plan: Plan) -> None:
        """Forget the members that were dropped since `before`, be it by a plan that we never saw."""
        for peer in (peer for peer in plan.dropped_since(before) if peer != self._endpoint.peer_id):
            # A member that was to move elsewhere did not leave on its own: it died on the way.
            drains = self._neighbours.drains(peer, before.stage_of(peer)) and not plan.has(peer)
            self._neighbours.forget(peer)
            if not drains:
                self._died(peer)
            else:
                self._neighbours.say([peer])  # it still answers what it owes, unless it is dropped because it died

    async def _take_place(self, before: SignedPlan | None, plan: Plan) -> None:
        me, replica = self._endpoint.peer_id, self.replica
        stage = plan.stage_of(me)
        place = None if stage is None else (stage, *plan.stages[stage].layers, bool(plan.experts))
        renewing, self._renewing = self._renewing, False
        if replica is not None and place != (replica.stage, *replica.layers, replica.experts_placed):
            is_counted_out = not plan.has(me) and not self._is_leaving
            if before is not None and plan.previous == before.digest and not is_counted_out:
                replica.depart(plan)
                await replica.drain(DRAIN_S, unless=lambda: self._drains_in_vain(plan, replica.stage))
            # Else the group has gone on without us, or we missed a plan and cannot know whether it has.
            await self._drop_replica()
        elif replica is not None and (renewing or (before is not None and plan.since_of(me) > before.plan.sequence)):
            logger.warning("stage %d: our state may differ from the group's: fetching it", replica.stage)
            await self._drop_replica()
        if stage is None or (self.replica is None and self._is_leaving):
            return
        if self.replica is None:
            self._num_begun += 1
            kind = FirstReplica if stage == 0 else Replica
            self.replica = kind(self._services, plan, stage, incarnation=self._incarnation)
            self._saved_s = self._clock.now_s()
            self.replica.start()
            self.pausing.begun(self.replica)
            self.replica.experts_at(me, self._presence())
        else:
            self.replica.follow(plan)

    def _drains_in_vain(self, plan: Plan, stage: int) -> bool:
        """True if draining is pointless: our stage is gone, or we cannot reach a member that would reduce with us."""
        if self._plan is None or self._plan.plan.era != self._endpoint.era or stage >= len(plan.stages):
            return True
        return any(self._meter.cannot_reach(peer) for peer in plan.stages[stage].peers)

    async def _drop_replica(self) -> None:
        """Close the replica and drop all it holds; others recompute what they need of it."""
        replica, self.replica = self.replica, None
        if replica is not None:
            self._neighbours.say(replica.audience)  # nobody needs to wait for us any more
            await replica.close()
            self.server.forget(replica.runtime.keys)

    def _renew(self, membership: GroupPart) -> None:
        """Begin anew as a newcomer does: the state differs from the group's."""
        if membership is not self.replica:
            self.experts.renew(membership)
            return
        self._renewing = True
        self._follow_soon()

    def _transition_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _announce_presence(self) -> None:
        self._neighbours.say(self._audience)
        if self.replica:
            self.replica.experts_at(self._endpoint.peer_id, self._presence())

    @property
    def _audience(self) -> list[PeerID]:
        return list(dict.fromkeys(peer for membership in self._memberships for peer in membership.audience))

    @property
    def _is_leaving(self) -> bool:
        return self._draining or self.pausing.is_leaving

    @property
    def _incarnation(self) -> int:
        """Number of our tenure. Each tenure begins without state, as each process does."""
        return self._endpoint.incarnation + self._num_begun

    def _presence(self) -> PresenceUpdate:
        replica = self.replica
        return PresenceUpdate(
            incarnation=self._incarnation,
            plan_sequence=self._plan.plan.sequence if self._plan else 0,
            stage=replica.stage if replica else -1,
            version=replica.version if replica else 0,
            ready=replica.is_ready if replica else False,
            is_open=replica.is_open if replica else False,
            learner=replica.is_learner if replica else False,
            draining=self._is_leaving or (replica is not None and replica.is_draining),
            experts=self.experts.places,
        )

    @property
    def _memberships(self) -> list[GroupMembership]:
        return [self.replica, *self.experts.memberships] if self.replica else [*self.experts.memberships]

    def _drains(self, peer: PeerID, membership: GroupMembership) -> bool:
        if membership is self.replica:
            return self._neighbours.drains(peer, self.replica.stage)
        return self._neighbours.drains_from(peer, membership.group_id)

    def _stays(self, peer: PeerID) -> bool:
        return peer in self._audience and self._neighbours.stays(peer)

    def _heard(self, source: PeerID, presence: PresenceUpdate) -> None:
        for membership in self._memberships:
            membership.peer_state(source, presence)

    def _reborn(self, peer: PeerID, incarnation: int) -> None:
        for membership in self._memberships:
            membership.peer_reborn(peer, incarnation)

    def _died(self, peer: PeerID) -> None:
        for membership in self._memberships:
            membership.peer_died(peer)

    def _on_silence(self, peer: PeerID) -> None:
        if self._plan is not None and not self._plan.plan.has(peer):
            self._died(peer)  # it fell silent while it drained, or right after
            return
        for membership in self._memberships:
            membership.peer_silent(peer)
        if peer in self._audience:
            self._neighbours.say([peer])  # its answer says that it is there again

    def _current(self, keys: Collection[str]) -> StageState | None:
        states = (membership.state for membership in self._memberships if membership.is_ready)
        return next((state for state in states if state is not None and set(keys) <= state.layers.keys()), None)

    def _is_stepping(self, keys: Collection[str]) -> bool:
        return any(membership.is_stepping and set(keys) <= set(membership.keys) for membership in self._memberships)

    async def _stored(self, era: int, version: int, keys: tuple[str, ...]) -> dict[str, LayerState]:
        carried = self._retained.read(era, version)
        found = {key: carried[key] for key in keys if key in carried}
        missing = tuple(key for key in keys if key not in found)
        return found | (await self._archive.read(era, version, missing) if missing else {})

    async def _witnessed(self, source: PeerID, keys: Collection[str], version: int) -> Witnessed | None:
        for membership in self._memberships:
            state = membership.state
            if membership.is_ready and state is not None and set(keys) <= state.layers.keys():
                return await membership.witnesses.offer(source, state, version)
        return None

    def measure_links(self, peers: tuple[PeerID, ...], beside: tuple[PeerID, ...]) -> None:
        """Measure our links to `peers`, as the coordinator asks. The peers `beside` us share our network card."""
        self._beside = beside
        self._to_probe = list(dict.fromkeys((*self._to_probe, *peers)))[:16]  # over oceans a probe takes a second
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_links(), name="measure links")

    def look_at_links(self) -> None:
        """Check our links by their traffic: the run is too slow, and a slow link may be too busy to probe."""
        seen_bytes_per_s = self._meter.look(self._beside)
        if seen_bytes_per_s is not None:
            # To be measured again once the lines are quiet.
            self._card_bytes_per_s, self._is_card_known = seen_bytes_per_s, False
        self._doubted_s = self._clock.now_s()

    async def _probe_links(self) -> None:
        while self._to_probe:
            await self._drop_unreachable()
            if not self._to_probe:
                return
            if not await self._is_quiet():
                self._to_probe = []
                return  # a probe of a busy line says nothing of the link
            mark = self._meter.mark
            report = await self._link_probe.measure_if_possible(self._to_probe.pop(0))
            if report is not None:
                self._links[report.peer] = report
                looks_slow = self._meter.probed(report, since=mark)
                if looks_slow and self._clock.now_s() < self._doubted_s + _DOUBT_S:
                    await asyncio.sleep(_AGAIN_S)
                    self._to_probe.append(report.peer)
                self._far.discard(report.peer)  # an earlier probe may have found it far because our line was busy
                if report.round_trip_s >= FAR_S:
                    self._far.add(report.peer)
            is_last = not self._is_card_known and not self._to_probe
            if len(self._far) >= PROBES_PER_REPLY_MAX or (len(self._far) > 1 and is_last):
                self._far.clear()
                await self._probe_card()

    async def _drop_unreachable(self) -> None:
        """Skip doubtful peers that do not answer. All are tried at once: one by one would outlast the first plan's
        wait."""
        doubtful = [p for p in self._to_probe if self._meter.cannot_reach(p) or not self._meter.has_met(p)]
        answers = await asyncio.gather(*(self._link_probe.answers(peer) for peer in doubtful))
        silent = {peer for peer, answer in zip(doubtful, answers, strict=True) if not answer}
        self._to_probe = [peer for peer in self._to_probe if peer not in silent]

    async def _probe_card(self) -> None:
        far = (link for link in self._links.values() if link.round_trip_s >= FAR_S)
        quickest = heapq.nlargest(TOGETHER_MAX, far, key=lambda link: (link.bytes_per_s, link.peer))
        if await self._is_quiet():
            found = await self._link_probe.measure_together(quickest, self._beside)
            self._card_bytes_per_s = max(self._card_bytes_per_s, found)
            self._is_card_known = self._is_card_known or found > 0.0

    async def _is_quiet(self) -> bool:
        """Wait for a moment without traffic, a second at most."""
        for _ in range(20):
            if self._meter.is_quiet:
                return True
            await asyncio.sleep(0.05)
        return False

    # --- told by the tenures ---

    def _committed(self, report: CommitReport) -> None:
        self.reports.committed(report)
        self._note_end(report)

    def _witnessed_commit(self, report: CommitReport) -> None:
        self.reports.witnessed(report)
        self._note_end(report)

    def _note_end(self, report: CommitReport) -> None:
        if self._plan and self._plan.plan.cutover_version == report.step + 1 and self._on_end:
            self._on_end()

    def _state_changed(self, membership: GroupPart, state: StageState) -> None:
        if self._on_state:
            self._on_state(membership.group_id, state)
        if self._plan and state.version > self._plan.plan.restore_version:
            self._tasks.spawn(self._archive.note_era(self._endpoint.era, state.version), "note the era")
        if self._plan and self._plan.plan.era == self._endpoint.era:
            self._retained.take(self._plan.plan, state.version, state.layers)
        if membership is self.replica and self._archive.is_due(state.version):
            self._saved_s = self._clock.now_s()
        if self._archive.is_attested(state.version):
            self._sign(membership, state)
        rank, num_ready = membership.core.group.standing
        self._copies.preserve(membership.group_id, state, rank=rank, num_ready=num_ready)

    def _sign(self, membership: GroupPart, state: StageState) -> None:
        has_stepped = self._plan is not None and state.version > self._plan.plan.restore_version
        if has_stepped and not membership.core.group.is_learner:
            self._tasks.spawn(self._attesting.sign(state, era=self._endpoint.era), f"sign version {state.version}")

    def _run_short(self, membership: GroupPart) -> None:
        """Claim less memory after a job found none, even with all caches freed, so that the next plan gives us less.

        The new claim is 3/4 of the old one, and at most 5/4 of this stage's state and base. That is too little for this
        stage: plans count at least 16 bytes a parameter, of which the state is 12, and the base."""
        state_bytes = membership.state_bytes
        if self._base is not None and membership is self.replica:
            state_bytes += sum(4 * begun_numel(self._spec, key) for key in self.replica.runtime.keys) // 2
        before = self.advert().memory_bytes
        self._claim_bytes = min(3 * before // 4, 5 * state_bytes // 4)
        self._shortages += 1
        if membership in self._short:
            return
        self._say(
            f"out of memory: this peer's work goes to others, and it claims {self._claim_bytes / 1e9:.2g} GB "
            f"instead of {before / 1e9:.2g} GB"
        )
        self._short[membership] = asyncio.get_running_loop().call_later(_SHORT_S, self._try_again, membership)
        self._announce_presence()

    def _try_again(self, membership: GroupPart) -> None:
        """Resume: no plan has taken the stage from us, so there may be no other peer for it."""
        del self._short[membership]
        if membership in self._memberships and not self.pausing.is_paused:
            membership.resume()

    def _fail(self, error: BaseException) -> None:
        logger.error("this peer cannot go on: %r", error)
        if not self.failure.done():
            self.failure.set_exception(error)
