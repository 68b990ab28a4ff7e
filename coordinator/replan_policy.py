"""Chooses the next layout and its time, from the coordinator's view of the swarm. Pure.

A change of the swarm is answered at once with a repaired layout, followed by a search for a better one
(`search_schedule`). If a stage's state is lost, the run rolls back to a snapshot (`era`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.coordinator.allocate.greedy import FIRST_PLAN
from shoal.coordinator.allocate.interface import (
    NO_MOVES,
    Allocator,
    Beginning,
    Layout,
    MeasuredPeer,
    NoLayout,
    Searching,
    SwarmSnapshot,
    places_of,
)
from shoal.coordinator.allocate.objective import Change, lacking_bytes, next_layout_change
from shoal.coordinator.cluster_view import NETWORK_PEERS_MAX, RETURN_HEARTBEATS, ClusterView
from shoal.coordinator.coordination_events import Searched
from shoal.coordinator.era import CheckpointCatalog, HolderWatch, behind, group_name, holders, next_beginning
from shoal.coordinator.ledger import PATIENCE_HEARTBEATS
from shoal.coordinator.search_schedule import REST_HEARTBEATS, SearchJob, SearchSchedule, Swarm, keeps_state
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Holding, Reset, TransferLeadership
from shoal.protocol.plan import Mandate, Plan, SignedPlan, Stage

LOOKING_FOR_FIRST = "looking for a first layout"
NOTHING_TO_READ = (
    "the run was saved, but no present peer can read a complete snapshot: waiting for one that can "
    "(another `seed` or `name` in the run file makes a new run)"
)
"""Why the run waits if the coordinator's own snapshots are damaged or lost."""
PATIENCE_S_MAX = 600.0
"""Longest wait for a silent peer that holds the only copy of a state."""
NOTICE_HEARTBEATS = 6.0
"""Time until all members surely know at which version the live layout ends: a report, two round trips and the votes
take half of it."""
END_PATIENCE_S = 30.0
END_PATIENCE_STEPS = 4.0
"""A change of layout waits for downloads until none has progressed for `END_PATIENCE_S` or this many steps, whichever
is longer. A change with its version already set is called off if no step was committed for so long."""
CERTIFY_HEARTBEATS = 2.0
"""Minimum time after the previous plan for a plan that only certifies a version."""
TOLD_HEARTBEATS = 4.0
"""Time until every peer has reported the contents of its disk, including copies requested just before."""

Next = Layout | SearchJob | None
"""A layout to propose, a search to run, or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The swarm at one moment. `sequence`: the number of the plan that may follow."""

    peers: tuple[MeasuredPeer, ...]
    catalog: CheckpointCatalog
    now_s: float
    sequence: int


