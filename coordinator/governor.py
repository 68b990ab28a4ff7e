"""What a coordinator knows and wants: who is there, what has been committed, which layout should come next. Pure.

Every peer has one, since everyone's turn comes; while somebody else coordinates it hears nothing and decides nothing.
"""

import math
from dataclasses import dataclass, field, replace

import msgspec

from shoal.coordinator import election
from shoal.coordinator.allocate.interface import NO_MOVES, Allocator, Layout, MeasuredPeer, NoLayout, Searching
from shoal.coordinator.ballot import Draft
from shoal.coordinator.confirmations import Confirmations, Ends
from shoal.coordinator.cost.workload import Workload
from shoal.coordinator.diagnosis import name_of
from shoal.coordinator.era import (
    Beginning,
    Disks,
    HolderWatch,
    disks_of,
    group_name,
    holders,
    is_last_holder,
    next_beginning,
)
from shoal.coordinator.experts.expert_groups import ExpertPlaces
from shoal.coordinator.handover import adverts, fitting
from shoal.coordinator.ledger import Ledger, StepRecord
from shoal.coordinator.plan_notes import PlanNotes
from shoal.coordinator.roster import Roster
from shoal.coordinator.search_schedule import SearchJob, SearchSchedule, Swarm, keeps_state, places_of
from shoal.coordinator.snapshots import SnapshotSchedule
from shoal.coordinator.survey import Survey
from shoal.coordinator.swarm_status import swarm_status
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import held_keys
from shoal.protocol.messages import HandOver, Heartbeat, Reset, SwarmStatus
from shoal.protocol.plan import Mandate, Plan, SignedPlan
from shoal.protocol.spec import RunSpec

LOOKING_FOR_FIRST = "looking for a first layout"
RETURN_S_MAX = 600.0
"""How long at most the run waits for a silent peer that has what nobody else has."""
SAFE_PEERS = 64
"""With more peers the coordinator looks more rarely which snapshot is safe: it reads every peer's list of snapshots."""
NETWORK_PEERS_MAX = 256
"""For more than these a repaired plan's shares follow speeds alone: what lies between them takes too long to put
together for a plan that must come at once. A search has it always."""


