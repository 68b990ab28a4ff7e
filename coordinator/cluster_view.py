"""Holds what a peer knows of the swarm when it coordinates: members, commits and measurements. Pure.

Every peer has such a view. Heartbeats fill it, and only the coordinator receives them: while another peer coordinates,
the view learns only which plans are live."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.coordinator import election
from shoal.coordinator.allocate.interface import HORIZON_S, MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured_topology import choose_formats, predict_step_time
from shoal.coordinator.allocate.plan_layout import Layout
from shoal.coordinator.allocate.reachability import Pair
from shoal.coordinator.calibration import Calibration
from shoal.coordinator.certificates import Certificates
from shoal.coordinator.chain_log import ENVELOPE_BYTES
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.era import CheckpointCatalog, disks_of, holders, is_last_holder
from shoal.coordinator.experts.groups import ExpertPlaces
from shoal.coordinator.ledger import Confirmations, Ends, Ledger, StepRecord
from shoal.coordinator.plan_notes import PlanNotes, Refusals
from shoal.coordinator.roll import Electorate, InviteOf
from shoal.coordinator.roster import Roster
from shoal.coordinator.snapshots import SnapshotSchedule
from shoal.coordinator.survey import Survey
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import held_keys
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import Heartbeat, Reset, TransferLeadership
from shoal.protocol.plan import Foreseen, Plan, SignedPlan, Stage
from shoal.protocol.spec import RunSpec
from shoal.protocol.wire_format import Formats

SAFE_PEERS = 64
"""Above this size the coordinator looks for the newest safe snapshot less often: it reads every peer's list."""
NETWORK_PEERS_MAX = 256
"""Only searches collect the links of a larger swarm, because nothing else can wait for that. No throughput is predicted
then, the shares of a repaired plan follow speeds only, and state for another division is always downloaded ahead."""
FORESEE_HEARTBEATS = 10.0
FORESEE_PEERS = 64
"""Interval between predictions for the live layout; above `FORESEE_PEERS` it grows in proportion to the swarm."""
RETURN_HEARTBEATS = 10.0
"""Estimated time of a roll-back: plan, votes, reading snapshots, filling the pipeline. The run waits at least as long
for a silent peer that holds the only copy of a state."""

HORIZON_S_MAX = 4 * 3600.0
"""A swarm without joins and departures is expected to stay so for as long again, but at most for this long."""

ADVERTS_MAX = 64
"""Maximum number of adverts in a transfer. They spare the successor the wait for most heartbeats."""
LEAST_NEEDED = ("roster", "plans", "absent", "records", "loads", "unreachable", "arrivals")
"""Fields to drop, in this order, from a transfer that is too large for a message; from some hundreds of peers on the
plan leaves no room for all. Plans and absences are for people; records choose among placements. Without loads the heir
keeps a hot expert's shares until it has measured where tokens go; without unreachable pairs it may group peers that
cannot talk; without arrivals it may remove a peer with late heartbeats."""


