"""What a coordinator knows and wants: who is there, what has been committed, which layout should come next. Pure.

Every peer has one, since everyone's turn comes; while somebody else coordinates it hears nothing and decides nothing.
"""

from dataclasses import dataclass, field

from shoal.coordinator import election
from shoal.coordinator.allocate.interface import Allocator, Layout, MeasuredPeer, NoLayout, Snapshot
from shoal.coordinator.cost import layer_costs
from shoal.coordinator.ledger import Ledger, StepRecord
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import HandOver, Heartbeat, SwarmStatus
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.spec import RunSpec

STATUS_PEERS_MAX = 256
"""A peer's line is about 200 bytes; more would not fit in one message."""
HANDOVER_ADVERTS_MAX = 64
"""The successor hears from everyone within a heartbeat anyway; adverts only spare it that wait for most."""


@dataclass(slots=True, kw_only=True)
class Governor:
    """Args:
    allocator: makes layouts.
    """

    run: str
    spec: RunSpec
    allocator: Allocator
    roster: Roster = field(init=False)
    ledger: Ledger = field(init=False)
    begun_s: float | None = None
    """When the run's first plan was made, in this clock, as far as we know."""
    _settled_for: tuple[object, ...] | None = None
    """The swarm for which the live plan, or the refusal to make another, is right."""
    _will: HandOver | None = None
    _layer_costs: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        swarm = self.spec.swarm
        self.roster = Roster(swarm.heartbeat_s)
        training = self.spec.training
        self.ledger = Ledger(
            num_stages=swarm.stages,
            steps=training.steps,
            heartbeat_s=swarm.heartbeat_s,
            validates=training.validation_interval_steps > 0,
            lead_steps=training.s_max + 1,
        )
        self._layer_costs = layer_costs(self.spec.model)

    # --- what comes in ---

    def hear(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> bool:
        """Returns: False if there is no room for this peer."""
        if not self.roster.heard(peer, heartbeat, now_s):
            return False
        self.ledger.note_version(heartbeat.stage, heartbeat.version)
        self.ledger.note_commits(heartbeat.commits, now_s)
        self.ledger.note_validations(heartbeat.validations)
        return True

    def obey(self, now_s: float) -> None:
        """A plan is live, whoever coordinates; the first one that we see is the best we know of the run's beginning."""
        self.begun_s = now_s if self.begun_s is None else self.begun_s

    def begin_term(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        """We coordinate now, or still (`continuing`): give every member time to be heard before its silence counts.

        `silent` is the coordinator before us if its silence is why we are here.
        """
        will, self._will = self._will, None
        self._settled_for = None
        if not continuing:
            # What we knew in an earlier term of ours is stale: who had left may be back, who drained may be gone.
            self.roster = Roster(self.spec.swarm.heartbeat_s)
        if will is not None:
            for peer, advert in will.roster:
                self.roster.expect(peer, advert, now_s)
            self.begun_s = now_s - max(0.0, will.elapsed_s)
            self.ledger.take_over(will)
        for peer in plan.members:
            self.roster.expect(peer, None, now_s)
        if silent in plan.members:
            self.roster.doubt(silent, now_s)
        self.roster.forget_silent(now_s, keep=frozenset(plan.members))

    def inherit(self, will: HandOver) -> None:
        """What the coordinator before us knows; for the term that we may get."""
        self._will = will

    # --- what to do ---

    def first_layout(self, now_s: float) -> tuple[Layout | None, str]:
        """The run's first layout as soon as enough peers are alive. Returns: (layout, why not yet)."""
        peers = self.roster.measured(now_s)
        if len(peers) < self.spec.swarm.min_peers:
            return None, f"waiting for peers: {len(peers)} of {self.spec.swarm.min_peers} are here"
        if not any(peer.has_data for peer in peers):
            return None, "waiting for a peer that has the run's text"
        return self._layout(peers, None, sequence=1)

    def next_layout(self, live: Plan, now_s: float, *, sequence: int) -> tuple[Layout | None, str]:
        """A layout for the swarm as it is, if the swarm has changed and the layout would.

        Returns: (layout, reason); an empty reason if there is nothing to say.
        """
        if self.roster.unheard(now_s):
            return None, ""  # they will be heard or suspected shortly; until then we know too little to move anybody
        peers = self.roster.measured(now_s)
        swarm = _swarm(peers)
        if swarm == self._settled_for:
            return None, ""
        layout, reason = self._layout(peers, live, sequence=sequence)
        if layout is None or layout.places() == _places(live):
            self._settled_for = swarm
            return None, reason if layout is None else ""
        return layout, layout.reason

    def settle(self, now_s: float) -> None:
        """The swarm as it is now has been provided for."""
        self._settled_for = _swarm(self.roster.measured(now_s))

    def unsettle(self) -> None:
        """A plan came to nothing: the swarm is still to be provided for."""
        self._settled_for = None

    @property
    def version_max(self) -> int:
        """Highest version committed anywhere, as far as we know."""
        inherited = self._will.version if self._will else 0
        return max(self.ledger.version_max, self.roster.version_max, inherited)

    def successors(self, live: Plan, now_s: float) -> tuple[PeerID, ...]:
        """Who may coordinate the next term, first in turn first."""
        candidates = (peer for peer in live.members if self.roster.may_coordinate(peer, now_s))
        return election.rank(self.run, live.term + 1, candidates)

    def will(self, live: SignedPlan, now_s: float) -> HandOver:
        """What the successor should know."""
        known = ((peer, self.roster.presences[peer].advert) for peer in self.roster.alive(now_s))
        adverts = tuple((peer, advert) for peer, advert in known if advert is not None)
        return HandOver(
            plan=live.envelope,
            roster=adverts[:HANDOVER_ADVERTS_MAX],
            version=self.version_max,
            loss=self.ledger.loss,
            validation_loss=self.ledger.validation_loss,
            tokens_per_s=self.ledger.tokens_per_s,
            staleness_steps_mean=self.ledger.staleness_mean,
            elapsed_s=self._elapsed_s(now_s),
        )

    def tell(self, live: Plan, now_s: float, *, flush: bool = False) -> list[StepRecord]:
        return self.ledger.tell(now_s, term=live.term, peers=len(live.members), flush=flush)

    def status(self, live: Plan, now_s: float) -> SwarmStatus:
        ids = sorted({*live.members, *self.roster.alive(now_s)}, key=lambda p: (_stage_key(live, p), p))
        peers = (self.roster.status(peer, live.stage_of(peer), now_s) for peer in ids[:STATUS_PEERS_MAX])
        return SwarmStatus(
            run=self.run,
            name=self.spec.name,
            coordinator=live.coordinator,
            term=live.term,
            plan_sequence=live.sequence,
            plan_reason=live.reason,
            step=self.ledger.step,
            steps=self.spec.training.steps,
            tokens_per_s=self.ledger.tokens_per_s,
            loss=self.ledger.loss,
            validation_loss=self.ledger.validation_loss,
            staleness_steps_mean=self.ledger.staleness_mean,
            stages=tuple((stage.first_layer, stage.last_layer) for stage in live.stages),
            peers=tuple(peer for peer in peers if peer is not None),
            elapsed_s=self._elapsed_s(now_s),
        )

    def _layout(
        self, peers: tuple[MeasuredPeer, ...], previous: Plan | None, *, sequence: int
    ) -> tuple[Layout | None, str]:
        snapshot = Snapshot(peers=peers, layer_costs=self._layer_costs, num_stages=self.spec.swarm.stages)
        try:
            layout = self.allocator.allocate(snapshot, previous, seed=sequence)
        except NoLayout as flaw:
            return None, f"no new plan: {flaw}"
        return layout, layout.reason

    def _elapsed_s(self, now_s: float) -> float:
        return now_s - self.begun_s if self.begun_s is not None else 0.0


def _swarm(peers: tuple[MeasuredPeer, ...]) -> tuple[object, ...]:
    """What a change of must lead to a new layout. Speeds are not in it: they are noise to a plan that moves nobody.

    Who holds its state matters only while somebody waits for that to be allowed to go.
    """
    draining = any(peer.draining for peer in peers)
    return tuple((p.peer, p.has_data, p.draining, p.synced_stage if draining else None) for p in peers)


def _places(plan: Plan) -> object:
    return Layout(stages=plan.stages, spares=plan.spares, reason="").places()


def _stage_key(plan: Plan, peer: PeerID) -> int:
    stage = plan.stage_of(peer)
    return len(plan.stages) if stage is None else stage
