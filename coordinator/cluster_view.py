"""Holds what a coordinator knows of the swarm, and collects the inputs of a layout search from it. Pure.

Every peer has such a view. Heartbeats fill it, and only the coordinator receives them: while another peer coordinates,
the view learns only which plans are live."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import msgspec

from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured import JOB_VARIANCE, REPORT_FORWARDS, Estimate, speeds
from shoal.coordinator.allocate.measured_topology import choose_formats, predict_step_time
from shoal.coordinator.calibration import Calibration
from shoal.coordinator.cost.workload import FormatBytes, Workload, layer_costs
from shoal.coordinator.era import Certificates, CheckpointCatalog, disks_of, holders, is_last_holder
from shoal.coordinator.experts.failure_records import HORIZON_S
from shoal.coordinator.experts.groups import ExpertPlaces
from shoal.coordinator.ledger import Confirmations, Ends, Ledger, SnapshotSchedule
from shoal.coordinator.link_survey import LinkSurvey
from shoal.coordinator.roster import TOLD_MAX, Roster
from shoal.coordinator.voting import Electorate, InviteOf, PlanNotes, Refusals
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys, held_keys
from shoal.protocol.limits import CONTROL_BYTES_MAX, ENVELOPE_BYTES_MAX
from shoal.protocol.messages import Heartbeat, Reset, TransferLeadership
from shoal.protocol.plan import Foreseen, Plan, SignedPlan, Stage
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import Formats

NETWORK_PEERS_MAX = 256
"""If the swarm is larger, only layout searches collect its links: nothing else can wait for that. Then no throughput is
predicted, repaired plans divide work by the devices' speeds only, and if stage boundaries change, state is always
fetched ahead, since the cost of a standstill is unknown."""
FORESEE_HEARTBEATS = 10.0
"""Interval at which the throughput of the live layout is predicted."""
RETURN_HEARTBEATS = 10.0
"""Estimated time of a roll-back: plan, votes, reading snapshots, filling the pipeline. The run waits at least as long
for a silent peer that holds the only copy of a state."""

HORIZON_S_MAX = 4 * 3600.0
"""A swarm that has not changed for some time is expected to stay unchanged for as long again, but at most this long."""

STEP_BESTS = 4.0
"""The first step is expected to take this many times `step_s_at_best`, since devices wait and probes overstate them."""

LEAST_NEEDED = ("roster", "plans", "absent", "records", "loads", "unreachable", "arrivals")
"""Fields to drop, in this order, from a leadership transfer that is too large for a message: a plan of some hundreds of
peers leaves no room for all. `plans` and `absent` are for people; `records` of failures help to choose a placement.
Without `loads` the next coordinator keeps a busy expert's shares until it has measured where tokens go; without
`unreachable` it may group peers that cannot talk; without `arrivals` it may remove a peer with late heartbeats."""


class ClusterView:
    """The swarm as this peer knows it. Args: invite_of: returns the invite of a member, as far as known."""

    def __init__(self, run: str, spec: RunSpec, invite_of: InviteOf = lambda _: b"") -> None:
        self.run, self.spec = run, spec
        swarm, training = spec.swarm, spec.training
        self.electorate = Electorate(swarm.heartbeat_s, invite_of if swarm.trust == "invites" else lambda _: b"")
        self.roster = Roster(swarm.heartbeat_s)
        self.links = LinkSurvey(self.roster)
        self.workload = Workload.of(spec)
        """The demands of a step on devices and links, with the narrowest wire formats that the run allows."""
        self._takes = FormatBytes.of(spec)
        """The wire formats that plans of this run may choose, with bytes of activations and gradient sums in each."""
        self._layer_costs = layer_costs(spec.model)
        told = layer_costs(spec.model, with_experts=not self.places_experts)
        self._told_flop = tuple(self.workload.tokens_per_microbatch * flop for flop in told)
        """[L], FLOP of a microbatch's forward in each layer, without placed experts (like `Heartbeat.forward_s`)."""
        self.confirmations = Confirmations()
        self.experts = ExpertPlaces(
            num_experts=spec.model.num_experts, slots=swarm.expert_slots, min_replicas=swarm.expert_replicas
        )
        are_enough = self.electorate.are_enough
        self.certificates = Certificates(spec.model, placed=self.places_experts, are_enough=are_enough)
        self.ledger = Ledger(spec)
        self.begun_s: float | None = None
        """When the run's first plan became live, on this peer's clock, as far as known; None: no plan yet."""
        self.calibration = Calibration(synchronous_steps=spec.synchronous_steps if training.s_max else 0)
        self._foresee_at_s = -math.inf
        self._formats: tuple[int, Formats | None] = (0, None)
        """(sequence of a plan, the wire formats that were best for it at the last prediction; None: no choice)."""
        self.notes = PlanNotes()
        self.refusals = Refusals()
        self._snapshots = SnapshotSchedule(spec)
        self._inherited: TransferLeadership | None = None
        """The state that the previous coordinator transferred, for the term that we may get."""
        self._safe = 0, 0
        self._look_for_safe_s = -math.inf
        self.plan: Plan | None = None
        self._working: frozenset[PeerID] = frozenset()
        self._former_members: frozenset[PeerID] = frozenset()
        """Members of the newest plan of which the next lost a member: the lost ones may still report work."""
        self._changed_s = math.inf
        """When we last saw a live plan with other members than the plan before it; inf: no plan yet."""
        self._num_divisions = 0
        """Number of live plans with other stage boundaries than their predecessor."""
        self._seen_from_s = math.inf
        """The time at which we saw the first live plan."""

    # --- inputs ---

    def hear(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> list[str]:
        """Record a heartbeat. Returns: a sentence for each impossible report in it."""
        self.roster.heard(peer, heartbeat, now_s)
        if heartbeat.era == self.ledger.era:
            held = ((group, version, True) for group, version in heartbeat.held)
            for group, version, holds in ((heartbeat.stage, heartbeat.version, heartbeat.synced), *held):
                if group is not None:
                    self.confirmations.note(peer, group, version, holds=holds)
                    self.ledger.note_version(group, self.confirmations.version(group))
            self.experts.hear(peer, heartbeat)
        self.experts.records.heard(peer, now_s)
        self._note_speed(peer, heartbeat, now_s)
        self.links.note(peer, heartbeat.links, now_s, busy=self._working)
        if not (self.plan is not None and self.plan.has(peer)) and peer not in self._former_members:
            return []
        flaws = self.ledger.note_commits(heartbeat.commits, now_s)
        self.ledger.note_validations(heartbeat.validations)
        return [f"{peer} reports {flaw}" for flaw in flaws]

    def _note_speed(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> None:
        """Record how fast the device of `peer` works for its stage."""
        plan, stage, w = self.plan, heartbeat.stage, self.workload
        if plan is None or heartbeat.plan_sequence != plan.sequence or stage is None or heartbeat.forward_s <= 0.0:
            return
        if 0 <= stage < len(plan.stages):
            record, (first, last) = self.roster.of(peer), plan.stages[stage].layers
            if record.speed_of != (first, last):
                record.speed, record.speed_of = Estimate(), (first, last)
            # The last stage runs forward and backward in one job.
            times = w.loss_per_forward if stage == len(plan.stages) - 1 else 1.0
            flop = times * sum(self._told_flop[first:last])
            is_new = now_s >= record.speed.at_s + REPORT_FORWARDS * heartbeat.forward_s
            record.speed.add(flop / heartbeat.forward_s, now_s, JOB_VARIANCE, is_new=is_new)

    def obey(self, plan: Plan, now_s: float, *, leads: bool = False) -> None:
        """Record a live plan of any coordinator. The time of the first live plan is our estimate of the run's start.
        Args: leads: we coordinate `plan` and its predecessor, so we know why the removed members are gone."""
        before, members = self.plan, frozenset(plan.members)
        members_before = frozenset(before.members) if before is not None else frozenset()
        for peer in sorted(members_before - members) if leads else ():
            if self.roster.has_vanished(peer, now_s):
                self.experts.records.lost(peer)
        if not members_before <= members:
            self._former_members = members_before
        if members_before != members:
            self._changed_s = now_s
        if before is None:
            self._seen_from_s = now_s
        elif [stage.layers for stage in before.stages] != [stage.layers for stage in plan.stages]:
            self._num_divisions += 1
        self.plan, self._working = plan, frozenset(peer for stage in plan.stages for peer in stage.peers)
        self.confirmations.obey(plan)
        self.certificates.obey(plan)
        self.experts.obey(plan)
        self.begun_s = now_s if self.begun_s is None else self.begun_s
        self.notes.obey(plan, before, now_s)
        self.calibration.obey(plan)
        self.roster.obey(plan)
        if plan.era != self.ledger.era:
            self.ledger.rewind(plan.era, plan.restore_version, num_stages=len(plan.stages))
            self._snapshots.begin()
        else:
            self.ledger.divide(len(plan.stages))

    def begin_term(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        """Begin a term as coordinator, or continue as coordinator (`continuing`). Give each member time for a heartbeat
        before its silence counts.
        Args: silent: the previous coordinator, if its silence caused this term."""
        inherited, self._inherited = self._inherited, None
        members = frozenset(plan.members)
        self.electorate.begin_term()
        self.experts.forget_strangers(members)
        if not continuing:
            # What we know from an earlier term of ours is stale; the roster keeps what still counts.
            self.roster.begin_term(members)
            self.links.begin_term(members)
            self._snapshots.begin()
            self._foresee_at_s = now_s + FORESEE_HEARTBEATS * self.spec.swarm.heartbeat_s
        if inherited is not None:
            self.roster.take_over(inherited.arrivals)
            if not continuing:
                self.links.take_over(inherited.unreachable, now_s)
            for peer, advert in inherited.roster:
                self.roster.expect(peer, advert, now_s)
            self.begun_s = now_s - max(0.0, inherited.elapsed_s)
            self.ledger.take_over(inherited, now_s)
            if not continuing:
                self.notes.inherit(inherited.plans, now_s)
                self.calibration.take_over(inherited.calibration)
                self.calibration.look(self.ledger.pace, now_s, version=self.version_max, is_whole=False)
        for peer in plan.members:
            self.roster.expect(peer, None, now_s)
        if inherited is not None and not continuing:
            self.roster.expect_absent(inherited.absent, now_s)
        if silent in plan.members:
            self.roster.doubt(silent, now_s)
        self.roster.forget_silent(now_s, keep=members)

    # --- between coordinators ---

    def inherit(self, handover: TransferLeadership) -> None:
        """Keep the state that the previous coordinator transfers, for the term that we may get."""
        self._inherited = handover
        self.experts.take_over(handover.loads)
        self.experts.records.take_over(handover.records)

    def inherit_reset(self, live: SignedPlan, reset: Reset, now_s: float) -> None:
        """Keep our own knowledge, and the peers that the owner's reset names, for the term that the reset begins."""
        self._inherited = msgspec.structs.replace(
            self.hand_over(live, now_s),
            roster=reset.roster,
            version=max(reset.version, self.version_max),
        )

    def forget_inherited(self) -> None:
        self._inherited = None

    def stand_by(self) -> None:
        """Follow another coordinator, which counts the experts' load from now on."""
        self._inherited = None
        self.experts.rest()

    def hand_over(self, live: SignedPlan, now_s: float, *, permit: bytes = b"") -> TransferLeadership:
        """Build the transfer of what we know to the next coordinator, as much as fits in a message."""
        known = ((peer, self.roster.advert(peer)) for peer in self.roster.alive(now_s))
        handover = TransferLeadership(
            plan=live.link,
            roster=tuple((peer, advert) for peer, advert in known if advert is not None)[:TOLD_MAX],
            permit=permit,
            era=self.ledger.era,
            version=self.version_max,
            step=self.ledger.step,
            loss=self.ledger.loss,
            validation_loss=self.ledger.validation_loss,
            validation_step=self.ledger.validation_step,
            pace=self.ledger.pace.tell(now_s),
            staleness_steps_mean=self.ledger.staleness_mean,
            elapsed_s=self.elapsed_s(now_s),
            plans=self.notes.tell(now_s),
            absent=self.roster.absent(live.plan.members, now_s),
            loads=self.experts.loads(len(live.plan.stages)),
            records=self.experts.records.tell(live.plan.members),
            calibration=self.calibration.tell(),
            arrivals=self.roster.irregular(),
            unreachable=self.links.tell(now_s),
        )
        return fitting(handover)

    # --- queries ---

    def catalog(self, now_s: float, *, among: Layout | None = None) -> CheckpointCatalog:
        """Return the snapshots for a roll-back. Args: among: read only the disks of this layout's peers; None: all."""
        return disks_of(self.roster, now_s, among=among).only(self.certificates.layers)

    @property
    def places_experts(self) -> bool:
        """True if plans of this run assign experts to members."""
        return self.spec.swarm.expert_slots > 0

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers, and placed experts, of which a complete snapshot consists, in order."""
        return held_keys(self.spec.model, placed=self.places_experts)

    @property
    def ends(self) -> Ends:
        """The signatures that prove the run's end; empty: the run goes on, or its last version is not validated."""
        return self.confirmations.ends if self.ledger.done else ()

    @property
    def claimed(self) -> tuple[int, int]:
        """Newest snapshot (era, version) that a member with a stage or expert reports, certified or not; (0, 0):
        none."""
        beats = self.roster.beats(self._working)
        return max(((held.era, held.version) for _, beat in beats for held in beat.holdings), default=(0, 0))

    @property
    def version_max(self) -> int:
        """The highest known version committed in this era."""
        era = self.ledger.era
        newest_era, newest = self.certificates.newest
        kept = newest if newest_era == era else 0
        inherited = self._inherited.version if self._inherited and self._inherited.era == era else 0
        return max(self.ledger.version_max, self.version_said, kept, inherited)

    @property
    def version_said(self) -> int:
        """The highest version of this era in any peer's last heartbeat."""
        beats = self.roster.beats(self.roster.records)
        return max((beat.version for _, beat in beats if beat.era == self.ledger.era), default=0)

    def is_fresh(self, live: Plan, own: Heartbeat | None, *, leads: bool) -> bool:
        """True if nothing has been committed yet in the era of `live`. In doubt return False: at worst, a stage without
        state counts as lost. A wrong True could begin one era twice, with two histories.
        Args: own: our own heartbeat, the only source after a coordinator's crash. leads: we coordinate `live`."""
        version = own.version if own and own.era == live.era and own.synced else None
        known = leads or self._inherited is not None or version is not None
        return live.not_started and known and max(self.version_max, version or 0) <= live.restore_version

    def is_irreplaceable(self, peer: PeerID, live: Plan, now_s: float) -> bool:
        held = holders(live, self.roster, self.catalog(now_s), self.spec.model, not_started=False, now_s=now_s)
        return is_last_holder(peer, live, held)

    def measured(self, live: Plan, now_s: float) -> tuple[MeasuredPeer, ...]:
        """Return the peers that are alive, for the allocator. A peer that still reports an earlier era counts as
        without state. A member that its group rejects counts as without memory, so that it becomes a standby."""

        def follows(peer: PeerID) -> bool:
            beat = self.roster.beat(peer)
            return beat is not None and beat.era == live.era

        refused = self._refused(live)
        peers = self.roster.measured(now_s)
        peers = tuple(replace(peer, memory_bytes=0) if peer.peer in refused else peer for peer in peers)
        return tuple(peer if follows(peer.peer) else replace(peer, synced_stage=None) for peer in peers)

    def _refused(self, live: Plan) -> set[PeerID]:
        """Return the peers that a stage rejects: a majority of its other members, at least two, report such a peer as
        unsound. If that stage's members joined by several invites, the reporters must have joined by two or more."""
        return {
            accused
            for accused, accusers in self.roster.accusers().items()
            for stage in live.stages
            if len(said := accusers.intersection(others := [peer for peer in stage.peers if peer != accused])) > 1
            and self.electorate.are_enough(said, others)
        }

    def snapshot(
        self,
        peers: tuple[MeasuredPeer, ...],
        previous: Plan | None,
        catalog: CheckpointCatalog,
        now_s: float,
        *,
        knows_network: bool,
        runs_ahead: bool | None = None,
    ) -> SwarmSnapshot:
        """Collect all inputs for the search or prediction of a layout.

        Args:
            knows_network: include the links, which takes a while for many peers.
            runs_ahead: False: predict synchronous steps; True: steps that run ahead; None: as plans are now made."""
        names, model, w = [peer.peer for peer in peers], self.spec.model, self.workload
        runs_ahead = self.runs_ahead(now_s) if runs_ahead is None else runs_ahead
        whole = catalog.newest_whole(self.layers)
        disks = catalog.parts[whole] if whole is not None else {}
        keys = [group_keys(model, previous, index) for index in range(len(previous.stages))] if previous else []

        def homes(peer: MeasuredPeer) -> tuple[int, ...]:
            kept = disks.get(peer.peer, frozenset())
            on_disk = (index for index, layers in enumerate(keys) if kept.issuperset(layers))
            stages = (peer.synced_stage, self.roster.at(peer.peer).former_stage, *on_disk)
            return tuple(dict.fromkeys(stage for stage in stages if stage is not None))

        believed = speeds(
            {peer.peer: peer.flop_per_s for peer in peers},
            {peer.peer: self.roster.at(peer.peer).speed for peer in peers},
            {peer.peer: peer.machine for peer in peers},
            now_s,
            seen=self.links.seen_by_others(),
        )
        uploads = self.links.uploads({peer.peer: peer.upload_bytes_per_s for peer in peers})
        in_flight_bytes = ((w.s_max + 1) * w.microbatches + 1) * sum(w.layer_held_bytes)
        whole_bytes = int(w.resident_bytes(0, w.num_layers, members=1) + in_flight_bytes)
        return SwarmSnapshot(
            peers=tuple(
                replace(
                    p,
                    homes=homes(p),
                    flop_per_s=believed[p.peer].flop_per_s,
                    speed_variance=believed[p.peer].variance,
                    upload_bytes_per_s=uploads[p.peer],
                    # more than the whole model needs is of no use, whatever the peer claims
                    memory_bytes=min(p.memory_bytes, whole_bytes),
                    failure_probability=chance,
                )
                for p, chance in zip(peers, self.experts.records.probabilities(names), strict=True)
            ),
            layer_costs=self._layer_costs,
            num_stages=self.spec.swarm.stages_for(sum(not peer.draining for peer in peers)),
            workload=w if runs_ahead else w.synchronous(),
            network=self.links.network(names, now_s) if knows_network else None,
            horizon_s=self._horizon_s(now_s),
            going_back_s=self._going_back_s(catalog, now_s),
            unreachable=self.links.pairs(now_s, {*names}),
        )

    def shortage(self, peers: tuple[MeasuredPeer, ...]) -> str:
        """Say how much memory the run lacks; empty: the peers together have the minimum for the model."""
        w = self.workload
        needed_gb = (w.resident_bytes(0, w.num_layers, members=1) + sum(w.layer_held_bytes)) / 1e9
        here_gb = sum(peer.memory_bytes for peer in peers if not peer.draining) / 1e9
        if here_gb >= needed_gb:
            return ""
        here = "the one peer has" if len(peers) == 1 else f"the {len(peers)} peers have"
        return (
            f"waiting for peers with {needed_gb - here_gb:.1f} GB of memory in all: the model takes {needed_gb:.1f} GB "
            f"while it trains, and {here} {here_gb:.1f} GB"
        )

    def runs_ahead(self, now_s: float) -> bool:
        """True if plans should be made for steps that run ahead; False while the synchronous steps still to come take
        more than half of the horizon (a layout's expected life)."""
        step_s = self.ledger.pace.usual_step_s or STEP_BESTS * self.step_s_at_best(now_s)
        return 2.0 * step_s * self.calibration.synchronous_left(self.version_max) <= self._horizon_s(now_s)

    def _horizon_s(self, now_s: float) -> float:
        """Estimate how long a layout will last: the time since the last membership change, between `HORIZON_S` and
        `HORIZON_S_MAX`, but at most the mean life of past layouts (a Poisson process with a gamma prior of one change
        in `HORIZON_S`). When no layout lasts, a change becomes less and less attractive."""
        lasts_s = max(HORIZON_S, now_s - self._changed_s)
        if self._num_divisions:
            lasts_s = min(lasts_s, (HORIZON_S + now_s - self._seen_from_s) / (1 + self._num_divisions))
        return min(lasts_s, HORIZON_S_MAX)

    def _going_back_s(self, catalog: CheckpointCatalog, now_s: float) -> float:
        """Estimate the seconds lost by a roll-back: its own time, and the training to repeat. The latter is half a
        snapshot interval, or the whole run so far if no snapshots are made, or the first is overdue."""
        swarm, step_s = self.spec.swarm, self.ledger.pace.usual_step_s
        every_s = [swarm.snapshot_interval_s, swarm.snapshot_interval_steps * step_s]
        interval_s = min((seconds for seconds in every_s if seconds > 0.0), default=math.inf)
        has_any = catalog.newest_whole(self.layers) is not None
        elapsed_s = self.elapsed_s(now_s)
        is_late = not has_any and elapsed_s > 2.0 * interval_s
        lost_s = elapsed_s if is_late or math.isinf(interval_s) else interval_s / 2.0
        return lost_s + RETURN_HEARTBEATS * swarm.heartbeat_s

    def step_s_at_best(self, now_s: float) -> float:
        """Return the seconds of a step if devices kept their adverts' speeds and never waited; 0: not known."""
        adverts = (self.roster.advert(peer) for peer in self.roster.alive(now_s))
        flop_per_s = sum(advert.flop_per_s for advert in adverts if advert is not None)
        flop = self.workload.microbatches * self.workload.job_flop(0, self.workload.num_layers)
        return flop / flop_per_s if flop_per_s > 0 else 0.0

    def predict_step_time(
        self, stages: Sequence[Stage], now_s: float, formats: Formats | None = None, *, runs_ahead: bool | None = None
    ) -> Foreseen | None:
        """Predict the throughput of these stages by `ThroughputObjective` alone. Returns None if a stage has no known
        peer, the layout is infeasible, or the stages have more than `NETWORK_PEERS_MAX` members. Args: formats: wire
        formats between the stages; None: the narrowest. runs_ahead: False: predict synchronous steps; True: steps that
        run ahead; None: the kind for which plans are now made."""
        snapshot = self._snapshot_of(stages, now_s, runs_ahead=runs_ahead)
        wire = self._takes.under(formats) if formats is not None else None
        return None if snapshot is None else predict_step_time(snapshot, stages, wire)

    def choose_formats(self, stages: Sequence[Stage], now_s: float, *, kept: Formats | None = None) -> Formats | None:
        """Choose wire formats of activations and gradient sums for these stages; None: the run allows only one."""
        takes = self._takes
        if not takes.are_choices:
            return None
        snapshot = self._snapshot_of(stages, now_s)
        return takes.thinnest(len(stages)) if snapshot is None else choose_formats(snapshot, stages, takes, kept=kept)

    def other_formats(self, live: Plan) -> Formats | None:
        """Return the wire formats to which the live plan should change; None: no better ones were found."""
        sequence, formats = self._formats
        return formats if sequence == live.sequence and formats != live.formats else None

    def _snapshot_of(
        self, stages: Sequence[Stage], now_s: float, *, runs_ahead: bool | None = None
    ) -> SwarmSnapshot | None:
        """Return the inputs of a prediction for these stages; None: they have more than `NETWORK_PEERS_MAX` members."""
        members = {peer for stage in stages for peer in stage.peers}
        peers = tuple(peer for peer in self.roster.measured(now_s) if peer.peer in members)
        if len(peers) > NETWORK_PEERS_MAX:
            return None
        nothing = CheckpointCatalog(parts={})
        return self.snapshot(peers, None, nothing, now_s, knows_network=True, runs_ahead=runs_ahead)

    def compare(self, live: Plan, now_s: float) -> None:
        """Compare the live plan's predicted and measured throughput. Call this once every member has been heard."""
        if now_s >= self._foresee_at_s:
            self._foresee_at_s = now_s + FORESEE_HEARTBEATS * self.spec.swarm.heartbeat_s
            is_ahead = not self.calibration.synchronous_left(self.version_max)
            today = self.predict_step_time(live.stages, now_s, live.formats, runs_ahead=is_ahead)
            self.calibration.predict_step_time(today, runs_ahead=self.runs_ahead(now_s))
            self._formats = live.sequence, self.choose_formats(live.stages, now_s, kept=live.formats)
        is_whole = self.roster.is_whole(live)
        self.calibration.look(self.ledger.pace, now_s, version=self.version_max, is_whole=is_whole)
        comparison = self.calibration.comparison()
        self.notes.judge(comparison.sentence if comparison is not None else "")

    def probe(self, peer: PeerID, live: Plan | None, now_s: float) -> tuple[PeerID, ...]:
        if live is None:
            return self.links.choose(peer, self.roster.alive(now_s), now_s)
        is_unexplained = self.calibration.is_unexplained
        return self.links.choose_one(peer, live, now_s, in_doubt=is_unexplained) if live.has(peer) else ()

    def save_at(self, live: Plan, now_s: float) -> int:
        """The version at which every stage of `live` should write a snapshot; 0: none is due."""
        beats = self.roster.beats(self.roster.records)
        alive = (beat for peer, beat in beats if beat.era == live.era and not self.roster.is_gone(peer, now_s))
        step_s = self.ledger.pace.usual_step_s
        self._snapshots.look(alive, now_s, elapsed_s=self.elapsed_s(now_s), step_s=step_s)
        return self._snapshots.save_at

    def safe(self, live: Plan, now_s: float) -> tuple[int, int]:
        """(era, version) of the newest snapshot with `SAFE_COPIES` of each layer on live members' disks; (0, 0): none.
        Only members count, because a roll-back reads only their disks. No snapshot counts before the first commit of an
        era, because members may still roll back."""
        if live.not_started:
            return (0, 0)
        if now_s >= self._look_for_safe_s:
            self._look_for_safe_s = now_s + self.spec.swarm.heartbeat_s
            alive = (peer for peer in live.members if not self.roster.is_gone(peer, now_s))
            holdings = ((peer, beat.holdings) for peer, beat in self.roster.beats(alive))
            catalog = CheckpointCatalog.of(holdings).only(self.certificates.layers)
            self._safe = catalog.newest_safe(self.layers) or (0, 0)
        return self._safe

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self.begun_s if self.begun_s is not None else 0.0


def fitting(handover: TransferLeadership) -> TransferLeadership:
    """Drop fields from `handover` until it fits in a message; a plan that alone is too large cannot be sent."""
    for name in LEAST_NEEDED:
        if len(msgspec.msgpack.encode(handover)) + ENVELOPE_BYTES_MAX <= CONTROL_BYTES_MAX:
            break
        handover = msgspec.structs.replace(handover, **{name: ()})
    return handover