class ClusterView:
    """The swarm as this peer knows it. Args: invite_of: returns the invite of a member, as far as known."""

    def __init__(self, run: str, spec: RunSpec, invite_of: InviteOf = lambda _: b"") -> None:
        self.run, self.spec = run, spec
        swarm, training = spec.swarm, spec.training
        self.electorate = Electorate(swarm.heartbeat_s, invite_of if swarm.trust == "invites" else lambda _: b"")
        self.roster = Roster(swarm.heartbeat_s)
        self.survey = Survey(spec)
        self.confirmations = Confirmations()
        self.experts = ExpertPlaces(
            num_experts=spec.model.num_experts, slots=swarm.expert_slots, min_replicas=swarm.expert_replicas
        )
        are_enough = self.electorate.are_enough
        self.certificates = Certificates(spec.model, placed=self.places_experts, are_enough=are_enough)
        self.ledger = Ledger(
            num_stages=1,  # until a plan says how many
            num_experts=spec.model.num_experts if swarm.expert_slots else 0,
            steps=training.steps,
            microbatches=training.microbatches_per_step,
            heartbeat_s=swarm.heartbeat_s,
            validates=training.validation_interval_steps > 0,
            tokens_per_step=spec.tokens_per_step,
        )
        self.begun_s: float | None = None
        """The time of the run's first plan on this peer's clock, as far as known."""
        self.calibration = Calibration(synchronous_steps=spec.synchronous_steps if training.s_max else 0)
        self._foresee_at_s = -math.inf
        self._formats: tuple[int, Formats | None] = (0, None)
        """(sequence of a plan, the best formats for its tensors by recent figures)."""
        self.notes = PlanNotes()
        self.refusals = Refusals()
        self._snapshots = SnapshotSchedule(
            interval_s=swarm.snapshot_interval_s, heartbeat_s=swarm.heartbeat_s, lead_steps=training.s_max + 1
        )
        self._inherited: TransferLeadership | None = None
        """The state that the previous coordinator transferred, for the term that we may get."""
        self._safe = 0, 0
        self._look_for_safe_s = -math.inf
        self._members: frozenset[PeerID] = frozenset()
        self._placed: frozenset[PeerID] = frozenset()
        """Members of the live plan that hold a stage or experts."""
        self._changed_s = math.inf
        """The time of the last plan with other members than its predecessor, as far as we have seen."""
        self._bounds: tuple[tuple[int, int], ...] = ()
        self._num_divisions = 0
        """Number of live plans with other stage boundaries than their predecessor."""
        self._seen_from_s = math.inf
        """The time at which we saw the first live plan."""
        self._former_members: frozenset[PeerID] = frozenset()
        """The members of the last plan with another membership; they may still report work that they did under it."""

    # --- inputs ---

    def hear(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> list[str]:
        """Record a heartbeat. Returns: the impossible reports in it, as sentences."""
        self.roster.heard(peer, heartbeat, now_s)
        if heartbeat.era == self.ledger.era:
            self.confirmations.note(peer, heartbeat.stage, heartbeat.version, holds=heartbeat.synced)
            self.ledger.note_version(heartbeat.stage, self.confirmations.version(heartbeat.stage or 0))
            for group, version in heartbeat.held:
                self.confirmations.note(peer, group, version, holds=True)
                self.ledger.note_version(group, self.confirmations.version(group))
            self.experts.hear(peer, heartbeat)
        self.experts.records.heard(peer, now_s)
        self.survey.hear(peer, heartbeat)
        self.survey.reach.note(peer, heartbeat.links, now_s)
        if peer not in self._members and peer not in self._former_members:
            return []
        flaws = self.ledger.note_commits(heartbeat.commits, now_s)
        self.ledger.note_validations(heartbeat.validations)
        return [f"{peer} reports {flaw}" for flaw in flaws]

    def obey(self, plan: Plan, now_s: float, *, leads: bool = False) -> None:
        """Record a live plan of any coordinator; the first one is our best estimate of the run's start.
        Args: leads: we coordinate it and its predecessor, so we know why the removed members are gone."""
        for peer in sorted(self._members.difference(plan.members)) if leads else ():
            if self.roster.has_vanished(peer, now_s):
                self.experts.records.lost(peer)
        if not self._members.issubset(plan.members):
            self._former_members = self._members
        if self._members != frozenset(plan.members):
            self._changed_s = now_s
        self._members = frozenset(plan.members)
        self._placed = self._members.difference(plan.spares)
        if (bounds := tuple(stage.layers for stage in plan.stages)) != self._bounds:
            self._num_divisions += bool(self._bounds)
            self._bounds, self._seen_from_s = bounds, min(self._seen_from_s, now_s)
        self.confirmations.obey(plan)
        self.certificates.obey(plan)
        self.experts.obey(plan)
        self.begun_s = now_s if self.begun_s is None else self.begun_s
        self.notes.obey(plan, now_s)
        self.calibration.obey(plan)
        self.survey.obey(plan)
        if plan.era != self.ledger.era:
            self.ledger.rewind(plan.era, plan.restore_version, num_stages=len(plan.stages))
            self._snapshots.begin()
        else:
            self.ledger.divide(len(plan.stages))

    def begin_term(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> bool:
        """Begin a term as coordinator, or continue as such (`continuing`). Give each member time for a heartbeat before
        its silence counts.
        Args: silent: the previous coordinator, if its silence caused this term.
        Returns: whether the previous coordinator has searched for a better layout than this plan's."""
        inherited, self._inherited = self._inherited, None
        members = frozenset(plan.members)
        self.electorate.begin_term()
        self.experts.forget_strangers(members)
        if not continuing:
            # Knowledge from an earlier term of ours is stale, except for the irregularity of heartbeats.
            irregular = self.roster.irregular()
            self.roster = Roster(self.spec.swarm.heartbeat_s)
            self.roster.take_over(irregular)
            self._snapshots.begin()
            self.survey.begin_term(plan)
            self._foresee_at_s = now_s + FORESEE_HEARTBEATS * self.spec.swarm.heartbeat_s
        if inherited is not None:
            self.roster.take_over(inherited.arrivals)
            if not continuing:
                self.survey.reach.forget_all()  # the previous coordinator knows of pairs that have met since
                self.survey.reach.take_over(inherited.unreachable, now_s)
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
        return inherited is not None and inherited.searched

    # --- between coordinators ---

    def inherit(self, handover: TransferLeadership) -> None:
        """Keep the transferred state of the previous coordinator, for the term that we may get."""
        self._inherited = handover
        self.experts.take_over(handover.loads)
        self.experts.records.take_over(handover.records)

    def inherit_reset(self, live: SignedPlan, reset: Reset, now_s: float, *, searched: bool) -> None:
        """Keep our own knowledge, with the peers that the owner's reset names, for the term that the reset begins."""
        self._inherited = msgspec.structs.replace(
            self.hand_over(live, now_s, searched=searched),
            roster=reset.roster,
            version=max(reset.version, self.version_max),
        )

    def forget_inherited(self) -> None:
        self._inherited = None

    def stand_by(self) -> None:
        """Follow another coordinator, which counts the experts' load from now on."""
        self._inherited = None
        self.experts.rest()

    def hand_over(self, live: SignedPlan, now_s: float, *, searched: bool, permit: bytes = b"") -> TransferLeadership:
        """Build the message for the next coordinator, as much as fits.
        Args: searched: whether a search has found nothing better than the live plan's layout."""
        known = ((peer, self.roster.presences[peer].advert) for peer in self.roster.alive(now_s))
        handover = TransferLeadership(
            plan=live.link,
            roster=tuple((peer, advert) for peer, advert in known if advert is not None)[:ADVERTS_MAX],
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
            searched=searched,
            plans=self.notes.tell(now_s),
            absent=self.roster.absent(live.plan.members, now_s),
            loads=self.experts.loads(len(live.plan.stages)),
            records=self.experts.records.tell(live.plan.members),
            calibration=self.calibration.tell(),
            arrivals=self.roster.irregular(),
            unreachable=self.survey.reach.tell(now_s),
        )
        return fitting(handover)

    # --- queries ---

    def catalog(self, now_s: float, *, among: Layout | None = None) -> CheckpointCatalog:
        """The snapshots to which the run may roll back. Args: among: as in `disks_of`."""
        return disks_of(self.roster, now_s, among=among).only(self.certificates.layers)

    @property
    def places_experts(self) -> bool:
        """True if plans of this run assign experts to members."""
        return self.spec.swarm.expert_slots > 0

    @property
    def ends(self) -> Ends:
        """The proof that the run is done; empty: it is not, or its last version is not validated."""
        return self.confirmations.ends if self.ledger.done else ()

    @property
    def claimed(self) -> tuple[int, int]:
        """(era, version) of the newest snapshot that a member with a place reports, certified or not; (0, 0): none."""
        beats = self.roster.beats(self._placed)
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
        beats = self.roster.beats(self.roster.presences)
        return max((beat.version for _, beat in beats if beat.era == self.ledger.era), default=0)

    def is_fresh(self, live: Plan, own: Heartbeat | None, *, leads: bool) -> bool:
        """True if nothing has been committed yet in the era of `live`. In doubt return False: at worst, a stage without
        state counts as lost. A wrong True could begin one era twice, with two histories.
        Args: own: our own heartbeat, the only source after a coordinator's crash. leads: we coordinate."""
        version = own.version if own and own.era == live.era and own.synced else None
        known = leads or self._inherited is not None or version is not None
        return live.not_started and known and max(self.version_max, version or 0) <= live.restore_version

    def is_irreplaceable(self, peer: PeerID, live: Plan, now_s: float) -> bool:
        held = holders(live, self.roster, self.catalog(now_s), self.spec.model, not_started=False, now_s=now_s)
        return is_last_holder(peer, live, held)

    def successors(self, live: Plan, now_s: float) -> tuple[PeerID, ...]:
        """The peers that may coordinate the next term, first choice first. Peers that members cannot reach come last,
        because a coordinator removes members that it cannot hear."""
        candidates = (peer for peer in live.members if self.roster.may_coordinate(peer, now_s))
        order = election.rank(self.run, live.term + 1, candidates)
        return tuple(sorted(order, key=lambda peer: self.num_unreached(peer, live, now_s)))

    def num_unreached(self, peer: PeerID, live: Plan, now_s: float) -> int:
        return sum(map(live.has, self.survey.reach.cannot_reach(peer, now_s)))

    def measured(self, live: Plan, now_s: float) -> tuple[MeasuredPeer, ...]:
        """Return the peers that are alive, for the allocator. A peer that has not followed into the live era yet holds
        nothing. A member whose group refuses its gradients has no memory for a stage: it stands by."""

        def follows(peer: PeerID) -> bool:
            beat = self.roster.beat(peer)
            return beat is not None and beat.era == live.era

        refused = self._refused(live)
        peers = self.roster.measured(now_s)
        peers = tuple(replace(peer, memory_bytes=0) if peer.peer in refused else peer for peer in peers)
        return tuple(peer if follows(peer.peer) else replace(peer, synced_stage=None) for peer in peers)

    def _refused(self, live: Plan) -> set[PeerID]:
        """Return the members that a stage reports as unsound: a majority of its other members, at least two, and not
        those of one invite alone."""
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
    ) -> SwarmSnapshot:
        """Collect all inputs of a layout. Args: as in `Survey.snapshot`."""
        found = self.survey.snapshot(peers, previous, catalog, knows_network=knows_network)
        chances = self.experts.records.probabilities([peer.peer for peer in found.peers])
        return replace(
            found,
            peers=tuple(replace(p, failure_probability=chance) for p, chance in zip(found.peers, chances, strict=True)),
            horizon_s=self._horizon_s(now_s),
            going_back_s=self._going_back_s(catalog, now_s),
            unreachable=self.unreachable(peers, now_s),
        )

    def _horizon_s(self, now_s: float) -> float:
        """Estimate how long a layout will last: the time since the last membership change, bounded by the mean life of
        past layouts (a Poisson process with a gamma prior of one in `HORIZON_S`). When no layout lasts, a change
        becomes less and less attractive."""
        lasts_s = max(HORIZON_S, now_s - self._changed_s)
        if self._num_divisions:
            lasts_s = min(lasts_s, (HORIZON_S + now_s - self._seen_from_s) / (1 + self._num_divisions))
        return min(lasts_s, HORIZON_S_MAX)

    def unreachable(self, peers: Sequence[MeasuredPeer], now_s: float) -> frozenset[Pair]:
        return self.survey.reach.pairs(now_s, {peer.peer for peer in peers})

    def _going_back_s(self, catalog: CheckpointCatalog, now_s: float) -> float:
        """Estimate the seconds lost by a roll-back: its own time, plus half a snapshot interval, or the whole run so
        far if a snapshot is overdue and none exists."""
        swarm, step_s = self.spec.swarm, self.ledger.pace.usual_step_s
        every_s = [swarm.snapshot_interval_s, swarm.snapshot_interval_steps * step_s]
        interval_s = min((seconds for seconds in every_s if seconds > 0.0), default=math.inf)
        has_any = catalog.newest_whole(held_keys(self.spec.model, placed=self.places_experts)) is not None
        elapsed_s = self.elapsed_s(now_s)
        is_late = not has_any and elapsed_s > 2.0 * interval_s
        lost_s = elapsed_s if is_late or math.isinf(interval_s) else interval_s / 2.0
        return lost_s + RETURN_HEARTBEATS * swarm.heartbeat_s

    def step_s_at_best(self, now_s: float) -> float:
        """Seconds a step if no device of the present peers ever waited; 0: not known."""
        workload = Workload.of(self.spec)
        adverts = (self.roster.presences[peer].advert for peer in self.roster.alive(now_s))
        flop_per_s = sum(advert.flop_per_s for advert in adverts if advert is not None)
        flop = workload.microbatches * workload.job_flop(0, workload.num_layers)
        return flop / flop_per_s if flop_per_s > 0 else 0.0

    def predict_step_time(
        self, stages: Sequence[Stage], now_s: float, formats: Formats | None = None, *, synchronous: bool = False
    ) -> Foreseen | None:
        """Predict the throughput of these stages by the objective alone; None: no prediction, or the swarm is too
        large.
        Args: formats: of the tensors between these stages; None: the narrowest. synchronous: no steps run ahead."""
        snapshot = self._snapshot_of(stages, now_s)
        wire = self.survey.takes.under(formats) if formats is not None else None
        return None if snapshot is None else predict_step_time(snapshot, stages, wire, synchronous=synchronous)

    def choose_formats(self, stages: Sequence[Stage], now_s: float, *, kept: Formats | None = None) -> Formats | None:
        """Choose the formats of these stages' tensors; None: the run allows only one."""
        takes = self.survey.takes
        if not takes.are_choices:
            return None
        snapshot = self._snapshot_of(stages, now_s)
        return takes.thinnest(len(stages)) if snapshot is None else choose_formats(snapshot, stages, takes, kept=kept)

    def other_formats(self, live: Plan) -> Formats | None:
        """Return the formats that the live plan should change to; None: its own are still the best."""
        sequence, formats = self._formats
        return formats if sequence == live.sequence and formats != live.formats else None

    def _snapshot_of(self, stages: Sequence[Stage], now_s: float) -> SwarmSnapshot | None:
        """Return the members of these stages as they are now; None: too many for a prediction in time."""
        members = {peer for stage in stages for peer in stage.peers}
        peers = tuple(peer for peer in self.roster.measured(now_s) if peer.peer in members)
        if len(peers) > NETWORK_PEERS_MAX:
            return None
        found = self.survey.snapshot(peers, None, CheckpointCatalog(parts={}), knows_network=True)
        return replace(found, unreachable=self.unreachable(peers, now_s))

    def compare(self, live: Plan, now_s: float) -> None:
        """Compare the live plan's prediction with the measured throughput, once every member has been heard."""
        if now_s >= self._foresee_at_s:
            apart = max(1.0, len(live.members) / FORESEE_PEERS)
            self._foresee_at_s = now_s + FORESEE_HEARTBEATS * self.spec.swarm.heartbeat_s * apart
            is_synchronous = self.calibration.is_synchronous(self.version_max)
            self.calibration.predict_step_time(
                self.predict_step_time(live.stages, now_s, live.formats),
                synchronous=self.predict_step_time(live.stages, now_s, live.formats, synchronous=True)
                if is_synchronous
                else None,
            )
            self._formats = live.sequence, self.choose_formats(live.stages, now_s, kept=live.formats)
        holders = (peer for stage in live.stages for peer in stage.peers)
        is_whole = all(self.roster.has_state(peer, live) for peer in holders)
        self.calibration.look(self.ledger.pace, now_s, version=self.version_max, is_whole=is_whole)
        comparison = self.calibration.comparison()
        self.notes.judge(comparison.sentence if comparison is not None else "")

    def probe(self, peer: PeerID, live: Plan | None, now_s: float) -> tuple[PeerID, ...]:
        if live is not None and not live.has(peer):
            return ()
        if live is not None:
            return self.survey.links.choose_one(peer, live, now_s, in_doubt=self.calibration.is_unexplained)
        return self.survey.links.choose(peer, self.roster.alive(now_s), now_s)

    def save_at(self, live: Plan, now_s: float) -> int:
        """The version at which every stage of `live` is to write a snapshot; 0: none is due."""
        if self._snapshots.is_due_to_look(now_s):
            beats = self.roster.beats(self.roster.alive(now_s))
            of_era = (beat for _, beat in beats if beat.era == live.era)
            self._snapshots.look(of_era, now_s, elapsed_s=self.elapsed_s(now_s))
        return self._snapshots.save_at

    def safe(self, live: Plan, now_s: float) -> tuple[int, int]:
        """(era, version) of the newest safe snapshot on disks of live members; (0, 0): none. Only members count,
        because a plan that rolls back reads their disks only, and none while the era has not started: members may still
        roll back."""
        if live.not_started:
            return (0, 0)
        if now_s >= self._look_for_safe_s:
            self._look_for_safe_s = now_s + self.spec.swarm.heartbeat_s * max(1.0, len(live.members) / SAFE_PEERS)
            alive = (peer for peer in live.members if not self.roster.is_gone(peer, now_s))
            holdings = ((peer, beat.holdings) for peer, beat in self.roster.beats(alive))
            layers = held_keys(self.spec.model, placed=self.places_experts)
            catalog = CheckpointCatalog.of(holdings).only(self.certificates.layers)
            self._safe = catalog.newest_safe(layers) or (0, 0)
        return self._safe

    def completed_steps(self, live: Plan, now_s: float, *, flush: bool = False) -> list[StepRecord]:
        return self.ledger.tell(now_s, term=live.term, peers=len(live.members), flush=flush)

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self.begun_s if self.begun_s is not None else 0.0


def fitting(handover: TransferLeadership) -> TransferLeadership:
    """Drop fields from `handover` until it fits in a message; a plan that is too large alone cannot be sent at all."""
    for name in LEAST_NEEDED:
        if len(msgspec.msgpack.encode(handover)) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX:
            break
        handover = msgspec.structs.replace(handover, **{name: ()})
    return handover
