"""When the coordinator searches for a better layout than the live plan's, and what becomes of the result. Pure.

Theory of operation. A change is answered at once with a repaired layout. The search comes behind it, in a thread of its
own in a live swarm, and answers with a layout or with none. There is a search

- for the first plan, which waits for it a while;
- `SETTLE_HEARTBEATS` after the last change of swarm or plan, when reports of the new neighbours are here;
- at once, if all that has changed is that a member is gone: a stage that has lost one of its few members keeps all
  others waiting, and everything is known of those that are left;
- when the measurements have changed since the last search (`has_drifted`), or the layout's pace has, or is far from
  what was foreseen (`calibration`), unless the last search for this plan and swarm broke down;
- and never sooner than `REST_HEARTBEATS` after the last one, or `LOST_REST_HEARTBEATS` when a member is gone.

The result holds for the swarm and the plan that the search was given; if either changes meanwhile the result is
dropped. A successor is told whether the plan has been searched, so that a quiet hour of sixty terms costs no sixty
searches.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.plan_layout import Layout, Places, places_of
from shoal.coordinator.reachability import Pair
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan
from shoal.protocol.topology import Floats

SETTLE_HEARTBEATS = 8.0
"""Newcomers have fetched their state by then, or the search comes later; peers tell of four links a heartbeat."""
REST_HEARTBEATS = 30.0
LOST_REST_HEARTBEATS = 8.0
REST_PEERS = 256
"""Searching so many peers takes a second or two. With more of them searches and looks are further apart, in
proportion."""
LOOK_HEARTBEATS = 10.0
"""How often the coordinator looks whether measurements have changed."""
AFRESH_TERMS = 10
"""One term in so many is searched whatever the predecessor says: changes that are too slow for one term are seen that
way."""
FIRST_PATIENCE_S = 10.0
"""The first plan waits so long for a search, which may still have to compile its kernels, once a machine."""
LINKS_PATIENCE_S = 5.0
LINKS_PATIENCE_HEARTBEATS = 10.0
"""The first plan waits at most so long, whichever is more, for the links of `FEW_PEERS` to be measured, and the time
below longer for each peer beyond them, since each machine measures one link at a time."""
FEW_PEERS = 8
LINKS_PATIENCE_HEARTBEATS_EACH = 0.5
LINKS_PATIENCE_HEARTBEATS_MAX = 30.0
SPEED_DRIFT = 1.3
LINK_DRIFT = 1.6
LATENCY_DRIFT_S = 0.005
NEWLY_KNOWN = 0.25
"""A search is worth while once so many links, as a part of those that were known, have been measured since."""

Swarm = tuple[object, ...]
"""The facts about the peers that are here on which layouts depend."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SearchJob:
    """One search. `previous` is None for a first plan."""

    number: int
    snapshot: Snapshot
    previous: Plan | None
    swarm: Swarm
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class _Searched:
    """The search that ended last."""

    places: Places | None
    """The places of the plan that was searched for; None: it was for a first plan."""
    swarm: Swarm
    snapshot: Snapshot
    is_bug: bool = False
    """The search broke down: the next one for these places and this swarm would do so, too."""


