"""The driver of one peer: follows plans, holds a replica of a stage when a plan says so, reports to the coordinator.

Open this file first: work begins in `obey`, and `heartbeat` makes the report. The constructor makes the objects that do
the work; the replica (`membership/`) trains.
"""

import asyncio

from shoal.peer.base.failures import Failures
from shoal.peer.base.plans import Plans
from shoal.peer.base.tasks import Tasks
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.compute.probe import probe_device
from shoal.peer.handoff.initial import InitialWeights
from shoal.peer.inference.service import InferenceService
from shoal.peer.links.probing import LinkProbing
from shoal.peer.membership.departure import Departure
from shoal.peer.membership.expert_seats import DRAIN_S, ExpertSeats
from shoal.peer.membership.pausing import Pausing
from shoal.peer.membership.replica_driver import Replica
from shoal.peer.membership.stage_seat import StageSeat
from shoal.peer.presence.life import Life
from shoal.peer.presence.neighbours import Neighbours
from shoal.peer.presence.own_word import Claims, OwnWord
from shoal.peer.presence.parts import Parts
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Reports, Watcher
from shoal.peer.replica.flow import Traffic
from shoal.peer.services.expert_server import ExpertServer
from shoal.peer.services.layers import Layers
from shoal.peer.services.services import RunHere, Services
from shoal.peer.services.shortages import Shortages
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert, FetchStatus, Heartbeat
from shoal.protocol.plan import SignedPlan
from shoal.protocol.spec import RunSpec

PROBE_EVERY_S = 60.0
"""Interval at which a peer without a place in the layout measures its device again."""