@dataclass(slots=True, kw_only=True)
class Governor:
    """Args:
    allocator: makes layouts.
    """

    run: str
    spec: RunSpec
    allocator: Allocator
    roster: Roster = field(init=False)
    experts: ExpertPlaces = field(init=False)
    ledger: Ledger = field(init=False)
    begun_s: float | None = None
    """When the run's first plan was made, in this clock, as far as we know."""
    complaints: list[str] = field(default_factory=list)
    """What peers have said that cannot be; whoever reads it empties it."""
    _settled_for: tuple[object, ...] | None = None
    """The swarm for which the live plan, or the refusal to make another, is right."""
    _will: HandOver | None = None
    _survey: Survey = field(init=False)
    _schedule: SearchSchedule = field(init=False)
    _job: SearchJob | None = None
    _holders: HolderWatch = field(init=False)
    _notes: PlanNotes = field(default_factory=PlanNotes)
    _snapshots: SnapshotSchedule = field(init=False)
    _safe: tuple[int, int] = (0, 0)
    _look_for_safe_s: float = -math.inf
    _members: frozenset[PeerID] = frozenset()
    """Of the live plan."""
    _former_members: frozenset[PeerID] = frozenset()
    """Of the last plan that had others: they may still report what they did then."""
    witnesses: Confirmations = field(default_factory=Confirmations)

    def __post_init__(self) -> None:
        swarm = self.spec.swarm
        self.roster = Roster(swarm.heartbeat_s)
        training = self.spec.training
        self.experts = ExpertPlaces(
            num_experts=self.spec.model.num_experts, slots=swarm.expert_slots, min_replicas=swarm.expert_replicas
        )
        self.ledger = Ledger(
            num_stages=swarm.stages,
            num_experts=self.spec.model.num_experts if swarm.expert_slots else 0,
            steps=training.steps,
            microbatches=training.microbatches_per_step,
            heartbeat_s=swarm.heartbeat_s,
            validates=training.validation_interval_steps > 0,
            tokens_per_step=self.spec.tokens_per_step,
        )
        self._snapshots = SnapshotSchedule(
            interval_s=swarm.snapshot_interval_s, heartbeat_s=swarm.heartbeat_s, lead_steps=training.s_max + 1
        )
        self._survey = Survey(self.spec)
        self._schedule = SearchSchedule(swarm.heartbeat_s, enabled=isinstance(self.allocator, Searching))
        self._holders = HolderWatch(swarm.heartbeat_s, 0.0)

    # --- what comes in ---

    def hear(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> bool:
        """Returns: False if there is no room for this peer."""
        if not self.roster.heard(peer, heartbeat, now_s):
            return False
        if heartbeat.era == self.ledger.era:
            self.witnesses.note(peer, heartbeat.stage, heartbeat.version, holds=heartbeat.synced)
            self.ledger.note_version(heartbeat.stage, self.witnesses.version(heartbeat.stage or 0))
            for group, version in heartbeat.held:
                self.witnesses.note(peer, group, version, holds=True)
                self.ledger.note_version(group, self.witnesses.version(group))
            self.experts.hear(peer, heartbeat)
        self.experts.records.heard(peer, now_s)
        self._survey.hear(peer, heartbeat)
        if peer in self._members or peer in self._former_members:
            flaws = self.ledger.note_commits(heartbeat.commits, now_s)
            self.complaints += [f"{peer} reports {flaw}" for flaw in flaws]
            self.ledger.note_validations(heartbeat.validations)
        return True

    @property
    def ends(self) -> Ends:
        """What proves that the run is done; empty: it is not, or not validated."""
        return self.witnesses.ends if self.ledger.done else ()

    def obey(self, plan: Plan, now_s: float, *, leads: bool = False) -> None:
        """A plan is live, whoever coordinates; the first one that we see is the best we know of the run's beginning.

        Args: leads: it is ours, as the one before was, so we know why whom it counts out is gone.
        """
        for peer in sorted(self._members.difference(plan.members)) if leads else ():
            if self.roster.has_vanished(peer, now_s):
                self.experts.records.lost(peer)
        if not self._members.issubset(plan.members):
            self._former_members = self._members
        self._members = frozenset(plan.members)
        self.witnesses.obey(plan)
        self.begun_s = now_s if self.begun_s is None else self.begun_s
        self._notes.obey(plan, now_s)
        self._survey.obey(plan)
        if plan.era != self.ledger.era:
            self.ledger.rewind(plan.era, plan.restore_version)
            self._snapshots.begin()
            self._holders = HolderWatch(self.spec.swarm.heartbeat_s, now_s)

    def begin_term(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        """We coordinate now, or still (`continuing`): give every member time to be heard before its silence counts.

        `silent` is the coordinator before us if its silence is why we are here.
        """
        will, self._will = self._will, None
        members = frozenset(plan.members)
        self._settled_for = None
        self.experts.forget_strangers(members)
        if not (continuing and self._holders.is_waiting(now_s)):
            self._holders = HolderWatch(self.spec.swarm.heartbeat_s, now_s)
        if not continuing:
            # What we knew in an earlier term of ours is stale: who had left may be back, who drained may be gone.
            self.roster = Roster(self.spec.swarm.heartbeat_s)
            self._snapshots.begin()
            self._schedule.begin_term(plan, now_s, searched=will is not None and will.searched)
            self._survey.begin_term(plan)
        if will is not None:
            for peer, advert in will.roster:
                self.roster.expect(peer, advert, now_s)
            self.begun_s = now_s - max(0.0, will.elapsed_s)
            self.ledger.take_over(will, now_s)
            if not continuing:
                self._notes.inherit(will.plans, now_s)
        for peer in plan.members:
            self.roster.expect(peer, None, now_s)
        if will is not None and not continuing:
            self.roster.expect_absent(will.absent, now_s)
        if silent in plan.members:
            self.roster.doubt(silent, now_s)
        self.roster.forget_silent(now_s, keep=members)

    def inherit(self, will: HandOver) -> None:
        """What the coordinator before us knows; for the term that we may get. Its first plan places experts already."""
        self._will = will
        self.experts.take_over(will.loads)
        self.experts.records.take_over(will.records)

    def stand_by(self) -> None:
        """Somebody else coordinates: what we were to inherit came to nothing, and what is counted next others hear."""
        self._will = None
        self.experts.rest()

    # --- what to do ---

    def first_plan(self, now_s: float) -> tuple[Draft | None, str]:
        """The run's first plan as soon as enough peers are alive. Returns: (plan, why not yet)."""
        peers = self.roster.measured(now_s)
        if len(peers) < self.spec.swarm.min_peers:
            return None, f"waiting for peers: {len(peers)} of {self.spec.swarm.min_peers} are here"
        if not any(peer.has_data for peer in peers):
            return None, "waiting for a peer that has the run's text"
        disks = disks_of(self.roster, now_s)
        swarm = _swarm(peers)
        layout = self._schedule.take(None, swarm)
        if layout is None and self._schedule.awaits_first(swarm, now_s):
            snapshot = self._survey.snapshot(peers, None, disks, knows_network=True)
            self._job = self._schedule.begin(snapshot, None, swarm, now_s, seed=1)
            return None, LOOKING_FOR_FIRST
        layout, reason = (layout, layout.reason) if layout else self._layout(peers, None, disks, sequence=1)
        if layout is None or disks.era_max < 0:
            return (None, reason) if layout is None else (Draft(layout=layout), reason)
        # All have died and forgotten their plans; some have kept their snapshots.
        beginning = next_beginning(None, self.roster, disks, self.spec.model, placed=self._placed)
        if awaited := self._awaited(disks, beginning, now_s):
            return None, awaited
        return _restarted(layout, beginning, "restart from disk")

    def next_plan(self, live: Plan, now_s: float, *, sequence: int) -> tuple[Draft | None, str]:
        """A plan for the swarm as it is, if the swarm has changed and the plan would, or a stage's state is lost.

        Returns: (plan, reason); an empty reason if there is nothing to say.
        """
        if self.roster.unheard(now_s):
            return None, ""  # they will be heard or suspected shortly; until then we know too little to move anybody
        disks = disks_of(self.roster, now_s)
        fresh = live.fresh and self.version_max <= live.restore_version
        held = holders(live, self.roster, disks, self.spec.model, fresh=fresh, now_s=now_s)
        lost = self._holders.lost(live, held, self.roster.alive(now_s), now_s)
        peers = self._measured(live.era, now_s)
        swarm = _swarm(peers)
        under_way = live.fresh and not fresh
        if not lost and not under_way and swarm == self._settled_for:
            return self._improve(live, peers, disks, now_s, sequence=sequence)
        if lost and (awaited := self._may_return(live, lost[0], disks, now_s)):
            return None, awaited  # a plan without who is silent would count it out, and its state with it
        layout, reason = self._layout(peers, live, disks, sequence=sequence)
        if layout is None:
            self._settled_for = swarm
            return None, reason
        if lost:
            within = disks_of(self.roster, now_s, among=layout)  # from others nobody could fetch a snapshot
            beginning = next_beginning(live, self.roster, within, self.spec.model, placed=self._placed)
            what = f"{group_name(live, lost[0])} has no holder left"
            # Where a part of the swarm trains on, an older snapshot at once is better than a newer one later.
            waits = beginning.version == 0 or not any(held)
            awaited = self._awaited(disks, beginning, now_s) if waits else ""
            if not awaited:
                return _restarted(layout, beginning, what)
            if swarm == self._settled_for:
                return None, f"{what}: {awaited}"
        if layout.places() == places_of(live):
            if under_way:
                # Who restarts, or comes to this plan late, must not begin the era again.
                layout = replace(layout, reason=f"training is under way{' again' if live.era else ''}")
                return Draft(layout=layout), layout.reason
            self._settled_for = swarm
            return None, ""
        return Draft(layout=layout), layout.reason

    def _may_return(self, live: Plan, group: int, disks: Disks, now_s: float) -> str:
        """Whom to wait for before the run goes back, as a sentence; empty: for nobody (any more).

        Who holds the last state of `group` and falls silent may only have been stopped. The run waits for as long as it
        would take to train again what would be lost, so that waiting in vain costs no more than going back in vain.
        """
        idle_s, step_s = self.ledger.pace.idle_s(now_s), self.ledger.pace.usual_step_s
        if idle_s is None:
            return ""
        beginning = next_beginning(live, self.roster, disks, self.spec.model, placed=self._placed)
        steps = self.version_max - beginning.version
        wait_s = min(steps * step_s, RETURN_S_MAX)
        silent = [
            member.peer
            for member in live.group_members(group)
            if self.roster.may_return(member.peer, group, live.era, now_s)
        ]
        if not silent or idle_s >= wait_s:
            return ""
        names = " or ".join(name_of(peer, self.roster) for peer in silent)
        back = f"to step {beginning.version}" if beginning.version else "to the beginning"
        return f"{group_name(live, group)} waits for {names}; the run goes back {back} in {wait_s - idle_s:.0f} s"

    def _awaited(self, disks: Disks, beginning: Beginning, now_s: float) -> str:
        """What to wait for before the run goes back to `beginning`, as a sentence; empty: for nothing (any more).

        A newer snapshot than that is on the disks that are here, but not all of it: a peer that comes back may have
        the rest. Whoever left politely has saved its layers, and the others theirs, at one version.
        """
        newest = disks.newest
        if newest is None or newest <= (beginning.from_era, beginning.version):
            return ""
        version = newest[1]
        steps = max(1, version - beginning.version)
        if self._holders.is_hopeless(now_s, relearn_s=steps * self._step_s_at_best(now_s)):
            return ""
        missing = set(held_keys(self.spec.model, placed=self._placed)) - disks.layers(newest)
        keys = [key for key in held_keys(self.spec.model, placed=self._placed) if key in missing]
        layers = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        return f"waiting for a peer that has {layers} of step {version} on its disk"

    def _step_s_at_best(self, now_s: float) -> float:
        """Seconds a step of those who are here, if none of their devices ever waited; 0: not known."""
        workload = Workload.of(self.spec)
        adverts = (self.roster.presences[peer].advert for peer in self.roster.alive(now_s))
        flop_per_s = sum(advert.flop_per_s for advert in adverts if advert is not None)
        flop = workload.microbatches * workload.job_flop(0, workload.num_layers)
        return flop / flop_per_s if flop_per_s > 0 else 0.0

    def awaits_disks(self, now_s: float) -> bool:
        """Whether a snapshot may still become whole. Who has begun to wait sees it through: it may take longer than a
        term, and an heir begins anew."""
        return self._holders.is_waiting(now_s)

    def is_irreplaceable(self, peer: PeerID, live: Plan, now_s: float) -> bool:
        """Whether the state of a group of `live` would be lost with `peer`."""
        disks = disks_of(self.roster, now_s)
        held = holders(live, self.roster, disks, self.spec.model, fresh=False, now_s=now_s)
        return is_last_holder(peer, live, held)

    def reset_plan(
        self, live: SignedPlan, reset: Reset, mandate: Mandate, now_s: float, *, sequence: int
    ) -> tuple[Draft | None, str]:
        """A plan for those that the owner has found in reach. What state is lost with the others is seen to later."""
        peers = tuple(
            MeasuredPeer.of(peer, advert, draining=False, synced_stage=live.plan.stage_of(peer))
            for peer, advert in sorted(dict(reset.roster).items())
        )
        if not peers:
            return None, "the reset names nobody who is in reach"
        layout, reason = self._layout(peers, live.plan, disks_of(self.roster, now_s), sequence=sequence)
        if layout is None:
            return None, reason
        self._will = msgspec.structs.replace(
            self.will(live, now_s), roster=reset.roster, version=max(reset.version, self.version_max)
        )
        beginning, back = None, ""
        if mandate.era:
            beginning = Beginning(era=mandate.era, version=mandate.restore_version, from_era=mandate.restore_era)
            back = f" back to version {beginning.version} of era {beginning.from_era},"
        layout = replace(layout, reason=f"reset by the owner:{back} {layout.reason}")
        return Draft(layout=layout, beginning=beginning), reason

    def settle(self, live: Plan, now_s: float) -> None:
        """The swarm as it is now has been provided for."""
        self._settled_for = _swarm(self._measured(live.era, now_s))

    def unsettle(self) -> None:
        """A plan came to nothing: the swarm is still to be provided for."""
        self._settled_for = self._will = None
        self._schedule.forget()

    def take_job(self) -> SearchJob | None:
        """What is to be searched now, once."""
        job, self._job = self._job, None
        return job

    def searched(self, job: SearchJob, layout: Layout | None, *, is_possible: bool) -> bool:
        """What came of it. Returns: whether anybody still wants to know."""
        if not is_possible:
            self._schedule.give_up()
        return self._schedule.returned(job, layout)

    @property
    def version_max(self) -> int:
        """Highest version committed anywhere in this era, as far as we know."""
        era = self.ledger.era
        beats = [seen.heartbeat for seen in self.roster.presences.values() if seen.heartbeat]
        heard = max((beat.version for beat in beats if beat.era == era), default=0)
        kept = max((held.version for beat in beats for held in beat.holdings if held.era == era), default=0)
        inherited = self._will.version if self._will and self._will.era == era else 0
        return max(self.ledger.version_max, heard, kept, inherited)

    def is_fresh(self, live: Plan, own: Heartbeat | None, *, leads: bool) -> bool:
        """Whether nothing has been committed yet in the era of `live`. If in doubt it has: then a stage without state
        is found to have lost it and the era begins anew, while two beginnings of one era are two histories.

        `own` is what we say of ourselves, all that is known to who takes over from the dead; `leads`: we coordinate.
        """
        version = own.version if own and own.era == live.era and own.synced else None
        known = leads or self._will is not None or version is not None
        return live.fresh and known and max(self.version_max, version or 0) <= live.restore_version

    def successors(self, live: Plan, now_s: float) -> tuple[PeerID, ...]:
        """Who may coordinate the next term, first in turn first."""
        candidates = (peer for peer in live.members if self.roster.may_coordinate(peer, now_s))
        return election.rank(self.run, live.term + 1, candidates)

    def save_at(self, live: Plan, now_s: float) -> int:
        """Of which version every stage of `live` is to write a snapshot; 0: none is due."""
        if self._snapshots.is_due_to_look(now_s):
            beats = (self.roster.presences[peer].heartbeat for peer in self.roster.alive(now_s))
            self._snapshots.look((beat for beat in beats if beat is not None and beat.era == live.era), now_s)
        return self._snapshots.save_at

    def safe(self, live: Plan, now_s: float) -> tuple[int, int]:
        """(era, version) of the newest snapshot that is safe on disks of members that are alive; (0, 0): none is.

        Of members only, since a plan that goes back reads from their disks alone; and none while they may go back.
        """
        if live.fresh:
            return (0, 0)
        if now_s >= self._look_for_safe_s:
            self._look_for_safe_s = now_s + self.spec.swarm.heartbeat_s * max(1.0, len(live.members) / SAFE_PEERS)
            alive = [peer for peer in live.members if not self.roster.is_gone(peer, now_s)]
            beats = ((peer, self.roster.presences[peer].heartbeat) for peer in alive)
            holdings = ((peer, beat.holdings) for peer, beat in beats if beat is not None)
            layers = held_keys(self.spec.model, placed=self._placed)
            self._safe = Disks.of(holdings).newest_safe(layers) or (0, 0)
        return self._safe

    def will(self, live: SignedPlan, now_s: float) -> HandOver:
        """What the successor should know, as far as it fits into a message."""
        will = HandOver(
            plan=live.link,
            roster=adverts(self.roster, now_s),
            era=self.ledger.era,
            version=self.version_max,
            step=self.ledger.step,
            loss=self.ledger.loss,
            validation_loss=self.ledger.validation_loss,
            validation_step=self.ledger.validation_step,
            pace=self.ledger.pace.tell(now_s),
            staleness_steps_mean=self.ledger.staleness_mean,
            elapsed_s=self._elapsed_s(now_s),
            searched=self._schedule.has_searched(live.plan),
            plans=self._notes.tell(now_s),
            absent=self.roster.absent(live.plan.members, now_s),
            loads=self.experts.loads(len(live.plan.stages)),
            records=self.experts.records.tell(live.plan.members) if self._placed else (),
        )
        return fitting(will)

    def tell(self, live: Plan, now_s: float, *, flush: bool = False) -> list[StepRecord]:
        return self.ledger.tell(now_s, term=live.term, peers=len(live.members), flush=flush)

    def status(self, live: Plan, now_s: float, *, owner: PeerID) -> SwarmStatus:
        elapsed_s = self._elapsed_s(now_s)
        return swarm_status(
            self.run,
            self.spec,
            live,
            self.roster,
            self.ledger,
            self.experts,
            self._notes.tell(now_s),
            owner=owner,
            elapsed_s=elapsed_s,
            now_s=now_s,
        )

    def _measured(self, era: int, now_s: float) -> tuple[MeasuredPeer, ...]:
        """Those alive; who has not followed into `era` yet holds nothing."""

        def follows(peer: PeerID) -> bool:
            beat = self.roster.presences[peer].heartbeat
            return beat is not None and beat.era == era

        peers = self.roster.measured(now_s)
        return tuple(peer if follows(peer.peer) else replace(peer, synced_stage=None) for peer in peers)

    def _layout(
        self, peers: tuple[MeasuredPeer, ...], previous: Plan | None, disks: Disks, *, sequence: int
    ) -> tuple[Layout | None, str]:
        knows = isinstance(self.allocator, Searching) and len(peers) <= NETWORK_PEERS_MAX
        snapshot = self._survey.snapshot(peers, previous, disks, knows_network=knows)
        try:
            layout = self.allocator.allocate(snapshot, previous, seed=sequence)
        except NoLayout as flaw:
            return None, f"no new plan: {flaw}"
        return layout, layout.reason

    def _improve(
        self, live: Plan, peers: tuple[MeasuredPeer, ...], disks: Disks, now_s: float, *, sequence: int
    ) -> tuple[Draft | None, str]:
        """Nothing has happened: what a search has found, or time to begin one."""
        swarm = _swarm(peers)
        if self.experts.is_due(live, self.ledger.step):
            placed = self.experts.place(live.stages, live, sequence=sequence)
            if placed != live.experts:
                moved = Layout(stages=live.stages, spares=live.spares, reason="experts go where the load is")
                return Draft(layout=moved), moved.reason
        layout = self._schedule.take(live, swarm)
        if layout is not None and keeps_state(layout, live, peers):
            return Draft(layout=layout), layout.reason
        if not live.fresh and self._schedule.is_due(live, swarm, now_s):
            snapshot = self._survey.snapshot(peers, live, disks, knows_network=True)
            self._job = self._schedule.begin(snapshot, live, swarm, now_s, seed=sequence)
        return None, ""

    @property
    def _placed(self) -> bool:
        return self.spec.swarm.expert_slots > 0

    def _elapsed_s(self, now_s: float) -> float:
        return now_s - self.begun_s if self.begun_s is not None else 0.0


def _swarm(peers: tuple[MeasuredPeer, ...]) -> Swarm:
    """What a change of must lead to a new layout at once. Speeds are not in it: they may lead to a search.

    Who holds its state matters only while somebody waits for that to be allowed to go.
    """
    draining = any(peer.draining for peer in peers)
    return tuple((p.peer, p.has_data, p.draining, p.synced_stage if draining else None) for p in peers)


def _restarted(layout: Layout, beginning: Beginning, why: str) -> tuple[Draft, str]:
    where = f"version {beginning.version}" if beginning.version else "the seed"
    moves = "" if layout.reason == NO_MOVES else f", {layout.reason}"
    layout = replace(layout, reason=f"{why}: back to {where}{moves}")
    return Draft(layout=layout, beginning=beginning), layout.reason
