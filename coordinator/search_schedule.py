"""When the coordinator searches for a better layout than the live plan's, and what becomes of what is found. Pure.

Theory of operation. A change is answered at once by a repaired layout; the search comes behind it, elsewhere (in life
in a thread), and answers with a layout or none. It searches

- for the first plan, which waits for it a while;
- `SETTLE_HEARTBEATS` after the last change of swarm or plan, when reports of the new neighbours are here;
- at once, if all that has changed is that somebody is gone: a stage that has lost one of its few members keeps all
  others waiting, and of those who are left everything is known;
- when what was measured has changed since the last search (`has_drifted`);
- and never sooner than `REST_HEARTBEATS` after the last one, or `LOST_REST_HEARTBEATS` when somebody is gone.

What it finds holds for the swarm and the plan that it was given; if either changes meanwhile it is dropped. A successor
is told whether the plan has been searched, so that a quiet hour of sixty terms costs no sixty searches.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.plan_layout import Layout, Places, places_of
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan
from shoal.protocol.topology import Floats

SETTLE_HEARTBEATS = 8.0
"""Newcomers have fetched their state by then, or the search comes later; peers tell of four links a heartbeat."""
REST_HEARTBEATS = 30.0
LOST_REST_HEARTBEATS = 8.0
REST_PEERS = 256
"""So many are searched in a second or two; where they are more, searches and looks are further apart, for they take
longer."""
LOOK_HEARTBEATS = 10.0
"""How often it looks whether figures have changed."""
AFRESH_TERMS = 10
"""Each such term is searched whatever the predecessor says: changes too slow for one term are seen that way."""
FIRST_PATIENCE_S = 10.0
"""How long the first plan waits for a search: it may still have to compile what it runs, once a machine."""
SPEED_DRIFT = 1.3
LINK_DRIFT = 1.6
LATENCY_DRIFT_S = 0.005
NEWLY_KNOWN = 0.25
"""Links that were measured since, as a part of those that were."""

Swarm = tuple[object, ...]
"""Who is there, as far as layouts depend on it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SearchJob:
    """`previous` None: for a first plan."""

    number: int
    snapshot: Snapshot
    previous: Plan | None
    swarm: Swarm
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class _Searched:
    places: Places | None
    """The plan's whose layout was searched for; None: a first plan's."""
    swarm: Swarm
    snapshot: Snapshot


class SearchSchedule:
    def __init__(self, heartbeat_s: float, *, enabled: bool) -> None:
        self._heartbeat_s = heartbeat_s
        self._enabled = enabled
        self._num_jobs = 0
        self._running: SearchJob | None = None
        self._found: tuple[SearchJob, Layout] | None = None
        self._last: _Searched | None = None
        self._inherited: Places | None = None
        """The places that our predecessor has searched."""
        self._seen: tuple[Places, Swarm] | None = None
        self._members: frozenset[PeerID] = frozenset()
        """Of the plan that was seen last."""
        self._due_s = -math.inf
        self._rested_s = -math.inf
        """When the next search may begin at the earliest, whatever happens."""
        self._first_asked_s: float | None = None

    def begin_term(self, plan: Plan, now_s: float, *, searched: bool) -> None:
        """We coordinate now: what we knew in an earlier term of ours is stale."""
        self._running = self._found = self._last = self._seen = None
        self._inherited = places_of(plan) if searched and plan.term % AFRESH_TERMS else None
        self._members = frozenset(plan.members)
        self._due_s = now_s + SETTLE_HEARTBEATS * self._heartbeat_s

    def forget(self) -> None:
        """What was found came to nothing: it may be found again."""
        self._last = None

    def give_up(self) -> None:
        """What searches is not there."""
        self._enabled = False
        self._running = None

    def has_searched(self, plan: Plan) -> bool:
        """Whether nothing better was found than the places of this plan."""
        return self._last is not None and self._last.places == places_of(plan)

    # --- the first plan ---

    def awaits_first(self, swarm: Swarm, now_s: float) -> bool:
        """Whether the first plan is to wait for a search; its result is in `found_for`."""
        if not self._enabled or (self._last is not None and self._last.swarm == swarm):
            return False
        self._first_asked_s = now_s if self._first_asked_s is None else self._first_asked_s
        return now_s < self._first_asked_s + FIRST_PATIENCE_S

    # --- later plans ---

    def is_due(self, plan: Plan, swarm: Swarm, now_s: float) -> bool:
        """Whether to `begin`, which may still find no reason to. Cheap."""
        if not self._enabled:
            return False
        seen = places_of(plan), swarm
        if seen != self._seen:
            if (members := frozenset(plan.members)) < self._members:
                self._due_s = self._rested_s
            else:
                self._due_s = max(self._due_s, now_s + SETTLE_HEARTBEATS * self._heartbeat_s)
            self._seen, self._members, self._found = seen, members, None
        return self._running is None and self._found is None and now_s >= self._due_s

    def begin(
        self, snapshot: Snapshot, plan: Plan | None, swarm: Swarm, now_s: float, *, seed: int
    ) -> SearchJob | None:
        """What to search now, if there is a reason to."""
        places, last = plan and places_of(plan), self._last
        if plan is None:
            if self._running is not None and self._running.swarm == swarm:
                return None
        else:
            apart = self._heartbeat_s * max(1.0, len(snapshot.peers) / REST_PEERS)
            self._due_s = now_s + LOOK_HEARTBEATS * apart
            if self._inherited is not None and self._inherited == places:
                self._inherited, self._last = None, _Searched(places, swarm, snapshot)
                return None
            if last and (last.places, last.swarm) == (places, swarm) and not has_drifted(last.snapshot, snapshot):
                return None
            self._due_s, self._rested_s = now_s + REST_HEARTBEATS * apart, now_s + LOST_REST_HEARTBEATS * apart
        self._num_jobs += 1
        self._running = SearchJob(number=self._num_jobs, snapshot=snapshot, previous=plan, swarm=swarm, seed=seed)
        return self._running

    def returned(self, job: SearchJob, layout: Layout | None) -> bool:
        """The answer to `job`. Returns: False if nobody waits for it any more."""
        if job is not self._running:
            return False
        self._running = None
        self._found = (job, layout) if layout is not None else None
        self._last = _Searched(job.previous and places_of(job.previous), job.swarm, job.snapshot)
        return True

    def found_for(self, plan: Plan | None, swarm: Swarm) -> Layout | None:
        """What a search has found, if it was for this plan and swarm. What was found is forgotten with the answer."""
        found, self._found = self._found, None
        if found is None:
            return None
        job, layout = found
        same = (job.previous and places_of(job.previous)) == (plan and places_of(plan)) and job.swarm == swarm
        return layout if same else None


def keeps_state(layout: Layout, live: Plan, peers: tuple[MeasuredPeer, ...]) -> bool:
    """Whether each stage keeps somebody who holds its state now, and nobody drains."""
    synced = {peer.peer: peer.synced_stage for peer in peers}
    stays = all(
        any(synced.get(peer) == index and peer in live.stages[index].peers for peer in stage.peers)
        for index, stage in enumerate(layout.stages)
    )
    return stays and not any(peer.draining for peer in peers)


def has_drifted(before: Snapshot, after: Snapshot) -> bool:
    """Whether figures of the same peers have changed by more than noise can do, or many are new."""
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
    """[N, N], where both are known and too far apart."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.fabs(np.log(a / b)) > math.log(LINK_DRIFT)