class SearchSchedule:
    """Begins searches and keeps their results until they are proposed.

    Args: enabled: whether the allocator searches at all.
    """

    def __init__(self, heartbeat_s: float, *, enabled: bool) -> None:
        self._heartbeat_s = heartbeat_s
        self._enabled = enabled
        self._num_jobs = 0
        self._running: SearchJob | None = None
        self._found: tuple[SearchJob, Layout] | None = None
        self._last: _Searched | None = None
        self._inherited: tuple[Places, frozenset[Pair]] | None = None
        """The places that our predecessor has searched, and the pairs that could not reach each other then."""
        self._seen: tuple[Places, Swarm] | None = None
        self._members: frozenset[PeerID] = frozenset()
        """The members of the plan that was seen last."""
        self._due_s = -math.inf
        self._rested_s = -math.inf
        """The next search may begin at this time at the earliest, whatever happens."""
        self._first_asked_s: float | None = None
        self._links_asked_s: float | None = None

    def begin_term(
        self, plan: Plan, now_s: float, *, searched: bool, unreachable: frozenset[Pair] = frozenset()
    ) -> None:
        """We coordinate now: what we knew in an earlier term of ours is stale.

        Args:
            searched: our predecessor has searched for a better layout than the plan's.
            unreachable: the pairs of members that could not reach each other, as far as it knew.
        """
        self._running = self._found = self._last = self._seen = None
        self._inherited = (places_of(plan), unreachable) if searched and plan.term % AFRESH_TERMS else None
        self._members = frozenset(plan.members)
        self._due_s = now_s + SETTLE_HEARTBEATS * self._heartbeat_s

    def forget(self) -> None:
        """A layout that was found came to nothing: it may be found again."""
        self._last = None

    def give_up(self) -> None:
        """Searching is not possible here."""
        self._enabled = False
        self._running = None

    def has_searched(self, plan: Plan, swarm: Swarm) -> bool:
        """Whether a search has found nothing better than the places of this plan for the swarm as it is."""
        return self._last is not None and (self._last.places, self._last.swarm) == (places_of(plan), swarm)

    # --- the first plan ---

    def awaits_links(self, num_peers: int, now_s: float) -> bool:
        """Whether the first plan is to wait until some links have been measured."""
        if not self._enabled:
            return False
        self._links_asked_s = now_s if self._links_asked_s is None else self._links_asked_s
        heartbeats = LINKS_PATIENCE_HEARTBEATS + LINKS_PATIENCE_HEARTBEATS_EACH * max(0, num_peers - FEW_PEERS)
        patience_s = min(heartbeats, LINKS_PATIENCE_HEARTBEATS_MAX) * self._heartbeat_s
        return now_s < self._links_asked_s + max(LINKS_PATIENCE_S, patience_s)

    def awaits_first(self, swarm: Swarm, now_s: float) -> bool:
        """Whether the first plan is to wait for a search; its result is in `found_for`."""
        if not self._enabled or (self._last is not None and self._last.swarm == swarm):
            return False
        self._first_asked_s = now_s if self._first_asked_s is None else self._first_asked_s
        return now_s < self._first_asked_s + FIRST_PATIENCE_S

    # --- later plans ---

    def is_due(self, plan: Plan, swarm: Swarm, now_s: float, *, is_off: bool = False) -> bool:
        """Whether to call `begin`, which may still find no reason for a search. This is cheap.

        Args: is_off: the layout's pace is a reason for a search.
        """
        if not self._enabled:
            return False
        seen = places_of(plan), swarm
        if seen != self._seen:
            if (members := frozenset(plan.members)) < self._members:
                self._due_s = self._rested_s
            else:
                self._due_s = max(self._due_s, now_s + SETTLE_HEARTBEATS * self._heartbeat_s)
            self._seen, self._members, self._found = seen, members, None
        return self._running is None and self._found is None and now_s >= self._due_at_s(is_off)

    def _due_at_s(self, is_off: bool) -> float:
        return min(self._due_s, self._rested_s) if is_off and self._last is not None else self._due_s

    def begin(
        self,
        snapshot: Snapshot,
        plan: Plan | None,
        swarm: Swarm,
        now_s: float,
        *,
        seed: int,
        is_off: bool = False,
        has_pace: bool = True,
    ) -> SearchJob | None:
        """The search to begin now; None: there is no reason for one.

        Args:
            is_off: as in `is_due`.
            has_pace: the run has made more than one step.
        """
        places, last = _places(plan), self._last
        if plan is None:
            if self._running is not None and self._running.swarm == swarm:
                return None
        else:
            apart = self._heartbeat_s * max(1.0, len(snapshot.peers) / REST_PEERS)
            self._due_s = now_s + LOOK_HEARTBEATS * apart
            if last and last.places is None and last.swarm == swarm and not has_pace:
                return None  # nothing is new but what probes say beside the first step
            if self._inherited is not None and self._inherited == (places, snapshot.unreachable) and not is_off:
                self._inherited, self._last = None, _Searched(places, swarm, snapshot)
                return None
            same = last is not None and (last.places, last.swarm) == (places, swarm)
            if last and same and (last.is_bug or (not is_off and not has_drifted(last.snapshot, snapshot))):
                return None
            self._due_s, self._rested_s = now_s + REST_HEARTBEATS * apart, now_s + LOST_REST_HEARTBEATS * apart
        self._num_jobs += 1
        self._running = SearchJob(number=self._num_jobs, snapshot=snapshot, previous=plan, swarm=swarm, seed=seed)
        return self._running

    def returned(self, job: SearchJob, layout: Layout | None, *, is_bug: bool = False) -> bool:
        """`job` has ended. Args: is_bug: it broke down. Returns: False if nobody waits for it any more."""
        if job is not self._running:
            return False
        self._running = None
        self._found = (job, layout) if layout is not None else None
        self._last = _Searched(_places(job.previous), job.swarm, job.snapshot, is_bug)
        return True

    def found_for(self, plan: Plan | None, swarm: Swarm) -> Layout | None:
        """The layout that a search has found, if it was for this plan and swarm. It is forgotten with the answer."""
        found, self._found = self._found, None
        if found is None:
            return None
        job, layout = found
        same = _places(job.previous) == _places(plan) and job.swarm == swarm
        return layout if same else None


def _places(plan: Plan | None) -> Places | None:
    return places_of(plan) if plan is not None else None


def keeps_state(layout: Layout, live: Plan, peers: tuple[MeasuredPeer, ...]) -> bool:
    """Whether each stage keeps a member that holds its state now, and nobody drains."""
    synced = {peer.peer: peer.synced_stage for peer in peers}
    stays = all(
        any(synced.get(peer) == index and peer in live.stages[index].peers for peer in stage.peers)
        for index, stage in enumerate(layout.stages)
    )
    return stays and not any(peer.draining for peer in peers)


def has_drifted(before: Snapshot, after: Snapshot) -> bool:
    """Whether figures of the same peers have changed by more than noise, or many are new."""
    pairs = zip(before.peers, after.peers, strict=True)
    if any(_ratio(a.flop_per_s, b.flop_per_s) > SPEED_DRIFT for a, b in pairs):
        return True
    if before.network is None or after.network is None:
        return before.network is not after.network
    old, new = before.network, after.network
    late = np.fabs(old.latency_s - new.latency_s) > LATENCY_DRIFT_S
    if (late & _far(old.latency_s, new.latency_s)).any() or _far(old.bytes_per_s, new.bytes_per_s).any():
        return True
    was, known = ~np.isnan(old.bytes_per_s), ~np.isnan(new.bytes_per_s)
    return bool((known & ~was).sum() > NEWLY_KNOWN * was.sum())


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)


def _far(a: Floats, b: Floats) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """bool [N, N]: where both figures are known and too far apart."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.fabs(np.log(a / b)) > math.log(LINK_DRIFT)
