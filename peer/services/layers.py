"""All layers of one peer besides those that it trains: on disk, kept from the last layout, fetched for the next one,
and copies for other peers."""

from shoal.peer.base.failures import Failures
from shoal.peer.base.plans import Plans
from shoal.peer.base.tasks import Tasks
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.disk.archive import Archive
from shoal.peer.disk.attesting import Attesting
from shoal.peer.handoff.base_layers import BaseLayers
from shoal.peer.handoff.copies import Copies
from shoal.peer.handoff.fetching_ahead import FetchingAhead
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.initial import InitialWeights
from shoal.peer.handoff.retained import RetainedLayers
from shoal.peer.handoff.server import StateServer
from shoal.peer.model.state import StageState
from shoal.peer.presence.life import Life
from shoal.peer.presence.parts import Part, Parts
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Reports
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.plan import Plan, Stage
from shoal.protocol.spec import RunSpec


class Layers:
    """The layers of one peer, and the server that sends them to other peers."""

    def __init__(
        self,
        ports: Ports,
        spec: RunSpec,
        arithmetic: Arithmetic,
        plans: Plans,
        life: Life,
        parts: Parts,
        reports: Reports,
        failures: Failures,
        tasks: Tasks,
    ) -> None:
        endpoint, disk, vectors = ports.endpoint, ports.disk, arithmetic.vectors
        self._endpoint, self._clock, self._spec = endpoint, ports.clock, spec
        self._plans, self._parts, self._reports = plans, parts, reports
        self._tasks, self._base_tasks = tasks, Tasks(failures.add)
        self.saved_s = ports.clock.now_s()
        """Time when a snapshot of our stage was last due, or when we took our place in the stage, if that is later."""
        self._base_for: tuple[Stage, ...] = ()
        self.archive = Archive(disk, run=endpoint.run, spec=spec, clock=ports.clock, run_blocking=ports.run_blocking)
        self.attesting = Attesting(
            self.archive, endpoint=endpoint, compute=ports.compute, model=spec.model, reports=reports
        )
        self.retained = RetainedLayers()
        self.inbox = ChunkInbox(endpoint, compute=ports.compute, vectors=vectors)
        self.server = StateServer(
            ports,
            plans=plans,
            parts=parts,
            archive=self.archive,
            retained=self.retained,
            inbox=self.inbox,
        )
        self.ahead = FetchingAhead(ports, inbox=self.inbox, arithmetic=arithmetic, spec=spec, failures=failures)
        self.base = (
            BaseLayers(spec, ports, inbox=self.inbox, arithmetic=arithmetic, server=self.server)
            if spec.adapter is not None
            else None
        )
        """The frozen base of adapters, the same in all layouts; None: all weights train."""
        self.server.initial = self.base
        self.copies = Copies(
            self.attesting,
            ports,
            spec=spec,
            server=self.server,
            inbox=self.inbox,
            plans=plans,
            life=life,
            tasks=tasks,
            base=self.base,
        )

    def begin_with(self, weights: InitialWeights | None) -> None:
        """Set the source of the run's initial weights on this machine (with adapters: of the base model's weights).
        None: this machine has no copy of these weights."""
        if self.base is not None:
            self.base.model_folder = weights
        else:
            self.server.initial = weights

    @property
    def unsaved_s(self) -> float:
        """Seconds since a snapshot of our stage was last due here; 0: this peer does not write our stage's state."""
        stage = self._parts.stage
        keeps = self.archive.keeps and stage is not None and stage.is_ready and not stage.is_learner
        return self._clock.now_s() - self.saved_s if keeps else 0.0

    def follow(self, plan: Plan, *, is_first: bool) -> None:
        """Follow a plan: prepare its next layout, and keep the snapshots that it certifies. Args: is_first: this
        process has followed no plan before."""
        self.archive.follow(plan)
        self.attesting.follow(plan)
        if is_first:
            self._tasks.spawn(self.attesting.sign_stored(plan), "sign what is on the disk")
        self.retained.follow(plan)
        self.ahead.follow(plan)
        self.server.gradient_log.follow(plan)
        self._get_base_ready(plan)
        if not plan.next_layout:
            self.server.forget_ahead()
        if plan.cutover_version:
            self.archive.want(plan.cutover_version)
        if plan.era != self._endpoint.era:
            return
        for part in self._parts.all:
            if part.is_ready and (state := part.state) is not None:
                self.retained.take(plan, state.version, state.layers)
                if plan.cutover_version == state.version:
                    self._sign(part, state)

    def _get_base_ready(self, plan: Plan) -> None:
        place = next((stage for stage in plan.next_layout if self._endpoint.peer_id in stage.peers), None)
        if self.base is not None and place is not None and plan.next_layout != self._base_for:
            self._base_for = plan.next_layout
            keys = stage_layer_keys(self._spec.model, *place.layers)
            self._base_tasks.spawn(self.base.get_ready(keys, plan.members), "get the base ready")

    def has_state(self, part: Part, state: StageState) -> None:
        """Handle a state that our membership `part` has stepped to or loaded: save, keep and sign it, each if due."""
        self._reports.has_state(part.group_id, state)
        plan = self._plans.newest
        if plan is not None and state.version > plan.restore_version:
            self._tasks.spawn(self.archive.note_era(self._endpoint.era, state.version), "note the era")
        if plan is not None and plan.era == self._endpoint.era:
            self.retained.take(plan, state.version, state.layers)
        if part is self._parts.stage and self.archive.is_due(state.version):
            self.saved_s = self._clock.now_s()
        if self.archive.is_attested(state.version):
            self._sign(part, state)
        rank, num_ready = part.core.group.standing
        self.copies.preserve(part.group_id, state, rank=rank, num_ready=num_ready)

    def _sign(self, part: Part, state: StageState) -> None:
        plan = self._plans.newest
        if plan is not None and state.version > plan.restore_version and not part.core.group.is_learner:
            self._tasks.spawn(self.attesting.sign(state, era=self._endpoint.era), f"sign version {state.version}")

    def thin(self, safe: tuple[int, int]) -> None:
        """Remove snapshots older than `safe` (era, version), which the coordinator no longer needs."""
        if self.archive.may_thin(safe):
            self._tasks.spawn(self.archive.thin(safe), f"remove snapshots before {safe}")

    async def close(self) -> None:
        """Stop fetching the base for the next layout."""
        await self._base_tasks.cancel()