class PeerDriver:
    """One peer of one run. The peer sends nothing before `obey` has given it a plan.

    Args:
        arithmetic: the peer's computations on tensors; it has the run's text if the peer may be at stage 0.
        traffic: makes the policy for sending microbatches to the next stage; None: the default, by measurements.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        spec: RunSpec,
        arithmetic: Arithmetic,
        traffic: Traffic | None = None,
        claims: Claims | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._ports, self._claims = ports, claims or Claims()
        endpoint, compute, clock = ports.endpoint, ports.compute, ports.clock
        # Each object takes objects made before it as arguments: the order of these lines is the order of dependence.
        failures = Failures()
        self.failure = failures.first
        self._tasks = tasks = Tasks(failures.add)
        """Background tasks, each of which ends by itself when the peer closes."""
        self._plans, life, parts = Plans(clock), Life(endpoint), Parts()
        self._links = LinkProbing(endpoint, clock, ports.meter, arithmetic.vectors)
        own = OwnWord(endpoint, self._plans, life, parts, self._links, self._claims, has_text=arithmetic.has_text)
        self._neighbours = Neighbours(endpoint, clock, self._plans, parts, own, silence_s=3.0 * spec.swarm.heartbeat_s)
        self.reports = Reports(endpoint, clock, self._plans, watcher or Watcher())
        self._layers = Layers(ports, spec, arithmetic, self._plans, life, parts, self.reports, failures, tasks)
        self.server = self._layers.server
        self.inference = InferenceService(spec, ports, self._plans, parts, failures)
        self.services = services = Services(
            ports=ports,
            run=RunHere(spec=spec, arithmetic=arithmetic, traffic=traffic or Traffic()),
            plans=self._plans,
            life=life,
            parts=parts,
            own=own,
            neighbours=self._neighbours,
            reports=self.reports,
            layers=self._layers,
            experts=ExpertServer(
                arithmetic.tokens, endpoint=endpoint, compute=compute, plans=self._plans, spec=spec, tasks=tasks
            ),
            shortages=Shortages(spec, life, parts, own, self._neighbours, self.reports, spare=self.inference),
            failures=failures,
        )
        self.experts = ExpertSeats(services)
        self.pausing = Pausing(clock, life, parts, self._neighbours)
        self._departure = Departure(services)
        self._stage = StageSeat(services, self.experts)
        self._probing: asyncio.Task[None] | None = None

    @property
    def replica(self) -> Replica | None:
        """Our replica of a stage; None: we have none."""
        return self._stage.replica

    @property
    def unsaved(self) -> str:
        """A sentence that names the steps that are lost when this peer ends, and why; empty: no step is lost."""
        is_over = self.replica is not None and self.replica.version >= self.services.spec.training.steps
        return self._departure.unsaved or (self._layers.archive.unsaved if is_over else "")

    def has_lost_all(self) -> bool:
        """Return True if this peer's disk had snapshots of the run, and none of them can be read."""
        return self._layers.archive.has_lost_all

    def begin_with(self, weights: InitialWeights | None) -> None:
        """Set the source of the run's initial weights on this machine (with adapters: of the base model's weights).
        None: this machine has no copy of these weights."""
        self._layers.begin_with(weights)

    # --- life ---

    async def start(self) -> None:
        """Measure the device, and read the snapshots on the disk. Raises: the device's error if the device is unfit."""
        services = self.services
        await self._layers.archive.open()
        await self._measure_device(self._claims.memory_bytes)
        self._probing = asyncio.create_task(self._measure_again(), name="measure the device again")
        self._probing.add_done_callback(services.failures.add_from)

    async def _measure_device(self, memory_bytes: int | None) -> None:
        services = self.services
        services.own.device = await probe_device(
            services.spec, services.compute, services.arithmetic, memory_bytes=memory_bytes
        )

    async def _measure_again(self) -> None:
        """Measure the device while it stands by: heat, a quota or other programs may have slowed it."""
        life, own = self.services.life, self.services.own
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            stands_by = not (self.services.parts.all or life.is_leaving or life.is_paused)
            if stands_by and own.device is not None:
                await self._measure_device(own.device.memory_bytes)

    async def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Save the layers that no other peer holds, finish our work, and wait for its commit (`departure.py`). This may
        take a little longer than `timeout_s` if a disk is slow. Returns: True if all of this was done."""
        self.services.life.is_draining = True
        await self._stage.settle()
        self.pausing.resume()  # a drain finishes what is in flight, which a pause would hold up
        self._neighbours.announce()
        drained = await self._departure.run(timeout_s)
        await self._neighbours.flush(2.0)  # group members wait for a leaving peer's last presence update
        return drained

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._stage.cancel()
        await self._links.close()
        await self._stage.close()
        self.services.shortages.close()
        await self.experts.close()
        await self._layers.ahead.close()
        await self.pausing.close()
        await self.inference.close()
        await self._layers.close()
        self.services.life.is_closed = True
        await self._tasks.wait()
        await self._neighbours.close()

    # --- with the coordinator ---

    def obey(self, signed: SignedPlan, *, predecessor: SignedPlan | None = None) -> None:
        """Follow a plan that is in force and newer than all plans before. Args: predecessor: the preceding plan, if the
        caller has it; a newcomer learns from it which peers may still drain."""
        before = self._plans.newest
        if before is None or before.term != signed.plan.term:
            self._ports.meter.tell_all()
        self._plans.obey(signed, predecessor=predecessor)
        self._layers.follow(signed.plan, is_first=before is None)
        self._neighbours.forget_strangers()
        if before is not None and before.era == signed.plan.era:
            self._neighbours.count_out(before, signed.plan)
            self._stage.obey(before, signed.plan)
            self.experts.follow_soon()
        self._stage.follow_soon()

    def lose_excluded(self) -> None:
        """Treat members that the run has excluded as dead, even if they drain: all peers refuse their messages."""
        plan = self._plans.newest
        for peer in plan.members if plan is not None else ():
            if self._ports.endpoint.members.is_excluded(peer):
                self.services.parts.died(peer)

    def advert(self) -> Advert:
        return self.services.own.advert()

    @property
    def fetch(self) -> FetchStatus | None:
        """The download of our state, or of frozen layers, that is under way; None: there is none."""
        progress = self._layers.base.progress if self._layers.base is not None else None
        progress = progress or (self.replica.joining.progress if self.replica is not None else None)
        return progress.status(self._ports.clock.now_s()) if progress is not None else None

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the reports since the last one. The caller must deliver it, since later heartbeats do
        not repeat its reports of commits."""
        endpoint, signed, layers, replica = self._ports.endpoint, self._plans.signed, self._layers, self.replica
        window = replica.core.pipeline.window if replica else None
        return Heartbeat(
            advert=self.advert(),
            plan_sequence=signed.plan.sequence if signed else 0,
            plan_digest=signed.digest if signed else "",
            era=endpoint.era,
            revision=endpoint.revision,
            stage=replica.stage if replica else None,
            version=max(replica.version if replica else 0, layers.archive.version_noted(endpoint.era)),
            synced=replica is not None and replica.is_ready and not replica.is_learner,
            light=replica.learner_layers if replica is not None and replica.is_ready else None,
            fetch=self.fetch,
            draining=self.services.life.is_leaving,
            commits=self.reports.take_commits(),
            validations=tuple(self.reports.validations),
            links=self._ports.meter.report(),
            holdings=layers.archive.holdings,
            attested=layers.attesting.told,
            carried=layers.retained.holding,
            unfetched_bytes=layers.ahead.unfetched_bytes,
            held=tuple((place.group, place.version) for place in self.services.parts.places if place.ready),
            loads=replica.expert_loads if replica else (),
            silent=self._neighbours.silent,
            unsound=self.reports.unsound,
            forward_s=replica.forward_s if replica else 0.0,
            window=window.size if window else 0,
            paused_s=self.pausing.paused_s,
            unsaved_s=layers.unsaved_s,
            shortages=self.services.shortages.num,
        )

    def save_at(self, version: int) -> None:
        """Write a snapshot at `version`, because the coordinator wants a snapshot of every stage."""
        if self.replica is not None and version > self.replica.version:
            self._layers.archive.want(version)

    def thin(self, safe: tuple[int, int]) -> None:
        """Remove snapshots older than `safe` (era, version), which the coordinator no longer needs."""
        self._layers.thin(safe)

    def measure_links(self, peers: tuple[PeerID, ...], beside: tuple[PeerID, ...]) -> None:
        """Measure our links to `peers`, as the coordinator asks. Args: beside: peers that share our network card."""
        self._links.measure(peers, beside)

    def look_at_links(self) -> None:
        """Measure our links by their traffic. The coordinator asks for this when the run is slower than the measured
        figures explain: a slow link may be too busy to be probed."""
        self._links.look()