class ReplanPolicy:
    """Chooses layouts from `view`. Args: has_lost_all: returns True if our disk had snapshots and none can be read."""

    def __init__(
        self, view: ClusterView, allocator: Allocator, *, has_lost_all: Callable[[], bool] = lambda: False
    ) -> None:
        self.view = view
        self._has_lost_all = has_lost_all
        self._allocator = allocator
        self._heartbeat_s = view.spec.swarm.heartbeat_s
        self._schedule = SearchSchedule(
            self._heartbeat_s, term_s=view.spec.swarm.term_s, enabled=isinstance(allocator, Searching)
        )
        self._holders = HolderWatch(self._heartbeat_s, 0.0)
        self._ends_s, self._notice = 0.0, 1
        """(when we set the live layout's last version, or our term began; our notice as a multiple of the usual)."""
        self._unfetched_bytes: int | None = None
        self._fetched_s = 0.0
        """The time of the downloads' last progress: when their missing bytes fell to `_unfetched_bytes`."""
        self._follows_s = 0.0
        """When we first saw the next layout that the live plan names (`Plan.next_layout`)."""
        self._change: Change | None = None
        """The cost of the change to the live plan's next layout, predicted after `END_PATIENCE_S`; None: not yet."""
        self._ended_s: float | None = None
        """When all stages, and a holder of each layer, were first seen at the layout's last version; None: not yet."""
        self._too_few_s = math.inf
        """When members of stages without state were last heard, if too few peers are left for a layout; else inf."""
        self.awaited: frozenset[PeerID] = frozenset()
        """Silent members that the run waits for, because without them it would have to roll back."""
        self._live_s = -math.inf
        self._due_s = math.inf
        """When the pending search became due; inf: no search is pending."""
        self._settled_for: Swarm | None = None
        """The swarm at our last decision about the live plan. The decision stands as long as the swarm is the same."""

    # --- inputs ---

    def obey(self, plan: Plan, now_s: float, *, leads: bool = False) -> None:
        """Record a live plan of any coordinator. Args: leads: we coordinate `plan` and its predecessor."""
        before = self.view.plan
        self.view.obey(plan, now_s, leads=leads)
        self._live_s = now_s
        if before is None or plan.next_layout != before.next_layout:
            self._follows_s, self._change = now_s, None
        if before is None or plan.era != before.era:
            self._holders, self._too_few_s = HolderWatch(self._heartbeat_s, now_s), math.inf
            self.awaited = frozenset()

    def begin_term(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        self.view.begin_term(plan, now_s, continuing=continuing, silent=silent)
        self._settled_for = self._ended_s = self._unfetched_bytes = None
        if not (continuing and self._holders.is_waiting(now_s)):
            self._holders = HolderWatch(self._heartbeat_s, now_s)
        if not continuing:
            self._ends_s = now_s - (self.view.ledger.pace.idle_s(now_s) or 0.0)
            self._schedule.begin_term(plan, now_s)

    def settle(self, live: Plan, now_s: float) -> None:
        self._settled_for = self._swarm(self.view.measured(live, now_s), now_s)

    def unsettle(self) -> None:
        """Record that our proposed plan has failed: the swarm still needs a new plan."""
        self._settled_for = None
        self.view.forget_inherited()

    def searched(self, event: Searched) -> bool:
        """Record the end of a search. Returns: whether its result is still wanted."""
        self.view.calibration.rejected = "" if event.layout is not None else event.reason
        return self._schedule.returned(event.job, event.layout, is_bug=event.is_bug)

    # --- decisions ---

    def first_plan(self, now_s: float, *, own: Sequence[Holding] = ()) -> tuple[Next, str]:
        """Return the run's first layout, as soon as enough peers are alive.
        Args: own: the snapshots on our disk. Without a plan nothing is certified, so the owner trusts only these.
        Returns: (the layout, a search to run first, or None if it is too early; the reason)."""
        view, spec = self.view, self.view.spec
        peers = view.roster.measured(now_s)
        if len(peers) < spec.swarm.min_peers:
            return None, f"waiting for peers: {len(peers)} of {spec.swarm.min_peers} are here"
        if not any(peer.has_data for peer in peers):
            return None, "waiting for a peer that has the run's text"
        awaits_links = self._schedule.awaits_links(len(peers), now_s)
        if awaits_links and not view.links.is_enough([peer.peer for peer in peers], now_s):
            return None, f"measuring the links between {len(peers)} peers"
        ages = {(held.era, held.version) for held in own}
        catalog = view.catalog(now_s).only(lambda age: None if age in ages else frozenset())
        swarm, look = self._swarm(peers, now_s), _Look(peers=peers, catalog=catalog, now_s=now_s, sequence=1)
        layout = self._schedule.found_for(None, swarm)
        if layout is None and len(peers) > 1 and self._schedule.awaits_first(swarm, now_s):
            snapshot = view.snapshot(peers, None, catalog, now_s, knows_network=True)
            return self._schedule.begin(snapshot, None, swarm, now_s, seed=1), LOOKING_FOR_FIRST
        layout, reason = (layout, layout.reason) if layout else self._repaired(look, None)
        if layout is None:
            return None, view.shortage(peers) or reason
        # If there are snapshots, all peers have stopped and lost their plans.
        beginning = self._beginning(None, catalog)
        if awaited := self._awaited(catalog, beginning, now_s):
            return None, awaited
        if catalog.era_max < 0:
            return layout, reason
        return _restarted(layout, beginning, "restart from disk")

    def next_plan(self, live: Plan, now_s: float, *, sequence: int) -> tuple[Next, str]:
        """Return a new layout if a change of the swarm requires one, if a better one is found, or if state is lost.
        Returns: (the layout, a search to run, or None; the reason, empty if there is nothing to say)."""
        view = self.view
        if not view.roster.are_heard(view.roster.alive(now_s)):
            return None, ""  # each will be heard or suspected soon; until then we know too little to move any peer
        view.compare(live, now_s)
        catalog = view.catalog(now_s)
        not_started = live.not_started and view.version_max <= live.restore_version
        held = holders(live, view.roster, catalog, view.spec.model, not_started=not_started, now_s=now_s)
        late = behind(live, view.roster, catalog, view.spec.model, now_s)
        lost = self._holders.lost(live, held, view.roster.alive(now_s), now_s, behind=late)
        peers = view.measured(live, now_s)
        swarm, look = self._swarm(peers, now_s), _Look(peers=peers, catalog=catalog, now_s=now_s, sequence=sequence)
        under_way = live.not_started and not not_started
        is_whole = {peer.peer for peer in peers if not peer.draining}.issuperset(live.members)
        if live.cutover_version and not lost and is_whole:
            return self._end(live, catalog, now_s)
        is_quiet = swarm == self._settled_for and not lost and not under_way
        if is_quiet and view.certificates.is_due and not live.cutover_version:
            # The vote of a member that leaves may be needed for the plan that certifies it.
            leaves = any(map(view.roster.draining, live.members))
            if leaves or now_s >= self._live_s + CERTIFY_HEARTBEATS * self._heartbeat_s:
                return _next(Layout.of(live, f"step {view.certificates.newest[1]} is certified"))
        if is_quiet and live.next_layout and not live.cutover_version:
            return self._prepared(live, look)
        if is_quiet:
            return self._better(live, look)
        self.awaited, waits_for = self._may_return(live, lost[0], catalog, now_s) if lost else (frozenset(), "")
        if waits_for:
            return None, waits_for  # a plan now would remove the silent peer, and its state
        layout, reason = self._repaired(look, live)
        # `min_peers` applies to the start of a run only. An era that has not begun has no state that could be lost.
        too_few = layout is None and (bool(lost) or not_started)
        self._too_few_s = min(self._last_sign_s(live, lost, now_s), self._too_few_s) if too_few else math.inf
        if now_s >= self._too_few_s + TOLD_HEARTBEATS * self._heartbeat_s:
            # By now all peers have reported what they saved when the last holder left.
            layout = self._divided_anew(look)
        if layout is None:
            self._settled_for = None if too_few else swarm
            return None, reason
        if lost or too_few:
            within = view.catalog(now_s, among=layout)  # other peers' snapshots cannot be downloaded
            beginning = self._beginning(live, within)
            what = f"{group_name(live, lost[0])} has no holder left" if lost else "the stages have too few peers"
            if not lost and (beginning.from_era, beginning.version) == (live.restore_era, live.restore_version):
                beginning = replace(beginning, loses=False)
            elif beginning.version == view.version_max == view.version_said > 0:  # reported by the last member to leave
                what, beginning = "the run was stopped", replace(beginning, loses=False)
            # If a part of the swarm still trains, an older snapshot now is better than a newer one later.
            waits = beginning.version == 0 or not any(held)
            awaited = self._awaited(catalog, beginning, now_s) if waits else ""
            if not awaited:
                return _restarted(layout, beginning, what)
            # A plan now would give a lost stage's places away, whose members may return and sign what they saved.
            self._settled_for = swarm
            return None, f"{what}: {awaited}"
        unheld = [group for group in range(len(live.stages)) if not held[group] and group not in late]
        if any(_loses_a_member(live, layout, group) for group in unheld):
            return None, ""  # the stage's state may be on that member's disk; soon it is held again, or lost
        goes_on = live.next_layout and not live.cutover_version and is_whole
        if goes_on and bounds_of(layout.stages) == bounds_of(live.stages):
            layout = replace(layout, next_layout=live.next_layout)  # members continue to download their missing layers
        if places_of(layout) == places_of(live):
            if under_way:
                # A peer that restarts, or gets this plan late, must not begin the era again.
                return _next(replace(layout, reason=f"training is under way{' again' if live.era else ''}"))
            if live.next_layout and not goes_on:
                return _called_off(live, "a member leaves")
            self._settled_for = swarm
            return None, ""
        return _next(layout)

    def reset_plan(
        self, live: SignedPlan, reset: Reset, mandate: Mandate, now_s: float, *, sequence: int
    ) -> tuple[Layout | None, str]:
        """Return a layout for the reachable peers that `reset` names. If state is lost, a later plan handles that."""
        peers = tuple(
            MeasuredPeer.of(peer, advert, draining=False, synced_stage=live.plan.stage_of(peer))
            for peer, advert in sorted(dict(reset.roster).items())
        )
        if not peers:
            return None, "the reset names no reachable peer"
        look = _Look(peers=peers, catalog=self.view.catalog(now_s), now_s=now_s, sequence=sequence)
        layout, reason = self._repaired(look, live.plan)
        if layout is None and mandate.era:
            layout = self._divided_anew(look)
        if layout is None:
            back = f"; `shoal recover --era {live.plan.era}` goes back to a snapshot, and may divide the layers anew"
            return None, reason if mandate.era else reason + back
        self.view.inherit_reset(live, reset, now_s)
        beginning, back = None, ""
        if mandate.era:
            beginning = Beginning(era=mandate.era, version=mandate.restore_version, from_era=mandate.restore_era)
            back = f" back to version {beginning.version} of era {beginning.from_era},"
        return replace(layout, reason=f"reset by the owner:{back} {layout.reason}", beginning=beginning), reason

    def foreseen(self, layout: Layout, now_s: float) -> Layout:
        """Return `layout` with its formats and its predicted throughput, for the plan that is made of it."""
        if layout.foreseen is not None:
            return layout  # it is the live layout with its prediction
        formats = layout.formats or self.view.choose_formats(layout.stages, now_s)
        foreseen = self.view.calibration.expected(
            self.view.predict_step_time(layout.stages, now_s, formats), len(layout.stages)
        )
        return replace(layout, foreseen=foreseen, formats=formats)

    def awaits_disks(self, now_s: float) -> bool:
        """True while the run waits for absent peers with a newer snapshot. A successor would begin the wait anew."""
        return self._holders.is_waiting(now_s)

    def hand_over(self, live: SignedPlan, now_s: float, *, permit: bytes = b"") -> TransferLeadership:
        return self.view.hand_over(live, now_s, permit=permit)

    # --- inside ---

    def _swarm(self, peers: tuple[MeasuredPeer, ...], now_s: float) -> Swarm:
        """Return the facts that require a new layout at once when they change. Memory is among these, because a peer
        lowers its claim when its place was too large; so are the holders of each state while a member drains. Speeds
        are not: a change of speed can only lead to a search."""
        drains = any(peer.draining for peer in peers)
        told = ((p.peer, p.has_data, p.memory_bytes, p.draining, p.synced_stage if drains else None) for p in peers)
        return (*told, tuple(sorted(self.view.links.pairs(now_s, {peer.peer for peer in peers}))))

    def _repaired(self, look: _Look, previous: Plan | None) -> tuple[Layout | None, str]:
        """Return a layout by rules that are quick and move few peers; None, with a reason: there is none."""
        knows = isinstance(self._allocator, Searching) and len(look.peers) <= NETWORK_PEERS_MAX
        snapshot = self.view.snapshot(look.peers, previous, look.catalog, look.now_s, knows_network=knows)
        try:
            layout = self._allocator.allocate(snapshot, previous, seed=look.sequence)
        except NoLayout as flaw:
            return None, f"no new plan: {flaw}"
        return layout, layout.reason

    def _last_sign_s(self, live: Plan, lost: Sequence[int], now_s: float) -> float:
        """Return the last time at which any member of these groups was heard. A leaving member first asks others to
        keep copies of its state, so all such copies were begun before that time."""
        roster = self.view.roster
        peers = {member.peer for group in lost for member in live.group_members(group)}
        return max((roster.arrivals(peer).sign_s for peer in peers if peer in roster.presences), default=now_s)

    def _divided_anew(self, look: _Look) -> Layout | None:
        """Return another division, for a run that rolls back with too few peers for its stages; None: there is none."""
        layout, _ = self._repaired(look, None)
        return layout and replace(layout, reason=layout.reason.removeprefix(FIRST_PLAN))

    def _better(self, live: Plan, look: _Look) -> tuple[Next, str]:
        """Return a better layout for the unchanged swarm (by load, formats or a search), or a search to begin."""
        view, now_s, swarm = self.view, look.now_s, self._swarm(look.peers, look.now_s)
        if view.experts.is_due(live, view.ledger.step):
            placed = view.experts.place(live.stages, live, sequence=look.sequence)
            if placed != live.experts:
                return _next(_same(live, "experts go where the load is"))
        formats = view.other_formats(live)
        if formats is not None:
            return _next(_same(live, formats.sentence, formats=formats))
        layout = self._schedule.found_for(live, swarm)
        if layout is not None and bounds_of(layout.stages) != bounds_of(live.stages):
            return self._preparing(live, look, layout)
        if layout is not None and keeps_state(layout, live, look.peers):
            return _next(layout)
        is_due = not live.not_started and self._schedule.is_due(live, swarm, now_s)
        self._due_s = min(now_s, self._due_s) if is_due else math.inf
        if is_due and not self._awaits_figures(live, now_s):
            return self._schedule.begin(self._compared(live, look), live, swarm, now_s, seed=look.sequence), ""
        return None, ""

    def _awaits_figures(self, live: Plan, now_s: float) -> bool:
        """True if the next search must wait, because links are being measured again or figures are out of date."""
        patience_s = REST_HEARTBEATS * self._heartbeat_s  # at most one search is left out
        links = self.view.links
        return now_s < self._due_s + patience_s and (
            self.view.calibration.is_unexplained
            or links.is_falling(live.members)
            or links.is_confirming(live.members, now_s)
        )

    def _compared(self, live: Plan, look: _Look) -> SwarmSnapshot:
        """Return the inputs of a search, with the measured speed of the live layout and the error of predictions."""
        calibration = self.view.calibration
        return replace(
            self.view.snapshot(look.peers, live, look.catalog, look.now_s, knows_network=True),
            seen_tokens_per_s=calibration.seen_tokens_per_s,
            chosen=calibration.chosen,
            forecast_error=calibration.forecast_error,
            forecast_bias=calibration.bias,
        )

    # --- another division into stages ---

    def _preparing(self, live: Plan, look: _Look, layout: Layout) -> tuple[Next, str]:
        """Return the live layout with `layout` as its successor. Members then download their missing layers, and the
        live layout's last version is set afterwards. It is set at once if no layer is missing, if a download during a
        standstill is cheaper, or if experts are placed."""
        announced = self._announced(live, layout.stages, layout.reason, look.now_s)
        lacks = any(lacking_bytes(self.view.workload, live, layout.stages).values())
        if announced[0] is None or live.experts or not lacks:
            return announced
        change = self._foreseen_change(live, look, layout.stages)
        if change is not None and change.stands_still():
            return announced
        self._unfetched_bytes, self._fetched_s = None, look.now_s
        return _next(_same(live, f"{layout.reason}: its members fetch what they lack", next_layout=layout.stages))

    def _prepared(self, live: Plan, look: _Look) -> tuple[Next, str]:
        """Return the live layout with its last version set, once the members of the next layout have all their layers,
        no download has progressed for long, or a standstill for the rest is cheaper."""
        now_s, members = look.now_s, dict.fromkeys(peer for stage in live.next_layout for peer in stage.peers)
        beats = dict(self.view.roster.beats(members))
        if len(beats) < len(members) or any(beat.plan_sequence < live.sequence for beat in beats.values()):
            return None, ""  # a member has not obeyed the plan yet
        left = {peer: max(0, beat.unfetched_bytes) for peer, beat in beats.items()}
        left_bytes = sum(left.values())
        if self._unfetched_bytes is None or left_bytes < self._unfetched_bytes:
            self._unfetched_bytes, self._fetched_s = left_bytes, now_s
        patience_s = max(END_PATIENCE_S, END_PATIENCE_STEPS * self.view.ledger.pace.usual_step_s)
        waits = left_bytes > 0 and now_s < self._fetched_s + patience_s
        if waits and not self._is_too_slow(live, look, left):
            return None, ""
        return self._announced(live, live.next_layout, "another division into stages", now_s)

    def _is_too_slow(self, live: Plan, look: _Look, left: Mapping[PeerID, int]) -> bool:
        """True if downloads ahead are so slow that a standstill costs less. Args: left: peer -> missing bytes."""
        fetched_s = look.now_s - self._follows_s
        if fetched_s < END_PATIENCE_S:
            return False
        if self._change is None:
            self._change = self._foreseen_change(live, look, live.next_layout)
        lacked = lacking_bytes(self.view.workload, live, live.next_layout)
        least = min((1.0 - left[peer] / lacked[peer] for peer in left if lacked[peer] > 0.0), default=1.0)
        precopy_s = fetched_s / least if least > 0.0 else math.inf
        return self._change is not None and self._change.stands_still(precopy_s)

    def _foreseen_change(self, live: Plan, look: _Look, next_layout: Sequence[Stage]) -> Change | None:
        """Return the cost of a change to these stages; None: no prediction, or the swarm is too large."""
        if len(look.peers) > NETWORK_PEERS_MAX:
            return None
        return next_layout_change(self._compared(live, look), live, next_layout)

    def _announced(
        self, live: Plan, stages: tuple[Stage, ...], why: str, now_s: float, *, times: int = 1
    ) -> tuple[Next, str]:
        """Return the live layout with `stages` as its successor, and with the version at which these take over: `times`
        the usual notice ahead; None while a stage's version cannot be certified, since the next era would not begin."""
        view, model = self.view, self.view.spec.model
        held = holders(live, view.roster, view.catalog(now_s), model, not_started=False, now_s=now_s)
        if not view.certificates.are_possible(held):
            return None, ""
        step_s = view.ledger.pace.usual_step_s
        notice = math.ceil(NOTICE_HEARTBEATS * self._heartbeat_s / step_s) if step_s > 0.0 else 1
        cutover_version = view.version_max + view.spec.training.s_max + 1 + times * min(max(1, notice), 256)
        if times == 1:
            cutover_version = self._sooner(live, stages, now_s, cutover_version=cutover_version)
        if cutover_version >= view.spec.training.steps:
            return None, ""  # the run is over before it pays
        self._ends_s, self._notice = now_s, times
        reason = f"{why}: at step {cutover_version}"
        return _next(_same(live, reason, cutover_version=cutover_version, next_layout=stages))

    def _sooner(self, live: Plan, stages: Sequence[Stage], now_s: float, *, cutover_version: int) -> int:
        """Return the cheapest version for the change: `cutover_version`, the first version of which all members learn
        in time, or the one after that. An early change spares slow steps, but repeats the part of a step that was
        begun. If a stage has its maximum lead already, it waits, and one step less of notice is enough."""
        view, pace = self.view, self.view.ledger.pace
        slow, quick = view.predict_step_time(live.stages, now_s), view.predict_step_time(stages, now_s)
        if slow is None or quick is None:
            return cutover_version
        sure_s = NOTICE_HEARTBEATS * self._heartbeat_s
        if view.version_max > view.ledger.step + view.spec.training.s_max:
            sure_s -= pace.usual_step_s
        expected = pace.commits_within(sure_s, now_s, believed_s=view.spec.tokens_per_step / slow.tokens_per_s)
        if expected is None:
            return cutover_version
        commits, begun = expected
        first = view.version_max + commits
        if not live.restore_version < first < cutover_version:
            return cutover_version
        waits = (cutover_version - first) * (1.0 / slow.tokens_per_s - 1.0 / quick.tokens_per_s)
        if waits > begun / quick.tokens_per_s:
            return first
        return first + 1 if waits > 0.0 else cutover_version

    def _end(self, live: Plan, catalog: CheckpointCatalog, now_s: float) -> tuple[Next, str]:
        """Return the next layout, once all groups are at the version at which the live layout ends."""
        view, version = self.view, live.cutover_version
        if view.version_max > version:
            # Stage 0 learned of the end too late and has begun later steps, which must be finished.
            times = min(2 * self._notice, 16)
            return self._announced(live, live.next_layout, "another division into stages", now_s, times=times)
        wanted = view.layers
        if view.ledger.step < version or not catalog.covers((live.era, version), wanted):
            self._ended_s = None
        elif self._ended_s is None:
            self._ended_s = now_s
        # A group reports after its members have compared their states: by then no layer has a single holder. The
        # reports may have gone to a previous coordinator, or never come, so the wait is limited.
        patience_s = PATIENCE_HEARTBEATS * self._heartbeat_s
        late = self._ended_s is not None and now_s >= self._ended_s + patience_s
        if self._ended_s is not None and (late or view.ledger.has_reported(version)):
            members = {peer for stage in live.next_layout for peer in stage.peers}
            spares = tuple(peer for peer in live.members if peer not in members)
            beginning = Beginning(era=self._beginning(live, catalog).era, version=version, from_era=live.era)
            reason = _divided(live, version)
            return _next(Layout(stages=live.next_layout, spares=spares, reason=reason, beginning=beginning))
        idle_s = view.ledger.pace.idle_s(now_s)
        end_patience_s = max(END_PATIENCE_S, END_PATIENCE_STEPS * view.ledger.pace.usual_step_s)
        if now_s >= self._ends_s + end_patience_s and (idle_s is None or idle_s >= end_patience_s):
            return _called_off(live, f"not all have come to step {version}")
        return None, ""

    # --- when state is lost ---

    def is_irreplaceable(self, peer: PeerID, live: Plan, now_s: float) -> bool:
        """True if `peer` alone holds the state of a group of `live`, or may return with a lost group's state."""
        return peer in self.awaited or self.view.is_irreplaceable(peer, live, now_s)

    def _may_return(
        self, live: Plan, group: int, catalog: CheckpointCatalog, now_s: float
    ) -> tuple[frozenset[PeerID], str]:
        """Return (peers to wait for before a roll-back, a sentence about the wait); both empty: do not wait. A peer
        that holds the last state of `group` and falls silent may only be suspended. The run waits as long as the
        roll-back and the repeated training would take."""
        view = self.view
        idle_s, step_s = view.ledger.pace.idle_s(now_s), view.ledger.pace.usual_step_s
        if idle_s is None:
            return frozenset(), ""
        beginning = self._beginning(live, catalog)
        steps = view.version_max - beginning.version
        wait_s = min(RETURN_HEARTBEATS * self._heartbeat_s + steps * step_s, PATIENCE_S_MAX)
        silent = [
            member.peer
            for member in live.group_members(group)
            if view.roster.may_return(member.peer, group, live.era, now_s)
        ]
        if not silent or idle_s >= wait_s:
            return frozenset(), ""
        names = " or ".join(view.roster.name_of(peer) for peer in silent)
        back = f"to step {beginning.version}" if beginning.version else "to the beginning"
        sentence = f"{group_name(live, group)} waits for {names}; the run goes back {back} in {wait_s - idle_s:.0f} s"
        return frozenset(silent), sentence

    def _awaited(self, catalog: CheckpointCatalog, beginning: Beginning, now_s: float) -> str:
        """Say what to wait for before the run rolls back to `beginning`; empty: nothing. The present disks have a part
        of a newer snapshot, and a returning peer may have the rest."""
        if beginning.version == 0 and self._has_lost_all():
            return NOTHING_TO_READ
        view, newest = self.view, catalog.newest
        begins_at = beginning.from_era, beginning.version
        if newest is None or newest <= begins_at:
            claimed = view.claimed
            if claimed <= begins_at or (view.certificates.are_any and self._holders.is_hopeless(now_s)):
                return ""
            # Returning members are signing it now, or the run is older than certificates.
            return (
                f"waiting until most holders of each stage have signed what they saved at step {claimed[1]} "
                "(`shoal recover --era` goes by the owner's word instead)"
            )
        version = newest[1]
        steps = max(1, version - beginning.version)
        if self._holders.is_hopeless(now_s, relearn_s=steps * view.step_s_at_best(now_s)):
            return ""
        wanted = view.layers
        missing = set(wanted) - catalog.layers(newest)
        keys = [key for key in wanted if key in missing]
        layers = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        return f"waiting for a peer that has {layers} of step {version} on its disk"

    def _beginning(self, live: Plan | None, catalog: CheckpointCatalog) -> Beginning:
        view = self.view
        return next_beginning(live, view.roster, catalog, view.spec.model, placed=view.places_experts)


def bounds_of(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    return tuple(stage.layers for stage in stages)


def _divided(live: Plan, version: int) -> str:
    before, after = len(live.stages), len(live.next_layout)
    layers = ", ".join(f"{first}-{last}" for first, last in bounds_of(live.next_layout))
    noun = "stage" if before == 1 else "stages"
    if before == after:
        return f"the boundaries of the {noun} moved at step {version}: layers {layers}"
    return f"{before} {noun} became {after} at step {version}: layers {layers}"


def _next(layout: Layout) -> tuple[Layout, str]:
    """Return `layout` as the next to propose, with its reason as the sentence to log."""
    return layout, layout.reason


def _same(live: Plan, reason: str, **changes: Any) -> Layout:
    """Return the layout of `live` with `changes`, which are fields that a plan may change while its layout stays."""
    return Layout(stages=live.stages, spares=live.spares, reason=reason, **changes)


def _loses_a_member(live: Plan, layout: Layout, group: int) -> bool:
    stays = {peer for stage in layout.stages if stage.layers == live.stages[group].layers for peer in stage.peers}
    return not stays.issuperset(live.stages[group].peers)


def _called_off(live: Plan, why: str) -> tuple[Layout, str]:
    return _next(_same(live, f"the stages stay as they are: {why}"))


def _restarted(layout: Layout, beginning: Beginning, why: str) -> tuple[Layout, str]:
    """Return `layout` as the first one of the era that starts at `beginning`, and the sentence to log."""
    where = f"version {beginning.version}" if beginning.version else "the seed"
    back = "back to" if beginning.loses else "goes on from"
    moves = "" if layout.reason == NO_MOVES else f", {layout.reason}"
    return _next(replace(layout, reason=f"{why}: {back} {where}{moves}", beginning=beginning))
